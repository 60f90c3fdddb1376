"""Loops over experts that pick the tokens of each, as one product in which each token names its experts.

Mixtures of experts are mostly written so: ``for i, expert in enumerate(experts): t, k = torch.where(ids == i);
out[t] += expert(x[t]) * w[t, k]``. How many tokens an expert gets depends on values, so no graph can hold the loop.
Where all experts are alike and treat each row alone, the exported loop becomes one pass over ``[t, r, n]``, a row for
each choice of a token: products with the experts' own matrices become ``autopar.experts_mm`` with all of them stacked,
vectors are looked up, and all else runs once. Any doubt leaves the loop as it is.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

import autopar.tracer.experts  # noqa: F401  registers autopar_capture.alongside
from autopar._torch import OpOverload, storage_key
from autopar.tracer.equal_masks import written_tensors
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

VIEWS = {aten.view.default, aten.reshape.default}
SAME = {*VIEWS, aten.to.dtype, aten.contiguous.default, aten.detach.default}
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

TURNS = {(aten.numpy_T.default,), (aten.t.default,), (aten.transpose.int, 0, 1), (aten.transpose.int, 1, 0)}
"""Ops that turn a matrix, with their other arguments."""

ALONE = {
    aten.to.dtype,
    aten.contiguous.default,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.dropout.default,
}


class _OtherwiseError(Exception):
    """The loop is not of the kind that is known."""


def _require(holds: object) -> None:
    if not holds:
        raise _OtherwiseError


def stack_expert_loops(graph: fx.Graph) -> int:
    """Rewrite the loops over experts of an exported graph, and return how many there were."""
    rewritten = 0
    for loop in _loops(graph):
        try:
            made = loop.rewritten()
        except _OtherwiseError:
            continue
        made()
        rewritten += 1
    return rewritten


def others_regions(graph: fx.Graph, expert: int) -> Iterator[list[fx.Node]]:
    """Yield what each loop does for each expert but one: nodes that nothing else reads, the last of which adds rows."""
    for loop in _loops(graph):
        with contextlib.suppress(_OtherwiseError):
            loop.find()
            yield from (r for p, r in zip(loop.each, loop.regions, strict=True) if p.expert != expert)


def are_left(graph: fx.Graph) -> bool:
    """Whether loops over experts are in a graph still."""
    return bool(_loops(graph))


def _loops(graph: fx.Graph) -> list[_Loop]:
    found: dict[fx.Node, list[_Picked]] = {}
    if not any(node.target in WHERES for node in graph.nodes):
        return []
    ops = [node for node in graph.nodes if isinstance(node.target, OpOverload)]
    written = {storage_key(value) for node in ops for value in written_tensors(node)}
    for node in graph.nodes:
        picked = _picked(node) if node.target in WHERES else None
        if picked is not None and storage_key(picked.choices.meta["val"]) not in written:
            found.setdefault(picked.choices, []).append(picked)
    return [_Loop(graph, choices, each) for choices, each in found.items()]


@dataclass(frozen=True)
class _Picked:
    """The tokens of one expert.

    Args:
        where: the node that finds them; ``token`` is the position of the tokens among its results.
        choices: numbers of experts, [t, r], or one-hot, [t, r, e].
        classes: number of experts that a one-hot mask tells apart.
    """

    where: fx.Node
    choices: fx.Node
    expert: int
    token: int
    classes: int = 0


def _picked(where: fx.Node) -> _Picked | None:
    mask = where.args[0]
    if not isinstance(mask, fx.Node) or len(_shape(mask)) != 2:
        return None
    if mask.target is aten.eq.Scalar and isinstance(mask.args[1], int) and isinstance(mask.args[0], fx.Node):
        return _Picked(where, mask.args[0], mask.args[1], 0)
    if mask.target is aten.select.int and mask.args[1] == 0 and isinstance(mask.args[2], int):
        turned: Any = mask.args[0]
        if turned.target is aten.permute.default and one_hot_in(turned) is not None:
            order = list(turned.args[1])
            if order in ([2, 1, 0], [2, 0, 1]):
                choices = turned.args[0]
                choices = choices.args[0] if choices.target is aten.one_hot.default else choices
                return _Picked(where, choices, mask.args[2], int(order[1] == 1), _shape(turned)[0])
    return None


def one_hot_in(mask: fx.Node) -> fx.Node | None:
    """Return the one-hot choices, [..., e], that a mask [e, ...] is made of; others may have taken some out."""
    return one_hot_of(mask.args[0]) if mask.target is aten.permute.default else None


def one_hot_of(node: Any) -> fx.Node | None:
    experts = _shape(node)[-1:]
    while isinstance(node, fx.Node) and _shape(node)[-1:] == experts:
        if node.target is aten.one_hot.default:
            return node
        keeps = node.target is aten.mul.Tensor and _is_bool(node.args[1])
        node = node.args[0] if keeps or node.target in SAME else None
    return None


def _is_bool(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.meta["val"].dtype == torch.bool


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def chosen_among(ids: fx.Node) -> tuple[int, int]:
    """Return among how many experts each token chooses, and how many, each once; (0, 0) if ids come from elsewhere."""
    node: Any = ids
    while node.target in SAME:
        node = node.args[0]
    choices = 1
    if node.target is operator.getitem and node.args[1] == 1 and node.args[0].target is aten.topk.default:
        node = node.args[0]
        scores, choices, *rest = node.args
    elif node.target is aten.argmax.default:
        scores, *rest = node.args
    else:
        return 0, 0
    shape = _shape(scores)
    last = rest[:1] in ([-1], [len(shape) - 1]) or (not rest and node.target is aten.topk.default)
    return (int(shape[-1]), choices) if last else (0, 0)


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
    choices: fx.Node
    each: Sequence[_Picked]
    values: dict[fx.Node, Any] = field(default_factory=dict)
    made: list[fx.Node] = field(default_factory=list)

    def find(self) -> None:
        """Find what the loop does for each expert.

        Raises:
            _OtherwiseError: it is another kind of loop.
        """
        experts = len(self.each)
        _require(experts > 1 and [p.expert for p in self.each] == list(range(experts)))
        among, choices = chosen_among(self._chosen_ids())
        _require((among or self.each[0].classes) == experts and len({p.token for p in self.each}) == 1)
        self.once = among > 0 and choices == _shape(self.choices)[1]
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
        self.inside = inside

    def rewritten(self) -> Callable[[], None]:
        """Add the nodes of the rewritten loop, and return what then takes the loop out.

        Raises:
            _OtherwiseError: it is another kind of loop; nothing has changed.
        """
        self.find()
        try:
            with self.graph.inserting_before(self.sinks[-1]):
                self.ids = self._ids(self.choices)
                last = self._run(self.regions[0])
        except Exception:
            for node in reversed(self.made):
                self.graph.erase_node(node)
            raise

        def take_out() -> None:
            self.sinks[-1].replace_all_uses_with(last)
            for node in sorted(self.inside, key=self.order.__getitem__, reverse=True):
                self.graph.erase_node(node)

        return take_out

    def _chosen_ids(self) -> fx.Node:
        one_hot = None if len(_shape(self.choices)) == 2 else one_hot_of(self.choices)
        return self.choices if one_hot is None else one_hot.args[0]  # type: ignore[return-value]

    def _ids(self, choices: fx.Node) -> fx.Node:
        """Return numbers of experts, [t, r], also of those from which a mask has taken a token."""
        if len(_shape(self.choices)) == 2:
            return choices
        before: Any = choices.args[0]
        if choices.target is aten.one_hot.default:
            return before  # type: ignore[no-any-return]
        shape = [list(choices.args[1])[:-1]] if choices.target in VIEWS else []  # type: ignore[arg-type]
        ids = self._ids(before)
        return self._call(choices, choices.target, ids, *shape) if shape else ids

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
        _require(target is not aten.dropout.default or (isinstance(x, _Rows) and x.each))  # each choice has its own
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
            _require(_shape(x)[:2] == _shape(self.choices)[:2])
            return _Rows(x, each=True)
        _require(indices[:1] == [None] and at == [False, True])
        _require(x.target is aten.unsqueeze.default and x.args[1] == 0)
        return _Rows(x.args[0], each=False, front=True)

    def _alongside(self, node: fx.Node, x: fx.Node, like: fx.Node) -> fx.Node:
        return self._call(node, torch.ops.autopar_capture.alongside.default, x, like)

    def _product(self, node: fx.Node, x: Any, weight: _PerExpert, bias: Any = None, *, transposed: bool) -> _Rows:
        _require(isinstance(x, _Rows) and not x.front and len(_shape(weight.nodes[0])) == 2)
        _require(bias is None or isinstance(bias, _PerExpert))
        rows, stacked = x.node, self._stacked(node, weight.nodes)
        dtype = autocast_dtype(weight.nodes[0].meta["val"])
        if dtype is not None:
            rows, stacked = (self._call(node, aten.to.dtype, v, dtype) for v in (rows, stacked))
        ids = self._alongside(node, self.ids, rows)
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
        return self._call(node, aten.embedding.default, self._stacked(node, given.nodes), ids)

    def _stacked(self, node: fx.Node, each: Sequence[fx.Node]) -> fx.Node:
        """Return a tensor of all experts: the one that they were taken from, if it is."""
        before: list[Any] = [n.args[0] if n.args else None for n in each]
        if all(n.target is aten.select.int and n.args[1:] == (0, e) for e, n in enumerate(each)):
            whole: fx.Node = before[0]
            if all(_same(x, whole) for x in before) and _shape(whole)[0] == len(each):
                return whole
        if all((n.target, *n.args[1:]) in TURNS and len(_shape(n)) == 2 for n in each):
            return self._call(node, aten.transpose.int, self._stacked(node, before), 1, 2)
        return self._call(node, aten.stack.default, list(each))

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
                return self._vectors(node, a, self._alongside(node, self.ids, rows[0].node))
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
            _require(accumulates or self.once)
            _require(isinstance(args[2], _Rows if accumulates else _Sum))
            rows = args[2] if accumulates else args[2].rows
        _require(isinstance(rows, _Rows) and rows.each and not rows.front)
        made = rows.node
        if len(_shape(self.choices)) == 3:
            taken = self._call(node, aten.sum.dim_IntList, self.choices, [-1])
            taken = self._call(node, aten.unsqueeze.default, self._alongside(node, taken, made), -1)
            made = self._call(node, aten.masked_fill.Scalar, made, self._call(node, aten.eq.Scalar, taken, 0), 0)
        total = self._call(node, aten.sum.dim_IntList, made, [1])
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
