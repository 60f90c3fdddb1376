"""Where a chain of blocks is cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import nsmallest
from itertools import accumulate, combinations
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.errors import PlanError
from autopar.pipelines.settings import FEW_CUTS

Range = tuple[int, int]
"""The first block of a part, and the one behind its last."""

Cut = tuple[Range, ...]


def partition_uniform(n: int, parts: int, chunks: int = 1) -> list[list[Range]]:
    """The layers of each rank of a pipeline, as ranges, one for each of its chunks.

    The layers are cut into equal chunks, and each chunk into as many parts as there are ranks; what is left over of a
    chunk goes to its last parts, one layer each.

    Raises:
        PlanError: the layers are not a multiple of the chunks.
    """
    if parts < 1 or chunks < 1 or n % chunks:
        raise PlanError(
            "The layers cannot be cut into equal chunks.",
            found=f"{n} layers, {parts} parts, {chunks} chunks",
            hint="take a number of chunks that divides the layers, and one part or more",
        )
    size = n // chunks
    whole, rest = divmod(size, parts)
    lengths = [whole] * (parts - rest) + [whole + 1] * rest
    ends = [0, *accumulate(lengths * chunks)]
    ranges = list(zip(ends[:-1], ends[1:], strict=True))
    return [ranges[rank::parts] for rank in range(parts)]


def balanced(
    costs: Sequence[float],
    parts: int,
    *,
    allowed: Collection[int] | None = None,
    rank_of: Sequence[int] | None = None,
) -> Cut:
    """The best of ``best_cuts``."""
    return best_cuts(costs, parts, 1, allowed=allowed, rank_of=rank_of)[0]


def best_cuts(
    costs: Sequence[float],
    parts: int,
    k: int,
    *,
    allowed: Collection[int] | None = None,
    rank_of: Sequence[int] | None = None,
) -> list[Cut]:
    """The ``k`` cuts of a chain into non-empty parts whose slowest rank is fastest, and of equal ones those of
    the most even ranks, and then parts.

    Exact where each rank has one part, in O(parts * blocks^2) for small ``k``, and elsewhere up to ``FEW_CUTS`` cuts.

    Args:
        costs: seconds by block.
        parts: number of stages.
        allowed: positions at which a cut may be, that is before which block; all without.
        rank_of: of each part; each is on a rank of its own without.

    Raises:
        PlanError: there are fewer positions than cuts to make.
    """
    blocks = len(costs)
    positions = sorted(set(range(1, blocks) if allowed is None else allowed) & set(range(1, blocks)))
    if not 1 <= parts <= len(positions) + 1:
        raise PlanError(
            "The model cannot be cut into so many stages.",
            found=f"{parts} stages, {len(positions)} places at which a cut may be",
            hint=f"take {len(positions) + 1} stages or fewer",
        )
    problem = _Chain((0.0, *accumulate(costs)), tuple(range(parts) if rank_of is None else rank_of))
    if len(set(problem.rank_of)) == parts:
        found = _by_dynamic_program(problem, positions, k)
    elif comb(len(positions), parts - 1) <= FEW_CUTS:
        every = list(combinations(positions, parts - 1))
        keys = problem.keys(np.array(every, dtype=np.int64).reshape(len(every), parts - 1))
        found = [cut for _, cut in nsmallest(k, zip(keys, every, strict=True))]
    else:
        found = _by_moves(problem, positions, k)
    return [_ranges(cut, blocks) for cut in found]


Positions = tuple[int, ...]
"""Before which blocks a chain is cut."""

Key = tuple[float, ...]
"""The seconds of the slowest rank, the sum of squares of the seconds of all ranks, and that of all parts, as shares of
the whole: where ranks are equal, their parts are as even as they can be."""

ROUNDING_DIGITS = 12
"""Of keys: sums in another order are equal."""


def _ranges(cut: Positions, blocks: int) -> Cut:
    return tuple(zip((0, *cut), (*cut, blocks), strict=True))


class _Chain(NamedTuple):
    """Sums of the seconds of the first blocks, see ``best_cuts`` for the rest."""

    sums: Sequence[float]
    rank_of: tuple[int, ...]

    def seconds(self, start: int, end: int) -> float:
        return self.sums[end] - self.sums[start]

    def keys(self, cuts: npt.NDArray[np.int64]) -> list[Key]:
        """The keys of cuts, one a row."""
        ends = np.full((len(cuts), 1), len(self.sums) - 1)
        seconds = np.diff(np.array(self.sums)[np.hstack([0 * ends, cuts, ends])], axis=1) / (self.sums[-1] or 1.0)
        loads = seconds @ np.eye(max(self.rank_of) + 1)[list(self.rank_of)]
        numbers = loads.max(axis=1), (loads * loads).sum(axis=1), (seconds * seconds).sum(axis=1)
        return list(zip(*(n.round(ROUNDING_DIGITS).tolist() for n in numbers), strict=True))


def _by_dynamic_program(problem: _Chain, positions: Sequence[int], k: int) -> list[Positions]:
    """Of the cuts of the first blocks into so many parts, keep those that fewer than ``k`` others beat in both numbers
    of their key: whatever follows, these others stay ahead."""
    parts, blocks = len(problem.rank_of), len(problem.sums) - 1
    best: dict[int, list[tuple[float, float, Positions]]] = {0: [(0.0, 0.0, ())]}
    for part in range(parts):
        left = parts - part - 1
        ends = [blocks] if not left else positions[part : len(positions) - left + 1]
        following: dict[int, list[tuple[float, float, Positions]]] = {}
        for end in ends:
            labels = []
            for start, before in best.items():
                if start >= end:
                    continue
                seconds = problem.seconds(start, end)
                cut = (end,) if left else ()
                labels += [
                    (max(most, seconds), squares + seconds * seconds, done + cut) for most, squares, done in before
                ]
            following[end] = _unbeaten(labels, k)
        best = following
    return [cut for _, _, cut in best[blocks][:k]]


def _unbeaten(labels: list[tuple[float, float, Positions]], k: int) -> list[tuple[float, float, Positions]]:
    kept: list[tuple[float, float, Positions]] = []
    for label in sorted(labels):
        if sum(other[1] <= label[1] for other in kept) < k:
            kept.append(label)
    return kept


def _by_moves(problem: _Chain, positions: Sequence[int], k: int) -> list[Positions]:
    """From the most even parts, while it helps, move some neighbouring cuts by one position, which takes blocks from
    one part to another; the best of all that were looked at."""
    current = _even(problem, positions)
    seen = {current: problem.keys(np.array([current]))[0]}
    while True:
        near = _neighbours(current, positions)
        seen.update(zip(map(tuple, near.tolist()), problem.keys(near), strict=True))
        best = min(seen, key=lambda cut: (seen[cut], cut))
        if best == current:
            return nsmallest(k, seen, key=lambda cut: (seen[cut], cut))
        current = best


def _even(problem: _Chain, positions: Sequence[int]) -> Positions:
    """Return the cut whose parts' ends are nearest to even ones."""
    cuts, at = len(problem.rank_of) - 1, np.array(problem.sums)[positions]
    wanted = problem.sums[-1] * np.arange(1, cuts + 1) / (cuts + 1)
    nearest = np.abs(at - wanted[:, None]).argmin(axis=1)
    # Each needs a place of its own, with as many places behind it as there are cuts to come.
    places = np.maximum.accumulate(nearest - np.arange(cuts)) + np.arange(cuts)
    places = np.minimum(places, len(positions) - cuts + np.arange(cuts))
    return tuple(positions[place] for place in places)


def _neighbours(cut: Positions, positions: Sequence[int]) -> npt.NDArray[np.int64]:
    """Cuts, one a row, of which some that follow each other are moved to the next position before or behind."""
    places = np.searchsorted(positions, cut)
    first, behind = np.triu_indices(len(cut) + 1, 1)
    column = np.arange(len(cut))
    moved = (first[:, None] <= column) & (column < behind[:, None])
    near = np.concatenate([places + moved, places - moved])
    inside = (near[:, 0] >= 0) & (near[:, -1] < len(positions)) & (np.diff(near, axis=1) > 0).all(axis=1)
    return np.take(np.array(positions), near[inside])
