"""Runs only the first three and the last two blocks of a run of equal blocks during an export.

Each other block becomes one opaque op with outputs like those of its predecessors. All Python code outside the blocks
runs as usual, which shows what goes into each block and who reads its results. Afterwards `cutting` takes the opaque
ops out of the graph, and `stamping` puts the blocks into the joint graph, forward and backward. If anything differs
between blocks, the whole model is captured instead.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, library, nn

from autopar.tracer.functions import LIBRARY
from autopar.tracer.repeated import Run

HEAD, TAIL = 3, 2
"""Numbers of blocks at both ends of a run that are captured as they are."""

OPS = torch.ops.autopar_capture
_PLAIN = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


@dataclass
class _Watched:
    """One run while its blocks are being called."""

    run: Run
    number: int
    blocks: list[nn.Module]
    called: int = 0
    skipped: int = 0
    broken: bool = False
    inside: bool = False
    entered: Any = None
    returned: tuple[Any, list[Any]] | None = None

    def is_real(self, index: int) -> bool:
        return index < HEAD or index >= len(self.run.paths) - TAIL

    def call(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a block, or return what its stand-in returns."""
        if not self.broken:
            given, shape = _flatten((args, kwargs))
            self._compare(index, given, shape)
        if self.broken:
            return forward(*args, **kwargs)
        self.called += 1
        inputs = [v for v in given if isinstance(v, Tensor)]
        if not self.is_real(index):
            return self._stand_in(index, inputs)
        OPS.block_enters(inputs, self.number, index)
        before = _attribute_identities(self.blocks[index])
        self.inside = True
        try:
            made = forward(*args, **kwargs)
        finally:
            self.inside = False
        self.broken = self.broken or _attribute_identities(self.blocks[index]) != before
        after, shape_after = _flatten((args, kwargs))
        if shape_after != shape or any(a is not b and isinstance(a, Tensor) for a, b in zip(given, after, strict=True)):
            self.broken = True  # the block changes an argument that is passed along
        self._remember(index, inputs, made)
        return made

    def _compare(self, index: int, given: list[Any], shape: Any) -> None:
        """Mark the run as broken unless each block is called once, in order, and alike from the second on."""
        plain = all(isinstance(v, (Tensor, *_PLAIN)) for v in given) and any(isinstance(v, Tensor) for v in given)
        entered = (shape, [_signature(v, given) for v in given], _modes())
        if index > 1 and entered != self.entered:
            self.broken = True
        self.entered = entered
        self.broken = self.broken or index != self.called or not plain

    def _remember(self, index: int, inputs: list[Tensor], made: Any) -> None:
        values, shape = _flatten(made)
        own, leaves = [], []
        for value in values:
            at = next((i for i, x in enumerate(inputs) if x is value), None)
            if at is not None:
                leaves.append(("input", at))
            elif isinstance(value, Tensor):
                own.append(value)
                leaves.append(("output", _signature(value, [value])))
            else:
                leaves.append(("plain", value))
                self.broken = self.broken or not isinstance(value, _PLAIN)
        if index > 1 and (shape, leaves) != self.returned:
            self.broken = True
        self.returned = (shape, leaves)
        OPS.block_returns(own, self.number, index)

    def _stand_in(self, index: int, inputs: list[Tensor]) -> Any:
        assert self.returned is not None
        shape, leaves = self.returned
        self.skipped += 1
        made = iter(OPS.block(inputs, self.number, index))
        values: list[Any] = []
        for kind, what in leaves:
            values.append(next(made) if kind == "output" else inputs[what] if kind == "input" else what)
            if kind == "output" and _signature(values[-1], [values[-1]]) != what:
                self.broken = True
        return _build(shape, iter(values))


@dataclass
class Skipping:
    """What was left out of an exported graph.

    Args:
        watched: the runs that were considered.
        cut: the runs whose middle is missing in the graph.
    """

    watched: list[_Watched] = field(default_factory=list)
    cut: list[Run] = field(default_factory=list)


def equal_blocks(runs: Sequence[Run]) -> dict[str, tuple[str, ...]]:
    """Return the blocks that were not run, by the equal block before them that was."""
    return {run.paths[HEAD - 1]: run.paths[HEAD : len(run.paths) - TAIL] for run in runs}


_current: ContextVar[Skipping] = ContextVar("skipping")


@contextlib.contextmanager
def skipping(model: nn.Module, runs: Sequence[Run]) -> Iterator[Skipping]:
    """Skip the middle of ``runs`` during an export of ``model``."""
    found = Skipping()
    token = _current.set(found)
    sites: dict[int, tuple[_Watched, int]] = {}
    classes: dict[type[nn.Module], None] = {}
    read: dict[tuple[type[nn.Module], str], None] = {}
    for run in runs:
        if any(name in dir(cls) for cls, name in run.differing):
            continue  # the property that watches the attribute would hide a default of the class
        watched = _Watched(run, len(found.watched), [model.get_submodule(path) for path in run.paths])
        found.watched.append(watched)
        for index, block in enumerate(watched.blocks):
            sites[id(vars(block))] = (watched, index)
            classes.setdefault(type(block))
        read |= dict.fromkeys(sorted(run.differing, key=lambda d: (d[0].__qualname__, d[1])))
    try:
        with contextlib.ExitStack() as stack:
            for cls in classes:
                stack.enter_context(mock.patch.object(cls, "forward", _intercepted(cls.forward, sites)))
            for cls, name in read:
                stack.enter_context(mock.patch.object(cls, name, _watching(name, found.watched), create=True))
            yield found
    finally:
        _current.reset(token)


def _intercepted(original: Callable[..., Any], sites: dict[int, tuple[_Watched, int]]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # torch.export calls a proxy of the module, which has the module's own __dict__.
        site = sites.get(id(vars(self)))
        if site is None:
            return original(self, *args, **kwargs)
        watched, index = site
        return watched.call(index, functools.partial(original, self), args, kwargs)

    return forward


def _watching(name: str, watched: Sequence[_Watched]) -> property:
    """Watch an attribute in which blocks differ: a run is broken if its blocks touch it."""

    def touched() -> None:
        for w in watched:
            w.broken = w.broken or w.inside

    def get(self: Any) -> Any:
        touched()
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(name) from None

    def put(self: Any, value: Any) -> None:
        touched()
        vars(self)[name] = value

    return property(get, put)


def _modes() -> tuple[Any, ...]:
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    return (torch.is_grad_enabled(), *autocast, torch.get_default_dtype())


def _signature(value: Any, among: Sequence[Any]) -> Any:
    """Return what a block can tell of a value without reading numbers, and which of the values it is."""
    if not isinstance(value, Tensor):
        return (type(value), value)
    first = next(i for i, v in enumerate(among) if v is value)
    return (first, type(value), value.shape, value.stride(), value.dtype, value.requires_grad)


def _attribute_identities(block: nn.Module) -> list[Any]:
    """Return what a block's attributes hold, one level deep, by identity, which shows if a shared list grows."""
    held: list[Any] = []
    for module in block.modules():
        for name, value in vars(module).items():
            held += [name, id(value)]
            if isinstance(value, (list, set)):
                held += map(id, value)
            elif isinstance(value, dict):
                held += [x for k, v in value.items() for x in (id(k), id(v))]
            elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
                held += [x for k, v in vars(value).items() for x in (k, id(v))]
    return held


def _flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return leaves and structure, looking only into plain containers."""
    if type(tree) in (tuple, list):
        parts = [_flatten(t) for t in tree]
        return [v for p, _ in parts for v in p], (type(tree), tuple(s for _, s in parts))
    if type(tree) is dict:
        parts = [_flatten(t) for t in tree.values()]
        return [v for p, _ in parts for v in p], (dict, tuple(tree), tuple(s for _, s in parts))
    return [tree], None


def _build(shape: Any, values: Iterator[Any]) -> Any:
    if shape is None:
        return next(values)
    if shape[0] is dict:
        return {k: _build(s, values) for k, s in zip(shape[1], shape[2], strict=True)}
    return shape[0](_build(s, values) for s in shape[1])


def _fake(tensors: list[Tensor], run: int, index: int) -> list[Tensor]:
    returned = _current.get().watched[run].returned
    assert returned is not None
    metas = [what for kind, what in returned[1] if kind == "output"]
    return [tensors[0].new_empty_strided(m[2], m[3], dtype=m[4]) for m in metas]


def _no_backward(ctx: Any, *_: Any) -> None:
    raise AssertionError("the stand-in of a block has no backward")


LIBRARY.define("block(Tensor[] tensors, int run, int index) -> Tensor[]")
library.register_fake("autopar_capture::block", _fake, lib=LIBRARY)
library.register_autograd("autopar_capture::block", _no_backward, lib=LIBRARY)
for _name in ("block_enters", "block_returns"):
    LIBRARY.define(f"{_name}(Tensor[] tensors, int run, int index) -> ()")
    library.register_fake(f"autopar_capture::{_name}", lambda *_: None, lib=LIBRARY)
    fx.node.has_side_effect(getattr(OPS, _name).default)
