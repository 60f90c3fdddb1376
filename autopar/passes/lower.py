"""Lower the planned program to torch.fx graphs of the forward and the backward that each rank runs.

Every op of the program becomes one call. Every collective and transfer becomes a launch and a wait, which comes before
its first reader or where the program says so.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import fx

from autopar import spmd
from autopar._torch import LazyGraphModule, changes_arguments
from autopar.garbage import collected_later
from autopar.holding import ACTIONS, Encoded
from autopar.ir import Graph, Node, Output, Phase, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.planner.footprint.layouts import NEEDS_CONTIGUOUS
from autopar.planner.graphs.accumulation import accumulation_program
from autopar.program import LocalTensor, Op, Program
from autopar.sharding import Loan, LocalChoice, LocalLength, LocalOffset, ShardingSpec, Strategy, local_length
from autopar.sharding.strategy import ring_axes
from autopar.spmd import Lowered
from autopar.strategies import Combine, Gathered, Operand, combine, localize
from autopar.strategies.registry import Metas

aten = torch.ops.aten


@collected_later()
def lower(program: Program, graph: Graph, mesh: Mesh) -> Lowered:
    """Translate ``program``, a plan for ``graph``, op by op."""
    last = _lower(program, graph, mesh)
    if not last.accumulators:
        return last
    before = _lower(accumulation_program(program, graph), graph, mesh)
    assert before.saved == last.saved, "the delivery of gradients reads nothing of the forward"
    return replace(last, accumulate=before.backward, accumulated=before.gradients)


def _lower(program: Program, graph: Graph, mesh: Mesh) -> Lowered:
    results = {p: [r for r in program.results if _phase(program, r[1]) == p] for p in ("forward", "backward")}
    saved = _saved(program, [name for _, name in results["backward"]])
    inputs = [op for op in program.ops if op.kind == "input"]
    kind = {op.name: graph.input_of[op.node].kind for op in inputs}
    tangents = [op for op in inputs if kind[op.name] == "tangent"]
    accumulators = [op for op in inputs if kind[op.name] == "accumulator"]
    fed = [op for op in inputs if kind[op.name] not in ("tangent", "accumulator")]

    shared = frozenset(program.once)
    held = tuple(t.name for op in program.ops if op.name in shared for t in op.writes if t.name in program.held_once)
    read_once = {name for op in program.ops if op.name in shared for name in op.reads}
    fed_once = [op for op in fed if op.writes[0].name in read_once]
    once = None
    if shared:
        first = _Builder(graph, mesh)
        for op in fed_once:
            first.placeholder(op.writes[0])
        first.run([op for op in program.ops if op.name in shared])
        once = first.finish(held)

    ahead = _Builder(graph, mesh)
    for op in fed:
        ahead.placeholder(op.writes[0])
    for name in held:
        ahead.placeholder(program.tensors[name])
    ahead.run([op for op in program.ops if op.phase == "forward" and op.kind != "input" and op.name not in shared])
    forward = ahead.finish([name for _, name in results["forward"]] + list(saved))

    back = _Builder(graph, mesh)
    for name in saved:
        back.placeholder(program.tensors[name])
    for op in (*tangents, *accumulators):
        back.placeholder(op.writes[0])
    back.run([op for op in program.ops if op.phase == "backward" and op.kind != "input"])
    backward = back.finish([name for _, name in results["backward"]])

    def with_spec(pairs: Sequence[tuple[Output, str]]) -> tuple[tuple[Output, ShardingSpec], ...]:
        return tuple((output, program.tensors[name].spec) for output, name in pairs)

    return Lowered(
        forward,
        backward,
        tuple((graph.input_of[op.node], op.writes[0].spec) for op in fed),
        with_spec(results["forward"]),
        saved,
        tuple((graph.input_of[op.node], op.writes[0].spec) for op in tangents),
        with_spec(results["backward"]),
        tuple((graph.input_of[op.node], op.writes[0].spec) for op in accumulators),
        once=once,
        once_inputs=tuple((graph.input_of[op.node], op.writes[0].spec) for op in fed_once),
        held=held,
    )


def _phase(program: Program, name: str) -> Phase:
    return program.ops[program.writer[name]].phase


def _saved(program: Program, results: Sequence[str]) -> tuple[str, ...]:
    """Return the tensors of the forward that the backward reads, in the order in which they are created."""
    read = {name for op in program.ops if op.phase == "backward" for name in op.reads} | set(results)
    made = [t.name for op in program.ops if op.phase == "forward" for t in op.writes]
    return tuple(name for name in made if name in read)


@dataclass
class _Builder:
    """Builds one fx graph. ``values`` maps program tensors to nodes, ``pending`` to launches in flight."""

    graph: Graph
    mesh: Mesh
    built: fx.Graph = field(default_factory=fx.Graph)
    values: dict[str, fx.Node] = field(default_factory=dict)
    pending: dict[str, fx.Node] = field(default_factory=dict)
    _integers: dict[Any, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank = self.built.placeholder("rank")

    def placeholder(self, tensor: LocalTensor) -> None:
        node = self.built.placeholder(identifier(tensor.name))
        self.values[tensor.name] = self._described(node, tensor)

    def run(self, ops: Sequence[Op]) -> None:
        for op in ops:
            if op.kind == "redistribute":
                self._redistribute(op)
            elif op.is_transfer:
                self._transfer(op)
            elif op.stores or op.restores:
                self._recode(op)
            elif op.kind == "decomposed":
                self._decomposed(op)
            elif op.kind == "wait":
                self._read(op.reads[-1])
            elif op.kind == "copy":
                self._copy(op)
            else:
                self._compute(op)

    def finish(self, results: Sequence[str]) -> fx.GraphModule:
        self.built.output(tuple(self._read(name) for name in results))
        self.built.lint()
        return LazyGraphModule(torch.nn.Module(), self.built)

    def _call(
        self, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, name: str | None = None
    ) -> fx.Node:
        """Append a call to the graph.

        Arguments are set afterwards, so that fx does not search them for symbols, which would take longer than the
        rest.
        """
        node = self.built.call_function(target, name=name)
        node.args = args
        if kwargs:
            node.kwargs = kwargs
        return node

    def _described(self, node: fx.Node, tensor: LocalTensor) -> fx.Node:
        node.meta["tensor"] = tensor
        return node

    def _read(self, name: str) -> fx.Node:
        if name in self.pending:
            self._wait(self.pending.pop(name), name)
        return self.values[name]

    def _wait(self, pending: fx.Node, name: str) -> None:
        op: Op = pending.meta["op"]
        if op.bucket:
            waited = self._call(spmd.wait, (pending,), name=identifier(op.name))
            for i, tensor in enumerate(op.writes):
                self.pending.pop(tensor.name, None)
                self._item(waited, i, tensor)
            return
        function = spmd.arrived if op.is_transfer else spmd.wait
        waited = self._call(function, (pending,), name=identifier(name))
        self.values[name] = self._described(waited, pending.meta["tensor"])

    def _item(self, several: fx.Node, index: int, tensor: LocalTensor) -> None:
        item = self._call(operator.getitem, (several, index), name=identifier(tensor.name))
        self.values[tensor.name] = self._described(item, tensor)

    def _redistribute(self, op: Op) -> None:
        if op.bucket:
            self._bucket(op)
            return
        step, tensor = op.step, op.writes[0]
        assert step is not None
        source = self._read(op.reads[0])
        before: LocalTensor = source.meta["tensor"]
        function, kwargs = spmd.step_call(step, before.spec, tensor.meta.shape, self.mesh)
        local = {k: self._argument(v) for k, v in kwargs.items()} | ({"in_place": True} if op.in_place else {})
        name = identifier(tensor.name) + ("_launched" if op.is_collective else "")
        node = self._call(function, (self.rank, source), local, name=name)
        node.meta["op"] = op
        self._described(node, tensor)
        (self.pending if op.is_collective else self.values)[tensor.name] = node

    def _bucket(self, op: Op) -> None:
        sources = [self._read(name) for name in op.reads]
        specs = [source.meta["tensor"].spec for source in sources]
        shapes = [tensor.meta.shape for tensor in op.writes]
        function, kwargs = spmd.bucket_call(op.bucket, specs, shapes, self.mesh)
        local = {k: self._argument(v) for k, v in kwargs.items()}
        node = self._call(function, (self.rank, sources), local, name=f"{identifier(op.name)}_launched")
        node.meta["op"] = op
        self.pending.update((tensor.name, node) for tensor in op.writes)

    def _transfer(self, op: Op) -> None:
        function, tensor = spmd.offload if op.kind == "offload" else spmd.fetch, op.writes[0]
        name = f"{identifier(tensor.name)}_launched"
        node = self._call(function, (self.rank, self._read(op.reads[0])), name=name)
        node.meta["op"] = op
        self.pending[tensor.name] = self._described(node, tensor)

    def _recode(self, op: Op) -> None:
        """Store a value in another form, or restore it."""
        action, source, tensor = ACTIONS[op.form], self._read(op.reads[0]), op.writes[0]
        assert isinstance(action, Encoded)
        namespace, _, name = (action.encode if op.stores else action.decode).partition("::")
        function = getattr(getattr(torch.ops, namespace), name).default
        args = (source,) if op.stores else (source, getattr(torch, tensor.meta.dtype))
        node = self._call(function, args, name=identifier(tensor.name))
        self.values[tensor.name] = self._described(node, tensor)

    def _copy(self, op: Op) -> None:
        tensor, contiguous = op.writes[0], {"memory_format": torch.contiguous_format}
        source = self._read(op.reads[0])
        node = self._call(torch.ops.aten.clone.default, (source,), contiguous, name=identifier(tensor.name))
        self.values[tensor.name] = self._described(node, tensor)

    def _compute(self, op: Op) -> None:
        node = self.graph.by_name[op.node]
        assert op.strategy is not None
        metas = tuple(self.graph.meta(v) for v in node.inputs)
        combined = combine(node, op.strategy, metas, self.mesh)
        name, args, kwargs = self._combined(op, combined) if combined else localize(node, op.strategy, metas, self.mesh)
        # The same value may be two operands in two specs, so operands are matched by position.
        operands = iter(self._widened(op) if op.halos else op.reads)
        made = self._made_args(args, kwargs, operands)
        if name.rpartition(".")[0] in NEEDS_CONTIGUOUS:
            made = tuple(map(self._dense, made[0])), made[1]
        target = resolve_op(name)
        if (shared := shared_attention(node, op.strategy, op.loan, metas)) is not None:
            target, made = shared[0], (made[0], {**made[1], **shared[1]})
        if target in spmd.RINGS:
            made = (self.rank, *made[0]), made[1]
        if op.in_place:
            target, made = _overwriting_call(target, *made, op.operand)
        if changes_arguments(target):
            call = self._call(spmd.on_copies, (target, *made[0]), made[1], name=identifier(op.name))
        else:
            call = self._call(target, made[0], self._with_device(target, made[1]), name=identifier(op.name))
        call.meta |= {"op": op, "module": node.module}
        if len(node.outputs) == 1 and (not _returns_list(target) or changes_arguments(target)):
            self.values[op.writes[0].name] = self._described(call, op.writes[0])
            return
        present = [i for i, meta in enumerate(node.outputs) if meta is not None]
        for index, tensor in zip(present, op.writes, strict=True):
            self._item(call, index, tensor)

    def _dense(self, arg: Any) -> Any:
        """Make an operand contiguous for a kernel that needs it; vectors always are."""
        tensor = arg.meta.get("tensor") if isinstance(arg, fx.Node) else None
        several = isinstance(tensor, LocalTensor) and len(tensor.meta.shape) > 1
        return self._call(aten.contiguous.default, (arg,)) if several else arg

    def _decomposed(self, op: Op) -> None:
        """Append one call for a contraction overlapped with the gather of an operand or the scatter of its result."""
        node, step, operand = self.graph.by_name[op.node], op.step, op.operand
        assert op.strategy is not None and step is not None
        metas = tuple(self.graph.meta(v) for v in node.inputs)
        _, args, kwargs = localize(node, op.strategy, metas, self.mesh)
        equation = next(a for a in (*args, *(v for _, v in kwargs)) if isinstance(a, str))
        given: dict[str, Any] = {"equation": equation, "operand": operand, "dim": step.dim, "axis": step.axis}
        function: Callable[..., Any] = spmd.product_scatter
        first, *kept = op.writes
        if step.kind == "all_gather":
            cut = op.strategy.inputs[operand].dims[step.dim]
            given["length"] = self._argument(local_length(metas[operand].shape[step.dim], cut, self.mesh))
            given |= {"keep": True} if kept else {}
            function = spmd.gather_product
        else:
            inputs, out = equation.split("->")
            given["dim"] = inputs.split(",")[operand].index(out[step.dim])
        operands = tuple(self._read(name) for name in op.reads)
        name = identifier(op.name) if kept else identifier(first.name)
        call = self._call(function, (self.rank, *operands), given, name=name)
        call.meta |= {"op": op, "module": node.module}
        if not kept:
            self.values[first.name] = self._described(call, first)
            return
        for index, tensor in enumerate(op.writes):
            item = self._call(operator.getitem, (call, index), name=identifier(tensor.name))
            self.values[tensor.name] = self._described(item, tensor)

    def _widened(self, op: Op) -> list[str | fx.Node]:
        """Return the op's operands. Those with halos become windows, which include the neighbours' rows.

        Dims are exchanged one after the other, so that corners of a window that is cut along two dims arrive through a
        neighbour.
        """
        operands: list[str | fx.Node] = list(op.reads)
        inside = iter(op.sent)
        for h in op.halos:
            before = operands[h.operand]
            own = self._read(before) if isinstance(before, str) else before
            name = f"{identifier(op.name)}_{h.operand}"
            launched = {
                towards: self._call(
                    spmd.shift,
                    (self.rank, own),
                    {"dim": h.dim, "axis": h.axis, "rows": rows, "towards": towards},
                    name=f"{name}_{side}_launched",
                )
                for towards, rows, side in ((1, h.before, "before"), (-1, h.after, "after"))
                if rows
            }
            for towards, launch in launched.items():
                side = "rows_before" if towards > 0 else "rows_after"
                module = self.graph.by_name[op.node].module
                launch.meta |= {"launches": side, "module": module, "sent": next(inside, None)}
            arrived = {t: self._call(spmd.wait, (p,), name=f"{name}_rows") for t, p in launched.items()}
            along: dict[str, Any] = {"dim": h.dim, "axis": h.axis, "windows": h.windows, "n": h.n, "fill": h.fill}
            around = (self.rank, own, arrived.get(1), arrived.get(-1))
            operands[h.operand] = self._call(spmd.window, around, along, name=f"{name}_window")
        return operands

    def _combined(self, op: Op, how: Combine) -> tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]:
        """Gather the summaries of all ranks, and return the call that finishes the op."""
        name, name_of, inside = how.summary[0], identifier(op.name), iter(op.sent)

        def given(arg: Any) -> Any:
            return self._read(op.reads[arg.position]) if isinstance(arg, Operand) else self._argument(arg)

        args, kwargs = tuple(map(given, how.summary[1])), {k: given(v) for k, v in how.summary[2]}
        made = self._call(resolve_op(name), args, kwargs, name=f"{name_of}_summary")
        made.meta["module"] = self.graph.by_name[op.node].module
        several = len(how.summaries) > 1
        gathered = []
        for i, own in enumerate(how.summaries):
            part = self._call(operator.getitem, (made, i), name=f"{name_of}_summary{i}") if several else made
            part.meta["local"] = own
            stacked, length = self._call(resolve_op("aten.unsqueeze.default"), (part, 0)), 1
            stacked.meta |= {"module": made.meta["module"], "local": TensorMeta((1, *own.shape), own.dtype)}
            for axis in reversed(how.axes):
                length *= self.mesh.shape[axis]
                along: dict[str, Any] = {"dim": 0, "axis": axis, "length": length}
                launched = self._call(spmd.all_gather, (self.rank, stacked), along, name=f"{name_of}_summary_launched")
                launched.meta |= {"launches": "summaries", "module": made.meta["module"], "sent": next(inside, None)}
                stacked = self._call(spmd.wait, (launched,), name=f"{name_of}_summaries")
                stacked.meta["local"] = TensorMeta((length, *own.shape), own.dtype)
            gathered.append(stacked)

        def finished(arg: Any) -> Any:
            return gathered[arg.index] if isinstance(arg, Gathered) else given(arg)

        name, args, kwargs_ = how.finish
        return name, tuple(map(finished, args)), tuple((k, finished(v)) for k, v in kwargs_)

    def _made_args(self, args: Any, kwargs: Any, operands: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        made = tuple(self._argument(a, operands) for a in args)
        return made, {k: self._argument(v, operands) for k, v in kwargs}

    def _argument(self, arg: Any, operands: Any = None) -> Any:
        if isinstance(arg, Value):
            operand = next(operands)
            return self._read(operand) if isinstance(operand, str) else operand
        if isinstance(arg, (LocalChoice, LocalLength, LocalOffset)):
            return self._integer(arg)
        if isinstance(arg, (tuple, list)):
            return [self._argument(a, operands) for a in arg]
        if isinstance(arg, str) and arg.startswith("torch."):
            return getattr(torch, arg.removeprefix("torch."))
        if isinstance(arg, str) and arg.startswith("complex:"):
            return complex(arg.removeprefix("complex:"))
        return arg

    def _integer(self, arg: LocalChoice | LocalLength | LocalOffset) -> fx.Node:
        """Return the node of an integer that differs between ranks. It is computed once."""
        if arg not in self._integers and isinstance(arg, LocalChoice):
            self._integers[arg] = self._call(spmd.choice, (self.rank, arg.values, arg.axis))
        elif arg not in self._integers and isinstance(arg, LocalLength):
            self._integers[arg] = self._call(spmd.length, (self.rank, arg.n, arg.axes))
        elif arg not in self._integers and isinstance(arg, LocalOffset):
            counted = (arg.micro_rows,) if arg.micro_rows else ()
            self._integers[arg] = self._call(spmd.offset, (self.rank, arg.n, arg.axes, *counted))
        return self._integers[arg]

    def _with_device(self, target: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Let ops that create a tensor create it on the rank's device."""
        if not _creates_tensor(target):
            return kwargs
        return {**kwargs, "device": self._call(spmd.device, (self.rank,))}


def shared_attention(
    node: Node, strategy: Strategy, loan: Loan | None, metas: Metas
) -> tuple[Callable[..., Any], dict[str, Any]] | None:
    """Return the function by which ranks share an attention's work, and its further options; None if they do not."""
    backward = node.packet.endswith("_backward")
    if loan is not None:
        terms = {"length": loan.n, "axes": list(loan.axes), "lent": list(loan.lent)}
        return spmd.balanced_attention_backward if backward else spmd.balanced_attention, terms
    if node.packet.startswith("autopar.attention") and (axes := ring_axes(strategy)):
        terms = {"length": metas[2 if backward else 1].shape[2], "axes": list(axes)}
        return spmd.ring_attention_backward if backward else spmd.ring_attention, terms
    return None


ACROSS_RANKS = ".across_ranks"
"""Overload of an op that ``spmd`` runs, since its ranks exchange rows inside."""

_OVERWRITING = {
    aten.add.Tensor: aten.add_.Tensor,
    aten.mul.Tensor: aten.mul_.Tensor,
    aten.relu.default: aten.relu_.default,
    aten.threshold_backward.default: aten.threshold_backward.grad_input,
    aten.gelu_backward.default: aten.gelu_backward.grad_input,
    aten.silu_backward.default: aten.silu_backward.grad_input,
}
NOT_OVERWRITING = {overwriting: op for op, overwriting in _OVERWRITING.items()}
"""The ops that leave their operands as they are, by those that overwrite one."""


def _overwriting_call(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operand: int
) -> tuple[Any, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the call that writes the result into an operand: the first one, or the incoming gradient."""
    overwriting = _OVERWRITING[target]
    if overwriting._overloadname == "grad_input":
        return overwriting, (args, {**kwargs, "grad_input": args[operand]})
    return overwriting, (args[operand:] + args[:operand], kwargs)


@cache
def _creates_tensor(target: Any) -> bool:
    """Whether an op takes a device but no tensor."""
    schema = getattr(target, "_schema", None)
    arguments = schema.arguments if schema is not None else ()
    return any(a.name == "device" for a in arguments) and not any("Tensor" in str(a.type) for a in arguments)


@cache
def _returns_list(target: Any) -> bool:
    """Whether an op returns a list even for one tensor, like ``split``."""
    schema = getattr(target, "_schema", None)
    return schema is not None and len(schema.returns) == 1 and str(schema.returns[0].type).startswith("List")


@cache
def resolve_op(name: str) -> Any:
    """Return the callable of a name such as ``"aten.mm.default"``, or ``"autopar.send.across_ranks"``."""
    if name.endswith(ACROSS_RANKS):
        return getattr(spmd, name.split(".")[1])
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def identifier(name: str) -> str:
    """Return a Python name for a program tensor: ``split.1|S0R|f`` becomes ``split_out1_S0R_f``."""
    return re.sub(r"\W+", "_", name.replace(".", "_out")).strip("_")
