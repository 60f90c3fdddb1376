"""Known rules for what to keep, each as the sets of values that it would keep on autopar's captured graph."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from torch import Tensor, nn

from autopar import planner
from autopar.arguments import canonical_names
from autopar.ir import Value
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options, Planned
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.schedule.timeline import simulate_streams
from autopar.planner.search.keeping import Keeping
from autopar.planner.search.two_stage import CheckpointSearch
from autopar.solver import Solution
from autopar.strategies import flops
from autopar.tracer import Capture, ColoTracer

ONE = Mesh((1,))
Kept = frozenset[Value]


@dataclasses.dataclass
class Case:
    """A model with its capture, on one device of ``cluster``."""

    name: str
    model: nn.Module
    inputs: dict[str, Tensor]
    cluster: Cluster
    time_limit_s: float

    @cached_property
    def capture(self) -> Capture:
        return ColoTracer().capture(self.model, self.inputs)

    def options(self, budget: float | None = None, search: str = "joint") -> Options:
        return Options(
            None if budget is None else int(budget),
            "sgd",
            aliases=canonical_names(self.model),
            time_limit_s=self.time_limit_s,
            search=search,
            device=self.cluster.device.kind,
        )

    def planned(self, budget: float | None = None) -> Planned:
        return planner.plan_graph(self.capture.graph, ONE, self.cluster, self.options(budget), compare=False)

    @cached_property
    def search(self) -> CheckpointSearch:
        graph, options = self.capture.graph, self.options()
        d = decide(graph, ONE, options, resolve(graph, ONE, {}, options.aliases), recompute=True)
        return CheckpointSearch(Objective(d, Prices(ONE, self.cluster)), options, [None] * len(d.variables))

    @cached_property
    def keeping(self) -> Keeping:
        assert self.search.rules is not None
        return self.search.rules

    def keep(self, kept: Kept) -> Planned:
        """Return the plan that keeps exactly these values."""
        choice = self.keeping.choosing(kept)
        program, memory = self.search.measured(choice)
        solution = Solution(choice, self.search.objective.seconds(choice), 0.0, proven=False)
        timeline = simulate_streams(program, self.search.prices.overlap)
        return Planned(program, self.search.decisions, solution, memory, timeline)

    @cached_property
    def blocks(self) -> dict[str, int]:
        """The block of each forward node that belongs to one."""
        found: dict[str, int] = {}
        for node in self.capture.graph.nodes:
            inside = re.search(r"(?:^|\.)(?:h|layers)\.(\d+)(?:\.|$)", node.module)
            if node.phase == "forward" and inside:
                found[node.name] = int(inside.group(1))
        return found

    @cached_property
    def outside(self) -> Kept:
        """Values made outside of blocks, which every rule keeps."""
        return frozenset(v for v in self.keeping.storages if v.node not in self.blocks)

    def into(self, block: int) -> Kept:
        """Values that a block reads and that were made before it."""
        first = min(i for i, n in enumerate(self.capture.graph.nodes) if self.blocks.get(n.name) == block)
        return self.keeping.crossing(first)

    def inside(self, block: int) -> Kept:
        return frozenset(v for v in self.keeping.storages if self.blocks.get(v.node) == block)


def none(case: Case) -> Iterator[Kept]:
    yield frozenset(case.keeping.storages)


def blocks(case: Case) -> Iterator[Kept]:
    yield case.outside.union(*(case.into(b) for b in set(case.blocks.values())))


def selective(case: Case) -> Iterator[Kept]:
    graph = case.capture.graph
    heavy = [v for v in case.keeping.storages if _flops(case, v) > 0]
    kept = case.outside.union(*(case.into(b) for b in set(case.blocks.values())))
    yield kept | {v for v in heavy if graph.by_name[v.node].outputs[v.index]}
    yield kept | {v for i, v in enumerate(heavy) if i % 2}


def _flops(case: Case, value: Value) -> float:
    graph = case.capture.graph
    node = graph.by_name[value.node]
    return flops(node, tuple(graph.meta(v) for v in node.inputs))


def sqrt(case: Case) -> Iterator[Kept]:
    for pieces in range(1, 3 * math.isqrt(len(case.keeping.storages)) + 1):
        yield case.keeping.cuts(pieces)


def torch_budget(case: Case) -> Iterator[Kept]:
    """Yield the values that take longest for their bytes, up to each share of all bytes."""
    graph, seconds = case.capture.graph, case.keeping.seconds
    size = {v: graph.meta(v).bytes for v in case.keeping.storages}
    worth = sorted(size, key=lambda v: -seconds.get(case.keeping.position[v.node], 0.0) / max(size[v], 1))
    for share in range(21):
        kept, left = set[Value](), sum(size.values()) * share / 20
        for value in worth:
            if size[value] <= left:
                kept.add(value)
                left -= size[value]
        yield frozenset(kept)


ROTOR_MOST = 6
"""Groups of blocks that are decided separately; neighbours are grouped, so that all choices can be tried."""


def rotor(case: Case) -> Iterator[Kept]:
    order = sorted(set(case.blocks.values()))
    stages = [order[i * len(order) // ROTOR_MOST : (i + 1) * len(order) // ROTOR_MOST] for i in range(ROTOR_MOST)]
    stages = [s for s in stages if s]
    into = {b: case.into(b) for b in order}
    inside = {b: case.inside(b) for b in order}
    for ways in itertools.product(("all", "input", "nothing"), repeat=len(stages)):
        kept = set(case.outside)
        for stage, way in zip(stages, ways, strict=True):
            if way != "nothing":
                kept |= into[stage[0]]
            if way == "all":
                kept |= frozenset().union(*(inside[b] | into[b] for b in stage))
        yield frozenset(kept)


RULES: Mapping[str, Callable[[Case], Iterator[Kept]]] = {
    "none": none,
    "blocks": blocks,
    "selective": selective,
    "sqrt": sqrt,
    "torch": torch_budget,
    "rotor": rotor,
}
