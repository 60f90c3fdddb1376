"""Outputs that are still on their way when the forward returns, such as a loss that the ranks add up.

A loss is mostly read after the backward, so the forward need not wait for the other ranks. What its program computes
of a collective that nothing else reads is written down (``_Recorded``), and the caller gets a tensor (``Late``) that
looks like any other, whose values come when something first reads them: at once where the caller prints or scales it,
else before the backward's first wait. From then on it is a plain ``torch.Tensor``.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from autopar import _torch

_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn", "output_nr", "is_cuda",
)  # fmt: skip
_READS_NOTHING: frozenset[Any] = frozenset({
    Tensor.backward, torch.autograd.grad, torch.ones_like, Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.__hash__,
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
})  # fmt: skip
"""What may be asked of a tensor that has no values yet."""


@dataclass(eq=False)
class _Value:
    """A value that is on its way. ``get`` waits for it, and is called once."""

    get: Callable[[], Tensor] | None
    found: Tensor | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def __call__(self) -> Tensor:
        """As the program would compute it, whatever the mode of whoever reads it."""
        with self.lock, torch.inference_mode(mode=False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            if self.get is not None:
                get, self.get = self.get, None
                self.found = get()
        assert self.found is not None
        return self.found


class _Recorded(Tensor):
    """Stands in a program for a value that is on its way: what is computed of it is written down."""

    value: _Value

    @staticmethod
    def of(value: _Value) -> _Recorded:
        made: Any = torch.empty(0)
        made.__class__, made.value = _Recorded, value
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})

        def compute() -> Any:
            return func(*tree_map(known, args), **tree_map(known, named))

        if getattr(func, "__name__", "") == "__get__":  # a shape or dtype: the program has to know it now
            return compute()
        return _Recorded.of(_Value(compute))


def known(x: Any) -> Any:
    """What the program returned, waited for."""
    return x.value() if type(x) is _Recorded else x


class Late(Tensor):
    """An output whose values come when something first reads them; then it is a plain ``torch.Tensor``.

    It has no memory of its own. ``twin`` is an output of the same node of autograd, and plain: it takes the values, and
    the place of this tensor. Only what holds this one below Python, as TorchScript may, goes on with it: each op then
    runs on the twin.
    """

    value: _Value
    twin: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _READS_NOTHING:
            with _torch.DisableTorchFunctionSubclass():
                return func(*args, **named)
        return func(*tree_map(_arrived, args), **tree_map(_arrived, named))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is torch.ops.aten.ones_like.default:  # with which a backward begins
            return func(torch.empty_like(args[0].twin), **named)
        return func(*tree_map(_values, args), **tree_map(_values, named))


def _values(x: Any) -> Any:
    """The values of a late tensor, without autograd."""
    if type(x) is not Late:
        return x
    with _torch.DisableTorchFunctionSubclass():
        x.twin.data = x.value()
        return x.twin.detach()


def _arrived(x: Any) -> Any:
    """A late tensor that has become a plain one."""
    if type(x) is not Late:
        return x
    with x.value.lock, _torch.DisableTorchFunctionSubclass():
        if type(x) is Late:
            _values(x)
            if not _torch.swapped(x, x.twin):  # something below Python holds it
                return x.twin
            x.__dict__.clear()
    return x


@dataclass(eq=False)
class LateOutputs:
    """The late outputs of one call.

    Args:
        allowed: whether any output may be late; else all is waited for where the program says so. On a GPU it is: there
            the stream waits, and the caller does not.
        due: whether they are to be there before the next wait, as in the backward.
        names: of the outputs of autograd's node, twins after all others.
    """

    allowed: bool
    due: bool = False
    names: list[str] = field(default_factory=list)
    _begun: list[_Value] = field(default_factory=list)
    _outputs: list[weakref.ref[Late]] = field(default_factory=list)

    def put_off(self, wait: Callable[[], Tensor]) -> Tensor:
        """What stands for what ``wait`` returns."""
        if self.due or not self.allowed:
            return wait()
        self._begun.append(_Value(wait))
        return _Recorded.of(self._begun[-1])

    def output(self, value: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Any:
        """A result of the program as an output for the caller."""
        if type(value) is not _Recorded:
            return value
        late = Tensor._make_wrapper_subclass(Late, tuple(shape), dtype=dtype, device=device)
        late.value = value.value
        self._outputs.append(weakref.ref(late))
        return late

    def with_twins(self, outputs: Sequence[Any], names: Sequence[str]) -> tuple[list[Any], list[str]]:
        """The outputs of autograd's node and their names: every late one has a twin."""
        late = [(o, n) for o, n in zip(outputs, names, strict=True) if type(o) is Late]
        self.names = [*names, *(name for _, name in late)]
        return [*outputs, *(torch.empty(o.shape, dtype=o.dtype, device=o.device) for o, _ in late)], self.names

    def paired(self, outputs: Sequence[Any]) -> list[Any]:
        """The outputs for the caller, each late one with its twin."""
        count = len(self.names) - sum(type(o) is Late for o in outputs)
        twins = iter(outputs[count:])
        for output in outputs[:count]:
            if type(output) is Late:
                output.twin = next(twins)
        return [*outputs[:count]]

    def arrive(self) -> None:
        """Wait for all, once."""
        outputs, self._outputs = self._outputs, []
        begun, self._begun = self._begun, []
        for value in begun:
            value()
        for output in outputs:
            _arrived(output())

    def __del__(self) -> None:
        """Outputs that nobody read, of a forward without a backward: a collective must be waited for all the same."""
        with contextlib.suppress(Exception):
            self.arrive()
