"""From the user's model to an exported forward graph on fake tensors."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from autopar.errors import CaptureError, InputError
from autopar.structure import Structure, flatten


@dataclass(frozen=True)
class Call:
    """One call of a model: its tensors by name, and how to give them back.

    Args:
        structure: of the bound arguments; its paths are the names of the inputs.
        tensors: one for each path.
    """

    structure: Structure
    tensors: tuple[torch.Tensor, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.structure.paths


def bind(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], forward: Callable[..., Any] | None = None
) -> Call:
    """Bind a call to the signature of ``model.forward``, so that the same call by position or keyword is one.

    Args:
        forward: the unbound function whose signature counts, when ``model.forward`` is not the user's own.

    Raises:
        InputError: the arguments do not fit the signature.
    """
    signature = inspect.signature(forward.__get__(model) if forward is not None else model.forward)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"These inputs do not fit {type(model).__name__}.forward.",
            found=str(error),
            hint=f"its signature is {signature}.",
        ) from None
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    tensors, structure = flatten({k: v for k, v in named.items() if v is not None})
    return Call(structure, tuple(tensors))


def call_with(model: nn.Module, named: Mapping[str, Any]) -> Any:
    """Call ``model`` with the arguments that ``bind`` named."""
    parameters = inspect.signature(model.forward).parameters
    positional: list[Any] = []
    keywords = dict(named)
    variadic = next((n for n, p in parameters.items() if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    for name, p in parameters.items():
        if p.kind is inspect.Parameter.POSITIONAL_ONLY or (variadic in named and name != variadic and _by_position(p)):
            if name not in keywords:
                break
            positional.append(keywords.pop(name))
        elif name == variadic:
            positional.extend(keywords.pop(name, ()))
    return model(*positional, **keywords)


def _by_position(p: inspect.Parameter) -> bool:
    return p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


class FlatModel(nn.Module):
    """The model as a function of flat tensors to flat tensors; remembers the structure of what it returned."""

    def __init__(self, model: nn.Module, call: Structure) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self.returned = _Returned()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, self.returned.structure = flatten(call_with(self.model, self._call.build(tensors)))
        self.returned.differentiable = tuple(t.requires_grad for t in out)
        return tuple(out)


class _Returned:
    """What the last call returned. An object of its own: torch.export resets the attributes of modules."""

    structure: Structure | None = None
    differentiable: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Exported:
    """A forward graph of ATen ops, the structure of what the model returned, and which outputs have gradients."""

    program: torch.export.ExportedProgram
    returned: Structure
    differentiable: tuple[bool, ...]


def export(model: nn.Module, call: Call) -> Exported:
    """Export the forward of ``model``, which is on fake tensors.

    Raises:
        CaptureError: naming the line of the user's code where capturing stopped.
    """
    flat = FlatModel(model, call.structure)
    _without_caches(model)
    try:
        with _device_neutral_masks(call.names):
            program = torch.export.export(flat, call.tensors, strict=False)
    except CaptureError:
        raise
    except Exception as error:
        raise capture_error(model, error) from error
    returned = flat.returned.structure
    assert returned is not None
    return Exported(program, returned, flat.returned.differentiable)


def _without_caches(model: nn.Module) -> None:
    """Caches serve generation; in a training step they only break the capture. ``model`` is our own copy."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # type: ignore[union-attr]


@contextlib.contextmanager
def _device_neutral_masks(names: Sequence[str]) -> Iterator[None]:
    """Let Hugging Face models mark causal attention as causal, as they do outside of tracing.

    Under export they build the [b, 1, s, s] mask instead, which is another kernel than the one that will run. It
    is skipped only when the inputs cannot contain padding or packed sequences.
    """
    padded = any("mask" in n or "position" in n for n in names)
    masking = sys.modules.get("transformers.masking_utils")
    if masking is None and "transformers" in sys.modules:
        with contextlib.suppress(ImportError):
            masking = importlib.import_module("transformers.masking_utils")
    with contextlib.ExitStack() as stack:
        if isinstance(masking, types.ModuleType) and not padded:
            replaced = {
                "find_packed_sequence_indices": lambda *a, **k: None,
                "is_torchdynamo_exporting": lambda *a, **k: False,
                "is_tracing": lambda *a, **k: False,
            }
            for name, function in replaced.items():
                if hasattr(masking, name):
                    stack.enter_context(mock.patch.object(masking, name, function))
        yield


_OURS = Path(__file__).resolve().parents[1]
_TORCH = Path(torch.__file__).resolve().parent


def capture_error(model: nn.Module, error: BaseException) -> CaptureError:
    """The error for the user: their line, what torch said, and what usually helps."""
    where = _user_line(error)
    reason = str(error).strip().split("\n")[0][:300] or type(error).__name__
    text = f"{type(error).__name__} {error}"
    if any(w in text for w in ("GuardOnDataDependent", "DataDependent", ".item()", "data-dependent", "tolist")):
        hint = "this line needs the values of a tensor; write it with torch.where or masks, or move it out of forward."
    elif isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        hint = "capture allocates nothing itself; the model allocates a large constant here."
    else:
        hint = "the program must be the same for every batch: no branches on values, no NumPy, no input or output."
    return CaptureError(
        f"{type(model).__name__} cannot be captured{f' because of {where}' if where else ''}.",
        found=f"{type(error).__name__}: {reason}",
        hint=hint,
    )


def _user_line(error: BaseException) -> str:
    """Innermost line outside of torch and autopar, as ``file:line in function: code``."""
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        if frame.filename.startswith("<") or _OURS in path.parents or _TORCH in path.parents:
            continue
        if "contextlib" in path.name or "unittest" in path.parts:
            continue
        found = f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return found
