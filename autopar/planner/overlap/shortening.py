"""A deep program as two shorter ones, from which its step time is extrapolated.

Equal layers are a run of equal ops in a program, once in each phase; some of them can be removed. Arrangements of
collectives are compared on programs of few layers: what one more layer adds is the same at any depth, except for
launches that carry a share of several layers. So the two programs differ by a few times as many layers as the largest
launch spans.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.program import Op, Program

MIN_LAYERS, MIN_MORE_LAYERS = 4, 4
"""The least number of layers of the shorter program, and by how many more the other has at least."""

LAUNCHES = 2
"""How many of the largest launch the shorter program holds; the other holds twice as many more."""

MAX_SHARE = 0.6
"""The largest mean share of the layers that the two programs may have. With more, nothing is saved."""

MIN_RUN_OPS = 64
"""The ops of a phase from which on it is worth looking for layers."""


class Depths(NamedTuple):
    """The layers of the two short programs and of the full one."""

    few: int
    more: int
    whole: int

    @classmethod
    def of(cls, whole: int, span: float) -> Depths | None:
        """Choose the depths of the short programs; None if nothing is saved.

        Args:
            span: the number of layers whose collectives go in the largest launch.
        """
        few = max(MIN_LAYERS, LAUNCHES * math.ceil(span))
        more = few + max(MIN_MORE_LAYERS, 2 * LAUNCHES * math.ceil(span))
        return cls(few, more, whole) if few + more <= MAX_SHARE * 2 * whole else None

    def seconds(self, few_s: float, more_s: float) -> float:
        """Extrapolate the seconds of the full program from those of the two."""
        return more_s + (self.whole - self.more) * (more_s - few_s) / (self.more - self.few)


@dataclass(frozen=True)
class Shortened:
    """Two programs with fewer layers than a deep one."""

    programs: tuple[Program, Program]
    depths: Depths


class _Run(NamedTuple):
    """Ops from ``start`` on that repeat with ``period``, with ``instances`` in all."""

    start: int
    period: int
    instances: int


def shortened(program: Program, likes: Mapping[str, str], share: float) -> Shortened | None:
    """Return two programs with fewer layers; None if no layers repeat, or few do.

    Args:
        likes: nodes of equal layers, and their likes one layer further on.
        share: the largest share of the layers whose collectives go in one launch.
    """
    ops = program.ops
    turn = program.turn
    runs = {"forward": _repeated(ops, likes, 0, turn), "backward": _repeated(ops, likes, turn, len(ops))}
    found = [run for run in runs.values() if run is not None]
    if not found:
        return None
    depth = min(run.instances for run in found)
    depths = Depths.of(depth, share * depth)
    if depths is None:
        return None
    both = _without(program, found, depth - depths.few), _without(program, found, depth - depths.more)
    return Shortened(both, depths)


def _repeated(ops: Sequence[Op], likes: Mapping[str, str], start: int, end: int) -> _Run | None:
    """Return the longest run of a phase."""
    if end - start < MIN_RUN_OPS:
        return None
    places = {op.node: i for i, op in enumerate(ops[start:end])}
    periods = {abs(places[likes[node]] - i) for node, i in places.items() if likes.get(node) in places}
    names: dict[object, int] = {}
    kinds = np.array(
        [
            names.setdefault((op.kind, id(op.strategy), op.seconds, op.wire_bytes, len(op.reads)), len(names))
            for op in ops[start:end]
        ]
    )
    best, longest = None, 0
    for period in sorted(periods):
        at, length = _longest(kinds[period:] == kinds[:-period])
        if length > longest and length >= 2 * period:
            best, longest = _Run(start + at, period, length // period + 1), length
    return best


def _longest(same: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Return where the longest stretch of True begins, and its length."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], same.view(np.int8), [0]))))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    at = int(lengths.argmax())
    return int(edges[2 * at]), int(lengths[at])


def _without(program: Program, runs: Sequence[_Run], removed: int) -> Program:
    """Remove instances from the middle of each run. What follows reads what the last remaining instance makes."""
    ops = program.ops
    kept: list[Op] = []
    at = 0
    for run in runs:
        begin = run.start + (run.instances - removed) // 2 * run.period
        end = begin + removed * run.period
        names = _names(ops[end - run.period : end], ops[begin - run.period : begin])
        kept += ops[at:begin]
        kept += [_reading(op, names) for op in ops[end : end + run.period]]
        at = end + run.period
    return Program((*kept, *ops[at:]), ())


def _names(layer: Sequence[Op], other: Sequence[Op]) -> dict[str, str]:
    """Map each tensor that ``layer`` makes to the one that ``other`` makes in its place."""
    pairs = zip(layer, other, strict=True)
    return {a.name: b.name for one, two in pairs for a, b in zip(one.writes, two.writes, strict=False)}


def _reading(op: Op, names: dict[str, str]) -> Op:
    if names.keys().isdisjoint(op.reads):
        return op
    return replace(op, reads=tuple(names.get(name, name) for name in op.reads))
