"""Turn an op and its chosen strategy into the call that each rank makes."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir import Arg, Node, Value, values_in
from autopar.mesh import Mesh
from autopar.sharding.local import LocalLength, LocalOffset, local_length
from autopar.sharding.spec import ShardingSpec
from autopar.sharding.strategy import Strategy
from autopar.strategies.registry import LocalArg, LocalCall, Metas, Rule, find_lowering, find_rule


def localize(node: Node, strategy: Strategy, metas: Metas, mesh: Mesh) -> LocalCall:
    """Return the (op, args, kwargs) that a rank runs on its shards. Tensors stay in place as ``Value``.

    Shapes and offsets in the arguments become local: integers if all ranks agree, otherwise ``LocalLength`` and
    ``LocalOffset``.
    """
    lower = find_lowering(node)
    if lower is not None:
        return lower(node, strategy, metas, mesh)
    rule = find_rule(node)
    return (node.op, node.args, node.kwargs) if rule is None else local_shapes(node, strategy, mesh, rule)


def local_shapes(node: Node, strategy: Strategy, mesh: Mesh, rule: Rule) -> LocalCall:
    """Return the call with each of the rule's ``shape_args`` replaced by the local shape of its result."""
    args: list[LocalArg] = list(node.args)
    kwargs: dict[str, LocalArg] = dict(node.kwargs)
    for place, index in rule.shape_args.items():
        meta, spec = node.outputs[index], strategy.outputs[index]
        if meta is None or spec is None:
            continue
        shape = local_shape(meta.shape_in(spec), spec, mesh)
        if isinstance(place, str):
            if place in kwargs:
                kwargs[place] = shape
        elif place < len(args):
            args[place] = shape
    return node.op, tuple(args), tuple(kwargs.items())


def local_shape(shape: Sequence[int], spec: ShardingSpec, mesh: Mesh) -> tuple[int | LocalLength, ...]:
    return tuple(local_length(n, axes, mesh) for n, axes in zip(shape, spec.dims, strict=True))


def local_offset(n: int, axes: Sequence[int], before: Arg = 0) -> int | LocalOffset:
    """Return where a rank's share of ``n`` elements begins: 0 if nothing is cut.

    Args:
        before: where these elements begin themselves: a ``LocalOffset`` if they belong to one of several micro-batches.
    """
    rows = before.micro_rows if isinstance(before, LocalOffset) else 0
    return LocalOffset(n, tuple(axes), rows) if axes or rows else 0


def operand(node: Node, position: int) -> int | None:
    """Return the index in ``node.inputs`` of the tensor at argument ``position``, or None if it is absent."""
    if position >= len(node.args) or not isinstance(node.args[position], Value):
        return None
    return sum(1 for arg in node.args[:position] for _ in values_in(arg))
