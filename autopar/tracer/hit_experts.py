"""Loops over the experts that were hit, ``for e in (mask.sum((1, 2)) > 0).nonzero():``, as loops over all experts.

How many iterations there are depends on values. An expert that was not hit has no tokens in the mask, so a loop that
picks tokens by ``mask[e]`` does nothing for it. So an export goes through all experts, and ``stack_expert_loops``
rewrites that loop. Python code may do anything else, such as count the experts. So another export goes through one
expert only, and must give the same program in all that lies outside of the other experts' iterations.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx

from autopar._torch import HigherOrderOperator, constant_of, traced_node
from autopar.errors import CaptureError
from autopar.structure import Structure
from autopar.tracer.expert_loops import CHECKS, WHERES, are_left, chosen_among, one_hot_in, others_regions

aten = torch.ops.aten
_COPIES = {aten.lift_fresh_copy.default, aten.detach_.default}
"""Between a constant and its reader."""

_FLAT = {aten.squeeze.dim, aten.squeeze.default, aten.flatten.using_ints, aten.view.default, aten.reshape.default}
"""Between the numbers of experts, [h, 1], and the same, [h]."""


@dataclass
class Unrolled:
    """Loops over experts that were hit, in one export.

    Args:
        only: the expert for which they run; None for all.
        lengths: how many experts each has.
        programs: what the program does, by the only expert for which loops would run.
        left: whether some could not be rewritten.
        notices: differences between the program and the model.
    """

    only: int | None
    lengths: list[int] = field(default_factory=list)
    programs: dict[int, list[Any]] = field(default_factory=dict)
    left: bool = False
    notices: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def unrolling(self) -> Iterator[None]:
        """Go through experts that were hit as if all had been, or only one."""
        ordinary: Callable[[Tensor], Iterator[Tensor]] = Tensor.__iter__
        formatted: Callable[[Tensor, str], str] = Tensor.__format__

        def iterate(hit: Tensor) -> Iterator[Tensor]:
            mask = _mask(traced_node(hit))
            count = 0 if mask is None else _experts(mask)
            if mask is None or count < 2:
                return ordinary(hit)
            self.lengths.append(count)
            return _iterations(mask, range(count) if self.only is None else [self.only], hit.ndim)

        def text(x: Tensor, spec: str) -> str:
            known = constant_of(x)
            return formatted(x, spec) if known is None or x.ndim else format(known.item(), spec)

        with mock.patch.object(Tensor, "__iter__", iterate), mock.patch.object(Tensor, "__format__", text):
            yield

    def simplify(self, program: torch.export.ExportedProgram, returned: Structure) -> None:
        """Give the unrolled loops of ``program`` the form of a loop over all experts, and note what it does."""
        if not self.lengths:
            return
        _inline_without_grad(program.graph_module)
        _pick_by_number(program)
        plain = (returned.paths, returned.plain, returned.dropped)
        self.programs = {e: [*_without_others(program, e), plain] for e in (0, 1)}

    def finish(self, program: torch.export.ExportedProgram) -> None:
        """Drop what computed which experts were hit, and their numbers."""
        if not self.lengths:
            return
        program.graph.eliminate_dead_code(_has_effects)
        parts = [m.graph for m in program.graph_module.modules() if isinstance(m, fx.GraphModule)]
        hits = any(node.target is aten.nonzero.default for part in parts for node in part.nodes)
        self.left = hits or are_left(program.graph)
        stacks = (n.args[0] for n in program.graph.nodes if n.target is aten.stack.default)
        if any(n.op == "placeholder" for stack in stacks for n in stack):
            self.notices.append("parameters of an expert that no token chooses get gradients of zeros, and not None")
        specs = program.graph_signature.input_specs
        inputs = [n for n in program.graph.nodes if n.op == "placeholder"]
        for node, spec in zip(inputs, list(specs), strict=True):
            if spec.kind.name == "CONSTANT_TENSOR" and not node.users:
                program.graph.erase_node(node)
                specs.remove(spec)


def _mask(hit: fx.Node | None) -> fx.Node | None:
    """Return the mask [e, ...] of tokens of which ``hit`` are the numbers ``e`` that have any."""
    node: Any = hit
    while node is not None and node.target in _FLAT:
        node = node.args[0]
    if node is None or node.target is not aten.nonzero.default:
        return None
    node = node.args[0]
    if node.target not in (aten.gt.Scalar, aten.greater.Scalar, aten.ne.Scalar) or node.args[1] != 0:
        return None
    node = node.args[0]
    if node.target is not aten.sum.dim_IntList or len(node.args) > 2 or not node.args[1]:
        return None
    mask, dims = node.args
    ndim = mask.meta["val"].ndim
    return mask if sorted(d % ndim for d in dims) == list(range(1, ndim)) else None


def _experts(mask: fx.Node) -> int:
    """Return how many experts there are, of which a mask may have one more; 0 if it is not such a mask."""
    one_hot: Any = one_hot_in(mask)
    return 0 if one_hot is None else chosen_among(one_hot.args[0])[0] or int(mask.meta["val"].shape[0])


def _iterations(mask: fx.Node, experts: Sequence[int], ndim: int) -> Iterator[Tensor]:
    for expert in experts:
        before = next(iter(reversed(mask.graph.nodes)))
        yield torch.tensor([expert] if ndim == 2 else expert)
        for node in reversed(mask.graph.nodes):
            if node is before:
                break
            if node.target in WHERES and not _picks(node.args[0], mask):
                raise CaptureError(
                    "A loop over experts that were hit picks tokens by another mask.",
                    found=str(node.args[0]),
                    hint="pick the tokens of each expert by the mask that says which were hit.",
                )


def _picks(node: Any, mask: fx.Node) -> bool:
    while node.target in (aten.squeeze.dim, aten.index.Tensor, aten.select.int):
        node = node.args[0]
    return node is mask


def _inline_without_grad(module: fx.GraphModule) -> None:
    """Inline code under ``no_grad``, which makes masks, as code on detached tensors."""
    graph = module.graph
    for node in list(graph.nodes):
        if getattr(node.target, "__name__", "") != "wrap_with_set_grad_enabled" or node.args[0]:
            continue
        named = node.args[1]
        body = getattr(module, named.target)
        if any(n.op == "get_attr" for n in body.graph.nodes):
            continue
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        with graph.inserting_before(node):
            given = dict(zip(inputs, map(_detached, node.args[2:]), strict=True))
            made: Any = graph.graph_copy(body.graph, given)
        for user in list(node.users):
            user.replace_all_uses_with(made[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)
        graph.erase_node(named)
        delattr(module, named.target)


def _detached(given: Any) -> Any:
    value = given.meta["val"] if isinstance(given, fx.Node) else None
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return given
    made = given.graph.call_function(aten.detach.default, (given,))
    made.meta = dict(given.meta)
    return made


def _pick_by_number(program: torch.export.ExportedProgram) -> None:
    """Turn masks ``mask[tensor([e])].squeeze(0)`` into ``mask[e]``."""
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    for where in [n for n in program.graph.nodes if n.target in WHERES]:
        squeeze: Any = where.args[0]
        row = squeeze.args[0] if squeeze.target is aten.squeeze.dim and squeeze.args[1] == 0 else squeeze
        index: Any = row.args[1][0] if row.target is aten.index.Tensor and len(row.args[1]) == 1 else None
        while isinstance(index, fx.Node) and index.target in _COPIES:
            index = index.args[0]
        known = program.constants.get(constants.get(getattr(index, "name", ""), ""))
        if isinstance(known, Tensor) and known.shape == (1,) and squeeze is not row:
            with program.graph.inserting_before(where):
                mask = program.graph.call_function(aten.select.int, (row.args[0], 0, int(known)))
            mask.meta = squeeze.meta
            where.args = (mask,)


def _has_effects(node: fx.Node) -> bool:
    if isinstance(node.target, HigherOrderOperator):
        return True  # it may change a buffer
    return node.is_impure() and node.target not in _COPIES and node.target not in CHECKS


def _without_others(program: torch.export.ExportedProgram, expert: int) -> list[Any]:
    """Return what a program computes if loops go through one expert only, as text."""
    regions = list(others_regions(program.graph, expert))
    before: dict[Any, Any] = {region[-1]: region[-1].args[0] for region in regions}
    dropped = {n for region in regions for n in region}

    def kept(node: fx.Node) -> fx.Node:
        while node in before:
            node = before[node]
        return node

    live, waiting = set[fx.Node](), [n for n in program.graph.nodes if _has_effects(n) and n not in dropped]
    waiting = [n for n in waiting if n.op != "placeholder"]
    while waiting:
        node = waiting.pop()
        if node not in live:
            live.add(node)
            waiting += map(kept, node.all_input_nodes)
    constants = program.graph_signature.inputs_to_lifted_tensor_constants
    names = [n.name for n in program.graph.nodes if n.op == "placeholder"]
    values = {name: str(program.constants.get(constants.get(name, ""), name)) for name in names}
    return _as_text(program.graph_module, [n for n in program.graph.nodes if n in live], kept, values)


def _as_text(
    module: fx.GraphModule, nodes: Iterable[fx.Node], kept: Callable[[fx.Node], fx.Node], values: Mapping[str, str]
) -> list[Any]:
    """Return what ``nodes`` compute, without the names of nodes and graphs, which number them."""
    numbers: dict[fx.Node, str] = {}
    lines = []
    for node in nodes:
        numbers[node] = f"%{len(numbers)}"
        inner = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        what = values.get(node.name, "") if node.op == "placeholder" else str(node.target)
        if isinstance(inner, fx.GraphModule):
            what = str(_as_text(inner, inner.graph.nodes, lambda n: n, {}))
        lines.append((what, str(fx.map_arg((node.args, node.kwargs), lambda n: numbers[kept(n)]))))
    return lines
