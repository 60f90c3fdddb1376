"""Loops over experts that pick the tokens of each, as one product in which each token names its experts.

Mixtures of experts are mostly written so: ``for i, expert in enumerate(experts): t, k = torch.where(ids == i);
out[t] += expert(x[t]) * w[t, k]``. How many tokens an expert gets depends on values, so no graph can hold the loop.
Where all experts are alike and treat each row alone, the exported loop becomes one pass over ``[t, r, n]``, a row for
each choice of a token: products with the experts' own matrices become ``autopar.experts_mm`` with all of them stacked,
vectors are looked up, and all else runs once. Any doubt leaves the loop as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

import autopar.tracer.experts  # noqa: F401  registers autopar_capture.alongside
from autopar._torch import OpOverload
from autopar.tracer.experts import autocast_dtype

aten = torch.ops.aten
WHERES = {aten.where.default, aten.nonzero_numpy.default}
ADDS = {aten.index_add_.default, aten.index_add.default}
PUTS = {aten.index_put_.default, aten.index_put.default}
CHECKS = {
    aten.sym_size.int,
    operator.ge,
    operator.le,
    aten._assert_scalar.default,
    aten._assert_tensor_metadata.default,
}
"""What an export adds for a size that depends on values."""

SAME = {aten.view.default, aten.reshape.default, aten.to.dtype, aten.contiguous.default, aten.detach.default}
"""Ops through which the router's choice may pass."""

ALONG: dict[Any, int] = {
    aten.chunk.default: 2,
    aten.split.Tensor: 2,
    aten.split_with_sizes.default: 2,
    aten.slice.Tensor: 1,
    aten.unsqueeze.default: 1,
    aten.softmax.int: 1,
}
"""Ops along one dim of a row, with the position of the argument that names it."""

ALONE = {aten.to.dtype, aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default}


class _OtherwiseError(Exception):
    """The loop is not of the kind that is known."""


def _require(holds: object) -> None:
    if not holds:
        raise _OtherwiseError


def stack_expert_loops(graph: fx.Graph) -> int:
    """Rewrite the loops over experts of an exported graph, and return how many there were."""
    found: dict[fx.Node, list[_Picked]] = {}
    for node in graph.nodes:
        picked = _picked(node) if node.target in WHERES else None
        if picked is not None:
            found.setdefault(picked.ids, []).append(picked)
    rewritten = 0
    for ids, each in found.items():
        try:
            made = _Loop(graph, ids, each).rewritten()
        except _OtherwiseError:
            continue
        made()
        rewritten += 1
    return rewritten


@dataclass(frozen=True)
class _Picked:
    """The tokens of one expert.

    Args:
        where: the node that finds them; ``token`` is the position of the tokens among its results.
    """

    where: fx.Node
    ids: fx.Node
    expert: int
    token: int


def _picked(where: fx.Node) -> _Picked | None:
    mask = where.args[0]
    if not isinstance(mask, fx.Node) or len(_shape(mask)) != 2:
        return None
    if mask.target is aten.eq.Scalar and isinstance(mask.args[1], int) and isinstance(mask.args[0], fx.Node):
        return _Picked(where, mask.args[0], mask.args[1], 0)
    if mask.target is aten.select.int and mask.args[1] == 0 and isinstance(mask.args[2], int):
        turned: Any = mask.args[0]
        if turned.target is aten.permute.default and turned.args[0].target is aten.one_hot.default:
            order = list(turned.args[1])
            if order in ([2, 1, 0], [2, 0, 1]):
                return _Picked(where, turned.args[0].args[0], mask.args[2], int(order[1] == 1))
    return None


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _chosen_among(ids: fx.Node) -> int:
    """Return the number of experts among which a top-k chooses, each once; 0 where the ids come from elsewhere."""
    node: Any = ids
    while node.target in SAME:
        node = node.args[0]
    if node.target is not operator.getitem or node.args[1] != 1 or node.args[0].target is not aten.topk.default:
        return 0
    scores, _, *rest = node.args[0].args
    shape = _shape(scores)
    return int(shape[-1]) if not rest or rest[0] in (-1, len(shape) - 1) else 0


@dataclass(frozen=True)
class _Rows:
    """Rows of the picked tokens, as what they become.

    Args:
        node: [t, ...] a row for each token, or with ``each`` [t, r, ...] a row for each choice.
        front: whether the loop has a dim of one element before the rows.
    """

    node: fx.Node
    each: bool
    front: bool = False


@dataclass(frozen=True)
class _Sum:
    """What ``out[t]`` is: before rows are added, or with them."""

    rows: _Rows | None = None


@dataclass
class _Loop:
    graph: fx.Graph
    ids: fx.Node
    each: Sequence[_Picked]
    values: dict[fx.Node, Any] = field(default_factory=dict)
    made: list[fx.Node] = field(default_factory=list)

    def rewritten(self) -> Callable[[], None]:
        """Add the nodes of the rewritten loop, and return what then takes the loop out.

        Raises:
            _OtherwiseError: it is another kind of loop; nothing has changed.
        """
        experts = len(self.each)
        _require(experts > 1 and [p.expert for p in self.each] == list(range(experts)))
        _require(_chosen_among(self.ids) == experts and len({p.token for p in self.each}) == 1)
        self.order = {n: i for i, n in enumerate(self.graph.nodes)}
        self.checks: set[fx.Node] = set()
        self.regions = [self._region(p.where) for p in self.each]
        first = self.regions[0]
        _require(all([n.target for n in r] == [n.target for n in first] for r in self.regions))
        self.places = [{n: i for i, n in enumerate(r)} for r in self.regions]
        self.sinks = [r[-1] for r in self.regions]
        _require(sum(n.target in ADDS | PUTS for n in first) == 1 and self.sinks[0].target in ADDS | PUTS)
        start = self.sinks[0].args[0]
        _require(isinstance(start, fx.Node))
        assert isinstance(start, fx.Node)
        self.start = start
        inside = {n for r in self.regions for n in r} | self.checks
        for sink in self.sinks[:-1]:
            _require(all(u in inside for u in sink.users))
        begin, end = self.order[self.each[0].where], self.order[self.sinks[-1]]
        _require(all(u in inside or not begin < self.order[u] < end for u in self.start.users))
        try:
            with self.graph.inserting_before(self.sinks[-1]):
                last = self._run(first)
        except Exception:
            for node in reversed(self.made):
                self.graph.erase_node(node)
            raise

        def take_out() -> None:
            self.sinks[-1].replace_all_uses_with(last)
            for node in sorted(inside, key=self.order.__getitem__, reverse=True):
                self.graph.erase_node(node)

        return take_out

    def _region(self, where: fx.Node) -> list[fx.Node]:
        """Return what depends on the picked tokens, up to where it is added to the result, in order."""
        found, ahead = set[fx.Node](), [where]
        while ahead:
            node = ahead.pop()
            if node in found or node in self.checks:
                continue
            if node.target in CHECKS:
                self.checks.add(node)
                _require(all(u.target in CHECKS for u in node.users))
                continue_with = list(node.users)
            else:
                _require(node.op == "call_function")
                found.add(node)
                continue_with = [] if node.target in ADDS | PUTS else list(node.users)
            ahead += continue_with
        return sorted(found, key=self.order.__getitem__)

    # What an argument is in all iterations.

    def _all(self, pick: Callable[[fx.Node], Any], node: fx.Node) -> list[Any]:
        at = self.places[0][node]
        return [pick(region[at]) for region in self.regions]

    def _argument(self, given: Sequence[Any]) -> Any:
        """Return what an argument, as it is in each iteration, becomes: a value of the loop, a node, a list of one node
        for each expert, or plain data."""
        first = given[0]
        if isinstance(first, (list, tuple)):
            _require(all(isinstance(g, (list, tuple)) and len(g) == len(first) for g in given))
            return [self._argument(parts) for parts in zip(*given, strict=True)]
        if not isinstance(first, fx.Node):
            _require(all(type(g) is type(first) and g == first for g in given))
            return first
        if first in self.places[0]:
            at = self.places[0][first]
            _require(all(self.places[i].get(g) == at for i, g in enumerate(given)))
            return self.values[first]
        if first is self.start:
            before = [self.start, *self.sinks[:-1]]
            _require(all(g in (self.start, b) for g, b in zip(given, before, strict=True)))
            return _Sum()
        if all(_same(first, g) for g in given):
            return first
        _require(all(isinstance(g, fx.Node) and _shape(g) == _shape(first) for g in given))
        return _PerExpert(list(given))

    def _run(self, nodes: Sequence[fx.Node]) -> fx.Node:
        for node in nodes:
            args = [self._argument(g) for g in zip(*self._all(lambda n: n.args, node), strict=True)]
            keys = [tuple(k) for k in self._all(lambda n: n.kwargs, node)]
            _require(len(set(keys)) == 1)
            kwargs = {k: self._argument([given[k] for given in self._all(_kwargs, node)]) for k in keys[0]}
            if node is nodes[-1]:
                return self._added(node, args, kwargs)
            self.values[node] = self._value(node, args, kwargs)
        raise _OtherwiseError

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {k: v for k, v in like.meta.items() if k != "val"}
        self.made.append(made)
        return made

    def _value(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        target: Any = node.target
        if node is self.each[0].where:
            return [_Position(i == self.each[0].token) for i in range(2)]
        if target is operator.getitem:
            _require(isinstance(args[0], list))
            return args[0][args[1]]
        if target is aten.index.Tensor:
            return self._picked_rows(*args)
        if target in (aten.add.Tensor, aten.add_.Tensor) and any(isinstance(a, _Sum) for a in args):
            rows = next((a for a in args if isinstance(a, _Rows)), None)
            _require(len(args) == 2 and not kwargs and rows is not None)
            return _Sum(rows)
        if target is aten.linear.default and isinstance(args[1], _PerExpert):
            return self._product(node, *args, transposed=True)
        if target in (aten.matmul.default, aten.mm.default) and isinstance(args[1], _PerExpert):
            return self._product(node, *args, transposed=False)
        if target is aten.dropout.default and (args[1] == 0 or not args[2]):
            return args[0]
        x = args[0]
        if target in (aten.view.default, aten.reshape.default):
            _require(isinstance(x, _Rows) and isinstance(args[1], list) and len(args[1]) == 2 and args[1][0] == -1)
            _require(_shape(node)[-1] == _shape(node.args[0])[-1])  # type: ignore[arg-type]
            return _Rows(x.node, x.each)
        if target is aten.squeeze.dim and isinstance(x, _Rows) and x.front and args[1] == 0:
            return _Rows(x.node, x.each)
        _require(not any(isinstance(a, _Rows) and a.front for a in args))
        if target in ALONE and isinstance(x, _Rows):
            return _Rows(self._call(node, target, x.node, *args[1:], **kwargs), x.each)
        if target in ALONG or target is aten.linear.default:
            return self._along(node, target, x, args, kwargs)
        return self._pointwise(node, target, args, kwargs)

    def _picked_rows(self, x: Any, indices: list[Any]) -> Any:
        at = [_is_token(i) for i in indices]
        choices = [isinstance(i, _Position) and not i.token for i in indices]
        if isinstance(x, _Sum):
            _require(at == [True] and x.rows is None)
            return x
        _require(isinstance(x, fx.Node))
        if at == [True]:
            return _Rows(x, each=False)
        if at == [True, False] and choices == [False, True]:
            _require(_shape(x)[:2] == _shape(self.ids))
            return _Rows(x, each=True)
        _require(indices[:1] == [None] and at == [False, True])
        _require(x.target is aten.unsqueeze.default and x.args[1] == 0)
        return _Rows(x.args[0], each=False, front=True)

    def _numbers(self, node: fx.Node, like: fx.Node) -> fx.Node:
        return self._call(node, torch.ops.autopar_capture.alongside.default, self.ids, like)

    def _product(self, node: fx.Node, x: Any, weight: _PerExpert, bias: Any = None, *, transposed: bool) -> _Rows:
        _require(isinstance(x, _Rows) and not x.front and len(_shape(weight.nodes[0])) == 2)
        _require(bias is None or isinstance(bias, _PerExpert))
        rows, stacked = x.node, self._call(node, aten.stack.default, weight.nodes)
        dtype = autocast_dtype(weight.nodes[0].meta["val"])
        if dtype is not None:
            rows, stacked = (self._call(node, aten.to.dtype, v, dtype) for v in (rows, stacked))
        ids = self._numbers(node, rows)
        made = self._call(node, torch.ops.autopar.experts_mm.default, rows, stacked, ids, transposed=transposed)
        if bias is not None:
            looked_up = self._vectors(node, bias, ids)
            if dtype is not None:
                looked_up = self._call(node, aten.to.dtype, looked_up, dtype)
            made = self._call(node, aten.add.Tensor, made, looked_up)
        return _Rows(made, each=True)

    def _vectors(self, node: fx.Node, given: _PerExpert, ids: fx.Node) -> fx.Node:
        """Return the vector of each choice's expert."""
        _require(len(_shape(given.nodes[0])) == 1)
        return self._call(node, aten.embedding.default, self._call(node, aten.stack.default, given.nodes), ids)

    def _along(self, node: fx.Node, target: Any, x: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        _require(isinstance(x, _Rows) and all(not isinstance(a, (_Rows, _PerExpert, _Sum)) for a in args[1:]))
        at = ALONG.get(target)
        given = list(args[1:])
        if at is not None:
            _require(at <= len(given) and isinstance(given[at - 1], int) and given[at - 1] != 0)
            if x.each and given[at - 1] > 0:
                given[at - 1] += 1
        made = self._call(node, target, x.node, *given, **kwargs)
        if target in (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default):
            count = len(node.meta["val"])
            return [_Rows(self._call(node, operator.getitem, made, i), x.each) for i in range(count)]
        return _Rows(made, x.each)

    def _pointwise(self, node: fx.Node, target: Any, args: list[Any], kwargs: dict[str, Any]) -> _Rows:
        _require(isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags)
        if target._schema.is_mutable:
            _require(target._opname.endswith("_"))
            target = getattr(getattr(aten, target._opname[:-1]), target._overloadname)
        rows = [a for a in args if isinstance(a, _Rows)]
        _require(rows and not any(isinstance(a, (_Sum, _Position, list)) for a in args))
        _require(not any(isinstance(v, (fx.Node, _Rows, _PerExpert)) for v in kwargs.values()))
        each = any(r.each for r in rows) or any(isinstance(a, _PerExpert) for a in args)

        def operand(a: Any) -> Any:
            if isinstance(a, _Rows):
                return a.node if a.each or not each else self._call(node, aten.unsqueeze.default, a.node, 1)
            if isinstance(a, _PerExpert):
                return self._vectors(node, a, self._numbers(node, rows[0].node))
            _require(not isinstance(a, fx.Node) or len(_shape(a)) < 2)
            return a

        return _Rows(self._call(node, target, *map(operand, args), **kwargs), each)

    def _added(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
        """Return the result with all rows added."""
        _require(not kwargs and isinstance(args[0], _Sum) and args[0].rows is None)
        if node.target in ADDS:
            _require(len(args) == 4 and args[1] == 0 and _is_token(args[2]))
            rows = args[3]
        else:
            _require(len(args[1]) == 1 and _is_token(args[1][0]))
            accumulates = len(args) > 3 and args[3]
            _require(isinstance(args[2], _Rows if accumulates else _Sum))
            rows = args[2] if accumulates else args[2].rows
        _require(isinstance(rows, _Rows) and rows.each and not rows.front)
        total = self._call(node, aten.sum.dim_IntList, rows.node, [1])
        total = self._call(node, aten.to.dtype, total, self.start.meta["val"].dtype)
        in_place = node.target in (aten.index_add_.default, aten.index_put_.default)
        return self._call(node, aten.add_.Tensor if in_place else aten.add.Tensor, self.start, total)


@dataclass(frozen=True)
class _Position:
    """Which tokens an expert gets, or as which of their choices."""

    token: bool


@dataclass(frozen=True)
class _PerExpert:
    """A tensor of each expert."""

    nodes: list[fx.Node]


def _kwargs(node: fx.Node) -> Any:
    return node.kwargs


def _is_token(x: Any) -> bool:
    return isinstance(x, _Position) and x.token


PURE = {aten.unsqueeze.default, aten.permute.default, aten.t.default, aten.transpose.int, aten.to.dtype, *SAME}


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments are one value: the same node, or views of the same."""
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        return a is b or (a.target is b.target and a.target in PURE and _same(a.args, b.args) and a.kwargs == b.kwargs)
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and bool(a == b)
