"""From decisions to the local program: every op in order, with redistributions where they are first needed.

A redistributed tensor is made once in each phase and shared; steps that two paths have in common are taken once. What a
gradient or a result needs is launched as soon as its value is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from autopar.holding import Stored
from autopar.ir import Graph, Node, Output, Phase, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.planner.footprint.implementations import implementation, packing_kernels
from autopar.planner.footprint.op_work import VIEWS, local_bytes
from autopar.planner.graphs.ahead import casts_of_parameters
from autopar.planner.memory.live_ranges import replaces_original
from autopar.planner.pricing.prices import Prices
from autopar.planner.pricing.transfers import place_transfers, state_seconds
from autopar.planner.problem.variables import (
    Decisions,
    copy_key,
    forced_key,
    hold_key,
    is_handed_out,
    output_key,
    rerun_key,
)
from autopar.planner.schedule.in_place import in_place
from autopar.planner.schedule.kernel_marks import mark_kernels
from autopar.planner.schedule.waits import place_waits
from autopar.program import AGAIN, LocalTensor, Op, Program, Sent
from autopar.sharding import Halo, Loan, ShardingSpec, Step, Strategy
from autopar.solver.clock import tick
from autopar.strategies import halos, lent

SECOND = "|2"
"""The suffix of a tensor that is made in a spec a second time."""

FORWARD: tuple[Phase, ...] = ("forward",)
BACKWARD: tuple[Phase, ...] = ("backward",)
BOTH = FORWARD + BACKWARD


def schedule(d: Decisions, choice: Sequence[int], prices: Prices) -> Program:
    """Return the program of the chosen options, with in-place ops marked."""
    return _Scheduler(d, choice, prices).run()


class _OpTemplate(NamedTuple):
    """What an op with one strategy is wherever it stands.

    Args:
        alias: whether its result is a view.
        kernels: the kernels that run it.
        results: the index, global shape, spec and bytes of each result.
    """

    seconds: float
    alias: bool
    kernels: tuple[str, ...]
    results: tuple[tuple[int, TensorMeta, ShardingSpec, int], ...]
    halos: tuple[Halo, ...] = ()
    sent: tuple[Sent, ...] = ()
    loan: Loan | None = None


class _StoredValue(NamedTuple):
    """A value that the backward finds stored: how, what it was, and the op that stored it."""

    action: Stored
    whole: LocalTensor
    op: Op


@dataclass
class _Scheduler:
    d: Decisions
    choice: Sequence[int]
    prices: Prices
    ops: list[Op] = field(default_factory=list)
    made: dict[Phase, dict[Value, dict[ShardingSpec, str]]] = field(
        default_factory=lambda: {"forward": {}, "backward": {}}
    )
    base: dict[Phase, dict[Value, ShardingSpec]] = field(default_factory=lambda: {"forward": {}, "backward": {}})
    rerun: set[str] = field(default_factory=set)
    redistributed: set[str] = field(default_factory=set)
    pending_results: list[list[Callable[[], None]]] = field(default_factory=list)
    stored: dict[Value, _StoredValue] = field(default_factory=dict)

    @cached_property
    def hold_variables(self) -> Mapping[Value, int]:
        """The hold variable of each value that has one."""
        return {v.value: i for i, v in enumerate(self.d.variables) if v.kind == "hold" and v.value is not None}

    @cached_property
    def copy_variables(self) -> Mapping[tuple[Value, Phase], int]:
        """The copy variable from which the readers of a phase read each value."""
        copy_variables = ((v.value, v.phase, v.key, i) for i, v in enumerate(self.d.variables) if v.kind == "copy")
        return {(x, phase): i for x, phase, key, i in copy_variables if x is not None and key == copy_key(x, phase)}

    @cached_property
    def forced(self) -> frozenset[Value]:
        """Outputs of modules that a constraint redistributes."""
        copy_variables = (v for v in self.d.variables if v.kind == "copy" and v.value is not None)
        return frozenset(v.value for v in copy_variables if v.value is not None and v.key == forced_key(v.value))

    @cached_property
    def ahead(self) -> frozenset[str]:
        """Ops whose results are there when a phase begins, as parameters are."""
        return casts_of_parameters(self.graph)

    @cached_property
    def owner(self) -> Mapping[str, str]:
        """The node of each parameter and buffer; the first if several share a name."""
        return {i.name: i.node for i in reversed(self.graph.inputs) if i.kind in ("parameter", "buffer")}

    @property
    def graph(self) -> Graph:
        return self.d.graph

    @property
    def mesh(self) -> Mesh:
        return self.d.mesh

    def run(self) -> Program:
        results: dict[int, str] = {}
        pending = self._results_by_node()
        for node in self.graph.nodes:
            self._node(node)
            for at in pending.get(node.name, ()):
                self._advance_results()
                results[at] = self._result(at)
        while self.pending_results:
            self._advance_results()
        tick("scheduled op", len(self.ops))
        outputs = tuple((o, results[i]) for i, o in enumerate(self.graph.outputs))
        host_state_bytes = [
            (v, v.host_state_bytes[option])
            for v, option in zip(self.d.variables, self.choice, strict=True)
            if v.host_state_bytes
        ]
        names = tuple(self.graph.input_of[v.key].name for v, size in host_state_bytes if size)
        seconds = float(state_seconds([size for _, size in host_state_bytes], self.prices.cluster.host).sum())
        program = Program(place_transfers(_without_unread(self.ops, outputs)), outputs, names, seconds)
        program = mark_kernels(program, self.graph, self.prices, AGAIN)
        program = self.prices.decomposition.decompose(program, self.graph)
        return in_place(place_waits(program, self.prices.overlap), self.graph)

    def _results_by_node(self) -> dict[str, list[int]]:
        pending: dict[str, list[int]] = {}
        for i, output in enumerate(self.graph.outputs):
            pending.setdefault(output.value.node, []).append(i)
        return pending

    def _chosen(self, key: str) -> Strategy:
        at = self.d.index[key]
        return self.d.variables[at].options[self.choice[at]]

    def _node(self, node: Node) -> None:
        at = self.d.index[node.name]
        strategy = self.d.variables[at].options[self.choice[at]]
        if node.phase == "backward" and self.d.recomputes:
            self._rerun_for(node)
        reads = self._operands(node, strategy, node.phase)
        self._run(node, strategy, reads, node.phase, self._template(node, strategy, at, self.choice[at]), "")
        if self.forced:
            for i in range(len(node.outputs)):
                self._force(Value(node.name, i), node.phase)
        for i in range(len(node.outputs)):
            self._replace_original(Value(node.name, i), node.phase)
        if self.hold_variables:
            for i in range(len(node.outputs)):
                self._keep_for_backward(Value(node.name, i))

    def _operands(self, node: Node, strategy: Strategy, phase: Phase) -> tuple[str, ...]:
        return tuple([self._read(v, spec, phase) for v, spec in zip(node.inputs, strategy.inputs, strict=True)])

    def _template(self, node: Node, strategy: Strategy, at: int, option: int) -> _OpTemplate:
        """Return what all equal ops with this strategy have in common.

        Args:
            at, option: the variable and option that the strategy is.
        """

        def made() -> _OpTemplate:
            seconds, kernel = 0.0, ""
            metas = tuple(self.graph.meta(v) for v in node.inputs)
            if node.op != "placeholder":
                kernel = implementation(node, strategy, metas, self.mesh, self.prices.cluster.device.kind)[0]
                seconds = float(self.prices.node_seconds(self.graph, node, self.d.variables[at].options)[option])
            results = tuple(
                (i, meta, spec, local_bytes(meta, spec, self.mesh))
                for i, (meta, spec) in enumerate(zip(node.outputs, strategy.outputs, strict=True))
                if meta is not None and spec is not None
            )
            return _OpTemplate(
                seconds,
                node.packet in VIEWS and bool(node.inputs),
                (kernel,) if kernel else (),
                results,
                halos(node, strategy, metas, self.mesh) or (),
                self.prices.sent(node, metas, strategy),
                lent(node, strategy, metas, self.mesh),
            )

        kind, traffic = self.graph.kinds[node.name], self.prices.traffic(self.graph, node)
        return self.prices.memo.of("op", (self.graph, strategy), made, kind, traffic)

    def _run(
        self, node: Node, strategy: Strategy, reads: tuple[str, ...], phase: Phase, template: _OpTemplate, mark: str
    ) -> None:
        """Emit an op. Its results are available in ``phase`` and, until they are held otherwise, in the backward."""
        writes = []
        for i, meta, spec, nbytes in template.results:
            value = Value(node.name, i)
            name = f"{value}{mark}"
            writes.append(LocalTensor(name, meta, spec, nbytes))
            for reach in BACKWARD if phase == "backward" else FORWARD if value in self.hold_variables else BOTH:
                self.base[reach][value] = spec
                made = self.made[reach]
                if value in made:
                    made[value][spec] = name
                else:
                    made[value] = {spec: name}
        placeholder = node.op == "placeholder"
        self.ops.append(
            Op(
                f"{node.name}{mark}",
                "input" if placeholder else "compute",
                node.name,
                reads,
                tuple(writes),
                phase,
                strategy=None if placeholder else strategy,
                seconds=template.seconds,
                alias=template.alias,
                kernels=template.kernels,
                halos=template.halos,
                sent=template.sent,
                loan=template.loan,
            )
        )

    def _replace_original(self, value: Value, phase: Phase) -> None:
        """Make a copy at once if all readers read from it, so that the original need not stay."""
        at = self.copy_variables.get((value, phase))
        if at is not None and replaces_original(self.d, self.d.variables[at]):
            self._redistribute(
                value, self.base[phase][value], self.d.variables[at].options[self.choice[at]].inputs[0], phase
            )

    def _keep_for_backward(self, value: Value) -> None:
        """Redistribute a value at once to the spec in which it is held, and store it if so chosen."""
        at = self.hold_variables.get(value)
        if at is None:
            return
        variable = self.d.variables[at]
        action = variable.actions[self.choice[at]]
        if not action.of_forward:
            return
        spec = variable.options[self.choice[at]].inputs[0]
        name = self._read(value, spec, "forward")
        if isinstance(action, Stored):
            self.stored[value] = self._store(action, value, self._tensor(name, self.graph.meta(value), spec))
        else:
            self._set_backward_value(value, spec, name)

    def _set_backward_value(self, value: Value, spec: ShardingSpec, name: str) -> None:
        """Let the backward find the value in tensor ``name``."""
        self.base["backward"][value] = spec
        self.made["backward"][value] = {spec: name}

    def _store(self, action: Stored, value: Value, whole: LocalTensor) -> _StoredValue:
        """Emit the op that stores a value."""
        kind, form = action.kinds[0], action.form(whole.meta)
        tensor = replace(self._tensor(f"{whole.name}|{action.suffix}", form, whole.spec), host=action.on_host)
        seconds = action.seconds(whole.bytes, tensor.bytes, self.prices.rates)
        name = f"{value}|{kind}"
        self.ops.append(
            Op(name, kind, value.node, (whole.name,), (tensor,), "forward", seconds=seconds, form=action.name)
        )
        return _StoredValue(action, whole, self.ops[-1])

    def _restore(self, value: Value) -> None:
        """Emit the op that restores a value that is stored."""
        action, whole, stored = self.stored.pop(value)
        tensor, kind = replace(whole, name=f"{whole.name}|back"), action.kinds[1]
        self.ops.append(
            replace(
                stored,
                name=f"{value}|{kind}",
                kind=kind,
                reads=(stored.writes[0].name,),
                writes=(tensor,),
                phase="backward",
            )
        )
        self._set_backward_value(value, whole.spec, tensor.name)

    def _rerun_for(self, node: Node) -> None:
        """Run again what ``node`` needs and the backward does not have, in the order of the graph."""
        missing: set[str] = set()
        ahead = [node]
        while ahead:
            for value in ahead.pop().inputs:
                there = value in self.base["backward"] or value in self.stored
                if not there and value.node not in missing and value.node not in self.rerun:
                    missing.add(value.node)
                    ahead.append(self.graph.by_name[value.node])
        for name in sorted(missing, key=self.graph.order.__getitem__):
            self._rerun(self.graph.by_name[name])

    def _rerun(self, node: Node) -> None:
        """Run a forward op again, on operands that the backward has or recomputes."""
        if node.name in self.rerun:
            return
        self.rerun.add(node.name)
        at = self.d.index[rerun_key(node.name)]
        strategy = self.d.variables[at].options[self.choice[at]]
        reads = self._operands(node, strategy, "backward")
        kept = {v: (self.base["backward"][v], self.made["backward"][v]) for v in self._kept_results(node)}
        first = self.d.index[node.name]
        self._run(node, strategy, reads, "backward", self._template(node, strategy, first, self.choice[at] - 1), AGAIN)
        for value, (spec, made) in kept.items():
            self.base["backward"][value], self.made["backward"][value] = spec, made

    def _kept_results(self, node: Node) -> list[Value]:
        """Return the results of an op that were kept although others of its results are recomputed."""
        values = [Value(node.name, i) for i in range(len(node.outputs))]
        return [v for v in values if v in self.base["backward"]]

    def _force(self, value: Value, phase: Phase) -> None:
        """Redistribute a module's output as a constraint demands, before anyone reads it."""
        if value in self.forced:
            spec = self._chosen(forced_key(value)).inputs[0]
            name = self._redistribute(value, self.base[phase][value], spec, phase)
            for reach in dict.fromkeys((phase, "backward" if hold_key(value) not in self.d.index else phase)):
                self.base[reach][value] = spec
                self.made[reach][value] = {spec: name}

    def _read(self, value: Value, spec: ShardingSpec, phase: Phase) -> str:
        """Return the tensor that holds ``value`` in ``spec``, redistributed through the phase's copy if there is
        one."""
        if phase == "backward":
            if value in self.stored:
                self._restore(value)
            elif value not in self.base["backward"]:
                self._rerun(self.graph.by_name[value.node])
        source = self.base[phase][value]
        at = self.copy_variables.get((value, phase))
        if at is not None:
            variable = self.d.variables[at]
            copy = variable.options[self.choice[at]].inputs[0]
            if variable.kept and variable.kept[self.choice[at]]:
                self.made["backward"].setdefault(value, {})[copy] = self.made["forward"][value][copy]
            self._redistribute(value, source, copy, phase)
            source = copy
        return self._redistribute(value, source, spec, phase)

    def _result(self, at: int) -> str:
        output = self.graph.outputs[at]
        phase = self.graph.by_name[output.value.node].phase
        if is_handed_out(output):
            return self._read(output.value, self._chosen(output_key(output.name)).inputs[0], phase)
        spec = self._chosen(self.owner[output.name]).outputs[0]
        assert spec is not None
        source = self.base[phase][output.value]
        chain = list(self._steps(output.value, source, spec, phase, hiding=True))
        if not chain:
            return self.made[phase][output.value][spec]
        chain.pop(0)()
        self.pending_results += [chain] if chain else []
        return _redistributed(output.value, spec, phase)

    def _advance_results(self) -> None:
        """Take the next step of every result that needs several.

        A step waits for the one before, and the program with it. So each comes when the next result is made, and the
        one before is probably done.
        """
        for chain in self.pending_results:
            chain.pop(0)()
        self.pending_results = [chain for chain in self.pending_results if chain]

    def _redistribute(self, value: Value, source: ShardingSpec, target: ShardingSpec, phase: Phase) -> str:
        made = self.made[phase][value]
        if target not in made:
            there = self.graph.by_name[value.node].op == "placeholder" or value.node in self.ahead
            for take in self._steps(value, source, target, phase, hiding=there):
                take()
        return made[target]

    def _steps(
        self, value: Value, source: ShardingSpec, target: ShardingSpec, phase: Phase, *, hiding: bool
    ) -> Iterator[Callable[[], None]]:
        """Yield functions that take the steps to a tensor in ``target`` in turn; none if it is there.

        Args:
            hiding: the program computes meanwhile, as the objective assumes for parameters and gradients.
        """
        made = self.made[phase].setdefault(value, {})
        if target in made:
            return
        meta = self.graph.meta(value)
        path = self.prices.path(source, target, meta, hiding=hiding)

        def taking(before: ShardingSpec, step: Step, after: ShardingSpec) -> Callable[[], None]:
            def take() -> None:
                if after not in made:
                    made[after] = self._step(value, meta, made[before], before, step, after, phase)

            return take

        yield from map(taking, path.specs, path.steps, path.specs[1:])

    def _step(
        self,
        value: Value,
        meta: TensorMeta,
        source: str,
        before: ShardingSpec,
        step: Step,
        after: ShardingSpec,
        phase: Phase,
    ) -> str:
        name = _redistributed(value, after, phase)
        if name in self.redistributed:  # a constraint took the value there and back
            name += SECOND
        self.redistributed.add(name)
        priced = local_bytes(meta, after if step.kind == "all_gather" else before, self.mesh)
        costs = self.prices.collectives.of(meta.dtype)
        seconds, launch_s = self.prices.step_seconds(step, before, meta)
        self.ops.append(
            Op(
                name,
                "redistribute",
                value.node,
                (source,),
                (self._tensor(name, meta, after),),
                phase,
                step=step,
                seconds=seconds,
                wire_bytes=0 if step.kind == "slice" else costs.sent(step.kind, priced),
                launch_s=launch_s,
                kernels=packing_kernels(step, after, meta, self.mesh, self.prices.cluster.device.kind),
            )
        )
        return name

    def _tensor(self, name: str, meta: TensorMeta, spec: ShardingSpec) -> LocalTensor:
        return LocalTensor(name, meta, spec, local_bytes(meta, spec, self.mesh))


def _without_unread(ops: Sequence[Op], results: Sequence[tuple[Output, str]]) -> list[Op]:
    """Drop redistributions that nobody reads, which a choice that is not optimal may have: nobody would wait for
    them."""
    read, kept = {name for _, name in results}, []
    for op in reversed(ops):
        if op.kind != "redistribute" or op.writes[0].name in read:
            read.update(op.reads)
            kept.append(op)
    return kept[::-1]


def _redistributed(value: Value, spec: ShardingSpec, phase: Phase) -> str:
    return f"{value}|{spec}|{phase[0]}"
