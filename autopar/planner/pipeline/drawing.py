"""Cuts and schedules of a pipeline with what they are estimated to cost, from one plan of the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.mesh import Mesh
from autopar.pipelines.actions import Schedule
from autopar.pipelines.makespan import Costs, by_rank, peak_bytes, simulate
from autopar.pipelines.orders import SCHEDULES, schedule
from autopar.pipelines.partition import balanced, partition_uniform
from autopar.pipelines.request import AUTO, Pipeline
from autopar.planner.pipeline.blocks import BlockCosts
from autopar.planner.pipeline.microbatches import MicroBatch
from autopar.planner.pipeline.stages import Seams, split_at
from autopar.planner.search.search import Planned

CHUNKS_TRIED = (1, 2, 4)
"""Stages a rank that schedules are tried with."""

NEARLY = 1.05
"""A pipeline estimated to hold up to this many times the budget may fit, since its stages are planned exactly
afterwards; and one that fits is good enough if it takes up to this many times as long as the shortest. So is the plan
of a stage."""


@dataclass(frozen=True)
class Whole:
    """The plan of the whole model for one micro-batch, on the mesh of a stage.

    Args:
        planned: of a deep model that of fewer layers.
        like: for each node of a layer that is not planned itself the one that stands for it.
        bound: seconds that no plan of the whole can beat, whatever it holds.
        working: bytes that a rank holds at its peak beside what stays and what micro-batches in flight hold.
    """

    micro: MicroBatch
    seams: Seams
    planned: Planned
    like: Mapping[str, str]
    blocks: tuple[BlockCosts, ...]
    bound: float
    working: float


@dataclass(frozen=True)
class Drawn:
    """A cut and a schedule with what they are estimated to cost."""

    whole: Whole
    starts: tuple[int, ...]
    schedule: Schedule
    costs: Costs
    seconds: float
    peaks: tuple[float, ...]

    def __str__(self) -> str:
        s = self.schedule
        chunks = f" x {s.stages // s.ranks}" if s.stages > s.ranks else ""
        return f"{s.name}{chunks} of {s.micro_batches} micro-batches"


@dataclass(frozen=True)
class Drawing:
    """What pipelines are drawn for.

    Args:
        ranks: along the pipeline.
        budget: bytes of each device.
        send_s: seconds of a message of so many bytes from one rank to the next.
    """

    asked: Pipeline
    ranks: int
    stage_mesh: Mesh
    budget: float
    send_s: Callable[[float], float]

    def fitting(self, drawn: Sequence[Drawn]) -> list[Drawn]:
        """Return those that may fit, the shortest first."""
        return sorted((d for d in drawn if max(d.peaks) <= NEARLY * self.budget), key=lambda d: d.seconds)

    def drawn(self, whole: Whole) -> list[Drawn]:
        """Return every cut and schedule that was asked for, or that may pay, with its estimated seconds.

        Raises:
            PlanError: there is none; says why the first one is not possible.
        """
        asked, found, refused = self.asked, [], []
        for name in SCHEDULES if asked.schedule == AUTO else (asked.schedule,):
            known = SCHEDULES[name].chunks
            chunks = [c for c in CHUNKS_TRIED if c in known] if asked.chunks == AUTO else [int(asked.chunks)]
            if name == "interleaved" and asked.chunks == AUTO:
                chunks = chunks[1:]  # with one stage a rank it is 1F1B
            for count in chunks:
                try:
                    found.append(self._draw(whole, name, count, whole.micro.micro_batches))
                except PlanError as error:
                    refused.append(error)
        if not found:
            raise refused[0]
        return found

    def _draw(self, whole: Whole, name: str, chunks: int, m: int) -> Drawn:
        starts = self._starts(whole, name, chunks)
        costs = self._estimate(whole, starts)
        rank_of = SCHEDULES[name].rank_of(self.ranks, chunks)

        def drawn(costs: Costs) -> Drawn:
            caps = self.caps(whole, starts, costs, rank_of, self.budget)
            made = schedule(name, self.ranks, m, chunks, costs, caps)
            if name != "listed":  # which holds no more than it may
                costs = self._recomputing(whole, starts, costs, rank_of, partial(peak_bytes, made))
            beside = self._beside(whole, starts, rank_of)
            peaks = tuple(map(sum, zip(beside, peak_bytes(made, costs), strict=True)))
            ways = [made, made.with_last_backwards_split()] if self.asked.schedule == AUTO else [made]
            return Drawn(whole, starts, made, costs, min(simulate(way, costs).seconds for way in ways), peaks)

        if name != "listed":
            return drawn(costs)
        depths = [math.ceil(min(m, depth)) for depth in costs.depths(rank_of)]

        def held_at_most(costs: Costs) -> Sequence[float]:
            return by_rank(rank_of, [k * held for k, held in zip(depths, costs.held, strict=True)])

        lean = self._recomputing(whole, starts, costs, rank_of, held_at_most)
        ways = [drawn(each) for each in dict.fromkeys((costs, lean))]
        return min(ways, key=lambda d: (not self.fitting([d]), d.seconds))

    def _recomputing(
        self,
        whole: Whole,
        starts: Sequence[int],
        costs: Costs,
        rank_of: Sequence[int],
        in_flight_bytes: Callable[[Costs], Sequence[float]],
    ) -> Costs:
        """Return the costs where stages whose rank would hold more than the budget recompute as much of what they hold
        as it takes: up to what enters their blocks.

        Args:
            in_flight_bytes: that micro-batches in flight hold on each rank.
        """
        ranges = ranges_of(starts, len(whole.blocks))
        entering = [0, *whole.seams.bytes]
        least = [
            min(sum(entering[a:b]) / self.stage_mesh.size, h) for (a, b), h in zip(ranges, costs.held, strict=True)
        ]
        leanest = replace(costs, held=tuple(least), kept=tuple(least))
        beside, share = self._beside(whole, starts, rank_of), []
        for one, most, lean in zip(beside, in_flight_bytes(costs), in_flight_bytes(leanest), strict=True):
            over = one + most - self.budget
            share.append(min(over / (most - lean), 1.0) if over > 0 and most > lean else 0.0)
        again = [share[rank] for rank in rank_of]
        held = tuple(h - x * (h - at_least) for h, at_least, x in zip(costs.held, least, again, strict=True))
        back = tuple(i + x * f for i, f, x in zip(costs.backward_input, costs.forward, again, strict=True))
        return replace(costs, backward_input=back, held=held, kept=held)

    def _starts(self, whole: Whole, name: str, chunks: int) -> tuple[int, ...]:
        stages = self.ranks * chunks
        split = self.asked.split
        if self.asked.like is not None:
            blocks, starts = self.asked.like
            if whole.seams.blocks[: starts[-1] + 1] == blocks[: starts[-1] + 1]:
                return starts
        if not isinstance(split, str):
            starts = split_at(whole.micro.graph, whole.seams, split)
            if len(starts) != stages:
                raise PlanError(
                    f"The split makes {len(starts)} stages, and the pipeline has {stages}.",
                    found=", ".join(split),
                    hint=f"name {stages - 1} modules, the first of each stage but the first.",
                )
            return starts
        begins = _first_blocks(whole.micro.graph, whole.seams)
        if stages > len(begins):
            raise PlanError(
                f"The model has {len(begins)} blocks with parameters, and the pipeline {stages} stages.",
                found=f"{self.ranks} ranks along pp" + (f", {chunks} stages a rank" if chunks > 1 else ""),
                hint=f"take at most {len(begins)} stages.",
            )
        rank_of = SCHEDULES[name].rank_of(self.ranks, chunks)
        if split == "uniform":
            # The remainder goes to the last parts, whatever the number of chunks.
            found = [r for ranges in partition_uniform(len(begins), stages) for r in ranges]
        else:
            seconds = [total(whole.blocks[a:b]).seconds for a, b in ranges_of(begins, len(whole.blocks))]
            found = list(balanced(seconds, stages, rank_of=rank_of))
        return tuple(begins[start] for start, _ in found)

    def _estimate(self, whole: Whole, starts: Sequence[int]) -> Costs:
        ranges = ranges_of(starts, len(whole.blocks))
        stages = [total(whole.blocks[a:b]) for a, b in ranges]
        sends = [self.send_s(whole.seams.bytes[at - 1] / self.stage_mesh.size) for at in starts[1:]]
        # Gradients are delivered beside the backward of the blocks before, so those of the first block cannot hide.
        hidden = [
            min(s.backward, s.delivery - whole.blocks[a].delivery) for s, (a, _) in zip(stages, ranges, strict=True)
        ]
        return Costs(
            forward=tuple(s.forward for s in stages),
            backward_input=tuple(s.backward_input for s in stages),
            backward_weight=tuple(s.backward_weight for s in stages),
            send=tuple(sends),
            held=tuple(float(s.held) for s in stages),
            kept=tuple(float(s.held) for s in stages),
            last_backward=tuple(s.delivery - beside for s, beside in zip(stages, hidden, strict=True)),
            first_forward=tuple(s.once for s in stages),
        )

    def caps(
        self, whole: Whole, starts: Sequence[int], costs: Costs, rank_of: Sequence[int], budget: float
    ) -> list[float]:
        """Return the bytes that micro-batches in flight may take on each rank: at least those of one."""
        beside = self._beside(whole, starts, rank_of)
        return [max(budget - s, h) for s, h in zip(beside, by_rank(rank_of, costs.held), strict=True)]

    def _beside(self, whole: Whole, starts: Sequence[int], rank_of: Sequence[int]) -> list[float]:
        """Return the bytes of each rank that no micro-batch in flight holds."""
        static = by_rank(rank_of, [total(whole.blocks[a:b]).static for a, b in ranges_of(starts, len(whole.blocks))])
        return [whole.working + size for size in static]


def _first_blocks(graph: Graph, places: Seams) -> tuple[int, ...]:
    """Return the blocks that a stage may begin with: the first, and those with parameters.

    So each stage has some, and an optimizer on each rank something to step.
    """
    given = {i.node for i in graph.inputs if i.kind == "parameter"}
    reading = (n for n in graph.nodes if n.phase == "forward" and any(v.node in given for v in n.inputs))
    found = {places.block_of[n.name] for n in reading if n.name in places.block_of}
    return tuple(sorted({0, *(found - {min(found)} if found else ())}))


def ranges_of(starts: Sequence[int], blocks: int) -> list[tuple[int, int]]:
    """Return the first block of each stage, and the one behind its last."""
    return list(zip(starts, [*starts[1:], blocks], strict=True))


def total(blocks: Sequence[BlockCosts]) -> BlockCosts:
    """Return what blocks cost together."""
    return sum(blocks, BlockCosts())
