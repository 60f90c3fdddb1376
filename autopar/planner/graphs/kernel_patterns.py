"""Patterns of ops that one of our kernels runs together.

These are a sum with a residual and the norm behind it, the gradient of both, and the maximum of a row with its sum of
exponentials. They are found in the captured graph by what they compute. Whether a strategy allows the kernel, and what
it costs then, is decided in ``pricing``.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace

from autopar.ir import Arg, Graph, Node, Value
from autopar.planner.footprint.implementations import KERNEL_DTYPES

STATISTICS = "statistics"
"""The fusion whose second op may wait for an exchange of what the first made: a maximum over all ranks."""

MAX_DIM = 32768
"""Elements of a row that a norm's kernel keeps in registers."""

MAX_DIM_BACKWARD = 16384
"""The same for its gradient, which also keeps the sums for weight and bias. The compiler spills them for longer
rows."""


@dataclass(frozen=True)
class Fusion:
    """Nodes that one kernel runs.

    Args:
        nodes: names, in order. Statistics are two kernels, one for each node.
        reads: role and value of each operand.
        writes: role and value of each result that others may read.
        dim: length of the normalised dim.
        eps: of a norm.
        centred: whether a norm subtracts the mean.
    """

    kernel: str
    nodes: tuple[str, ...]
    reads: tuple[tuple[str, Value], ...]
    writes: tuple[tuple[str, Value], ...]
    dim: int
    eps: float = 0.0
    centred: bool = False


def fusions(graph: Graph) -> tuple[Fusion, ...]:
    """Return every fusion of ``graph``; no node is in two of them."""
    finder, taken, found = _Finder(graph), set[str](), list[Fusion]()
    for fusion in finder.found():
        if taken.isdisjoint(fusion.nodes) and finder.is_closed(fusion):
            taken.update(fusion.nodes)
            found.append(fusion)
    return tuple(found)


def inner_values(graph: Graph) -> frozenset[Value]:
    """Return what the ops of a fusion hand each other and its kernel does not write."""
    made = {(f, Value(n, i)) for f in fusions(graph) for n in f.nodes for i in range(len(graph.by_name[n].outputs))}
    return frozenset(value for f, value in made if value not in (v for _, v in f.writes))


def part_that_runs(fusion: Fusion, mark: str, there: Container[str]) -> Fusion:
    """Return the part of ``fusion`` that runs where its ops, with suffix ``mark``, are ``there``.

    If the sum before a norm is not made again, the norm alone runs.
    """
    summed = any(role == "residual" for role, _ in fusion.reads)
    if fusion.kernel != "add_norm" or not summed or len(fusion.nodes) == 2 or fusion.nodes[0] + mark in there:
        return fusion
    (_, total), *writes = fusion.writes
    reads = tuple((role, v) for role, v in fusion.reads if role not in ("x", "residual"))
    return replace(fusion, nodes=fusion.nodes[1:], reads=(("x", total), *reads), writes=tuple(writes))


@dataclass(frozen=True)
class _RmsRoot:
    """An RMS norm that the model writes out, from x in the dtype of computation to the inverse of its root mean
    square."""

    x: Value
    rstd: Value
    nodes: tuple[Node, ...]
    eps: float
    dim: int


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.outputs = {o.value for o in graph.outputs}
        self.roots: dict[Value, tuple[_RmsRoot, Value]] = {}

    def found(self) -> Iterator[Fusion]:
        makers = {
            "autopar.sumexp": self._statistics,
            "aten.native_layer_norm": self._norm,
            "aten._fused_rms_norm": self._norm,
            "aten.native_layer_norm_backward": self._norm_backward,
            "aten._fused_rms_norm_backward": self._norm_backward,
            "aten.rsqrt": self._rms_norm,
            "aten.pow": self._rms_norm_backward,
        }
        for node in self.graph.nodes:
            make = makers.get(node.packet)
            fusion = make(node) if make is not None else None
            if fusion is not None:
                yield fusion

    def is_closed(self, fusion: Fusion) -> bool:
        """Whether nobody else reads what the kernel does not write."""
        written, nodes = {v for _, v in fusion.writes}, set(fusion.nodes)
        for name in fusion.nodes:
            for i in range(len(self.graph.by_name[name].outputs)):
                value = Value(name, i)
                readers = {n.name for n, _ in self.graph.consumers.get(value, ())}
                if value not in written and (value in self.outputs or not readers <= nodes):
                    return False
        return len({self.graph.by_name[n].phase for n in nodes}) == 1

    # Walking the graph.

    def maker(self, value: Arg, packet: str) -> Node | None:
        """Return the op that makes a value, if it is of this packet."""
        node = self.graph.by_name[value.node] if isinstance(value, Value) else None
        return node if node is not None and node.packet == packet else None

    def readers(self, value: Value, packet: str) -> list[Node]:
        return [n for n, _ in self.graph.consumers.get(value, ()) if n.packet == packet]

    def only_reader(self, value: Value, packet: str) -> Node | None:
        """Return the only reader of a value that leaves the program nowhere else, if it is of this packet."""
        readers = self.graph.consumers.get(value, ())
        if len(readers) != 1 or value in self.outputs or readers[0][0].packet != packet:
            return None
        return readers[0][0]

    def uncast(self, value: Value, phase: str) -> tuple[Value, tuple[Node, ...]]:
        """Return what a value was before a conversion of dtype, and that conversion."""
        cast = self.maker(value, "aten._to_copy")
        if cast is None or cast.phase != phase or set(dict(cast.kwargs)) - {"dtype"}:
            return value, ()
        return cast.inputs[0], (cast,)

    def is_float(self, *values: Value) -> bool:
        return all(self.graph.meta(v).dtype in KERNEL_DTYPES for v in values)

    def sum_of(self, y: Value, phase: str) -> tuple[Node, Value, Value] | None:
        """Return (the sum that makes ``y``, what is added, the operand of its own dtype) for a sum of two tensors of
        its shape."""
        add, like = self.maker(y, "aten.add"), self.graph.meta(y)
        if add is None or len(add.inputs) != 2 or len(add.args) != 2 or add.kwargs or add.phase != phase:
            return None
        if any(self.graph.meta(v).shape != like.shape for v in add.inputs) or not self.is_float(*add.inputs, y):
            return None
        for x, residual in (add.inputs, add.inputs[::-1]):
            if self.graph.meta(residual).dtype == like.dtype:
                return add, x, residual
        return None

    # Patterns.

    def _statistics(self, node: Node) -> Fusion | None:
        x, m = node.inputs
        amax = self.maker(m, "aten.amax")
        if amax is None or amax.inputs[0] != x or not self.is_float(x) or tuple(amax.args[1:]) not in (((-1,),), (-1,)):
            return None
        writes = (("most", m), ("total", Value(node.name, 0)))
        return Fusion(STATISTICS, (amax.name, node.name), (("x", x),), writes, self.graph.meta(x).shape[-1])

    def _norm(self, node: Node) -> Fusion | None:
        centred = node.packet == "aten.native_layer_norm"
        weight, bias, eps = (*node.args[2:4], node.args[4]) if centred else (node.args[2], None, node.args[3])
        y = node.inputs[0]
        added, like = self.sum_of(y, node.phase), self.graph.meta(y)
        if added is None or node.args[1] != (like.shape[-1],) or like.shape[-1] > MAX_DIM or not isinstance(eps, float):
            return None
        add, x, residual = added
        affine = [(role, v) for role, v in (("weight", weight), ("bias", bias)) if isinstance(v, Value)]
        if not self.is_float(*(v for _, v in affine)):
            return None
        roles = ("out", "mean", "rstd") if centred else ("out", "rstd")
        writes = [("total", y), *((role, Value(node.name, i)) for i, role in enumerate(roles))]
        if self.graph.meta(writes[1][1]).dtype != like.dtype:
            return None
        reads = (("x", x), ("residual", residual), *affine)
        return Fusion("add_norm", (add.name, node.name), reads, tuple(writes), like.shape[-1], eps, centred)

    def _norm_backward(self, node: Node) -> Fusion | None:
        """Match a norm's gradient with the sum of what comes along the residual path, the only reader of the input's
        gradient."""
        centred = node.packet == "aten.native_layer_norm_backward"
        dx = Value(node.name, 0)
        add = self.only_reader(dx, "aten.add") if node.outputs[0] else None
        if add is None or self.sum_of(Value(add.name, 0), node.phase) is None:
            return None
        grad, y = node.inputs[:2]
        like = self.graph.meta(y)
        beside = next((v for v in add.inputs if v != dx), None)
        if beside is None or node.args[2] != (like.shape[-1],) or like.shape[-1] > MAX_DIM_BACKWARD:
            return None
        rows = [("mean", node.args[3]), ("rstd", node.args[4])] if centred else [("rstd", node.args[3])]
        affine = [("weight", node.args[5 if centred else 4])]
        given = (("grad", grad), ("y", y), *rows, *affine, ("beside", beside))
        reads = [(role, v) for role, v in given if isinstance(v, Value)]
        same = {self.graph.meta(v).dtype for r, v in reads if r in ("grad", "y", "beside")}
        if same != {like.dtype} or not self.is_float(*(v for _, v in reads)):
            return None
        # The kernel of a norm's gradient does not read the bias.
        roles = [(r, Value(node.name, i)) for r, i in (("weight_gradient", 1), ("bias_gradient", 2))]
        writes = [("input_gradient", Value(add.name, 0))] + [
            (r, v) for r, v in roles if v.index < len(node.outputs) and node.outputs[v.index] is not None
        ]
        return Fusion(
            "norm_backward", (node.name, add.name), tuple(reads), tuple(writes), like.shape[-1], centred=centred
        )

    # An RMS norm as models write it: x * rsqrt(mean(x ** 2) + eps) * weight, in float32 where x is in half precision.

    def _rms_root(self, rsqrt: Node) -> _RmsRoot | None:
        shifted = self.maker(rsqrt.inputs[0], "aten.add")
        mean = self.maker(shifted.inputs[0], "aten.div") if shifted and len(shifted.inputs) == 1 else None
        total = self.maker(mean.inputs[0], "aten.sum") if mean and len(mean.inputs) == 1 else None
        square = self.maker(total.inputs[0], "aten.pow") if total else None
        if shifted is None or mean is None or total is None or square is None or square.args[1] != 2:
            return None
        x, eps = square.inputs[0], shifted.args[1]
        last, dim = len(self.graph.meta(x).shape) - 1, self.graph.meta(x).shape[-1]
        if total.args[1:] not in (((-1,), True), ((last,), True)) or mean.args[1] != dim or dim > MAX_DIM:
            return None
        if not isinstance(eps, float) or len(shifted.args) != 2 or self.graph.meta(x).dtype != "float32":
            return None
        return _RmsRoot(x, Value(rsqrt.name, 0), (square, total, mean, shifted, rsqrt), eps, dim)

    def _rms_norm(self, rsqrt: Node) -> Fusion | None:
        root = self._rms_root(rsqrt)
        scaled = self.readers(root.rstd, "aten.mul") if root is not None else []
        hat = next((n for n in scaled if root and n.inputs == (root.x, root.rstd) and n.phase == rsqrt.phase), None)
        if root is None or hat is None:
            return None
        y, widened = self.uncast(root.x, rsqrt.phase)
        hat_value, narrowed = Value(hat.name, 0), list[Node]()
        if widened:
            narrowed = [n for n in self.readers(hat_value, "aten._to_copy") if n.phase == rsqrt.phase][:1]
            hat_value = Value(narrowed[0].name, 0) if narrowed else hat_value
        like = self.graph.meta(y)
        if self.graph.meta(hat_value).dtype != like.dtype or not self.is_float(y):
            return None
        self.roots[root.rstd] = root, hat_value
        product = next((n for n in self.readers(hat_value, "aten.mul") if n.phase == rsqrt.phase), None)
        weight = next((v for v in product.inputs if v != hat_value), None) if product else None
        if product is None or weight is None or self.graph.meta(weight).shape != (root.dim,):
            return None
        out = Value(product.name, 0)
        if self.graph.meta(out).dtype != like.dtype or not self.is_float(weight):
            return None
        added = self.sum_of(y, rsqrt.phase)
        nodes = [*(added[:1] if added else ()), *widened, *root.nodes, hat, *narrowed, product]
        reads = (("x", added[1]), ("residual", added[2])) if added else (("x", y),)
        writes = [("total", y)] if added else []
        writes += [("wide", root.x)] if widened else []
        writes += [("out", out), ("rstd", root.rstd), ("hat", hat_value)]
        return Fusion(
            "add_norm", self._in_order(nodes), (*reads, ("weight", weight)), tuple(writes), root.dim, root.eps
        )

    def _rms_norm_backward(self, cube: Node) -> Fusion | None:
        """Match from rstd ** 3, which only the gradient of rsqrt computes, back to what made it and on to the sums."""
        known = self.roots.get(cube.inputs[0]) if cube.args[1] == 3 and cube.phase == "backward" else None
        if known is None or known[0].dim > MAX_DIM_BACKWARD:
            return None
        root, hat = known
        walked = self._chain(cube)
        if walked is None:
            return None
        nodes, (wide, square), total, beside = walked
        # The gradient of hat comes from that of the product; that of the weight is beside it.
        given, cast = self.uncast(wide, "backward")
        product = self.maker(given, "aten.mul")
        weight = next((v for v in product.inputs if self.graph.meta(v).shape == (root.dim,)), None) if product else None
        grad = next((v for v in product.inputs if v != weight), None) if product else None
        if product is None or weight is None or grad is None or square != root.x:
            return None
        nodes += [product, *cast]
        result = Value(total.name, 0)
        if cast:
            narrow = self.only_reader(result, "aten._to_copy")
            if narrow is None:
                return None
            nodes.append(narrow)
            result = Value(narrow.name, 0)
        reads = [("grad", grad), ("y", root.x), ("rstd", root.rstd), ("weight", weight)]
        add = self.only_reader(result, "aten.add") if beside is None else None
        if add is not None and self.sum_of(Value(add.name, 0), "backward"):
            beside = next((v for v in add.inputs if v != result), None)
            nodes.append(add)
            result = Value(add.name, 0)
        if beside is not None:
            if self.graph.meta(beside) != self.graph.meta(result):
                return None
            reads.append(("beside", beside))
        writes = [("input_gradient", result)]
        summed = self._weight_gradient(grad, hat, root)
        if summed:
            nodes += summed
            writes.append(("weight_gradient", Value(summed[-1].name, 0)))
        if self.graph.meta(result).dtype != self.graph.meta(grad).dtype or not self.is_float(*(v for _, v in reads)):
            return None
        return Fusion("norm_backward", self._in_order(nodes), tuple(reads), tuple(writes), root.dim)

    def _chain(self, cube: Node) -> tuple[list[Node], tuple[Value, Value], Node, Value | None] | None:
        """Return the ops from ``cube`` on.

        Returns:
            The ops; (the gradient of hat, x) as they read them; the sum that ends them; what else is in that sum.
        """
        cubed = self.only_reader(Value(cube.name, 0), "aten.mul")
        halved = next((self.maker(v, "aten.mul") for v in cubed.inputs if v.node != cube.name), None) if cubed else None
        summed = self.maker(halved.inputs[0], "aten.sum") if halved and halved.args[1] == -0.5 else None
        dotted = self.maker(summed.inputs[0], "aten.mul") if summed else None
        spread = self.only_reader(Value(cubed.name, 0), "aten.expand") if cubed else None
        mean = self.only_reader(Value(spread.name, 0), "aten.div") if spread else None
        times = self.only_reader(Value(mean.name, 0), "aten.mul") if mean else None
        if not (cubed and halved and summed and dotted and spread and mean and times):
            return None
        doubled = next((self.maker(v, "aten.mul") for v in times.inputs if v.node != mean.name), None)
        total = self.only_reader(Value(times.name, 0), "aten.add")
        if doubled is None or doubled.args[1] != 2.0 or total is None or len(total.inputs) != 2:
            return None
        x = doubled.inputs[0]
        wide = next((v for v in dotted.inputs if v != x), None)
        other = next((v for v in total.inputs if v.node != times.name), None)
        if wide is None or other is None or x not in dotted.inputs:
            return None
        nodes = [cube, cubed, halved, summed, dotted, spread, mean, times, doubled, total]
        # What comes along the residual path may have been added in between.
        inner = self.maker(other, "aten.add")
        for v in (other, *(inner.inputs if inner else ())):
            scaled = self.maker(v, "aten.mul")
            if scaled is not None and set(scaled.inputs) == {wide, cube.inputs[0]}:
                between = [inner] if inner is not None and v != other else []
                beside = next((b for b in inner.inputs if b != v), None) if inner is not None and between else None
                return [*nodes, scaled, *between], (wide, x), total, beside
        return None

    def _weight_gradient(self, grad: Value, hat: Value, root: _RmsRoot) -> list[Node]:
        """Match ``grad * hat``, summed over all dims but the last and viewed as a vector. ``hat`` may be made again
        (``remade``)."""
        again = self._made_again(root)
        hats = {hat, *(Value(nodes[-1].name, 0) for nodes in again)}
        products = [n for n in self.readers(grad, "aten.mul") if any(set(n.inputs) == {grad, h} for h in hats)]
        summed = self.only_reader(Value(products[0].name, 0), "aten.sum") if products else None
        seen = self.only_reader(Value(summed.name, 0), "aten.view") if summed else None
        if summed is None or seen is None:
            return []
        lead = tuple(range(len(self.graph.meta(grad).shape) - 1))
        vector = self.graph.meta(Value(seen.name, 0)).shape == (self.graph.meta(grad).shape[-1],)
        remade = next((nodes for nodes in again if Value(nodes[-1].name, 0) in products[0].inputs), [])
        return [*remade, products[0], summed, seen] if summed.args[1:] == (lead, True) and vector else []

    def _made_again(self, root: _RmsRoot) -> list[list[Node]]:
        """Return the ops of the backward that make the normalized rows again, as a product and as a cast of it."""
        products = [
            n
            for n in self.readers(root.rstd, "aten.mul")
            if n.phase == "backward" and set(n.inputs) == {root.x, root.rstd}
        ]
        casts = [[n, c] for n in products for c in self.readers(Value(n.name, 0), "aten._to_copy")]
        return [*([n] for n in products), *casts]

    def _in_order(self, nodes: Sequence[Node]) -> tuple[str, ...]:
        return tuple(sorted((n.name for n in nodes), key=self.graph.order.__getitem__))
