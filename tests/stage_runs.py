"""Plan the stages of a pipeline, and run all ranks of all stages in one process."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from autopar import passes, planner
from autopar.ir import Graph, Value
from autopar.mesh import Cluster, Mesh
from autopar.planner.pipeline.stages import Seams, Stage, free_nodes
from autopar.runtime.meter import MemoryMeter
from autopar.runtime.simulation import assemble, run, shard
from autopar.spmd import Ends, LocalRank, Lowered, Results, local_ranks

Named = Mapping[tuple[str, str], Tensor]
Exchanged = Mapping[str, Tensor]


@dataclass(frozen=True)
class StageProgram:
    """What every rank of a stage runs, and the graph that it was planned for."""

    stage: Stage
    planned: planner.Planned
    lowered: Lowered

    @property
    def graph(self) -> Graph:
        return self.planned.decisions.graph


@dataclass(frozen=True)
class StagesRun:
    """The results of one step of a pipeline.

    Args:
        outputs: what the model returns, whole, for each micro-batch.
        grads: whole gradients by FQN, added up over micro-batches and stages.
        buffers: new values of buffers.
    """

    outputs: tuple[Mapping[str, Tensor], ...]
    grads: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]


def plan_stages(
    stages: Sequence[Stage], mesh: Mesh, cluster: Cluster, options: planner.Options | None = None
) -> tuple[StageProgram, ...]:
    """Plan and lower each stage by itself on ``mesh``."""
    options = options or planner.Options(outputs="dtensor", device="cpu", time_limit_s=20.0, gap=0.1)
    programs = []
    for stage in stages:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            planned = planner.plan_forms(stage.graph, mesh, cluster, options)
        graph = planned.decisions.graph
        lowered = passes.compose(passes.lower(planned.program, graph, mesh), graph)
        programs.append(StageProgram(stage, planned, lowered))
    return tuple(programs)


def run_stages(
    programs: Sequence[StageProgram],
    mesh: Mesh,
    named: Named,
    micro_batches: Sequence[Mapping[str, Tensor]] | None = None,
    seed: int = 0,
    tangent: float = 1.0,
) -> StagesRun:
    """Run the forwards of all micro-batches, and then their backwards in reverse.

    Args:
        named: whole parameters, buffers, constants and inputs.
        micro_batches: the inputs of each micro-batch by name; those in ``named`` if there is only one.
        tangent: gradient of every output of the model, in each micro-batch.
    """
    named = dict(named)
    steps, outputs = [], []
    buffers: dict[str, Tensor] = {}
    for batch in [{}] if micro_batches is None else micro_batches:
        step = _MicroBatch(programs, mesh, named | {("input", n): t for n, t in batch.items()}, seed, tangent)
        step.forward()
        steps.append(step)
        outputs.append(step.outputs)
        buffers |= step.buffers
        named |= {("buffer", n): t for n, t in step.buffers.items()}
    grads: dict[str, Tensor] = {}
    for step in reversed(steps):
        step.backward()
        for name, grad in step.grads.items():
            grads[name] = grads[name] + grad if name in grads else grad
    return StagesRun(tuple(outputs), grads, buffers)


@dataclass
class _MicroBatch:
    """One micro-batch on its way through the stages and back.

    Args:
        saved: what each rank of each stage keeps for the backward.
    """

    programs: Sequence[StageProgram]
    mesh: Mesh
    named: Named
    seed: int
    tangent: float
    outputs: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    grads: dict[str, Tensor] = field(default_factory=dict)
    saved: list[list[list[Tensor]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks: Sequence[LocalRank] = local_ranks(self.mesh)
        self.meters = [MemoryMeter() for _ in self.ranks]

    @torch.no_grad()
    def forward(self) -> None:
        activations: Exchanged = {}
        for p in self.programs:
            assert set(p.stage.receives) == set(activations)
            feeds = [self._fed(p.lowered.inputs, activations, r) for r in self.ranks]
            made = run(p.lowered.forward, self.ranks, feeds, self.meters)
            n = len(p.lowered.results)
            self.saved.append([list(own[n:]) for own in made])
            activations = self._take_results(p, made)

    @torch.no_grad()
    def backward(self) -> None:
        gradients: Exchanged = {}
        for p in reversed(self.programs):
            assert set(p.stage.takes) == set(gradients)
            saved = self.saved.pop()
            feeds = [[*own, *self._tangents(p, gradients, r)] for own, r in zip(saved, self.ranks, strict=True)]
            gradients = self._take_gradients(p, run(p.lowered.backward, self.ranks, feeds, self.meters))

    def _fed(self, ends: Ends, activations: Exchanged, rank: LocalRank) -> list[Tensor]:
        fed = []
        for meaning, spec in ends:
            if meaning.kind == "seed":
                fed.append(torch.tensor(self.seed, dtype=torch.int64))
                continue
            received = meaning.kind == "received"
            whole = activations[meaning.name] if received else self.named[meaning.kind, meaning.name]
            fed.append(shard(whole.detach(), spec, self.mesh, rank.coordinate))
        return fed

    def _tangents(self, p: StageProgram, gradients: Exchanged, rank: LocalRank) -> list[Tensor]:
        found = []
        for meaning, spec in p.lowered.tangents:
            meta = p.graph.meta(Value(meaning.node))
            ours = p.graph.comes_from_stage(meaning)
            whole = (
                gradients[meaning.name] if ours else torch.full(meta.shape, self.tangent).to(getattr(torch, meta.dtype))
            )
            assert tuple(whole.shape) == meta.shape and str(whole.dtype) == f"torch.{meta.dtype}"
            found.append(shard(whole, spec, self.mesh, rank.coordinate))
        return found

    def _take_results(self, p: StageProgram, made: Sequence[Sequence[Tensor]]) -> Exchanged:
        sent: dict[str, Tensor] = {}
        of_kind = {"output": self.outputs, "mutation": self.buffers, "sent": sent}
        for output, whole in self._whole(p, p.lowered.results, made):
            found = of_kind[output.kind]
            again = output.kind == "mutation" and output.name in found and torch.equal(found[output.name], whole)
            assert again or output.name not in found, f"the {output.kind} {output.name} is made twice"
            found[output.name] = whole.clone()
        return sent

    def _take_gradients(self, p: StageProgram, made: Sequence[Sequence[Tensor]]) -> Exchanged:
        returned: dict[str, Tensor] = {}
        for output, whole in self._whole(p, p.lowered.gradients, made):
            if p.graph.goes_to_stage(output):
                returned[output.name.removeprefix("input:")] = whole
            else:
                before = self.grads.get(output.name)
                self.grads[output.name] = whole if before is None else before + whole
        return returned

    def _whole(self, p: StageProgram, ends: Results, made: Sequence[Sequence[Tensor]]):
        for i, (output, spec) in enumerate(ends):
            shape = p.graph.meta(output.value).shape
            yield output, assemble([own[i] for own in made], spec, shape, self.mesh)


def assert_is_cut(graph: Graph, seams: Seams, stages: Sequence[Stage]) -> None:
    """Check that the stages are the graph: every op once, neighbours alone exchange, every result is made.

    Raises:
        AssertionError: they are not.
    """
    free = free_nodes(graph)
    placed = {n.name for n in graph.nodes if n.op != "placeholder" and n.name not in free}
    assert set(seams.block_of) == placed
    times = Counter(n.name for s in stages for n in s.graph.nodes if n.name in placed and n.op != "placeholder")
    assert set(times.values()) == {1}
    sums = placed - set(times)
    assert all(graph.by_name[n].op == "aten.add.Tensor" for n in sums), "only sums of gradients are taken apart"
    for before, after in zip((None, *stages), (*stages, None), strict=True):
        assert (before.sends if before else ()) == (after.receives if after else ())
        assert (before.takes if before else ()) == (after.returns if after else ())
    for stage in stages:
        _assert_is_graph(stage, graph, free)
    made = Counter((o.kind, o.name) for s in stages for o in s.graph.outputs if not s.graph.goes_to_stage(o))
    wanted = {(o.kind, o.name) for o in graph.outputs}
    assert set(made) == wanted
    assert all(n == 1 for (kind, _), n in made.items() if kind == "output")
    for name in {o.name for o in graph.outputs if o.kind == "mutation"}:
        reading = [s for s in stages if any(i.kind == "buffer" and i.name == name for i in s.graph.inputs)]
        assert len(reading) == made["mutation", name], f"a stage reads {name} and does not change it"
    inputs = {(i.kind, i.name) for s in stages for i in s.graph.inputs if not s.graph.comes_from_stage(i)}
    assert inputs == {(i.kind, i.name) for i in graph.inputs}


def _assert_is_graph(stage: Stage, whole: Graph, free: frozenset[str]) -> None:
    graph, there = stage.graph, set[str]()
    for node in graph.nodes:
        assert all(v.node in there for v in node.inputs), f"{node.name} reads what is not there"
        there.add(node.name)
        if node.name in free:
            assert node == whole.by_name[node.name]
    assert {i.node for i in graph.inputs} == {n.name for n in graph.nodes if n.op == "placeholder"}
    assert all(o.value.node in there for o in graph.outputs)
    for ends in (graph.inputs, graph.outputs):
        assert max(Counter((e.kind, e.name) for e in ends).values()) == 1
    sent = {o.name: graph.meta(o.value) for o in graph.outputs if o.kind == "sent"}
    for i in graph.inputs:
        if i.kind == "tangent" and i.name in sent:
            assert graph.meta(Value(i.node)) == sent[i.name]
    assert tuple(sent) == stage.sends
    phases = [n.phase for n in graph.nodes if n.op != "placeholder"]
    assert phases == sorted(phases, reverse=True), "the backward follows the forward"


def merged(run_: StagesRun) -> StagesRun:
    """Return a run of one micro-batch with its outputs by name, to compare with one device."""
    (outputs,) = run_.outputs
    return replace(run_, outputs=outputs)  # type: ignore[arg-type]
