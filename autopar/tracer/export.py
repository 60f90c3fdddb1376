"""From the user's model to an exported forward graph on fake tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx, nn

from autopar._torch import HigherOrderOperator
from autopar.errors import AutoparError, CaptureError, InputError
from autopar.structure import Structure, flatten
from autopar.tracer import functions
from autopar.tracer.blame import capture_error, user_line
from autopar.tracer.checks import taken_as_passed
from autopar.tracer.convert import source_line
from autopar.tracer.ctc import forget_packed, without_tables
from autopar.tracer.derivatives import DerivativeError, refused
from autopar.tracer.device_neutral import device_neutral_ops
from autopar.tracer.hugging_face import masks_as_in_eager, without_caches
from autopar.tracer.normalize import CONTEXTS
from autopar.tracer.randomness import refuse_python_random
from autopar.tracer.side_effects import changed, constant_requires_grad, plain_state, set_to_new, watched


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
        before, plain = _held(self.model), plain_state(self.model)
        with constant_requires_grad(self.model):
            out, self.returned.structure = flatten(call_with(self.model, self._call.build(tensors)))
        self.returned.differentiable = tuple(t.requires_grad for t in out)
        self.returned.assigned = _write_in_place(self.model, before)
        self.returned.counted = changed(plain, plain_state(self.model))
        return tuple(out)


class _Returned:
    """What the last call returned. An object of its own: torch.export resets the attributes of modules."""

    structure: Structure | None = None
    differentiable: tuple[bool, ...] = ()
    assigned: tuple[str, ...] = ()
    counted: Mapping[str, tuple[Any, Any]] = MappingProxyType({})


def _held(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Buffers and plain tensor attributes of every module, by module and attribute."""
    found: dict[tuple[str, str], Any] = {}
    for path, module in model.named_modules():
        found |= {(path, name): b for name, b in module._buffers.items() if b is not None}
        found |= {(path, name): v for name, v in vars(module).items() if isinstance(v, torch.Tensor)}
    return found


def _write_in_place(model: nn.Module, before: Mapping[tuple[str, str], Any]) -> tuple[str, ...]:
    """Buffers that the forward replaced are written in place, which torch.export sees. Returns the plain attributes
    that it set, which nobody sees."""
    assigned = []
    for (path, name), new in _held(model).items():
        old, fqn = before.get((path, name)), f"{path}.{name}" if path else name
        if new is old:
            continue
        module = model.get_submodule(path)
        if name not in module._buffers:
            assigned.append(fqn)
        elif old is None or old.shape != new.shape or old.dtype != new.dtype:
            raise CaptureError(
                f"The forward gives the buffer {fqn} another shape or dtype.",
                found=f"{'nothing' if old is None else _text(old)} becomes {_text(new)}",
                hint="give the buffer its final shape and dtype in __init__.",
            )
        else:
            old.copy_(new.detach())
            module._buffers[name] = old
    return tuple(assigned)


def _text(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


@dataclass(frozen=True)
class Exported:
    """A forward graph of ATen ops, the structure of what the model returned, and which outputs have gradients.

    Args:
        program: None where the forward takes derivatives, which no exported graph holds.
        values: of the outputs, on fake tensors.
        notices: what the program will do otherwise than the model, one sentence each.
    """

    program: torch.export.ExportedProgram | None
    values: Sequence[Any]
    returned: Structure
    differentiable: tuple[bool, ...]
    notices: tuple[str, ...] = ()


def export(model: nn.Module, call: Call) -> Exported:
    """Export the forward of ``model``, which is on fake tensors.

    Raises:
        CaptureError: naming the line of the user's code where capturing stopped.
    """
    plain = dict(call.structure.plain)
    cached = without_caches(model) and plain.get("use_cache") is not False
    flat = FlatModel(model, call.structure)
    try:
        with (
            masks_as_in_eager(call.names, cached=cached), functions.opaque(),
            refuse_python_random(lambda: flat(*call.tensors)), device_neutral_ops(), refused(),
            without_tables(), watched(), taken_as_passed() as checks,
        ):  # fmt: skip
            program = torch.export.export(flat, call.tensors, strict=False)
            counted = flat.returned.counted
            if counted:
                with set_to_new(model, counted):
                    again = torch.export.export(flat, call.tensors, strict=False)
                _refuse_counters(program, again, counted)
    except DerivativeError:
        raise
    except CaptureError as error:
        raise _located(error) from error.__cause__
    except Exception as error:
        raise capture_error(model, error) from error
    _refuse_functions(program.graph)
    forget_packed(program.graph)
    returned = flat.returned.structure
    assert returned is not None
    notices = tuple(_notices(flat.returned, cached, checks))
    return Exported(program, _output_values(program), returned, flat.returned.differentiable, notices)


def run_once(model: nn.Module, call: Call) -> Exported:
    """What ``model``, on fake tensors, returns.

    Raises:
        CaptureError: it does not run on them.
    """
    cached = without_caches(model)
    flat = FlatModel(model, call.structure)
    try:
        with (
            refuse_python_random(lambda: flat(*call.tensors)), watched(), taken_as_passed() as checks,
        ):  # fmt: skip
            values = flat(*call.tensors)
    except CaptureError as error:
        raise _located(error) from error.__cause__
    except Exception as error:
        raise capture_error(model, error) from error
    assert flat.returned.structure is not None
    notices = _notices(flat.returned, cached, checks)
    return Exported(None, values, flat.returned.structure, flat.returned.differentiable, tuple(notices))


def _output_values(program: torch.export.ExportedProgram) -> list[Any]:
    output = next(n for n in program.graph.nodes if n.op == "output")
    specs = program.graph_signature.output_specs
    user = [a for a, s in zip(output.args[0], specs, strict=True) if s.kind.name == "USER_OUTPUT"]
    return [a.meta["val"] if isinstance(a, fx.Node) else a for a in user]


def _refuse_functions(graph: fx.Graph) -> None:
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if isinstance(node.target, HigherOrderOperator) and name not in CONTEXTS:
            raise CaptureError(
                f"The forward calls {name}, which takes functions, and those would need plans of their own.",
                found=source_line(node.meta) or name,
                hint="in place of torch.cond compute both sides and choose by torch.where; unroll loops; in place of "
                "flex_attention use scaled_dot_product_attention with a mask.",
            )


def _refuse_counters(
    program: torch.export.ExportedProgram, again: torch.export.ExportedProgram, counted: Mapping[str, tuple[Any, Any]]
) -> None:
    """Numbers that the forward changes may only be for show: the program of the second call is that of the first.

    Raises:
        CaptureError: it is another.
    """
    first, second = ([(str(n.target), str(n.args), str(n.kwargs)) for n in p.graph.nodes] for p in (program, again))
    if first != second:
        name, (old, new) = next(iter(counted.items()))
        raise CaptureError(
            f"The forward changes {name}, a plain number, and computes with it: the program would keep one value.",
            found=f"{old!r} becomes {new!r}",
            hint=f"keep it as a tensor: self.register_buffer({name.rpartition('.')[2]!r}, torch.tensor({old!r})).",
        )


def _located(error: CaptureError) -> AutoparError:
    """An error of our own, raised below a line of the user's."""
    where = user_line(error)
    return CaptureError(f"{error.what[:-1]}: {where}." if where else error.what, found=error.found, hint=error.hint)


def _notices(returned: _Returned, cached: bool, checks: Sequence[str]) -> list[str]:
    notices = [f"{name} is set in forward, and keeps its old value outside of it" for name in returned.assigned]
    notices += [f"{name} changes in forward, and keeps its old value outside of it" for name in returned.counted]
    if checks:
        notices.append(f"checks of values are taken as passed: {', '.join(dict.fromkeys(checks))}")
    if cached:
        notices.append("caches for generation (past_key_values) are None in training")
    return notices
