"""Losses and their gradients. ``reduction`` is 0 (none), 1 (mean) or 2 (sum). Averaged dims are never cut."""

from __future__ import annotations

from autopar.ir import Node
from autopar.strategies.registry import LinearSets, Metas, Notation, aten, rule
from autopar.strategies.rules.terms import int_arg, replicated

NONE, MEAN = 0, 1


def _elementwise_loss(position: int) -> Notation:
    """Return the rule of an elementwise loss. The argument at ``position`` is its reduction."""

    def notation(node: Node, metas: Metas) -> str:
        reduction = int_arg(node, position, MEAN, "reduction")
        operand = "[...]" if reduction == MEAN else "..."
        return f"{', '.join([operand] * len(metas))} -> {'...' if reduction == NONE else '-'}"

    return notation


def _elementwise_loss_backward(position: int) -> Notation:
    """Return the rule of a loss's gradient. A mean's is divided by the count, which must be global, so it is whole."""

    def notation(node: Node, metas: Metas) -> str:
        operand = "[...]" if int_arg(node, position, MEAN, "reduction") == MEAN else "..."
        return f"{', '.join([operand] * len(metas))} -> {operand}"

    return notation


for _op in (aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.soft_margin_loss):
    rule(_op, _elementwise_loss(2))
for _op in (
    aten.mse_loss_backward,
    aten.smooth_l1_loss_backward,
    aten.huber_loss_backward,
    aten.soft_margin_loss_backward,
):
    rule(_op, _elementwise_loss_backward(3), linear=((0,),))


rule(aten.binary_cross_entropy, _elementwise_loss(3))
rule(aten.binary_cross_entropy_backward, _elementwise_loss_backward(4), linear=((0,),))
rule(aten.binary_cross_entropy_with_logits, _elementwise_loss(4))


def _nll(node: Node, metas: Metas) -> str:
    """Write the rule for ``n`` samples and classes ``c``. Images have spatial dims after these."""
    x = metas[0].shape
    if len(x) == 1:
        return replicated(node, metas)
    space = [f"s{i}" for i in range(len(x) - 2)]
    reduction = int_arg(node, 3, MEAN)
    samples = [f"[{d}]" if reduction == MEAN else d for d in ("n", *space)]
    weight = ", [c]" if len(metas) == 3 else ""
    result = " ".join(samples) if reduction == NONE else "-"
    return f"{' '.join([samples[0], '[c]', *samples[1:]])}, {' '.join(samples)}{weight} -> {result}, -"


def _nll_backward(node: Node, metas: Metas) -> str:
    """Write the rule. The total weight of the samples is an operand, so even the gradient of a mean may be cut."""
    x = metas[1].shape
    if len(x) == 1:
        return replicated(node, metas)
    samples = ["n", *(f"s{i}" for i in range(len(x) - 2))]
    grad = " ".join(samples) if int_arg(node, 4, MEAN) == NONE else "-"
    weight = ", [c]" if len(metas) == 5 else ""
    logits = " ".join(["n", "[c]", *samples[1:]])
    return f"{grad}, {logits}, {' '.join(samples)}{weight}, - -> {logits}"


GRADIENT: LinearSets = ((0,),)

for _op in (aten.nll_loss_forward, aten.nll_loss2d_forward):
    rule(_op, _nll)
for _op in (aten.nll_loss_backward, aten.nll_loss2d_backward):
    rule(_op, _nll_backward, linear=GRADIENT)
rule(aten._cdist_forward, "... p [m], ... r [m] -> ... p r")
rule(aten._cdist_backward, "... p r, ... p [m], ... r [m], ... p r -> ... p [m]", linear=GRADIENT)
