"""Enumerate the strategies of an op on a mesh from its rule.

Each mesh axis independently replicates the work, takes one factor of the rule, or passes partial sums through one of
the sets of operands in which the op is linear.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from autopar.ir import Node, TensorMeta
from autopar.mesh import Mesh
from autopar.sharding.halo import Halo
from autopar.sharding.loan import Loan
from autopar.sharding.spec import Reduction, ShardingSpec, length
from autopar.sharding.strategy import MOVED, RING, Strategy
from autopar.strategies.combine import Combine
from autopar.strategies.notation import Bound, Equation, bind, parse
from autopar.strategies.registry import (
    LinearSets,
    Metas,
    Moves,
    Rule,
    find_combining,
    find_lending,
    find_rule,
    find_windows,
    on_change,
)

_cache: dict[tuple[object, ...], tuple[Strategy, ...]] = {}
_bounds: dict[tuple[object, ...], Bound | None] = {}
on_change(_cache.clear)
on_change(_bounds.clear)

Cuts = Mapping[str, tuple[int, ...]]
"""The mesh axes that cut each factor, in increasing order."""


def strategies(node: Node, metas: Metas, mesh: Mesh) -> tuple[Strategy, ...]:
    """Return every strategy of ``node`` on ``mesh``, the replicated one first; without a rule it is the only one.

    Args:
        metas: global shape and dtype of each of ``node.inputs``.

    Raises:
        RuleError: if the op's rule does not fit these shapes.
    """
    key = (node.op, node.signature, tuple(metas), node.outputs, mesh.shape)
    if key not in _cache:
        _cache[key] = tuple(_enumerate(node, metas, mesh))
    return _cache[key]


def bound(node: Node, metas: Metas) -> Bound | None:
    """Return the op's rule bound to the node's shapes, or None without a rule."""
    key = (node.op, node.signature, tuple(metas), node.outputs)
    if key not in _bounds:
        rule = find_rule(node)
        _bounds[key] = bind(_equation(rule, node, metas), tuple(metas), node.outputs) if rule else None
    return _bounds[key]


def flops(node: Node, metas: Metas) -> float:
    """Return the FLOPs of the whole op by its rule, a multiply-add counting as two; 0 if the rule states none."""
    rule = find_rule(node)
    if rule is None or rule.flops is None:
        return 0.0
    if not isinstance(rule.flops, str):
        return float(rule.flops(node, metas))
    fitted = bound(node, metas)
    return 2.0 * math.prod(fitted.sizes.values()) if fitted else 0.0


def missing_rule(node: Node, metas: Metas = ()) -> str:
    """Return a template line that registers a rule for ``node``'s op, with every dim marked as never cut."""
    letters = (f"d{i}" for i in itertools.count())

    def term(meta: TensorMeta) -> str:
        return " ".join(f"[{next(letters)}]" for _ in meta.shape) or "-"

    operands = ", ".join(map(term, metas)) or ", ".join("[...]" for _ in node.inputs)
    results = ", ".join(term(m) for m in node.outputs if m is not None)
    namespace, name = node.packet.split(".", 1) if "." in node.packet else ("", node.packet)
    return f'autopar.register_rule("{namespace}.{name}", "{operands} -> {results}")'


def _enumerate(node: Node, metas: Metas, mesh: Mesh) -> Iterator[Strategy]:
    rule = find_rule(node)
    if rule is None:
        yield _replicated(node, metas, mesh)
        return
    fitted = bind(_equation(rule, node, metas), tuple(metas), node.outputs)
    linear = _linear(rule, node, metas)
    even = {f for f in fitted.sizes if rule.even} | set(_grouped(fitted))
    seen: set[tuple[object, ...]] = set()
    moves, rings = _pairs(rule.moves, node, metas), _pairs(rule.rings, node, metas)
    options = [_choices(fitted, linear, moves, rings, k) for k in mesh.shape]
    for axes in itertools.product(*options):
        if (moves and not _tells_rows(axes, moves)) or any(f"{s}{RING}{t}" in axes and s in axes for s, t in rings):
            continue
        made = _strategy(fitted, axes, linear, even, rule.reduction, mesh)
        if made is not None and _sliding(fitted, axes) and halos(node, made, metas, mesh) is None:
            continue
        if made is not None and fitted.combined.intersection(axes) and combine(node, made, metas, mesh) is None:
            continue
        if made is not None and (made.inputs, made.outputs) not in seen:
            seen.add((made.inputs, made.outputs))
            yield made


def _sliding(fitted: Bound, axes: Sequence[str]) -> bool:
    return any(a in fitted.tied for a in axes)


def halos(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> tuple[Halo, ...] | None:
    """Return the rows that the strategy's op reads of its neighbours' shards, or None if it cannot get them."""
    find = find_windows(node)
    return () if find is None else find(node, strategy, metas, mesh)


def combine(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Combine | None:
    """Return the summaries that ranks exchange to run the strategy, or None if it needs none."""
    find = find_combining(node)
    return None if find is None else find(node, strategy, metas, mesh)


def lent(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> Loan | None:
    """Return the rows that ranks lend to each other to run the strategy, or None if they lend none."""
    find = find_lending(node)
    return None if find is None else find(node, strategy, metas, mesh)


def _pairs(pairs: Moves | Callable[[Node, Metas], Moves], node: Node, metas: Metas) -> Moves:
    return pairs if isinstance(pairs, tuple) else pairs(node, metas)


def _choices(fitted: Bound, linear: LinearSets, moves: Moves, rings: Moves, ways: int) -> tuple[str, ...]:
    if ways == 1:
        return ("",)
    both = [f"{a}{MOVED}{e}" for a, e in moves if {a, e} <= set(fitted.cuttable)]
    both += [f"{s}{RING}{t}" for s, t in rings if s in fitted.cuttable and fitted.sizes[t] > 1]
    return ("", *fitted.cuttable, *both, *(f"P{i}" for i in range(len(linear))))


def _tells_rows(axes: Sequence[str], moves: Moves) -> bool:
    """Whether the cuts inside tell which rows a rank has, by whatever way it got them.

    Where an axis that stays cuts ``a`` further than one that moves, the rows inside are not adjacent in ``a``. They
    would be if another factor moved, or none, so these are left out.
    """
    for axis, choice in enumerate(axes):
        outside, moved, inside = choice.rpartition(MOVED)
        if any(inside == e for _, e in moves):
            further = {a for a in axes[axis + 1 :] if any(a == b for b, _ in moves)}
            if further and (not moved or further != {outside}):
                return False
    return True


def _strategy(
    fitted: Bound, axes: Sequence[str], linear: LinearSets, even: set[str], reduction: Reduction, mesh: Mesh
) -> Strategy | None:
    """Return the strategy in which mesh axis ``i`` does ``axes[i]``, or None if the shapes forbid it."""
    rings = {i for i, a in enumerate(axes) if RING in a}
    chosen = [a.split(RING if RING in a else MOVED) for a in axes]
    cuts = {f: tuple(i for i, a in enumerate(chosen) if f in a) for a in chosen for f in a if f in fitted.sizes}
    outside = {a[0] for i, a in enumerate(chosen) if len(a) > 1 and i not in rings}
    inside = {i: a[1] for i, a in enumerate(chosen) if len(a) > 1 and i not in rings}
    lengths = ((n, f, at) for f, at in cuts.items() for n in (fitted.sizes[f], *fitted.tied.get(f, ())))
    if not all(_fits(n, at, mesh, f in even) for n, f, at in lengths):
        return None
    partial_in: list[dict[int, Reduction]] = [{} for _ in fitted.inputs]
    passed: dict[int, Reduction] = {}
    for axis, choice in enumerate(axes):
        if choice and axis not in inside and axis not in rings and choice not in cuts:
            passed[axis] = "sum"
            for operand in linear[int(choice[1:])]:
                partial_in[operand][axis] = "sum"
    inputs: list[ShardingSpec] = []
    outputs: list[ShardingSpec | None] = []
    for dims, partial in zip(fitted.inputs, partial_in, strict=True):
        spec = _spec(dims, fitted, _cuts_of(dims, cuts, outside, inside), partial, mesh)
        if spec is None:
            return None
        inputs.append(spec)
    for index, result in enumerate(fitted.outputs):
        if result is None:
            outputs.append(None)
            continue
        summed = {a for f, at in cuts.items() if _sums(fitted, index, f) for a in at}
        completes = dict.fromkeys(sorted(summed - inside.keys() - rings), reduction)
        spec = _spec(result, fitted, _cuts_of(result, cuts, outside, inside), {**passed, **completes}, mesh)
        if spec is None:
            return None
        outputs.append(spec)
    work = math.prod(1.0 / mesh.shape[a] for a in {a for at in cuts.values() for a in at})
    return Strategy(tuple(inputs), tuple(outputs), tuple(axes), work)


def _cuts_of(dims: Sequence[tuple[str, ...]], cuts: Cuts, outside: set[str], inside: Mapping[int, str]) -> Cuts:
    """Return the cuts of a term: an axis that moves cuts the inner factor where the term has it, else the outer one."""
    if not inside:
        return cuts
    there = {f for d in dims for f in d}
    return {f: tuple(a for a in at if not (f in outside and inside.get(a) in there)) for f, at in cuts.items()}


def _sums(fitted: Bound, index: int, factor: str) -> bool:
    """Whether result ``index`` is partial if ``factor`` is cut."""
    dims, whole = fitted.outputs[index], fitted.whole[index]
    if dims is None or factor in whole or (factor.startswith(".") and "..." in whole):
        return False
    return not any(factor in d for d in dims) and any(factor in d for term in fitted.inputs for d in term)


def _spec(
    dims: Sequence[tuple[str, ...]], fitted: Bound, cuts: Cuts, partial: Mapping[int, Reduction], mesh: Mesh
) -> ShardingSpec | None:
    """Return the spec of a tensor under these cuts, or None if a group is cut behind an uncut factor."""
    spec = []
    for factors in dims:
        at: tuple[int, ...] = ()
        blocked = False
        for factor in factors:
            here = cuts.get(factor, ())
            if here and (blocked or (at and here[0] < at[-1])):
                return None
            at += here
            blocked = blocked or length(fitted.sizes[factor], here, mesh) > 1
        spec.append(at)
    return ShardingSpec.of(tuple(spec), tuple(partial.items()))


def _fits(n: int, axes: Sequence[int], mesh: Mesh, even: bool) -> bool:
    """Whether cutting ``n`` elements by ``axes`` leaves no rank empty, and with ``even`` gives all ranks the same."""
    if n % math.prod(mesh.shape[a] for a in axes) == 0:
        return True
    return not even and _least(n, tuple(mesh.shape[a] for a in axes)) > 0


@lru_cache(maxsize=65536)
def _least(n: int, ways: tuple[int, ...]) -> int:
    """Return the fewest elements on a rank when ``n`` elements are cut into each of ``ways`` parts in turn."""
    if not ways:
        return n
    size = -(-n // ways[0])
    last = max(n - size * (ways[0] - 1), 0)
    return min(_least(size, ways[1:]), _least(last, ways[1:]))


def _grouped(fitted: Bound) -> Iterable[str]:
    terms = (*fitted.inputs, *(o for o in fitted.outputs if o is not None))
    return (f for term in terms for dim in term if len(dim) > 1 for f in dim)


def _equation(rule: Rule, node: Node, metas: Metas) -> Equation:
    return parse(rule.notation if isinstance(rule.notation, str) else rule.notation(node, metas))


def _linear(rule: Rule, node: Node, metas: Metas) -> LinearSets:
    """Return the rule's linear sets, without those that name an absent operand or that a dtype breaks.

    Booleans have no sum, the sum of truncated parts is not the truncated sum, and 8-bit floats are scaled to the range
    of their values.
    """
    sets = rule.linear if isinstance(rule.linear, tuple) else rule.linear(node, metas)
    results = [o for o in node.outputs if o is not None]
    truncated = not all(map(_is_real, results))

    def summable(position: int) -> bool:
        if position >= len(metas):
            return False
        if any(d == "bool" or d.startswith("float8") for d in (metas[position].dtype, *(r.dtype for r in results))):
            return False
        return not (truncated and _is_real(metas[position]))

    return tuple(s for s in sets if all(map(summable, s)))


def _is_real(meta: TensorMeta) -> bool:
    """Whether the dtype can hold fractions."""
    return meta.dtype.startswith(("float", "bfloat", "complex"))


def _replicated(node: Node, metas: Metas, mesh: Mesh) -> Strategy:
    return Strategy(
        tuple(ShardingSpec.replicated(len(m.shape)) for m in metas),
        tuple(None if m is None else ShardingSpec.replicated(len(m.shape)) for m in node.outputs),
        ("",) * mesh.ndim,
    )
