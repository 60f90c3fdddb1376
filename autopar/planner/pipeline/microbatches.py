"""The graph of one micro-batch: a shard of the whole batch's graph on an axis of time.

The graph is walked on a mesh of one axis, along which the micro-batches lie. Inputs with the batch are cut by it, and
all others are replicated. Each node takes the strategy whose operands are there as they come, so a value is either
*cut* along the batch, *partial*, a sum over micro-batches, or *whole*, as computed from the whole batch. Losses and
gradients of parameters are partial: they are added up, and equal those of the whole batch.

Where an op needs more than its micro-batch has, there are three cases:

- What depends on inputs alone, such as the number of labelled tokens, is computed for the whole batch *ahead*.
- A partial statistic of activations, such as the variance in batch norm, is each micro-batch's own. Micro-batches are
  of equal size, so ``m`` times its part estimates the sum. Its readers take the estimate for the whole.
- Anything else, such as the similarities of all samples to each other, is refused. So is a loss that is not linear in
  its total, such as the root of a mean: the mean of its values for micro-batches is another loss.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from autopar.errors import InputError, PlanError
from autopar.ir import FLOATS, Graph, Input, LocalOffset, Node, Output, Phase, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.pipelines.actions import Joined
from autopar.planner.graphs.accumulation import is_gradient
from autopar.planner.graphs.dataflow import Dataflow, batch_size
from autopar.planner.pipeline.indexed import SPECIAL, TIME, Option
from autopar.sharding import LocalChoice, LocalLength, ShardingSpec, Strategy
from autopar.sharding.strategy import moved_axes, ring_axes
from autopar.strategies import combine, flops, halos, lent, localize, strategies
from autopar.strategies.registry import LocalCall

OTHER_LOSS = "so the loss is another function of the batch"
"""What a notice says where statistics of each micro-batch make a term of the loss, as those of balanced experts do."""

ONE = "train this model without micro-batches: pipeline=Pipeline(micro_batches=1)"

PLACED = frozenset(
    {"autopar.dropout", "autopar.uniform", "autopar.attention", "autopar.attention_backward", "aten.narrow_copy"}
)
"""The ops that know a place in the whole batch: those that draw random numbers, and the one that reads rows."""


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of a graph.

    Args:
        graph: its joint graph. Only ``LocalOffset`` tells one micro-batch from another.
        micro_batches: how many make up the batch.
        prologue: the forward of the whole batch, as far as it makes the values ``ahead``; None if there are none.
        ahead: names of outputs of ``prologue`` that are inputs of ``graph``.
        outputs: for each output of the model, and for gradients of its inputs as ``input:NAME``, how micro-batches make
            up the whole. A tangent is cut where its output is concatenated, else the same for all.
        buffers: the same for new values of buffers; None if each micro-batch reads what the one before it wrote.
        notices: what each micro-batch has for itself where one device has it of the whole batch, one sentence a module.
    """

    graph: Graph
    micro_batches: int
    prologue: Graph | None
    ahead: tuple[str, ...]
    outputs: Mapping[str, Joined]
    buffers: Mapping[str, Joined | None]
    notices: tuple[str, ...]


def micro_batch(graph: Graph, micro_batches: int) -> MicroBatch:
    """Return one of ``micro_batches`` equal parts of the joint graph of a whole batch.

    Raises:
        InputError: if the batch does not divide.
        PlanError: if micro-batches would compute something else, or nothing less each.
    """
    batch = batch_size(graph)
    if batch < 1 or micro_batches < 1 or batch % micro_batches:
        raise InputError(
            f"A batch of {max(batch, 0)} cannot be cut into {micro_batches} equal micro-batches.",
            found=f"{micro_batches} micro-batches of inputs with {max(batch, 0)} rows",
            hint=f"take {_nearest(batch, micro_batches)} micro-batches, or a batch that {micro_batches} divides.",
        )
    if micro_batches == 1:
        return MicroBatch(graph, 1, None, (), *_unchanged(graph), ())
    return _Walk(graph, micro_batches).result()


def _nearest(batch: int, micro_batches: int) -> int:
    divisors = (n for n in range(1, max(batch, 1) + 1) if batch % n == 0)
    return min(divisors, key=lambda n: (abs(n - micro_batches), n))


def _unchanged(graph: Graph) -> tuple[dict[str, Joined], dict[str, Joined | None]]:
    outputs: dict[str, Joined] = {o.name: "same" for o in graph.outputs if _is_result(o)}
    return outputs, {o.name: "same" for o in graph.outputs if o.kind == "mutation"}


def _is_result(output: Output) -> bool:
    """Whether a result is the caller's: an output, or the gradient of an input."""
    return output.kind == "output" or (output.kind == "gradient" and not is_gradient(output))


@dataclass(frozen=True, order=True)
class _Price:
    """What it takes to have a value in another form, the most regrettable first."""

    statistics: int = 0
    ahead: int = 0
    copies: int = 0

    def __add__(self, other: _Price) -> _Price:
        return _Price(self.statistics + other.statistics, self.ahead + other.ahead, self.copies + other.copies)


LIKE = frozenset(
    f"aten.{name}"
    for name in (
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
        *("zeros_like", "ones_like", "full_like", "empty_like"),
    )
)
"""The ops that read nothing of their operand but its shape, dtype and device."""

VIEWS = frozenset({"aten.view", "aten._unsafe_view", "aten.reshape"})
"""The ops that may leave the batch inside of a dim, besides joining."""

DIM_ARGUMENT = {"aten.cat": 1, "aten.slice": 1, "aten.slice_backward": 2, "aten.split": 2, "aten.split_with_sizes": 2}
"""The position of the dim among the arguments of ops that join or take parts of it."""

PLACES = {"aten.slice": (2, 3), "aten.slice_backward": (3, 4), "aten.split": (1,), "aten.split_with_sizes": (1,)}
"""The positions of arguments that count elements of that dim."""

SCALED = frozenset({"aten.div", "aten.mul", "aten.neg", "aten._to_copy"})
"""The ops that leave a value alike in all rows if they read no other."""

SHIFTS = frozenset({"aten.add", "aten.sub", "aten.rsub"})
"""The ops that may add a number to a value, as in ``loss + 1.0``."""

FREE, COPY, AHEAD, STATISTIC = _Price(), _Price(copies=1), _Price(ahead=1), _Price(statistics=1)

Form = tuple[Value, ShardingSpec]
"""A value of the whole batch, and how a micro-batch has it."""

Found = tuple[_Price, Option | None]
"""What a form costs, and how its op makes it again; None for a conversion."""


@dataclass
class _Walk:
    """Builds the graph of a micro-batch, node by node.

    Args:
        over: how each value of the whole graph comes; ``made`` has its name in the micro-batch's graph by form.
        of_inputs: nodes that depend on inputs, buffers and the seed alone.
        own: whole values of which each micro-batch has its own.
        summaries: statistics in the micro-batch's graph, and whether the op that makes them does not add up over
            micro-batches, or those that read them.
        outer: how many parts of its cut dim a value has a piece of, if more than one.
    """

    graph: Graph
    count: int
    over: dict[Value, ShardingSpec] = field(default_factory=dict)
    made: dict[Form, Value] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    of_inputs: set[str] = field(default_factory=set)
    own: set[Value] = field(default_factory=set)
    ahead: dict[Value, Node] = field(default_factory=dict)
    statistics: dict[str, None] = field(default_factory=dict)
    summaries: dict[Value, Literal["made", "read"]] = field(default_factory=dict)
    again: dict[str, list[str]] = field(default_factory=dict)
    outer: dict[Value, int] = field(default_factory=dict)
    phase: Phase = "forward"

    def __post_init__(self) -> None:
        self.mesh = Mesh((self.count,))
        self.batch = Dataflow(self.graph).batch()
        self.taken = {n.name for n in self.graph.nodes}
        self._options: dict[int, tuple[Option, ...]] = {}
        self._fits: dict[tuple[int | str, tuple[ShardingSpec, ...]], Option | None] = {}

    def result(self) -> MicroBatch:
        tangents = {i.node for i in self.graph.inputs if i.kind == "tangent"}
        ahead = [n for n in self.graph.nodes if n.phase == "forward" and n.name not in tangents]
        for node in (*ahead, *(n for n in self.graph.nodes if n.phase != "forward" or n.name in tangents)):
            self.phase = node.phase
            if node.op == "placeholder":
                self._placeholder(node)
            else:
                self._node(node)
        outputs, joined, buffers = self._outputs()
        self._check_divided()
        terms = self._terms_of_losses(outputs)
        nodes, outputs = self._named(self._live(outputs), outputs)
        inputs = (*self.graph.inputs, *(Input(n.name, "input", f"ahead:{v}") for v, n in self.ahead.items()))
        names = tuple(f"ahead:{v}" for v in self.ahead)
        rows = batch_size(self.graph)
        notices = tuple(
            f"{module or self.graph.name}: each micro-batch has its own statistics, of {rows // self.count} rows of "
            f"the batch; one device has those of all {rows}{', ' + OTHER_LOSS if module in terms else ''}."
            for module in self.statistics
        )
        graph = replace(self.graph, nodes=nodes, inputs=inputs, outputs=outputs)
        return MicroBatch(graph, self.count, self._prologue(), names, joined, buffers, notices)

    # One node.

    def _placeholder(self, node: Node) -> None:
        meaning, value = self.graph.input_of[node.name], Value(node.name)
        meta = self.graph.meta(value)
        spec = whole(meta)
        if meaning.kind == "tangent":
            output = next(o for o in self.graph.outputs if o.kind == "output" and o.name == meaning.name)
            spec = self.over[output.value] if is_cut(self.over[output.value]) else spec
        elif value in self.batch:
            spec = ShardingSpec.of(((TIME,), *spec.dims[1:]))
        if meaning.kind in ("input", "buffer", "constant", "seed"):
            self.of_inputs.add(node.name)
        self._have(value, spec, value)
        self.nodes.append(replace(node, outputs=(self._local(meta, spec),)))

    def _node(self, node: Node) -> None:
        if all(v.node in self.of_inputs for v in node.inputs):
            self.of_inputs.add(node.name)
        if self._is_folded(node):
            self._fold(node)
            return
        fit = self._fit(node)
        if fit is not None and not fit.combined:
            self._emit(node, fit, node.name)
        elif fit is not None and node.name not in self.of_inputs and self._is_statistic(node, fit.strategy):
            self.statistics.setdefault(node.module)
            self._emit(node, fit, node.name)
            made = {Value(node.name, i) for i in range(len(node.outputs))}
            self.own |= made
            self.summaries |= dict.fromkeys(made, "made")
        else:
            self._converted(node)

    # Dims in which the batch is not outermost, such as steps times samples in a recurrent network. A micro-batch has a
    # piece of each of their outer parts. No spec of ranks says so, so all such operands of an op must agree.

    def _is_folded(self, node: Node) -> bool:
        if any(v in self.outer for v in node.inputs):
            return True
        if node.packet not in VIEWS | {"aten.cat", "aten.repeat", "aten.slice_backward"} or self._fit(node) is not None:
            return False
        specs, dim = [self.over[v] for v in node.inputs], self._dim(node)
        return all(any(s.dims) if dim is None else bool(s.dims[dim]) for s in specs)

    def _dim(self, node: Node) -> int | None:
        """Return the dim that an op joins, splits or slices; None if it does not."""
        if node.packet not in DIM_ARGUMENT:
            return None
        position, ndim = DIM_ARGUMENT[node.packet], len(self.graph.meta(node.inputs[0]).shape)
        given = node.args[position] if position < len(node.args) else node.kwarg("dim", 0)
        assert isinstance(given, int)
        return given % ndim

    def _fold(self, node: Node) -> None:
        try:
            option, made = self._folded(node)
        except PlanError:
            if node.name not in self.of_inputs:
                raise
            self._whole(node)
            return
        self._emit(node, option, node.name)
        if made > 1:
            values = (Value(node.name, i) for i in range(len(node.outputs)))
            self.outer |= {v: made for v in values if v in self.over and is_cut(self.over[v])}

    def _folded(self, node: Node) -> tuple[Option, int]:
        """Return how a micro-batch runs an op on folded dims, and the outer parts of the cut dim of its results."""
        cut = [v for v in node.inputs if is_cut(self.over[v])]
        differing = [v for v in cut if not self._is_alike(v, self.over[v])]
        outer = {self.outer.get(v, 1) for v in differing or cut}
        if len(outer) != 1:
            raise self._changes(node)
        (parts,), dim = outer, self._dim(node)
        if node.packet in VIEWS:
            return self._folded_view(node, parts)
        if node.packet == "aten.repeat":
            return self._folded_repeat(node, parts)
        if node.packet == "aten.cat" and dim is not None and all(self.over[v].dims[dim] for v in node.inputs):
            return self._folded_cat(node, parts)
        if dim is not None and self.over[node.inputs[0]].dims[dim]:
            return self._between_folds(node, parts, dim)
        return self._along_folds(node), parts

    def _between_folds(self, node: Node, parts: int, dim: int) -> tuple[Option, int]:
        """Return how to take whole outer parts of a dim, or to put them in their place again."""
        (value,) = node.inputs
        have, n = self.over[value], self.graph.meta(value).shape[dim]
        part, lengths = n // parts, {m.shape[dim] for m in node.outputs if m is not None}
        longest, args = max(n, *lengths), list(node.args)

        def local(arg: Any) -> Any:
            if isinstance(arg, tuple):
                return tuple(map(local, arg))
            if isinstance(arg, int) and min(arg, longest) % part:
                raise self._changes(node)
            return min(arg, longest) // self.count if isinstance(arg, int) else arg

        for i in (i for i in PLACES[node.packet] if i < len(args)):
            args[i] = local(args[i])
        step = args[max(DIM_ARGUMENT[node.packet], *PLACES[node.packet]) + 1 :]
        if len(lengths) > 1 or step not in ([], [1]):
            raise self._changes(node)
        if node.packet == "aten.slice_backward" and isinstance(args[1], tuple):
            args[1] = (*args[1][:dim], longest // self.count, *args[1][dim + 1 :])
        made = tuple(None if m is None else have for m in node.outputs)
        return Option(Strategy((have,), made, ("fold",)), plain=True, args=tuple(args)), lengths.pop() // part

    def _along_folds(self, node: Node) -> Option:
        """Return the way in which an op keeps a folded dim or reduces it."""

        def fits(value: Value, spec: ShardingSpec) -> bool:
            return not is_cut(spec) or spec == self.over[value] or self._is_alike(value, spec)

        metas = tuple(self.graph.meta(v) for v in node.inputs)
        best: tuple[_Price, int, Option] | None = None
        for i, option in enumerate(self.options(node)):
            operands = zip(node.inputs, self._read(node, option), strict=True)
            price = self._total(node, option, {}) if all(fits(v, s) for v, s in operands) else None
            placed = any(map(is_placed, _leaves(localize(node, option.strategy, metas, self.mesh))))
            if price is not None and not option.combined and not placed and (best is None or (price, i) < best[:2]):
                best = price, i, option
        if best is None:
            raise self._changes(node)
        return best[2]

    def _is_alike(self, value: Value, cut: ShardingSpec) -> bool:
        """Whether a value is the same in every row along the dim that a spec cuts."""
        node, shape = self.graph.by_name[value.node], self.graph.meta(value).shape
        if node.packet in LIKE:
            return True
        if node.packet == "aten.expand":
            given = self.graph.meta(node.inputs[0]).shape
            at = next(d for d, axes in enumerate(cut.dims) if axes) - len(shape) + len(given)
            return at < 0 or given[at] == 1
        same = len(node.inputs) == 1 and self.graph.meta(node.inputs[0]).shape == shape
        return node.packet in SCALED and same and self._is_alike(node.inputs[0], cut)

    def _folded_view(self, node: Node, parts: int) -> tuple[Option, int]:
        """Return how to view a cut tensor in another shape, and the outer parts of the dim that is then cut."""
        (value,) = node.inputs
        x, y = self.graph.meta(value).shape, self.graph.meta(Value(node.name)).shape
        have = self.over[value]
        dim = next(d for d, axes in enumerate(have.dims) if axes)
        before = math.prod(x[:dim]) * parts  # how many elements of the dims outside of the batch
        for at, n in enumerate(y):
            outside = math.prod(y[:at])
            inside = before // outside if before % outside == 0 else 0
            if inside and n % (inside * self.count) == 0:
                spec = ShardingSpec.of(tuple((TIME,) if d == at else () for d in range(len(y))))
                return Option(Strategy((have,), (spec,), ("fold",))), inside
        raise self._changes(node)

    def _folded_repeat(self, node: Node, parts: int) -> tuple[Option, int]:
        """Return how to repeat a cut tensor, and the parts of the result: all of them once more each time."""
        have, counts = self.over[node.inputs[0]], node.args[1]
        assert isinstance(counts, tuple)
        new = len(counts) - len(have.dims)
        at = new + next(d for d, axes in enumerate(have.dims) if axes)
        times = counts[at]
        assert isinstance(times, int)
        made = ShardingSpec.of(((),) * new + have.dims)
        return Option(Strategy((have,), (made,), ("fold",)), plain=True), parts * times

    def _folded_cat(self, node: Node, parts: int) -> tuple[Option, int]:
        """Return how to join cut tensors of one length along the dim that is cut, and the parts of the result."""
        have = [self.over[v] for v in node.inputs]
        if parts > 1 or len({self.graph.meta(v) for v in node.inputs}) > 1:
            raise self._changes(node)
        return Option(Strategy(tuple(have), (have[0],), ("fold",)), plain=True), len(have)

    def _fit(self, node: Node) -> Option | None:
        """Return the way whose operands are there as they come."""
        have = tuple([self.over[v] for v in node.inputs])
        # Whether an index lists all rows is not part of a kind.
        key = (node.name if node.packet in SPECIAL else self.graph.kinds[node.name], have)
        if key not in self._fits:
            self._fits[key] = next((o for o in self.options(node) if tuple(self._read(node, o)) == have), None)
        # Values that are not there yet count as whole.
        there = all((v, s) in self.made for v, s in zip(node.inputs, have, strict=True))
        return self._fits[key] if there else None

    def _read(self, node: Node, option: Option) -> Iterator[ShardingSpec]:
        """Return how each operand is read."""
        for value, spec in zip(node.inputs, option.strategy.inputs, strict=True):
            have = self.over[value]
            # ``new_zeros`` states its shape; ``zeros_like`` has that of its operand.
            blank = node.packet in LIKE and (have.dims == spec.dims or ".new_" in node.packet)
            yield have if blank and (value, have) in self.made else spec

    def options(self, node: Node) -> Sequence[Option]:
        """Return the ways in which a micro-batch can run an op."""
        kind = self.graph.kinds[node.name]
        if kind not in self._options:
            metas = tuple(self.graph.meta(v) for v in node.inputs)
            found = []
            for o in strategies(node, metas, self.mesh):
                if self._exchanges(node, o, metas):
                    continue
                combined = bool(o.axes and o.axes[0]) and combine(node, o, metas, self.mesh) is not None
                if combined or self._placed(node, o, metas) is not None:
                    found.append(Option(o, combined))
            if node.packet in SHIFTS and len(metas) == 1 and isinstance(node.args[1], float | int):
                partial = ShardingSpec.of(((),) * len(metas[0].shape), ((TIME, "sum"),))
                args = (node.args[0], node.args[1] / self.count, *node.args[2:])
                if node.outputs == metas and metas[0].dtype in FLOATS:
                    found.append(Option(Strategy((partial,), (partial,), ("shift",)), plain=True, args=args))
            self._options[kind] = tuple(found)
        special = SPECIAL.get(node.packet)
        return self._options[kind] if special is None else [*self._options[kind], *special(self.graph, node)]

    def _exchanges(self, node: Node, option: Strategy, metas: Sequence[TensorMeta]) -> bool:
        """Whether ranks would read rows of each other inside of the op: of other micro-batches there are none."""
        given = tuple(metas)
        if ring_axes(option) or moved_axes(option) or lent(node, option, given, self.mesh) is not None:
            return True
        return bool(halos(node, option, given, self.mesh))

    def _is_statistic(self, node: Node, option: Strategy) -> bool:
        """Whether the op summarizes the batch: numbers without the batch's dim, which no index into it is."""
        results = [(m, s) for m, s in zip(node.outputs, option.outputs, strict=True) if m is not None and s is not None]
        return all(s.is_replicated and m.dtype != "int64" for m, s in results)

    def _converted(self, node: Node) -> None:
        """Append a node of which not all operands are as it needs them."""
        memo: dict[Form, Found | None] = {}
        priced = [(self._total(node, o, memo), i, o) for i, o in enumerate(self.options(node)) if not o.combined]
        best = min(((price, i, o) for price, i, o in priced if price is not None), default=None, key=lambda f: f[:2])
        if best is not None:
            self._emit(node, best[2], node.name)
        elif node.name in self.of_inputs:
            self._whole(node)
        else:
            raise self._changes(node)

    def _whole(self, node: Node) -> None:
        """Leave a node of inputs alone to the prologue."""
        for i, meta in enumerate(node.outputs):
            if meta is not None:
                self.over[Value(node.name, i)] = whole(meta)

    def _total(self, node: Node, option: Option, memo: dict[Form, Found | None]) -> _Price | None:
        total = FREE
        for value, spec in zip(node.inputs, self._read(node, option), strict=True):
            found = self._cheapest(value, spec, memo)
            if found is None:
                return None
            total += found[0]
        return total

    def _cheapest(self, value: Value, spec: ShardingSpec, memo: dict[Form, Found | None]) -> Found | None:
        """Return the cheapest way to have ``value`` as ``spec``; None if there is none."""
        form = value, spec
        if form in self.made:
            return FREE, None
        if form in memo:
            return memo[form]
        memo[form] = None
        converted = self._conversion(value, spec, memo)
        best: Found | None = None if converted is None else (converted, None)
        node = self.graph.by_name[value.node]
        if node.op != "placeholder" and self._is_cheap(node, value):
            for option in self.options(node):
                fits = not option.combined and option.strategy.outputs[value.index] == spec
                price = self._total(node, option, memo) if fits else None
                # Rows made again are less than rows read of all; sums are less than what they add up.
                if price is not None and (best is None or price < best[0] or (price == best[0] and is_cut(spec))):
                    best = price, option
        memo[form] = best
        return best

    def _is_cheap(self, node: Node, value: Value) -> bool:
        """Whether a value may be made again. What is cut is not: that would be the work of all micro-batches."""
        if node.packet in LIKE or not is_cut(self.over[value]):
            return True
        # An input of as many rows as the batch may still be none of it, such as the positions of a sequence.
        known = all(v.node in self.of_inputs for v in node.inputs if is_cut(self.over[v]))
        return known and not flops(node, tuple(self.graph.meta(v) for v in node.inputs))

    def _conversion(self, value: Value, spec: ShardingSpec, memo: dict[Form, Found | None]) -> _Price | None:
        have, meta, known = self.over[value], self.graph.meta(value), value.node in self.of_inputs
        if spec.is_replicated:
            return AHEAD if known else STATISTIC if have.partial and meta.dtype != "bool" else None
        if is_cut(spec) and have.partial and not known:
            return None  # which of its rows are the micro-batch's own nobody knows
        if not is_cut(spec) and (meta.dtype not in FLOATS or spec.partial != ((TIME, "sum"),)):
            return None
        complete = self._cheapest(value, whole(meta), memo)
        return None if complete is None else complete[0] + COPY

    # Emitting.

    def obtain(self, value: Value, spec: ShardingSpec) -> Value:
        """Return the name of ``value`` as ``spec`` in the graph of the micro-batch, made if need be."""
        form = value, spec
        if form not in self.made:
            found = self._cheapest(value, spec, {})
            assert found is not None
            if found[1] is not None:
                name = self._unused(f"{value.node}_again")
                self.again.setdefault(value.node, []).append(name)
                self._emit(self.graph.by_name[value.node], found[1], name)
            elif spec.is_replicated:
                self.made[form] = self._completed(value)
            elif is_cut(spec):
                self.made[form] = self._rows(value, spec)
            else:
                self.made[form] = self._scaled(value, self.obtain(value, whole(self.graph.meta(value))), "div", "share")
        return self.made[form]

    def _completed(self, value: Value) -> Value:
        """Return a value that is partial or cut as a whole one: computed ahead, or estimated from the micro-batch."""
        meta, spec = self.graph.meta(value), self.over[value]
        if value.node in self.of_inputs:
            name = self._unused(f"{value.node}_{value.index}_ahead" if value.index else f"{value.node}_ahead")
            self.ahead[value] = Node(name, "placeholder", outputs=(meta,))
            return Value(name)
        self.statistics.setdefault(self.graph.by_name[value.node].module)
        part = self.made[value, spec]
        estimate = self._scaled(value, part, "mul", "estimate") if spec.partial == ((TIME, "sum"),) else part
        self.own.add(estimate)
        self.summaries.setdefault(estimate, "made" if estimate == part else "read")
        return estimate

    def _rows(self, value: Value, spec: ShardingSpec) -> Value:
        """Return the micro-batch's rows of a whole value."""
        meta, dim = self.graph.meta(value), next(d for d, axes in enumerate(spec.dims) if axes)
        n = meta.shape[dim] // self.count
        whole_value = self.obtain(value, whole(meta))
        node = self.graph.by_name[value.node]
        args = (whole_value, dim, LocalOffset(n, (), n), n)
        name = self._unused(f"{node.name}_rows")
        made = (self._local(meta, spec),)
        self.nodes.append(Node(name, "aten.narrow_copy.default", args, (), made, self.phase, node.module, node.source))
        return Value(name)

    def _first_rows(self, value: Value, read: Value, dim: int) -> Value:
        """Return the first of the indices that list all rows."""
        node, meta = self.graph.by_name[value.node], self.graph.meta(value)
        n = meta.shape[dim] // self.count
        shape = (*meta.shape[:dim], n, *meta.shape[dim + 1 :])
        made = Node(
            self._unused(f"{node.name}_first"),
            "aten.slice.Tensor",
            (read, dim, 0, n),
            outputs=(TensorMeta(shape, meta.dtype),),
            phase=self.phase,
            module=node.module,
            source=node.source,
        )
        self.nodes.append(made)
        return Value(made.name)

    def _scaled(self, value: Value, read: Value, op: Literal["mul", "div"], suffix: str) -> Value:
        node, meta = self.graph.by_name[value.node], self.graph.meta(value)
        name = self._unused(f"{node.name}_{suffix}")
        args = (read, self.count)
        self.nodes.append(Node(name, f"aten.{op}.Tensor", args, (), (meta,), self.phase, node.module, node.source))
        return Value(name)

    def _emit(self, node: Node, option: Option, name: str) -> None:
        """Append ``node`` with the shapes of a micro-batch."""
        operands = [self.obtain(v, s) for v, s in zip(node.inputs, self._read(node, option), strict=True)]
        for position, dim in option.first_rows:
            operands[position] = self._first_rows(node.inputs[position], operands[position], dim)
        metas = tuple([self.graph.meta(v) for v in node.inputs])
        call: LocalCall | None = (node.op, node.args if option.args is None else option.args, node.kwargs)
        if not option.plain:
            call = self._placed(node, option.strategy, metas)
        if call is None:  # the summary of a micro-batch is that of its own rows
            call = localize(node, option.strategy, metas, self.mesh)
        read = iter(operands)
        args, kwargs = _with_values(call[1], read), tuple((k, _with_values(a, read)) for k, a in call[2])
        own = node.packet not in LIKE and any(v in self.own for v in operands)
        made: list[TensorMeta | None] = []
        for i, (meta, spec) in enumerate(zip(node.outputs, option.strategy.outputs, strict=True)):
            if meta is None or spec is None:
                made.append(None)
                continue
            made.append(self._local(meta, spec))
            self._have(Value(node.name, i), spec, Value(name, i))
            if own and spec.is_replicated:
                self.own.add(Value(name, i))
        phase = self.phase if name != node.name else node.phase
        emitted = replace(node, name=name, op=call[0], args=args, kwargs=kwargs, outputs=tuple(made), phase=phase)
        if option.average:
            own_average = replace(emitted, name=self._unused(f"{name}_own"))
            self.nodes.append(own_average)
            args, kwargs = (Value(own_average.name), self.count), ()
            emitted = replace(emitted, op="aten.div.Tensor", args=args, kwargs=kwargs)
        self.nodes.append(emitted)

    def _placed(self, node: Node, option: Strategy, metas: Sequence[TensorMeta]) -> LocalCall | None:
        """Return the micro-batch's call; None if it depends on the micro-batch's place in a way that no op takes."""
        op, args, kwargs = localize(node, option, metas, self.mesh)
        op = node.op if node.packet in ("aten.view", "aten._unsafe_view") else op  # as captured
        differs = [a for a in _leaves((args, kwargs)) if isinstance(a, (LocalChoice, LocalLength, LocalOffset))]
        if any(not isinstance(a, LocalOffset) for a in differs) or (differs and node.packet not in PLACED):
            return None
        # What a lowering adds for ranks that have a part of a vocabulary is added when the micro-batch is lowered.
        named = {k for k, _ in node.kwargs}
        said = ((k, a) for k, a in kwargs if op != node.op or k in named or any(map(is_placed, _leaves(a))))
        return op, tuple(map(self._place, args)), tuple((k, self._place(a)) for k, a in said)

    def _place(self, arg: Any) -> Any:
        if isinstance(arg, LocalOffset) and arg.axes:
            return LocalOffset(arg.n // self.count, (), arg.n // self.count)
        return tuple(map(self._place, arg)) if isinstance(arg, (tuple, list)) and not isinstance(arg, Value) else arg

    def _have(self, value: Value, spec: ShardingSpec, name: Value) -> None:
        self.over.setdefault(value, spec)
        self.made.setdefault((value, spec), name)

    def _local(self, meta: TensorMeta, spec: ShardingSpec) -> TensorMeta:
        return TensorMeta(tuple(spec.local_shape(meta.shape, self.mesh)), meta.dtype)

    def _unused(self, name: str) -> str:
        found, count = name, 0
        while found in self.taken:
            count += 1
            found = f"{name}_{count}"
        self.taken.add(found)
        return found

    # The results.

    def _outputs(self) -> tuple[tuple[Output, ...], dict[str, Joined], dict[str, Joined | None]]:
        outputs: list[Output] = []
        joined: dict[str, Joined] = {}
        buffers: dict[str, Joined | None] = {}
        for output in self.graph.outputs:
            self.phase = self.graph.by_name[output.value.node].phase
            value, how = self._joined(output)
            outputs.append(replace(output, value=value))
            if output.kind == "mutation":
                each = value in self.own
                buffers[output.name] = None if each else how
            elif _is_result(output):
                joined[output.name] = how
        return tuple(outputs), joined, buffers

    def _joined(self, output: Output) -> tuple[Value, Joined]:
        value, meta = output.value, self.graph.meta(output.value)
        have = self.over[value]
        if is_cut(have):
            if have.dims[0] and value not in self.outer and not is_gradient(output):
                return self.obtain(value, have), "concatenate"
            raise self._changes(self.graph.by_name[value.node])
        total = ShardingSpec.of(((),) * len(meta.shape), ((TIME, "sum"),))
        if have == total and output.kind != "mutation":
            return self.obtain(value, have), "sum"
        summed = have.partial or is_gradient(output) or self._differs(value)
        if output.kind == "mutation":
            # A statistic is written by each micro-batch and read by the next, as on one device by each batch.
            if have == total:
                return self.obtain(value, have), "sum"
            return self.obtain(value, whole(meta)), "same"
        if not summed:
            return self.obtain(value, whole(meta)), "same"
        if self._cheapest(value, total, {}) is None:
            raise self._changes(self.graph.by_name[value.node])
        return self.obtain(value, total), "sum"

    def _differs(self, value: Value) -> bool:
        return self.made.get((value, whole(self.graph.meta(value)))) in self.own

    def _check_divided(self) -> None:
        starts = {i.name for i in self.graph.inputs if i.kind == "tangent"}
        values = [o.value for o in self.graph.outputs if o.kind == "output" and o.name in starts]
        alike = [v for v in values if self.over[v].is_replicated and not self._differs(v)]
        if values and len(alike) == len(values):
            raise self._changes(self.graph.by_name[alike[0].node])

    def _terms_of_losses(self, outputs: Sequence[Output]) -> set[str]:
        """Return the modules with statistics of which a loss is computed otherwise than by way of rows.

        Raises:
            PlanError: a loss is computed of a single number of the whole batch, and not linearly.
        """
        cut = {name for (_, spec), name in self.made.items() if is_cut(spec)}
        of: dict[Value, dict[Value, Node]] = {}  # the statistics in a value, each with the op that does not add up
        numbers: set[Value] = set()
        modules: dict[Value, str] = {}
        for node in self.nodes:
            if node.phase != "forward" or node.packet in LIKE:
                continue
            found: dict[Value, Node] = {}
            for v in node.inputs:
                found = of.get(v, {}) | found
                if self.summaries.get(v) == "read":
                    found.setdefault(v, node)
            for i, meta in enumerate(node.outputs):
                v, how = Value(node.name, i), self.summaries.get(Value(node.name, i))
                if v not in cut:
                    of[v] = found | ({v: node} if how == "made" else {})
                modules |= {v: node.module} if how else {}
                numbers |= {v} if meta is not None and meta.numel == 1 else set()
        starts = {i.name for i in self.graph.inputs if i.kind == "tangent"}
        losses = [o.value for o in outputs if o.kind == "output" and o.name in starts]
        terms = {summary: node for value in losses for summary, node in of.get(value, {}).items()}
        for summary, node in terms.items():
            if summary in numbers:
                raise self._another_loss(node)
        return {modules[summary] for summary in terms}

    def _another_loss(self, node: Node) -> PlanError:
        where = f" at {node.source}" if node.source else ""
        return PlanError(
            f"Micro-batches would change the loss of {node.module or self.graph.name}: it is no sum over samples, and "
            "the mean of its values for micro-batches is another number.",
            found=f"{node.packet} of what the whole batch adds up to{where}",
            hint=f"{ONE}, or return a sum or mean over samples as the loss.",
        )

    def _changes(self, node: Node) -> PlanError:
        where = f" at {node.source}" if node.source else ""
        operands = ", ".join(str(self.graph.meta(v)) for v in node.inputs)
        return PlanError(
            f"Micro-batches would change what {node.module or self.graph.name} computes: it relates the samples of the "
            "whole batch to each other.",
            found=f"{node.packet} of {operands}{where}",
            hint=f"{ONE}, or take this out of the model: compute it of its outputs.",
        )

    def _live(self, outputs: Sequence[Output]) -> list[Node]:
        read, kept = {o.value.node for o in outputs}, list[Node]()
        for node in reversed((*self.ahead.values(), *self.nodes)):
            if node.op == "placeholder" or node.name in read:
                kept.append(node)
                read.update(v.node for v in node.inputs)
        return kept[::-1]

    def _named(self, nodes: Sequence[Node], outputs: tuple[Output, ...]) -> tuple[tuple[Node, ...], tuple[Output, ...]]:
        """Give nodes that were made again the names of those that they replace."""
        live = {n.name for n in nodes}
        names: dict[str, str] = {}
        for name, made in self.again.items():
            kept = [n for n in made if n in live]
            if name not in live and len(kept) == 1:
                names[kept[0]] = name
        if not names:
            return tuple(nodes), outputs

        def named(v: Value) -> Value:
            return Value(names.get(v.node, v.node), v.index)

        def renamed(node: Node) -> Node:
            read = iter([named(v) for v in node.inputs])
            args, kwargs = _with_values(node.args, read), tuple((k, _with_values(a, read)) for k, a in node.kwargs)
            return replace(node, name=names.get(node.name, node.name), args=args, kwargs=kwargs)

        return tuple(map(renamed, nodes)), tuple(replace(o, value=named(o.value)) for o in outputs)

    def _prologue(self) -> Graph | None:
        if not self.ahead:
            return None
        outputs = tuple(Output(v, "output", f"ahead:{v}") for v in self.ahead)
        read, kept = {v.node for v in self.ahead}, list[Node]()
        for node in reversed(self.graph.nodes):
            if node.name in read:
                kept.append(replace(node, phase="forward"))
                read.update(v.node for v in node.inputs)
        inputs = tuple(i for i in self.graph.inputs if i.node in read)
        return Graph(tuple(kept[::-1]), inputs, outputs, self.graph.name, has_loss=False)


def whole(meta: TensorMeta) -> ShardingSpec:
    return ShardingSpec.replicated(len(meta.shape))


def is_cut(spec: ShardingSpec) -> bool:
    return any(spec.dims)


def is_placed(arg: object) -> bool:
    return isinstance(arg, LocalOffset)


def _leaves(arg: object) -> Iterator[object]:
    if isinstance(arg, (tuple, list)) and not isinstance(arg, Value):
        for each in arg:
            yield from _leaves(each)
    else:
        yield arg


def _with_values(arg: Any, values: Iterator[Value]) -> Any:
    """Replace each value in an argument by the next of ``values``."""
    if isinstance(arg, Value):
        return next(values)
    return tuple([_with_values(a, values) for a in arg]) if isinstance(arg, (tuple, list)) else arg
