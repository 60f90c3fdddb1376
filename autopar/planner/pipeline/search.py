"""The search for a pipeline: micro-batches, the cut, the schedule, and the plan of every stage.

One plan of the whole model for one micro-batch, on the mesh of a stage, tells the seconds and bytes of every block. Of
a deep model as many equal layers are planned as a stage has, and stand for the others. A stage's optimum is affine in
its blocks, so that sums of these are what any cut costs. The model is cut so that no rank takes longer than need be,
each schedule is simulated exactly with the stages' own seconds, and those of the shortest are planned stage by stage. A
stage takes the choices of the whole plan where they fit; else those of an equal stage, or what a search finds that
begins from the shardings of the whole.

The whole model with as many micro-batches in flight as there are ranks, on a device that has the memory of all ranks
of the pipeline, holds what the ranks hold together. Where nothing fits, or by estimate what fits takes longer than what
does not, the whole is planned for that budget too.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from autopar import settings
from autopar.cost_models import CollectiveCosts
from autopar.errors import AutoparError, InfeasibleError, PlanError, Shortfall
from autopar.ir import Graph, Value
from autopar.mesh import Cluster, Mesh, without_axis
from autopar.pipelines.actions import Schedule
from autopar.pipelines.makespan import Costs, in_flight, simulate
from autopar.pipelines.orders import schedule, zero_bubble
from autopar.pipelines.request import AUTO, AXIS, Pipeline
from autopar.planner.answers.nearby import with_candidate
from autopar.planner.baselines.roles import baselines
from autopar.planner.graphs.accumulation import with_gradient_sums
from autopar.planner.graphs.dataflow import batch_size
from autopar.planner.graphs.layers import shortened
from autopar.planner.graphs.shared import shared
from autopar.planner.memory.exact import profile, saved_bytes
from autopar.planner.options import Options
from autopar.planner.pipeline.blocks import BlockCosts, block_costs
from autopar.planner.pipeline.carry import Known, carried, forms_of
from autopar.planner.pipeline.drawing import NEARLY, Drawing, Drawn, Whole, ranges_of, total
from autopar.planner.pipeline.microbatches import MicroBatch, micro_batch
from autopar.planner.pipeline.parts import Parts, parts_of
from autopar.planner.pipeline.peaks import StageBytes, inputs_of, output_bytes, rank_peaks, static_bytes
from autopar.planner.pipeline.renamed import Names, renamed
from autopar.planner.pipeline.stages import Seams, Stage, cut, seams
from autopar.planner.pricing.prices import Prices, least_seconds
from autopar.planner.problem.constraints import resolve, those_that_apply
from autopar.planner.schedule.timeline import simulate_streams
from autopar.planner.search.candidates import Candidate, budget_bytes
from autopar.planner.search.fitting import scheduled
from autopar.planner.search.forms import for_kernels, plan_forms
from autopar.planner.search.infeasible import bytes_text
from autopar.planner.search.phases import Free, Given, Phase
from autopar.planner.search.search import Planned, plan_graph
from autopar.planner.search.state import Progress
from autopar.solver.clock import limited, now

TRIED = 3
"""Cuts and schedules whose stages are planned, the shortest by estimate first."""

CONSIDERED = 8
"""Pipelines that a plan tells about beside its own."""

FREE_SHARE, WHOLE_SHARE, STAGES_SHARE = 0.25, 0.4, 0.35
"""Shares of the time limit for plans of the whole model: without a budget, for several numbers of micro-batches, and
within the budget for one of them; and at least for plans of the stages."""

UNLIMITED = 2**60
"""Bytes that no device has."""

STAGE_SHARE, STAGE_S = 0.25, 8.0
"""Share of the time left for the plan of one stage, which equal ones share; and seconds at least, since a pipeline of
which one stage does not fit is none. Those of Llama 3 405B on 32 x 4 x 8 took 6 to 10 s each."""

ROUNDS = 3
"""Times that stages are planned: what a rank holds beside its stages, such as messages, is known after the first."""

SEAM_BYTES = 1e8
"""Bytes of a message that is long enough for its latency not to count."""

LEAST_SHARE = 0.05
"""Share of the budget that a stage may take at least, whatever the rank's other stages are estimated to."""

SPLIT_GAIN = 0.01
"""Backwards in two parts need a program more, so a step has to be this share shorter where only the last are."""

TELLING = 0.1
"""An error names an output that takes more than this share of a rank's peak."""


@dataclass(frozen=True)
class PlannedPipeline:
    """A pipeline that was found. Seconds and bytes.

    Args:
        micro: what one micro-batch computes.
        stages: the graphs of the stages, with the sums of their gradients.
        planned: the plan of each stage.
        seconds: of a step; ``bound``: that no pipeline of these ranks and micro-batches can beat.
        peaks: by rank along the pipeline.
        considered: other pipelines, with the seconds that they were estimated to take.
    """

    micro: MicroBatch
    seams: Seams
    starts: tuple[int, ...]
    stages: tuple[Stage, ...]
    planned: tuple[Planned, ...]
    schedule: Schedule
    costs: Costs
    seconds: float
    bound: float
    peaks: tuple[int, ...]
    considered: tuple[tuple[str, float], ...] = ()


def plan_pipeline(
    graph: Graph,
    mesh: Mesh,
    cluster: Cluster,
    options: Options,
    asked: Pipeline,
    report: Progress | None = None,
    *,
    cutoff_s: float = math.inf,
) -> PlannedPipeline:
    """Return the shortest pipeline that was found within the memory budget of every device.

    Args:
        graph: of the whole batch, without sums of gradients.
        mesh: with the axis ``pp``.
        cutoff_s: seconds of a step that is known from elsewhere.

    Raises:
        PlanError: what is asked does not fit the model or the batch, or by estimate no pipeline is shorter than
            ``cutoff_s``.
        InfeasibleError: no pipeline fits the budget.
    """
    with limited(options.time_limit_s):
        return _PipelineSearch(graph, mesh, cluster, options, asked, report or (lambda _: None), cutoff_s).run()


BY_HAND = ("gpipe", "1f1b", "interleaved", "zbv")
"""Schedules of pipelines that people write by hand."""


def pipelines_by_hand(
    graph: Graph, mesh: Mesh, cluster: Cluster, options: Options, micro_batches: int
) -> Iterator[tuple[str, PlannedPipeline]]:
    """Yield pipelines with equal numbers of blocks in every stage, each stage trained in a known way, by their names.

    They may hold more than the budget.
    """
    free = replace(options, memory_budget_bytes=UNLIMITED, constraints={})
    stage_mesh = without_axis(mesh, AXIS, cluster)[0]
    with limited(options.time_limit_s):
        for name in [b.name for b in baselines(stage_mesh)] or [""]:
            one = replace(free, search=f"baseline:{name}") if name else free
            asked = Pipeline(micro_batches=micro_batches, split="uniform")
            search = _PipelineSearch(graph, mesh, cluster, one, asked, lambda _: None)
            for schedule_name in BY_HAND:
                search.asked = replace(asked, schedule=schedule_name)
                with contextlib.suppress(AutoparError):
                    yield f"{schedule_name}, {name}" if name else schedule_name, search.run()


@dataclass
class _Room:
    """How the stages of a rank share its memory. Bytes.

    Args:
        least: that each stage takes, whatever the others hold.
        resident: that each stage holds while another one runs, estimated or as last planned.
        beside: that each rank holds beside its stages, such as messages.
    """

    budget: float
    rank_of: tuple[int, ...]
    least: list[float]
    resident: list[float]
    beside: list[float]

    @classmethod
    def estimated(cls, d: Drawn, budget: float) -> _Room:
        made = d.schedule
        flying = zip(in_flight(made), d.costs.held, ranges_of(d.starts, len(d.whole.blocks)), strict=True)
        resident = [total(d.whole.blocks[a:b]).static + k * held for k, held, (a, b) in flying]
        least = [LEAST_SHARE * budget] * made.stages
        return cls(budget, made.rank_of, least, resident, [0.0] * made.ranks)

    def left_for(self, stage: int) -> float:
        """Return what the rank's other stages leave."""
        rank = self.rank_of[stage]
        return max(self.budget - self.beside[rank] - self._of_others(stage), self.least[stage])

    def _of_others(self, stage: int) -> float:
        rank = self.rank_of[stage]
        return sum(self.resident[t] for t, r in enumerate(self.rank_of) if r == rank and t != stage)

    def count_beside(self, found: PlannedPipeline) -> None:
        """Count what each rank held in ``found`` beyond the peak of a stage and what its others hold meanwhile."""
        for rank, peak in enumerate(found.peaks):
            mine = (s for s, r in enumerate(self.rank_of) if r == rank)
            known = max(found.planned[s].memory.peak_bytes + self._of_others(s) for s in mine)
            self.beside[rank] = max(self.beside[rank], peak - known)


@dataclass(frozen=True)
class _Equal:
    """A plan of a stage with so many micro-batches in flight, which equal stages may take over. Bytes.

    Args:
        options: with which it was planned.
        held: by each micro-batch in flight.
    """

    planned: Planned
    options: Options
    held: int

    def peak_bytes(self, in_flight: int) -> int:
        return self.planned.memory.peak_bytes + (in_flight - self.options.in_flight) * self.held

    def taken_over(self, graph: Graph, prices: Prices, options: Options) -> _Renamed | None:
        """Return this plan under the names of ``graph``; None if it is not equal, or under other constraints."""
        more = (options.in_flight - self.options.in_flight) * self.held
        for form in forms_of(graph, prices, options):
            names = Names.between(self.planned.decisions.graph, form)
            if names and options.constraints == {names.constraint(k): s for k, s in self.options.constraints.items()}:
                return _Renamed(renamed(self.planned, form, names, more), self.planned, names)
        return None


class _Renamed(NamedTuple):
    """A plan that is that of an equal stage under other names."""

    planned: Planned
    like: Planned
    names: Names


@dataclass(frozen=True)
class _Staged:
    """A stage as it was planned under constraints, for so many micro-batches in flight.

    Args:
        found: its plan, before what micro-batches share was told apart; held, since it is known by its identity.
    """

    stage: Stage
    found: Planned
    constraints: Mapping[str, str]
    in_flight: int
    held: StageBytes


class _Scheduled(NamedTuple):
    """A schedule of planned stages, with what they cost in it and the peaks of its ranks."""

    schedule: Schedule
    costs: Costs
    peaks: tuple[int, ...]


@dataclass
class _PipelineSearch:
    graph: Graph
    mesh: Mesh
    cluster: Cluster
    options: Options
    asked: Pipeline
    report: Progress
    cutoff_s: float = math.inf
    wholes: dict[tuple[int, float | None], Whole] = field(default_factory=dict)
    equal: dict[object, list[_Equal]] = field(default_factory=dict)
    taken: dict[int, _Renamed] = field(default_factory=dict)
    known: dict[int, _Staged] = field(default_factory=dict)
    refused: list[InfeasibleError] = field(default_factory=list)
    ends: float = math.inf

    def __post_init__(self) -> None:
        self.options = replace(self.options, device=self.cluster.device.kernels)

    @cached_property
    def ranks(self) -> int:
        return self.mesh.shape[self.mesh.names.index(AXIS)]

    @cached_property
    def stage_mesh(self) -> Mesh:
        return without_axis(self.mesh, AXIS, self.cluster)[0]

    @cached_property
    def stage_cluster(self) -> Cluster:
        return without_axis(self.mesh, AXIS, self.cluster)[1]

    @cached_property
    def budget(self) -> float:
        return budget_bytes(self.cluster, self.options)

    @property
    def drawing(self) -> Drawing:
        return Drawing(self.asked, self.ranks, self.stage_mesh, self.budget, self._send_s)

    @cached_property
    def prices(self) -> Prices:
        return Prices(self.stage_mesh, self.stage_cluster, self.options.backend, self.options.decomposed)

    @property
    def overlap(self) -> float:
        return self.prices.overlap

    def run(self) -> PlannedPipeline:
        self.ends = now() + self.options.time_limit_s
        self.refused.clear()
        drawn = self._drawn_without_budget()
        shortest = min(drawn, key=lambda d: d.seconds)
        if shortest.seconds >= self.cutoff_s:
            raise _none_shorter(self.cutoff_s, shortest.seconds)
        best: PlannedPipeline | None = None
        if fitting := self.drawing.fitting(drawn):
            best = self._planned(fitting, None)
        if best is None or self._may_be_shorter(fitting[0].seconds, shortest.seconds):
            more = self.drawing.drawn(self._whole(shortest.schedule.micro_batches, self.budget * self.ranks))
            drawn += more
            leanest = sorted(drawn, key=lambda d: max(d.peaks)) if best is None else []
            best = self._planned(self.drawing.fitting(more) or leanest, best)
        if best is None:
            raise min(self.refused, key=lambda error: error.least_bytes)
        others = {str(d): d.seconds for d in sorted(drawn, key=lambda d: -d.seconds)}
        return replace(best, considered=tuple(sorted(others.items(), key=lambda o: o[1])[:CONSIDERED]))

    def _drawn_without_budget(self) -> list[Drawn]:
        """Return the pipelines of some numbers of micro-batches, until more of them take longer."""
        began = now()
        drawn: list[Drawn] = []
        refused: list[AutoparError] = []
        shortest_s = math.inf
        for m in self._micro_batch_counts():
            if drawn and now() - began > FREE_SHARE * self.options.time_limit_s:
                break
            try:
                found = self.drawing.drawn(self._whole(m, None))
            except PlanError as error:
                if self.asked.micro_batches != AUTO:
                    raise
                refused.append(error)
                continue
            drawn += found
            least_s = min((d.seconds for d in found), default=math.inf)
            if least_s > shortest_s or found[0].whole.bound * m / self.ranks >= self.cutoff_s:
                break
            shortest_s = min(shortest_s, least_s)
        if not drawn:
            raise refused[0]
        return drawn

    def _may_be_shorter(self, seconds: float, least_s: float) -> bool:
        """Whether the time that is left is well spent on a pipeline of ``least_s``, where one takes ``seconds``."""
        left_s = self.ends - now()
        return NEARLY * least_s < seconds and 0 < left_s < (seconds - least_s) * self.options.training_steps

    def _micro_batch_counts(self) -> Iterator[int]:
        """Yield the numbers of micro-batches to try; with fewer samples each a step takes longer sooner or later.

        First those that leave each a multiple of the longest axis that the batch has, so that it can be sharded there.
        """
        if self.asked.micro_batches != AUTO:
            yield int(self.asked.micro_batches)
            return
        batch = batch_size(self.graph)
        wanted = [m for m in range(1, max(batch, 1) + 1) if batch % m == 0]
        longest = max(n for n in (1, *self.stage_mesh.shape) if batch % n == 0)
        even = [m for m in wanted if batch // m % longest == 0] or wanted
        many = [m for m in wanted if m >= self.ranks] or wanted[-1:]
        tried = (
            min(among, key=lambda m: (abs(math.log(m / (times * self.ranks))), m))
            for among in (even, many)
            for times in (2, 4, 8, 16)
        )
        yield from dict.fromkeys(tried)

    def _whole(self, m: int, budget: float | None) -> Whole:
        """Plan the whole model for one of ``m`` micro-batches; without a budget as if memory were of no concern."""
        if (m, budget) not in self.wholes:
            self.wholes[m, budget] = self._planned_whole(m, budget)
        return self.wholes[m, budget]

    def _planned_whole(self, m: int, budget: float | None) -> Whole:
        self.report(f"{m} micro-batches" + ("" if budget is None else " within the budget"))
        micro = micro_batch(self.graph, m)
        graph = with_gradient_sums(micro.graph, m * self.options.accumulation_steps, self.options.dtype_of("reduce"))
        graph = for_kernels(graph, self.cluster, self.options.backend)
        places, options = seams(micro.graph), self._stage_options(m, self.ranks)
        block_of = _block_of(graph, places)
        fewer = shortened(graph, block_of, self.ranks)
        if fewer is not None:
            resolve(graph, self.stage_mesh, options.constraints, options.aliases)  # raises for what names nothing
            options = replace(options, constraints=those_that_apply(fewer.graph, options.constraints, options.aliases))
        planned = self._planned_micro_batch(graph if fewer is None else fewer.graph, graph, options, budget)
        like = {} if fewer is None else fewer.like
        block_of = _block_of(planned.decisions.graph, places) | block_of
        program = self._with_shared(planned, options).program
        blocks = list(block_costs(program, planned.decisions.graph, self.stage_mesh, options, self.overlap, block_of))
        held = total(blocks)
        working = planned.memory.peak_bytes - held.static - options.in_flight * held.held
        blocks += [BlockCosts()] * (len(places.blocks) - len(blocks))
        for name in like.keys() & block_of.keys():
            blocks[block_of[name]] = blocks[block_of[like[name]]]
        if fewer is None:
            bound = planned.trace[0].bound if planned.trace else 0.0
        else:
            bound = least_seconds(planned.decisions, self.prices, like)
        return Whole(micro, places, planned, like, tuple(blocks), bound, max(working, 0.0))

    def _planned_micro_batch(self, graph: Graph, whole: Graph, options: Options, budget: float | None) -> Planned:
        """Plan ``graph``, with all or some of the layers of ``whole``, without a budget or within its part of it."""
        if budget is None:
            limit_s = self.options.time_limit_s * FREE_SHARE
            options = replace(options, memory_budget_bytes=UNLIMITED, time_limit_s=limit_s)
            return plan_graph(graph, self.stage_mesh, self.stage_cluster, options, prices=self.prices)
        limit_s = self.options.time_limit_s * WHOLE_SHARE
        part = _parameter_bytes(graph) / max(_parameter_bytes(whole), 1)
        options = replace(options, memory_budget_bytes=int(budget * part), time_limit_s=limit_s)
        # With as many micro-batches in flight on every rank as on the first: a pipeline may fit all the same.
        return self._plan_or_leanest(graph, options)

    def _stage_options(self, m: int, k: int) -> Options:
        return replace(
            self.options,
            expert_room=None if self.options.expert_room == "auto" else self.options.expert_room,
            accumulation_steps=m * self.options.accumulation_steps,
            in_flight=min(k, m),
            seam_s=self._send_s(SEAM_BYTES) / SEAM_BYTES,
            held_batches=m,
            compare=False,
        )

    @cached_property
    def _collective_costs(self) -> CollectiveCosts:
        return CollectiveCosts(self.mesh, self.cluster.sized(self.mesh.size))

    def _send_s(self, nbytes: float) -> float:
        return self._collective_costs.seconds("permute", nbytes, self.mesh.names.index(AXIS))

    def _planned(self, drawn: Sequence[Drawn], best: PlannedPipeline | None) -> PlannedPipeline | None:
        """Plan the stages of pipelines in turn, while that may gain more than it costs, and return the shortest of
        those that fit, and of ``best``; None if none fits."""
        refused, began = len(self.refused), now()
        ends = max(self.ends, began + STAGES_SHARE * self.options.time_limit_s)
        for d in drawn[:TRIED]:
            took_s, began = now() - began, now()
            if (best is not None or len(self.refused) > refused) and began > ends:
                break
            gain_s = math.inf if best is None else best.seconds - d.seconds
            if gain_s <= 0 or gain_s * self.options.training_steps < took_s:
                break
            try:
                found = self._with_stages(d, ends)
            except InfeasibleError as error:
                self.refused.append(error)
                continue
            if best is None or found.seconds < best.seconds:
                best = found
        return best

    def _with_stages(self, d: Drawn, ends: float) -> PlannedPipeline:
        """Plan the stages; again with less for each, where a rank holds more than its stages by themselves.

        Args:
            ends: on ``clock.now``.

        Raises:
            InfeasibleError: a rank holds more than the budget.
        """
        room = _Room.estimated(d, self.budget)
        least = sys.maxsize
        before: list[_Staged] = []
        for _ in range(ROUNDS):
            before = self._within(d, room, now() + settings.MAIN_SHARE * max(ends - now(), 0.0), before)
            found = self._result(d, [each.stage for each in before], [each.held for each in before])
            least = min(least, max(found.peaks))
            if least <= self.budget:
                return found
            room.count_beside(found)
            if all(p.memory.peak_bytes <= room.left_for(s) for s, p in enumerate(found.planned)):
                break  # nothing would be planned otherwise
        raise _over(found, least, self.budget)

    def _within(self, d: Drawn, room: _Room, ends: float, before: Sequence[_Staged]) -> list[_Staged]:
        """Plan the stages in turn, each within what the other stages of its rank leave, or as small as was found
        where that is more, and tell ``room`` of it.

        Args:
            before: the stages as they were planned with more room; what fits stays as it is.
        """
        graphs = cut(d.whole.micro.graph, d.whole.seams, d.starts)
        m = d.schedule.micro_batches
        flying = in_flight(d.schedule)
        n = m * self.options.accumulation_steps
        made: list[_Staged] = []
        specs: dict[str, str] = {}
        stored: dict[str, str] = {}
        shapes = [_shape(stage.graph) for stage in graphs]
        estimated = [total(d.whole.blocks[a:b]) for a, b in ranges_of(d.starts, len(d.whole.blocks))]
        for s, stage in enumerate(graphs):
            self.report(f"stage {s} of {len(graphs)}, {d}")
            summing = replace(stage, graph=with_gradient_sums(stage.graph, n, self.options.dtype_of("reduce")))
            # Stages that hold a parameter add up their parts of its gradient, so they store it alike.
            names = {i.name for i in summing.graph.inputs if i.kind == "parameter"}
            tied = {name: spec for name, spec in stored.items() if name in names}
            options = replace(
                self._stage_options(m, flying[s]),
                memory_budget_bytes=int(room.left_for(s)),
                time_limit_s=max(ends - now(), settings.LEAST_S),
                constraints={
                    **those_that_apply(summing.graph, self.options.constraints, self.options.aliases),
                    **tied,
                    **specs,
                },
            )
            if before and before[s].constraints == options.constraints and _fits(before[s].held.planned, options):
                made.append(before[s])
            else:
                alike = (t for t in range(s, len(graphs)) if shapes[t] == shapes[s])
                t = min(alike, key=lambda t: (room.left_for(t) - estimated[t].static) / flying[t])
                tight = replace(options, in_flight=flying[t], memory_budget_bytes=int(room.left_for(t)))
                found = self._stage(d.whole, summing, options, tight, estimated[s].seconds)
                made.append(self._staged(summing, found, options, self._stage_options(m, 1)))
            held, found = made[-1].held, made[-1].held.planned
            if found.memory.peak_bytes > room.left_for(s):
                room.least[s] = found.memory.peak_bytes
            room.resident[s] = static_bytes(found, self.stage_mesh, held.options) + flying[s] * held.parts.held
            specs = seam_specs(summing, found)
            stored |= {name: str(tensor.spec) for name, tensor in inputs_of(found, "parameter")}
        return made

    def _staged(self, stage: Stage, planned: Planned, options: Options, one: Options) -> _Staged:
        """Return a planned stage with what its parts cost and hold, as an equal one has it where there is one.

        Args:
            one: options with one micro-batch in flight.
        """
        taken = self.taken.get(id(planned))
        like = None if taken is None else self.known.get(id(taken.like))
        if taken is not None and like is not None:
            more = (options.in_flight - like.in_flight) * like.held.parts.held
            again = renamed(like.held.planned, taken.planned.decisions.graph, taken.names, more)
            held = replace(like.held, planned=again, takes=stage.takes)
        else:
            shared = self._with_shared(planned, options)
            parts = parts_of(shared.program, shared.decisions.graph, self.stage_mesh, one, self.overlap)
            held = StageBytes(shared, stage.takes, parts, self.stage_mesh, one)
        self.known[id(planned)] = _Staged(stage, planned, options.constraints, options.in_flight, held)
        return self.known[id(planned)]

    def _with_shared(self, planned: Planned, options: Options) -> Planned:
        """Return a plan whose micro-batches share what they compute alike and keep, as its memory is counted."""
        graph = planned.decisions.graph
        program = shared(planned.program, graph) if options.held_batches > 1 else planned.program
        if program is planned.program:
            return planned
        memory = profile(program, graph, self.stage_mesh, options)
        return replace(planned, program=program, memory=memory, timeline=simulate_streams(program, self.overlap))

    def _stage(self, whole: Whole, stage: Stage, options: Options, tight: Options, estimated_s: float) -> Planned:
        """Plan a stage as the whole or an equal stage is planned, whichever is the shortest that fits; while time is
        left, anew from there where that takes longer than an equal stage or, at first, than estimated.

        Args:
            tight: options of that of the equal stages that has the least room. A new plan is for it, so that it is one
                for all of them.
        """
        ends, equal = now() + options.time_limit_s, self.equal.setdefault((id(whole), _shape(stage.graph)), [])

        def taken_over(e: _Equal) -> Planned | None:
            found = e.taken_over(stage.graph, self.prices, options)
            if found is not None:
                self.taken[id(found.planned)] = found
            return found and found.planned

        def learn(planned: Planned, of: Options) -> _Equal:
            held = saved_bytes(planned.program, planned.decisions.graph, self.stage_mesh, of)[0]
            learned = _Equal(planned, of, held)
            equal.append(learned)
            equal.sort(key=lambda e: e.planned.timeline.seconds)
            return learned

        likely = [e for e in equal if e.peak_bytes(options.in_flight) <= _room(options)]
        known = next((p for p in map(taken_over, likely) if p is not None), None)
        if known is None:
            known = carried(Known(whole.planned, whole.like), stage.graph, self.prices, options)
            if known is not None:
                learn(known, options)
        plans = [known] if known is not None and _fits(known, options) else []
        least_s = min((e.planned.timeline.seconds for e in equal), default=0.0)
        if len(equal) == 1:  # the choices of the whole: what hides behind its other layers may not hide here
            least_s = min(least_s, estimated_s)
        if plans and id(plans[0]) in self.taken and plans[0].timeline.seconds > NEARLY * least_s:
            with_room = self._given_room(plans[0], options)
            if _fits(with_room, options) and with_room.timeline.seconds < plans[0].timeline.seconds:
                plans.insert(0, with_room)
                learn(with_room, options)
        if plans and (plans[0].timeline.seconds <= NEARLY * least_s or now() >= ends - settings.LEAST_S):
            return plans[0]
        given: Mapping[type[Phase], Phase] = {Free: Given(Known(whole.planned, whole.like).still)}
        ways: list[tuple[Options, Mapping[type[Phase], Phase]]] = [(tight, given), (options, given), (options, {})]
        ways, took_s = ways[:1] if plans else ways[tight == options :], 0.0
        for asked, before in ways:
            fits = any(_fits(p, options) for p in plans)
            if fits and asked is not tight and (before or took_s > STAGE_SHARE * (ends - now())):
                break
            began = now()
            asked = replace(asked, time_limit_s=max((ends - began) * STAGE_SHARE, STAGE_S))
            other = learn(self._plan_or_leanest(stage.graph, asked, before), asked)
            again = taken_over(other) if asked.in_flight != options.in_flight else None
            plans.append(other.planned if again is None else again)  # it counts the micro-batches in flight here
            took_s += now() - began
        return min(plans, key=lambda p: (not _fits(p, options), p.timeline.seconds))

    def _given_room(self, planned: Planned, options: Options) -> Planned:
        """Return a plan with the same choices, in which transfers give way to no more than is too much here."""
        d, solution, prices = planned.decisions, planned.solution, self.prices
        program, memory = scheduled(d, solution.choice, prices, options, _room(options))
        return with_candidate(
            planned, Candidate.of(solution.method, d, solution, program, prices, options, memory=memory)
        )

    def _plan_or_leanest(
        self, graph: Graph, options: Options, before: Mapping[type[Phase], Phase] | None = None
    ) -> Planned:
        """Return the plan within the budget or, where there is none, that of the smallest peak that was found."""
        mesh, cluster = self.stage_mesh, self.stage_cluster
        try:
            return plan_forms(graph, mesh, cluster, options, before=before, prices=self.prices)
        except InfeasibleError as error:
            if error.leanest is None:
                raise
            found: Planned = error.leanest()
            return found

    def _result(self, d: Drawn, stages: Sequence[Stage], held: Sequence[StageBytes]) -> PlannedPipeline:
        parts, planned = [stage.parts for stage in held], tuple(stage.planned for stage in held)
        costs = Costs(
            forward=tuple(p.forward for p in parts),
            backward_input=tuple(p.backward_input for p in parts),
            backward_weight=tuple(p.backward_weight for p in parts),
            send=tuple(self._send_s(stage.message) for stage in held[:-1]),
            held=tuple(float(p.held) for p in parts),
            kept=tuple(float(min(p.kept, p.held)) for p in parts),
            first_forward=tuple(p.once for p in parts),
        )
        made, costs, peaks = self._with_memory(d, costs, held)
        seconds = simulate(made, costs).seconds
        return PlannedPipeline(
            d.whole.micro,
            d.whole.seams,
            d.starts,
            tuple(stages),
            planned,
            made,
            costs,
            seconds,
            min(d.whole.bound * made.micro_batches / self.ranks, seconds),
            peaks,
        )

    def _with_memory(self, d: Drawn, costs: Costs, held: Sequence[StageBytes]) -> _Scheduled:
        """Return the schedule for these stages: as it was drawn or, of listed ones, made anew from what the stages cost
        and hold, whichever is shorter; with only the last backwards split where that shortens it."""

        def costed(made: Schedule, peaks: tuple[int, ...]) -> _Scheduled:
            return _Scheduled(made, _delivering(costs, made, [stage.parts for stage in held]), peaks)

        def leaner(made: Schedule) -> _Scheduled:
            return costed(*self._with_less(made, held))

        caps = self.drawing.caps(d.whole, d.starts, costs, d.schedule.rank_of, self.budget)
        least = self.drawing.caps(d.whole, d.starts, costs, d.schedule.rank_of, 0.0)
        found = [leaner(d.schedule)]
        while d.schedule.name == "listed":
            made = d.schedule
            made = schedule("listed", made.ranks, made.micro_batches, made.stages // made.ranks, found[0].costs, caps)
            less, before = leaner(made), list(caps)
            found += [less, costed(made, rank_peaks(made, held))]
            fullest = found[-1] if max(less.peaks) <= self.budget else less
            for rank, over in enumerate(peak - self.budget for peak in fullest.peaks):
                if over > 0:
                    one = min(h for h, r in zip(costs.held, made.rank_of, strict=True) if r == rank)
                    caps[rank] = max(caps[rank] - max(over, one), least[rank])
            if caps == before:
                break
        best = min(found, key=self._badness)
        if self.asked.schedule == AUTO:
            split = leaner(best.schedule.with_last_backwards_split())
            (peak, seconds), (least_peak, least_s) = self._badness(split), self._badness(best)
            if peak <= least_peak and seconds < (1 - SPLIT_GAIN) * least_s:
                best = split
        return best

    def _badness(self, f: _Scheduled) -> tuple[float, float]:
        """Return the bytes of the fullest rank, at least the budget, and the seconds of a step."""
        return max(*f.peaks, self.budget), simulate(f.schedule, f.costs).seconds

    def _with_less(self, made: Schedule, held: Sequence[StageBytes]) -> tuple[Schedule, tuple[int, ...]]:
        """Return a schedule whose ranks put off less of their weights' gradients, or in the end do not split their
        backward, where they would hold more than the budget; and the peaks of its ranks."""
        lag, whole = list(range(made.ranks)), set[int]()
        while True:
            if made.name == "zb":
                made = zero_bubble(made.ranks, made.micro_batches, lag)
            made = made.with_whole_backwards(whole)
            peaks = rank_peaks(made, held)
            over = [rank for rank in range(made.ranks) if peaks[rank] > self.budget]
            if made.name == "zb" and any(lag[rank] > 0 for rank in over):
                lag = [max(n - (rank in over), 0) for rank, n in enumerate(lag)]
            elif splitting := {rank for rank in over if any(action.kind == "I" for action in made.order[rank])}:
                whole |= splitting
            else:
                return made, peaks


def _delivering(costs: Costs, made: Schedule, parts: Sequence[Parts]) -> Costs:
    """Return the costs with what the last backward of each stage takes besides, as the schedule has it."""
    last = made.last_backwards
    extra = (p.delivery_apart if last[s].kind == "W" else p.delivery for s, p in enumerate(parts))
    return replace(costs, last_backward=tuple(extra))


def _room(options: Options) -> float:
    return math.inf if options.memory_budget_bytes is None else options.memory_budget_bytes


def _fits(planned: Planned, options: Options) -> bool:
    return planned.memory.peak_bytes <= _room(options)


def _shape(graph: Graph) -> tuple[object, ...]:
    """Return what equal stages have in common."""
    return tuple((node.op, node.packet, node.outputs) for node in graph.nodes)


def seam_specs(stage: Stage, planned: Planned) -> dict[str, str]:
    """Return constraints on the next stage: on what it receives, and on the gradients that it returns."""
    tensors = planned.program.tensors
    sent = {f"received:{o.name}": str(tensors[name].spec) for o, name in planned.program.results if o.kind == "sent"}
    back = {f"received:{name}.grad": str(t.spec) for name, t in inputs_of(planned, "tangent") if name in stage.takes}
    return sent | back


def _parameter_bytes(graph: Graph) -> int:
    return sum(graph.meta(Value(i.node)).bytes for i in graph.inputs if i.kind == "parameter")


def _block_of(graph: Graph, places: Seams) -> dict[str, int]:
    """Return the block of every node, also of those that the planned form of the graph has of its own."""
    found = dict(places.block_of)
    for node in graph.nodes:
        if node.name not in found and node.op != "placeholder":
            made = [found[v.node] for v in node.inputs if v.node in found]
            if made:
                found[node.name] = max(made)
    return found


def _none_shorter(cutoff_s: float, found_s: float) -> PlanError:
    return PlanError(
        "No pipeline is shorter than what is known.",
        found=f"{found_s:.3g} s a step by estimate, beside {cutoff_s:.3g} s",
        hint="take the other plan, or name the stages and the mesh.",
    )


def _over(found: PlannedPipeline, least: int, budget: float) -> InfeasibleError:
    """The error where the smallest peak that was found for a pipeline is ``least``."""
    rank = max(range(len(found.peaks)), key=lambda r: found.peaks[r])
    made = found.schedule
    mine = (p for p, r in zip(found.planned, made.rank_of, strict=True) if r == rank)
    returned = {name: size * made.micro_batches for p in mine for name, size in output_bytes(p).items()}
    name = max(returned, key=lambda name: returned[name], default="")
    telling = returned.get(name, 0) > TELLING * found.peaks[rank]
    error = InfeasibleError(
        f"Rank {rank} of the pipeline holds more than its memory budget.",
        found=f"{bytes_text(found.peaks[rank])} with the schedule {made.name} of {made.micro_batches} micro-batches, "
        f"budget {bytes_text(budget)}"
        + (f"; its output {name!r} takes {bytes_text(returned[name])} for the whole batch" if telling else ""),
        hint=(f"let the forward return less than {name!r}, " if telling else "")
        + "take more stages, more micro-batches, or a larger memory_budget: the smallest that works so far is "
        f"{bytes_text(least)}: memory_budget={least}.",
    )
    error.shortfall = Shortfall(budget, {"pipeline": least}, (made.ranks,), late=True)
    return error
