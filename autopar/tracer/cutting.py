"""Cuts the opaque ops that stand for skipped blocks out of an exported graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.tracer.convert import module_path
from autopar.tracer.repeated import Run
from autopar.tracer.skipping import HEAD, OPS, TAIL, Skipping

_CONVERSIONS = {
    torch.ops.aten.to.dtype,
    torch.ops.aten.to.dtype_layout,
    torch.ops.aten.to.device,
    torch.ops.aten.to.other,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.type_as.default,
}


def cut(skipped: Skipping, graph: fx.Graph) -> bool:
    """Take the opaque ops out of ``graph``; return False if the graph would have a gap."""
    calls: dict[tuple[int, int], fx.Node] = {}
    results: dict[tuple[int, int], fx.Node] = {}
    for node in graph.nodes:
        if node.target in (OPS.block.default, OPS.block_enters.default):
            calls[node.args[1:]] = node
        elif node.target is OPS.block_returns.default:
            results[node.args[1:]] = node
    for watched in skipped.watched:
        if not watched.skipped:
            continue
        keys = [(watched.number, i) for i in range(len(watched.run.paths))]
        if watched.broken or not _cut(watched.run, [calls.get(k) for k in keys], [results.get(k) for k in keys]):
            return False
        skipped.cut.append(watched.run)
    for node in (*calls.values(), *results.values()):
        if node.target is not OPS.block.default:
            graph.erase_node(node)
    return True


def _cut(run: Run, calls: Sequence[fx.Node | None], results: Sequence[fx.Node | None]) -> bool:
    """Connect the last two blocks to the first three. Blocks must form a chain whose links nothing else reads."""
    found = [c for c in calls if c is not None]
    if len(found) != len(run.paths):
        return False
    made = [_block_outputs(call, result) for call, result in zip(found, results, strict=True)]
    links = [_links(found[k], made[k - 1]) for k in range(1, len(found))]
    last = len(found) - TAIL - 1
    if any(link != links[0] for link in links) or not _is_read_by_next_only(run, found, made, last):
        return False
    for at, old in made[last].items():
        old.replace_all_uses_with(made[HEAD - 1][at])
    for call in reversed(found[HEAD : last + 1]):
        for item in list(call.users):
            call.graph.erase_node(item)
        call.graph.erase_node(call)
    return True


def _block_outputs(call: fx.Node, result: fx.Node | None) -> dict[int, fx.Node]:
    """Return the tensors that a block itself returns, by position."""
    if result is not None:
        return dict(enumerate(result.args[0]))  # type: ignore[arg-type]
    return {int(str(u.args[1])): u for u in call.users if u.target is operator.getitem}


def _links(call: fx.Node, before: dict[int, fx.Node]) -> list[Any]:
    """Return a block's inputs: positions of outputs of the block before, or nodes that all blocks read."""
    positions = {_unconverted(node): at for at, node in before.items()}
    read = [_unconverted(node) for node in call.args[0]]  # type: ignore[union-attr, arg-type]
    return [positions.get(node, node) for node in read]


def _unconverted(node: fx.Node) -> fx.Node:
    """Return the argument of a chain of conversions that change nothing and so return their argument."""
    while node.target in _CONVERSIONS and isinstance(node.args[0], fx.Node):
        value, given = node.meta["val"], node.args[0].meta["val"]
        if (value.dtype, value.shape, value.stride()) != (given.dtype, given.shape, given.stride()):
            break
        node = node.args[0]
    return node


def _is_read_by_next_only(run: Run, calls: Sequence[fx.Node], made: Sequence[dict[int, fx.Node]], last: int) -> bool:
    """Whether only the next block reads what each skipped block returns."""
    after = run.paths[last + 1]
    for k in range(HEAD, last + 1):
        for user in (user for node in made[k].values() for user in node.users):
            path = module_path(user.meta)
            inside = k == last and (path == after or path.startswith(f"{after}."))
            if user is not calls[k + 1] and not inside:
                return False
    return True
