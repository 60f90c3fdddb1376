"""Sizes, bytes and FLOPs of a plan as formulas of the sizes that vary."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.ir import Graph, Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.planner.ranges import Ranges, Sizes
from autopar.program import LocalTensor, Op, Program
from autopar.sharding import ShardingSpec
from autopar.strategies import flops

if TYPE_CHECKING:
    import sympy

Lengths = tuple["sympy.Expr", ...]
DEGREE = 3
"""The highest degree of FLOPs in one size. Those of attention have degree 2."""


class NoFormulaError(Exception):
    """A size is no sum of products of the sizes that vary, in whole numbers."""


def symbols_of(ranges: Ranges) -> Mapping[str, sympy.Symbol]:
    import sympy

    return {s.name: sympy.Symbol(s.name, integer=True, positive=True) for s in ranges.symbols}


def formulas(graphs: Sequence[Graph], corners: Sequence[Sizes], program: Program, mesh: Mesh, ranges: Ranges) -> Any:
    """Return what a user asks of a plan, as text that sympy reads.

    Args:
        graphs: captured at each of ``corners``, the planned sizes first.

    Returns:
        ``flops`` of a step over all ranks; on the fullest rank ``saved_bytes`` from forward to backward and
        ``communicated_bytes``, the operands or results of its collectives; and the shape of every input and output.

    Raises:
        NoFormulaError: a shape has none.
    """
    symbols = symbols_of(ranges)
    fit = _Fit(corners, symbols, {})
    lengths = {
        (node.name, i): tuple(map(fit, zip(*(g.meta(Value(node.name, i)).shape for g in graphs), strict=True)))
        for node in graphs[0].nodes
        for i, meta in enumerate(node.outputs)
        if meta is not None
    }
    of_tensor = _lengths_of_tensors(program, graphs[0], lengths)
    read = {name for op in program.ops if op.phase == "backward" for name in op.reads}
    inputs = {t.name for op in program.ops if op.kind == "input" for t in op.writes}
    saved = [t for op in program.ops if op.phase == "forward" for t in op.writes if t.name in read - inputs]
    sent = [program.tensors[name] for op in program.ops if op.is_collective for name in _priced(op)]
    found = {
        "flops": _flops(graphs[0], lengths, symbols),
        "saved_bytes": sum(_bytes(t, of_tensor[t.name], mesh) for t in saved if program.root[t.name] == t.name),
        "communicated_bytes": sum(_bytes(t, of_tensor[t.name], mesh) for t in sent),
    }
    shapes = {f"input:{i.name}": lengths[i.node, 0] for i in graphs[0].inputs if i.kind == "input"}
    outputs = [o for o in graphs[0].outputs if o.kind == "output"]
    shapes |= {f"output:{o.name}": lengths[o.value.node, o.value.index] for o in outputs}
    return {k: str(v) for k, v in found.items()} | {k: [str(n) for n in shape] for k, shape in shapes.items()}


class _Fit:
    """The formula of a number from its values at the corners: a sum of products with each symbol at most once in
    each."""

    def __init__(
        self, corners: Sequence[Sizes], symbols: Mapping[str, sympy.Symbol], known: dict[tuple[int, ...], sympy.Expr]
    ) -> None:
        self.corners, self.symbols, self.known = corners, symbols, known

    def __call__(self, values: tuple[int, ...]) -> sympy.Expr:
        if values not in self.known:
            self.known[values] = self._fitted(values)
        return self.known[values]

    def _fitted(self, values: tuple[int, ...]) -> sympy.Expr:
        import sympy

        if len(set(values)) == 1:
            return sympy.Integer(values[0])
        total: Any = sympy.Integer(0)
        for corner, value in zip(self.corners, values, strict=True):
            weight: Any = sympy.Integer(1)
            for name, symbol in self.symbols.items():
                other = next((c[name] for c in self.corners if c[name] != corner[name]), None)
                if other is not None:
                    weight = weight * sympy.Rational(1, corner[name] - other) * (symbol - other)
            total += value * weight
        expression = sympy.expand(total)
        if not all(c.is_integer for c in expression.as_coefficients_dict().values()):
            raise NoFormulaError(f"{values} at {list(map(dict, self.corners))}")
        return expression


def _lengths_of_tensors(
    program: Program, graph: Graph, lengths: Mapping[tuple[str, int], Lengths]
) -> Mapping[str, Lengths]:
    found: dict[str, Lengths] = {}
    for op in program.ops:
        if op.kind == "decomposed":
            lasting = [lengths[op.node, 0], found[op.reads[op.operand]]]
            found |= {t.name: n for t, n in zip(op.writes, lasting, strict=False)}
        elif op.kind in ("input", "compute"):
            present = [i for i, m in enumerate(graph.by_name[op.node].outputs) if m is not None]
            found |= {t.name: lengths[op.node, i] for t, i in zip(op.writes, present, strict=True)}
        else:
            found |= {t.name: found[source] for t, source in zip(op.writes, op.reads, strict=False)}
    return found


def _bytes(tensor: LocalTensor, shape: Lengths, mesh: Mesh) -> Any:
    """Return the bytes of the fullest rank's shard."""
    return math.prod(_local(shape, tensor.spec, mesh), start=tensor.meta.itemsize)


def _local(shape: Lengths, spec: ShardingSpec, mesh: Mesh) -> list[Any]:
    import sympy

    made = []
    for n, axes in zip(shape, spec.dims, strict=True):
        for a in axes:
            n = sympy.ceiling(n / mesh.shape[a])
        made.append(n)
    return made


def _priced(op: Op) -> Sequence[str]:
    gathers = op.step is not None and op.step.kind == "all_gather"
    return [t.name for t in op.writes] if gathers else op.reads


def _flops(graph: Graph, lengths: Mapping[tuple[str, int], Lengths], symbols: Mapping[str, sympy.Symbol]) -> Any:
    """Return FLOPs as a polynomial in each size, from their values at enough sizes."""
    import sympy

    points = list(itertools.product(range(2, DEGREE + 3), repeat=len(symbols)))
    names = list(symbols)
    distinct: dict[tuple[object, ...], list[int]] = {}
    total: Any = sympy.Integer(0)
    for node in graph.nodes:
        shapes = [lengths[v.node, v.index] for v in node.inputs]
        made = tuple(lengths.get((node.name, i)) for i in range(len(node.outputs)))
        key = (node.op, node.signature, tuple(shapes), made)
        if node.op == "placeholder" or not flops(node, tuple(graph.meta(v) for v in node.inputs)):
            continue
        if key not in distinct:
            evaluate = [_evaluated(node, graph, lengths, dict(zip(names, p, strict=True)), symbols) for p in points]
            distinct[key] = [round(v) for v in evaluate]
        total += _interpolated(points, distinct[key], [symbols[n] for n in names])
    return sympy.expand(total)


def _evaluated(
    node: Node,
    graph: Graph,
    lengths: Mapping[tuple[str, int], Lengths],
    sizes: Sizes,
    symbols: Mapping[str, sympy.Symbol],
) -> float:
    at = {symbols[n]: size for n, size in sizes.items()}

    def resized(name: str, index: int, meta: TensorMeta | None) -> TensorMeta | None:
        if meta is None:
            return None
        return TensorMeta(tuple(int(n.subs(at)) for n in lengths[name, index]), meta.dtype)

    metas = [resized(v.node, v.index, graph.meta(v)) for v in node.inputs]
    outputs = tuple(resized(node.name, i, m) for i, m in enumerate(node.outputs))
    return flops(replace(node, outputs=outputs), tuple(m for m in metas if m is not None))


def _interpolated(points: Sequence[tuple[int, ...]], values: Sequence[int], symbols: Sequence[sympy.Symbol]) -> Any:
    import sympy

    if not symbols:
        return sympy.Integer(values[0])
    known = dict(zip(points, values, strict=True))
    return _along(known, (), symbols, sympy.interpolate)


def _along(
    known: Mapping[tuple[int, ...], int],
    prefix: tuple[int, ...],
    symbols: Sequence[sympy.Symbol],
    interpolate: Callable[..., Any],
) -> Any:
    if len(prefix) == len(symbols):
        return known[prefix]
    ends = sorted({p[len(prefix)] for p in known})
    data = [(n, _along(known, (*prefix, n), symbols, interpolate)) for n in ends]
    return interpolate(data, symbols[len(prefix)])
