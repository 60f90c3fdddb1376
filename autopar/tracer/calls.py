"""Calls of the user's model by argument names, and the model as a function of flat tensors."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autopar.attributes import AttributeOutput, Place
from autopar.errors import CaptureError, InputError
from autopar.structure import Structure, flatten
from autopar.tracer import attribute_outputs
from autopar.tracer.python_state import Change, changed, plain_state
from autopar.tracer.reads import watched_reads
from autopar.tracer.side_effects import constant_requires_grad


@dataclass(frozen=True)
class Call:
    """One call of a model: its tensors by name, and their places in the arguments.

    Args:
        structure: that of the bound arguments; its paths are the names of the inputs.
        tensors: one for each path.
    """

    structure: Structure
    tensors: tuple[torch.Tensor, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return self.structure.paths


@functools.lru_cache(maxsize=64)
def _signature(forward: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a method once it is bound."""
    return inspect.signature(forward.__get__(object()))


def bind(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], forward: Callable[..., Any] | None = None
) -> Call:
    """Bind a call to the signature of ``model.forward``, so that positional and keyword calls are treated alike.

    Args:
        forward: the unbound function whose signature is used if ``model.forward`` is not the user's own.

    Raises:
        InputError: the arguments do not match the signature.
    """
    signature = inspect.signature(model.forward) if forward is None else _signature(forward)
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
    """Call ``model`` with arguments named by ``bind``."""
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
    """The model as a function from flat tensors to flat tensors; it records the structure of what it returned."""

    def __init__(self, model: nn.Module, call: Structure) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self.returned = LastCall()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        before, plain, attributes = (
            _buffers(self.model),
            plain_state(self.model),
            attribute_outputs.attributes(self.model),
        )
        with constant_requires_grad(self.model), watched_reads():
            out, self.returned.structure = flatten(call_with(self.model, self._call.build(tensors)))
        out += self._attribute_outputs_since(attributes)
        self.returned.differentiable = tuple(t.requires_grad for t in out)
        _write_in_place(self.model, before)
        self.returned.changes = changed(plain, plain_state(self.model))
        return tuple(out)

    def _attribute_outputs_since(self, attributes: attribute_outputs.Attributes) -> list[torch.Tensor]:
        """Return what the forward has stored in attributes, as further outputs."""
        if self.returned.excluded is None:
            return []
        found = attribute_outputs.outputs_since(self.model, attributes, self.returned.excluded)
        self.returned.attribute_outputs = tuple(each for each, _ in found)
        return [t for _, tensors in found for t in tensors]


class LastCall:
    """What the last call returned, and what it stored in attributes except for ``excluded``.

    It is a separate object because torch.export resets the attributes of modules.
    """

    structure: Structure | None = None
    differentiable: tuple[bool, ...] = ()
    changes: Mapping[str, Change] = MappingProxyType({})
    attribute_outputs: tuple[AttributeOutput, ...] = ()
    excluded: frozenset[Place] | None = None


def _buffers(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Return the buffers of all modules, by module path and name."""
    modules = model.named_modules()
    return {(path, name): b for path, m in modules for name, b in m._buffers.items() if b is not None}


def _write_in_place(model: nn.Module, before: Mapping[tuple[str, str], Any]) -> None:
    """Copy buffers that the forward replaced into the old ones in place, which torch.export can see."""
    for (path, name), new in _buffers(model).items():
        old, fqn = before.get((path, name)), f"{path}.{name}" if path else name
        if new is old:
            continue
        if old is None or old.shape != new.shape or old.dtype != new.dtype:
            raise CaptureError(
                f"The forward changes the shape or dtype of the buffer {fqn}.",
                found=f"{'nothing' if old is None else _text(old)} becomes {_text(new)}",
                hint=_settled(fqn, old, new),
            )
        old.copy_(new.detach())
        model.get_submodule(path)._buffers[name] = old


def _settled(fqn: str, old: torch.Tensor | None, new: torch.Tensor) -> str:
    """Return how to give a buffer at once what the forward gives it."""
    if old is None or old.shape != new.shape:
        return "give the buffer its final shape and dtype in __init__."
    name = re.sub(r"\.(\d+)(?=\.)", r"[\1]", f"model.{fqn}")
    return f"convert it before that: {name} = {name}.to({new.dtype})."


def _text(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"
