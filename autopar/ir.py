"""The captured program as frozen data: names, shapes and dtypes, without torch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, Union

from autopar.repetition import Network, Repetition, repetition, shift_of

ITEMSIZE: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes of one element by dtype name."""

FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Real floating-point dtypes that every backend can send and reduce without a cast."""

LEAST_LAYERS = 2
"""Of a run of equal layers."""

Phase = Literal["forward", "backward"]


class Cuts(Protocol):
    """What a ``ShardingSpec`` says of shapes."""

    @property
    def dims(self) -> Sequence[tuple[int, ...]]: ...

    def local_shape(
        self, shape: Sequence[int], mesh: Any, coordinate: Sequence[int] | None = None
    ) -> tuple[int, ...]: ...


class TensorMeta(NamedTuple):
    """Global shape and dtype of a tensor. ``dtype`` is torch's name without the prefix ``torch.``.

    Args:
        routed: how many leading dims are those of routed rows (``planner.graphs.routed``): how they are cut says which
            rows a rank has, so no redistribution changes it.
        choices: of routed rows: how many tokens there are along their last dim, and choices of each. Where no experts
            are cut, a rank has these rows, and room for more is only where they are.
    """

    shape: tuple[int, ...]
    dtype: str
    routed: int = 0
    choices: tuple[int, ...] = ()

    def __repr__(self) -> str:
        routed = f", routed={self.routed}, choices={self.choices}" if self.routed else ""
        return f"TensorMeta(shape={self.shape!r}, dtype={self.dtype!r}{routed})"

    def shape_in(self, spec: Cuts) -> tuple[int, ...]:
        """Return the global shape of which ``spec`` cuts a rank's."""
        if not self.choices or spec.dims[self.routed - 1]:
            return self.shape
        return (*self.shape[: self.routed - 2], *self.choices, *self.shape[self.routed :])

    def local_shape(self, spec: Cuts, mesh: Any, coordinate: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return the shape of the shard at ``coordinate``, by default of the largest."""
        return spec.local_shape(self.shape_in(spec), mesh, coordinate)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return ITEMSIZE[self.dtype]

    @property
    def bytes(self) -> int:
        return self.numel * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


class Value(NamedTuple):
    """Output ``index`` of the node called ``node``. A tuple, since values are hashed very often."""

    node: str
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which has no use here

    def __str__(self) -> str:
        return self.node if self.index == 0 else f"{self.node}.{self.index}"


@dataclass(frozen=True)
class LocalOffset:
    """The global index of the first element that a rank holds of a dim of ``n`` that mesh ``axes`` cut.

    Args:
        micro_rows: how many elements of the dim each micro-batch has, if the graph is that of one of several. Those of
            the micro-batches before count too.
    """

    n: int
    axes: tuple[int, ...]
    micro_rows: int = 0


Arg: TypeAlias = Union[Value, LocalOffset, int, float, bool, str, None, tuple["Arg", ...]]


def values_in(arg: Arg) -> Iterator[Value]:
    """Yield every tensor value inside a (nested) argument, in order."""
    if isinstance(arg, Value):
        yield arg
    elif isinstance(arg, tuple):
        for item in arg:
            yield from values_in(item)


def _masked(arg: Arg) -> object:
    if isinstance(arg, Value):
        return Value
    if isinstance(arg, tuple):
        return tuple(map(_masked, arg))
    return type(arg), arg


def _without_floats(arg: Any) -> Any:
    if isinstance(arg, float):
        return 0.0
    return tuple(map(_without_floats, arg)) if type(arg) is tuple else arg


@dataclass(frozen=True)
class Node:
    """One op of the joint program. Inputs of the program are nodes too, with ``op == "placeholder"``.

    ``op`` is the full overload name, such as ``"aten.mm.default"``. ``args`` and ``kwargs`` hold tensors as ``Value``
    and everything else as plain data (dtypes and devices as strings, and the place of a micro-batch as
    ``LocalOffset``). ``outputs`` has one entry per result of the op,
    None if that result is absent.
    """

    name: str
    op: str
    args: tuple[Arg, ...] = ()
    kwargs: tuple[tuple[str, Arg], ...] = ()
    outputs: tuple[TensorMeta | None, ...] = ()
    phase: Phase = "forward"
    module: str = ""
    source: str = ""

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """All tensor operands in order, repeated if the op takes one twice."""
        return (*values_in(self.args), *(v for _, a in self.kwargs for v in values_in(a)))

    @cached_property
    def packet(self) -> str:
        """The op without its overload, ``aten.mm`` for ``aten.mm.default``."""
        return self.op.rsplit(".", 1)[0]

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """The arguments without tensors; types are included to tell ``1`` from ``1.0`` and ``True``."""
        return _masked(self.args), _masked(tuple(a for _, a in self.kwargs)), tuple(k for k, _ in self.kwargs)

    @property
    def signature_of_layer(self) -> tuple[object, ...]:
        """The signature without what may differ from layer to layer: floats, and the number of a random op."""
        kwargs = tuple((name, _without_floats(arg)) for name, arg in self.kwargs if name != "site")
        return replace(self, args=_without_floats(self.args), kwargs=kwargs).signature

    def kwarg(self, name: str, default: Arg = None) -> Arg:
        return dict(self.kwargs).get(name, default)


InputKind = Literal["parameter", "buffer", "constant", "input", "tangent", "seed", "accumulator", "received"]
OutputKind = Literal["output", "gradient", "mutation", "accumulator", "sent"]


@dataclass(frozen=True, slots=True)
class Input:
    """The meaning of a placeholder. ``name`` is the FQN of a parameter or buffer, or the path of an input.

    ``trainable`` marks parameters that are optimized. A tangent has the name of its output. An accumulator, which holds
    the sum of a gradient over the micro-batches so far, has the name of its parameter. What a pipeline stage receives
    from the one before it, an activation, has the name of the value there.
    """

    node: str
    kind: InputKind
    name: str
    trainable: bool = False


@dataclass(frozen=True, slots=True)
class Output:
    """The meaning of a result: an output of the model, a gradient, a new value of a buffer or accumulator, or what a
    pipeline stage sends to the next one.

    The gradient of an input is called ``input:NAME``. A sent value has the name under which it is received, and its
    gradient comes back as a tangent of that name.
    """

    value: Value
    kind: OutputKind
    name: str


@dataclass(frozen=True)
class Part:
    """What the graph of a pipeline stage does not show by itself.

    Args:
        batch: size of the batch; -1 if the model has none.
        exchanged: names of the activations and gradients that it exchanges with its neighbours.
    """

    batch: int
    exchanged: frozenset[str]


@dataclass(frozen=True)
class Graph:
    """The joint forward and backward program, in execution order.

    Args:
        has_loss: False if the only output with a gradient is a scalar but not a loss.
        part: what a pipeline stage has to know of the whole; None for a whole model.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    name: str = field(default="model")
    has_loss: bool = True
    part: Part | None = None

    def comes_from_stage(self, meaning: Input) -> bool:
        """Whether an input is an activation from the stage before, or a gradient from the next one."""
        exchanged = self.part.exchanged if self.part else frozenset()
        return meaning.kind == "received" or (meaning.kind == "tangent" and meaning.name in exchanged)

    def goes_to_stage(self, output: Output) -> bool:
        """Whether a result is an activation for the next stage, or a gradient for the one before."""
        exchanged = self.part.exchanged if self.part else frozenset()
        own = output.name.removeprefix("input:")
        return output.kind == "sent" or (output.kind == "gradient" and own != output.name and own in exchanged)

    @cached_property
    def lone_scalar(self) -> str | None:
        """The name of the only output that the backward starts from, if it is a scalar."""
        tangents = [
            (i.name, self.by_name[i.node].outputs[0])
            for i in self.inputs
            if i.kind == "tangent" and not self.comes_from_stage(i)
        ]
        found = [(name, meta.shape) for name, meta in tangents if meta is not None]
        return found[0][0] if len(found) == 1 and found[0][1] == () else None

    @cached_property
    def buffers_read(self) -> frozenset[str]:
        """The buffers on which results other than new values of buffers depend, also through new values of others."""
        buffers = {i.node: i.name for i in self.inputs if i.kind == "buffer"}
        new = {o.name: o.value.node for o in self.outputs if o.kind == "mutation"}
        pending = [o.value.node for o in self.outputs if o.kind != "mutation"]
        seen: set[str] = set()
        while pending:
            name = pending.pop()
            if name not in seen:
                seen.add(name)
                pending += [v.node for v in self.by_name[name].inputs]
                pending += [new[buffers[name]]] if buffers.get(name) in new else []
        return frozenset(buffers[name] for name in seen & buffers.keys())

    @cached_property
    def tangents_of(self) -> Mapping[str, frozenset[str]]:
        """The tangents on which each gradient depends, both by name."""
        found = {i.node: frozenset((i.name,)) for i in self.inputs if i.kind == "tangent"}
        for node in self.nodes:
            if node.phase == "backward" and node.op != "placeholder":
                found[node.name] = frozenset[str]().union(*(found.get(v.node, ()) for v in node.inputs))
        return {o.name: found.get(o.value.node, frozenset()) for o in self.outputs if o.kind == "gradient"}

    @cached_property
    def by_name(self) -> Mapping[str, Node]:
        return {n.name: n for n in self.nodes}

    @cached_property
    def input_of(self) -> Mapping[str, Input]:
        """The meaning of each placeholder, by node name."""
        return {i.node: i for i in self.inputs}

    @cached_property
    def consumers(self) -> Mapping[Value, tuple[tuple[Node, int], ...]]:
        """For each value, the (node, operand position) pairs that read it."""
        found: dict[Value, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for position, value in enumerate(node.inputs):
                found.setdefault(value, []).append((node, position))
        return {v: tuple(c) for v, c in found.items()}

    @cached_property
    def kinds(self) -> Mapping[str, int]:
        """A number for each node by name, equal for nodes that agree in op, non-tensor arguments, shapes and dtypes.

        Such nodes have the same strategies with the same costs.
        """
        numbers: dict[object, int] = {}
        made = {n.name: n.outputs for n in self.nodes}

        def kind(node: Node) -> int:
            operands = tuple([made[name][i] for name, i in node.inputs])
            return numbers.setdefault((node.op, node.signature, operands, node.outputs), len(numbers))

        return {n.name: kind(n) for n in self.nodes}

    @cached_property
    def repetition(self) -> Repetition:
        """Runs of layers of equal ops on equal shapes, by the positions of their nodes. Numbers, such as the share that
        dropout zeroes, may differ from layer to layer."""
        outputs: dict[str, list[object]] = {}
        for output in self.outputs:
            outputs.setdefault(output.value.node, []).append((output.value.index, output.kind))
        kinds: dict[object, int] = {}

        def label(node: Node) -> int:
            meaning = self.input_of.get(node.name)
            role = (meaning and (meaning.kind, meaning.trainable), tuple(outputs.get(node.name, ())))
            operands = tuple(map(self.meta, node.inputs))
            look = (node.op, node.phase, node.signature_of_layer, node.outputs, operands, role)
            return kinds.setdefault(look, len(kinds))

        reads = (
            (kinds.setdefault((position, value.index), len(kinds)), self.order[value.node], at)
            for at, node in enumerate(self.nodes)
            for position, value in enumerate(node.inputs)
        )
        labels = [label(node) for node in self.nodes]
        return repetition(Network.of(labels, reads, [1] * len(labels), least=LEAST_LAYERS, ends=True))

    @cached_property
    def likes(self) -> Mapping[str, str]:
        """The nodes of all equal layers but the last ones, and their likes one layer further on."""
        names = [n.name for n in self.nodes]
        return {names[a]: names[b] for a, b in shift_of(self.repetition.runs).items()}

    @cached_property
    def turn(self) -> int:
        """Position of the backward's first op; the number of nodes where there is none."""
        ops = (i for i, n in enumerate(self.nodes) if n.phase == "backward" and n.op != "placeholder")
        return next(ops, len(self.nodes))

    @cached_property
    def order(self) -> Mapping[str, int]:
        """The position of each node by name."""
        return {n.name: i for i, n in enumerate(self.nodes)}

    def meta(self, value: Value) -> TensorMeta:
        meta = self.by_name[value.node].outputs[value.index]
        assert meta is not None, f"{value} is an absent output"
        return meta

    @cached_property
    def digest(self) -> str:
        """Hash of everything that decides what the program computes. Module paths and source lines do not count."""
        h = hashlib.sha256()
        for n in self.nodes:
            h.update(repr((n.name, n.op, n.args, n.kwargs, n.outputs, n.phase)).encode())
        h.update(repr((self.inputs, self.outputs)).encode())
        if self.lone_scalar and not self.has_loss:
            h.update(b"no loss")
        return h.hexdigest()[:16]
