"""Checks op by op that a program computes what a graph says. A saved plan, which anybody may have changed, runs only
then.

Each tensor of the program stands for a value of the graph in a spec. An op must be one of the graph's, on tensors that
stand for its operands, with a strategy of its rule. A redistribution must be a step that leads from one spec to the
other. The tensors that then stand for the graph's results must be the program's results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from autopar.errors import AutoparError, PlanError
from autopar.holding import ACTIONS, Stored
from autopar.ir import Graph, Input, Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.planner.footprint.contraction import terms
from autopar.planner.footprint.overwriting import MAKES_NEW, OVERWRITABLE, OVERWRITING, may_overwrite, only_reads
from autopar.planner.graphs.accumulation import accumulated_sums, accumulation_program
from autopar.planner.graphs.shared import may_be_shared
from autopar.planner.options import Options
from autopar.planner.problem.decide import batch_spec, is_plain_output
from autopar.plans import Plan
from autopar.program import LocalTensor, Op, Program
from autopar.sharding import ShardingSpec, Step, Strategy
from autopar.sharding.redistribution import steps_from
from autopar.strategies import halos, lent, strategies

BUCKETS = ("all_gather", "all_reduce", "reduce_scatter")


def verify(plan: Plan, graph: Graph, options: Options) -> None:
    """Check a plan's program against ``graph``, and the plan's specs that a run uses against the program.

    Args:
        options: ``batch`` and ``outputs`` count.

    Raises:
        PlanError: they do not fit.
    """
    try:
        _Verifier(plan.program, graph, plan.mesh, options).run()
        _check_specs(plan, graph)
    except PlanError:
        raise
    except (AutoparError, LookupError, TypeError, ValueError, AssertionError) as error:
        raise _no_program(f"{type(error).__name__}: {error!s:.200}") from None


def _no_program(found: str) -> PlanError:
    return PlanError(
        "The plan's program does not compute what the model computes.",
        found=found,
        hint="plan again, or undo what was changed in the plan's program.",
    )


def _check_specs(plan: Plan, graph: Graph) -> None:
    names = {i.name for i in graph.inputs if i.kind == "parameter"}
    _require(plan.parameters.keys() == names, "the plan's parameters are not the model's")
    prefixes = {"parameter": "", "accumulator": "accumulated:"}
    for i in graph.inputs:
        if i.kind in prefixes:
            in_plan, spec = plan.specs.get(prefixes[i.kind] + i.name), plan.program.tensors[i.node].spec
            _require(
                in_plan == spec, f"the {i.kind} {i.name} is {spec} in the program, and {in_plan} in the plan's specs"
            )


@dataclass
class _Verifier:
    """One check of a program.

    Args:
        value_of: the value that each tensor stands for.
        phase: the phase in which each tensor is made.
        known_strategies: by kind of node.
    """

    program: Program
    graph: Graph
    mesh: Mesh
    options: Options
    value_of: dict[str, Value] = field(default_factory=dict)
    phase: dict[str, str] = field(default_factory=dict)
    known_strategies: dict[int, frozenset[Strategy]] = field(default_factory=dict)

    def run(self) -> None:
        for op in (*self._ops_of("forward"), *self._ops_of("backward")):
            try:
                self._op(op)
            except AutoparError as error:
                raise _no_program(f"op {op.name}: {error.what} {error.found}") from None
        self._inputs()
        self._results()
        self._sums()
        self._overwrites()
        self._once()
        trained = {i.name for i in self.graph.inputs if i.kind == "parameter"}
        _require(
            trained.issuperset(self.program.offloaded_optimizer),
            "optimizer state is kept on the host for something that is no parameter",
        )

    def _ops_of(self, phase: str) -> list[Op]:
        return [op for op in self.program.ops if op.phase == phase]

    def _op(self, op: Op) -> None:
        for tensor in op.writes:
            tensor.spec.check(len(tensor.meta.shape), self.mesh, tensor.name)
        _require(
            op.phase == "backward" or all(self.phase[name] == "forward" for name in op.reads),
            f"{op.name}: the forward reads from the backward",
        )
        check = {
            "input": self._input,
            "compute": self._compute,
            "redistribute": self._redistribute,
            "wait": self._wait,
            "decomposed": self._decomposed,
            "offload": self._store,
            "encode": self._store,
            "fetch": self._restore,
            "decode": self._restore,
            "copy": self._copy,
        }
        check[op.kind](op)
        on_host = op.kind == "offload"
        _require(all(t.host == on_host for t in op.writes), f"{op.name}: writes to the wrong memory, host or device")
        reads_stored = op.restores or op.kind == "wait"
        _require(
            reads_stored or not any(self.program.ops[self.program.writer[n]].stores for n in op.reads),
            f"{op.name}: reads a tensor that is stored for the backward",
        )
        _require(not op.in_place or op.kind in ("compute", "redistribute"), f"{op.name}: may not run in place")

    def _tensor(self, name: str) -> LocalTensor:
        return self.program.tensors[name]

    def _record(self, op: Op, tensor: LocalTensor, value: Value, spec: ShardingSpec | None) -> None:
        _require(tensor.spec == spec, f"{op.name}: {tensor.name} in {tensor.spec}, where the op makes {spec}")
        _require(tensor.meta == self.graph.meta(value), f"{op.name}: {tensor.name} is {tensor.meta}")
        self.value_of[tensor.name], self.phase[tensor.name] = value, op.phase

    def _input(self, op: Op) -> None:
        node = self.graph.by_name[op.node]
        called = op.name == op.writes[0].name == node.name and op.phase == node.phase
        _require(node.op == "placeholder" and called, f"{op.name}: {op.node} is no input of that name and phase")
        meaning, meta = self.graph.input_of[op.node], self.graph.meta(Value(op.node))
        (tensor,) = op.writes
        self._record(op, tensor, Value(op.node), tensor.spec)
        _require(
            self._is_valid_input(meaning, meta, tensor.spec),
            f"the {meaning.kind} {meaning.name} cannot come in {tensor.spec}",
        )

    def _is_valid_input(self, meaning: Input, meta: TensorMeta, spec: ShardingSpec) -> bool:
        """Whether the caller can give an input in this spec."""
        if meaning.kind == "accumulator":
            return True  # the op that adds to it decides its spec
        if meaning.kind == "parameter" or self.graph.comes_from_stage(meaning):
            return self._is_stored(meta, spec)
        if meaning.kind == "input":
            return not spec.partial if self.options.batch == "global" else spec == self._plain_spec(meta)
        if meaning.kind == "tangent":
            return self._is_valid_output(meta, spec)
        return spec.is_replicated

    def _is_valid_output(self, meta: TensorMeta, spec: ShardingSpec) -> bool:
        """Whether an output can be returned to the caller in this spec, and its tangent be taken back."""
        whole = is_plain_output(self.graph, meta, self.options)
        return spec == self._plain_spec(meta) if whole else self._is_stored(meta, spec)

    def _plain_spec(self, meta: TensorMeta) -> ShardingSpec:
        """Return the spec in which the caller has a plain tensor."""
        if self.options.batch == "local":
            return batch_spec(meta, self.mesh, self.graph)
        return ShardingSpec.replicated(len(meta.shape))

    def _is_stored(self, meta: TensorMeta, spec: ShardingSpec) -> bool:
        """Whether a DTensor can have this spec."""
        cuts = zip(meta.shape, spec.dims, strict=True)
        alike = (list(axes) == sorted(axes) or n % prod(self.mesh.shape[a] for a in axes) == 0 for n, axes in cuts)
        return not spec.partial and all(alike)

    def _node(self, op: Op) -> tuple[Node, tuple[TensorMeta, ...], Strategy]:
        """Return the op's node, operands and strategy, after checking that they are the graph's and the rule's."""
        node, strategy = self.graph.by_name[op.node], op.strategy
        metas = tuple(self.graph.meta(v) for v in node.inputs)
        _require(
            node.op != "placeholder" and strategy is not None,
            f"{op.name}: {op.node} is no op of the graph, or has no strategy",
        )
        assert strategy is not None
        kind = self.graph.kinds[node.name]
        if kind not in self.known_strategies:
            self.known_strategies[kind] = frozenset(strategies(node, metas, self.mesh))
        _require(strategy in self.known_strategies[kind], f"{op.name}: {node.op} has no strategy {strategy}")
        _require(tuple(self.value_of[n] for n in op.reads) == node.inputs, f"{op.name}: reads {', '.join(op.reads)}")
        return node, metas, strategy

    def _compute(self, op: Op) -> None:
        node, metas, strategy = self._node(op)
        for name, spec in zip(op.reads, strategy.inputs, strict=True):
            _require(self._tensor(name).spec == spec, f"{op.name}: {name} is read in {spec}")
        made = [(Value(node.name, i), s) for i, s in enumerate(strategy.outputs) if node.outputs[i] is not None]
        for tensor, (value, result) in zip(op.writes, made, strict=True):
            self._record(op, tensor, value, result)
        _require(
            op.halos == (halos(node, strategy, metas, self.mesh) or ()), f"{op.name}: other halos than its strategy has"
        )
        _require(op.loan == lent(node, strategy, metas, self.mesh), f"{op.name}: another loan than its strategy has")
        if op.in_place:
            _require(not op.kernels and op.operand < OVERWRITING.get(node.op, 0), f"{op.name}: may not run in place")
            _require(op.operand >= 0 and may_overwrite(node, self.graph), f"{op.name}: may not run in place")

    def _redistribute(self, op: Op) -> None:
        steps = op.bucket or ((op.step,) if op.step is not None else ())
        for step, name, tensor in zip(steps, op.reads, op.writes, strict=True):
            self._record(op, tensor, self.value_of[name], self._after(op, step, name))
            alike = op.step is not None and (step.kind, step.axis, step.reduction) == (
                op.step.kind,
                op.step.axis,
                op.step.reduction,
            )
            _require(alike and (not op.bucket or step.kind in BUCKETS), f"{op.name}: {step} cannot be in this bucket")
        _require(
            not op.in_place or (not op.bucket and steps[0].kind == "all_reduce"), f"{op.name}: may not run in place"
        )

    def _after(self, op: Op, step: Step, name: str) -> ShardingSpec:
        before, shape = self._tensor(name).spec, self._tensor(name).meta.shape
        after = dict(steps_from(before, len(shape), self.mesh)).get(step)
        _require(
            after is not None and step.fits(before, shape, self.mesh),
            f"{op.name}: {step} is no step of {name} in {before}",
        )
        assert after is not None
        return after

    def _store(self, op: Op) -> None:
        (name,), (tensor,), source = op.reads, op.writes, self._tensor(op.reads[0])
        form = self._form(op).form(source.meta)
        _require(tensor.meta == form, f"{op.name}: {tensor.name} is {tensor.meta}, where {op.form} stores {form}")
        _require(tensor.spec == source.spec, f"{op.name}: stores {source.spec} in {tensor.spec}")
        self.value_of[tensor.name], self.phase[tensor.name] = self.value_of[name], op.phase

    def _restore(self, op: Op) -> None:
        (name,), (tensor,) = op.reads, op.writes
        by = self.program.ops[self.program.writer[name]]
        known = by.stores and by.form == op.form
        _require(known, f"{op.name}: restores {name}, which is not {self._form(op).text}")
        self._record(op, tensor, self.value_of[name], self._tensor(name).spec)

    def _form(self, op: Op) -> Stored:
        action = ACTIONS.get(op.form)
        _require(isinstance(action, Stored) and op.kind in action.kinds, f"{op.name}: no {op.kind} is by {op.form!r}")
        assert isinstance(action, Stored)
        return action

    def _copy(self, op: Op) -> None:
        (name,), (tensor,) = op.reads, op.writes
        _require(op.phase == "forward", f"{op.name}: copies a part in the backward")
        self._record(op, tensor, self.value_of[name], self._tensor(name).spec)

    def _wait(self, op: Op) -> None:
        _require(not op.writes, f"{op.name}: a wait makes nothing")

    def _decomposed(self, op: Op) -> None:
        """Check a contraction beside the gather of an operand, or the scatter of its sum."""
        node, _, strategy = self._node(op)
        names, step = terms(node), op.step
        assert names is not None
        assert step is not None
        _require(step.kind in ("all_gather", "reduce_scatter"), f"{op.name}: {step} cannot overlap with a product")
        gathers = step.kind == "all_gather"
        for i, (name, spec) in enumerate(zip(op.reads, strategy.inputs, strict=True)):
            found = self._after(op, step, name) if gathers and i == op.operand else self._tensor(name).spec
            _require(found == spec, f"{op.name}: {name} is read in {spec}")
        result, *kept = op.writes
        made = strategy.outputs[0]
        assert made is not None
        if gathers:
            _require(
                names.becomes(op.operand, step.dim) is not None, f"{op.name}: {step} cannot overlap with the product"
            )
            self._record(op, result, Value(node.name), made)
            for tensor in kept:
                self._record(op, tensor, self.value_of[op.reads[op.operand]], strategy.inputs[op.operand])
            return
        source = names.comes_from(step.dim)
        _require(
            source is not None and source[0] == op.operand and step.reduction == "sum",
            f"{op.name}: {step} cannot overlap with the product",
        )
        _require(not kept, f"{op.name}: makes {len(op.writes)} tensors")
        self._record(op, result, Value(node.name), step.apply(made))

    def _inputs(self) -> None:
        there = sorted(op.node for op in self.program.ops if op.kind == "input")
        _require(there == sorted(i.node for i in self.graph.inputs), "the inputs of the program are not the model's")
        specs: dict[tuple[str, str], ShardingSpec] = {}
        for meaning in self.graph.inputs:
            spec = self._spec_of(Value(meaning.node))
            same = specs.setdefault((meaning.kind, meaning.name), spec) == spec
            _require(same, f"the {meaning.kind} {meaning.name} comes in two specs")

    def _spec_of(self, value: Value) -> ShardingSpec:
        return self._tensor(str(value)).spec

    def _results(self) -> None:
        outputs = [output for output, _ in self.program.results]
        _require(outputs == list(self.graph.outputs), "the results of the program are not the model's")
        kinds = ("parameter", "buffer")
        stored = {i.name: self._spec_of(Value(i.node)) for i in reversed(self.graph.inputs) if i.kind in kinds}
        for output, name in self.program.results:
            what, spec = f"the {output.kind} {output.name}", self._tensor(name).spec
            stored_away = self.program.ops[self.program.writer[name]].stores
            _require(self.value_of[name] == output.value and not stored_away, f"{what} is {name}")
            early = output.kind in ("output", "mutation", "sent")
            _require(early == (self.phase[name] == "forward"), f"{what} is made in the {self.phase[name]}")
            meta = self.graph.meta(output.value)
            if output.kind == "output":
                _require(self._is_valid_output(meta, spec), f"{what} in {spec}")
            elif self.graph.goes_to_stage(output):
                _require(self._is_stored(meta, spec), f"{what} in {spec}")
            else:
                as_input = output.name.startswith("input:")
                _require(spec == (self._plain_spec(meta) if as_input else stored[output.name]), f"{what} in {spec}")

    def _sums(self) -> None:
        """Check that each accumulated sum replaces its accumulator, and that all micro-batches keep the same values."""
        for name, (before, total) in accumulated_sums(self.graph).items():
            here = self.value_of.get(str(total)) == total and self.phase[str(total)] == "backward"
            _require(
                here and self._spec_of(total) == self._spec_of(before),
                f"the sum of {name}'s gradients does not replace its accumulator",
            )
        if accumulated_sums(self.graph):
            same = _kept_for_backward(self.program) == _kept_for_backward(
                accumulation_program(self.program, self.graph)
            )
            _require(same, "the last micro-batch keeps other values of the forward than those before it")

    def _once(self) -> None:
        """Check that what runs once for all micro-batches is the same for all of them."""
        possible = may_be_shared(self.program, self.graph)
        named = frozenset(self.program.once)
        made = {t.name for op in self.program.ops if op.name in named for t in op.writes}
        _require(named <= possible.keys(), "what runs once depends on the micro-batch")
        for name in named:
            before = {n for n in possible[name].reads if n not in made}
            _require(before <= self._stored_inputs(), f"{name} runs once, but what it reads does not")

    def _stored_inputs(self) -> frozenset[str]:
        return frozenset(op.writes[0].name for op in self.program.ops if op.kind == "input")

    def _overwrites(self) -> None:
        """Check that what is overwritten was made for that and is no longer read: see ``schedule.in_place``."""
        order = {op.name: i for i, op in enumerate((*self._ops_of("forward"), *self._ops_of("backward")))}
        readers: dict[str, list[Op]] = {}
        for op in self.program.ops:
            for name in op.reads:
                readers.setdefault(name, []).append(op)
        kept = {name for _, name in self.program.results}
        shared = {self.program.root[held] for held in self.program.held_once}
        for op in self.program.ops:
            if not op.in_place:
                continue
            name = op.reads[max(op.operand, 0)]
            others = [r for r in readers[name] if r is not op]
            done = all(order[r.name] < order[op.name] and self._only_reads(r) for r in others)
            new = self._is_new(self.program.ops[self.program.writer[name]], op)
            spares = self.program.root[name] not in shared
            alone = op.reads.count(name) == 1 and name not in kept
            _require(new and done and alone and spares, f"{op.name} overwrites {name}")

    def _only_reads(self, op: Op) -> bool:
        return op.kind == "wait" or only_reads(op, self.graph)

    def _is_new(self, writer: Op, overwriting: Op) -> bool:
        """Whether an op certainly makes memory of its own, in the same phase."""
        made = MAKES_NEW if overwriting.kind == "redistribute" else OVERWRITABLE
        new = self.graph.by_name[writer.node].packet in made if writer.kind == "compute" else writer.is_collective
        return new and writer.phase == overwriting.phase


def _kept_for_backward(program: Program) -> set[str]:
    """Return what the backward reads of the forward."""
    made = {t.name for op in program.ops if op.phase == "forward" for t in op.writes}
    read = {name for op in program.ops if op.phase == "backward" for name in op.reads}
    return made & (
        read | {name for output, name in program.results if output.kind not in ("output", "mutation", "sent")}
    )


def _require(condition: bool, found: str) -> None:
    if not condition:
        raise _no_program(found)
