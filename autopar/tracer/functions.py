"""Custom ``torch.autograd.Function``s, of which torch.export keeps the forward and loses the backward.

During an export each call becomes an opaque op that records what was called; the joint tracer then calls the Function
itself, whose own backward goes into the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction

from autopar.errors import CaptureError
from autopar.tracer import flat
from autopar.tracer.replacements import REPLACEMENTS

LIBRARY: Any = torch.library.Library("autopar_capture", "DEF")  # type: ignore[no-untyped-call]
_APPLY: Any = torch.autograd.Function.__dict__["apply"]
"""A class method: a Python one before torch 2.15, and a C one since."""


@dataclass
class _FunctionCall:
    """One call: ``args`` without its tensors, whose positions are ``at``; likewise ``returned``."""

    function: type[torch.autograd.Function]
    args: list[Any]
    at: list[int]
    returned: list[Any] = field(default_factory=list)
    is_tuple: bool = False

    def run(self, tensors: list[Tensor]) -> Any:
        args = list(self.args)
        for position, tensor in zip(self.at, tensors, strict=True):
            args[position] = tensor
        return _APPLY.__get__(None, self.function)(*args)

    def rebuild(self, tensors: list[Tensor]) -> Any:
        remaining = iter(tensors)
        values = [next(remaining) if v is _TENSOR else v for v in self.returned]
        return tuple(values) if self.is_tuple else values[0]


_TENSOR = object()
_calls: ContextVar[list[_FunctionCall]] = ContextVar("calls")


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Record every call of a Function until the joint graph has been traced."""
    token = _calls.set([])
    try:
        yield
    finally:
        _calls.reset(token)


@contextlib.contextmanager
def opaque(overridden: list[str]) -> Iterator[None]:
    """Handle, during an export, what torch.export cannot: Functions, reentrant checkpoints and tensor hooks.

    Functions become opaque ops, reentrant checkpoints run the function they wrap, and tensor hooks are refused. The
    plan decides what is recomputed; the names of the user's own checkpoints are added to ``overridden``.
    """

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:
            run, _, *rest = args
            overridden.append(getattr(run, "__qualname__", type(run).__name__))
            # As in eager mode, where a reentrant checkpoint only sees the gradients of its inputs.
            with torch.set_grad_enabled(torch.is_grad_enabled() and _need_grad(rest)):
                return run(*rest)
        if cls.__module__.partition(".")[0] == "torch" or kwargs:
            return _APPLY.__get__(None, cls)(*args, **kwargs)
        return _record(cls, args)

    with (
        mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)),
        mock.patch.object(Tensor, "register_hook", _refuse_hook),
    ):
        yield


def _need_grad(values: Sequence[Any]) -> bool:
    return any(isinstance(v, Tensor) and v.requires_grad for v in values)


def _refuse_hook(tensor: Tensor, hook: Any) -> None:
    raise CaptureError(
        "register_hook in forward cannot be captured, so the gradient would be wrong.",
        found=getattr(hook, "__qualname__", repr(hook)),
        hint="write it as a torch.autograd.Function, whose backward is captured.",
    )


def _record(function: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    at = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    recorded_call = _FunctionCall(function, [None if i in at else a for i, a in enumerate(args)], at)
    calls = _calls.get()
    calls.append(recorded_call)
    made = torch.ops.autopar_capture.function([args[i] for i in at], len(calls) - 1)
    return recorded_call.rebuild(made)


def _fake(tensors: list[Tensor], call: int) -> list[Tensor]:
    recorded_call = _calls.get()[call]
    with torch.no_grad():
        result = recorded_call.run([t.detach() for t in tensors])
    recorded_call.is_tuple = isinstance(result, tuple)
    values = list(result) if recorded_call.is_tuple else [result]
    recorded_call.returned = [_TENSOR if isinstance(v, Tensor) else v for v in values]
    return [v.clone() for v in values if isinstance(v, Tensor)]


def _no_backward(ctx: Any, *_: Any) -> None:
    raise AssertionError("the stand-in of a Function has no backward")


def _run(tracer: Any, tensors: list[Any], call: int) -> list[Tensor]:
    result = _calls.get()[call].run([flat.materialize(t) for t in tensors])
    return [v for v in (result if isinstance(result, tuple) else (result,)) if isinstance(v, Tensor)]


LIBRARY.define("function(Tensor[] tensors, int call) -> Tensor[]")
torch.library.register_fake("autopar_capture::function", _fake, lib=LIBRARY)
torch.library.register_autograd("autopar_capture::function", _no_backward, lib=LIBRARY)
REPLACEMENTS[torch.ops.autopar_capture.function.default] = _run
