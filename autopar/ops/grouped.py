"""Grouped products for a rank that holds the matrices of some experts, from ``first`` on.

``ends``, the cumulative counts of all experts, assigns rows to experts. Rows of other ranks' experts become zeros, to
be summed over the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ops.registration import define, once_differentiable

aten = torch.ops.aten


def _own(ends: Tensor, first: int, experts: int) -> tuple[Tensor, Tensor]:
    """Return where the rows of these experts begin, and their ends relative to that."""
    start = ends[first - 1] if first else ends.new_zeros(())
    return start, ends[first : first + experts] - start


def _bounds(ends: Tensor, first: int, experts: int) -> list[tuple[int, int]]:
    bounds = [0, *ends.tolist()]
    return [(bounds[i], bounds[i + 1]) for i in range(first, first + experts)]


def _forward(rows: Tensor, weight: Tensor, ends: Tensor, first: int) -> Tensor:
    """[t, k], [e, k, n] -> [t, n]"""
    t, experts = rows.shape[0], weight.shape[0]
    if rows.device.type == "cpu":
        out = rows.new_zeros(t, weight.shape[2])
        for expert, (low, high) in enumerate(_bounds(ends, first, experts)):
            torch.mm(rows[low:high], weight[expert], out=out[low:high])
        return out
    start, own = _own(ends, first, experts)
    place = torch.arange(t, device=rows.device)
    turned: Tensor = aten._grouped_mm(rows.index_select(0, (place + start) % t), weight, own)
    turned = turned.masked_fill((place >= own[-1]).unsqueeze(1), 0)  # rows that the kernel does not write
    return turned.index_select(0, (place - start) % t).contiguous()


def _forward_fake(rows: Tensor, weight: Tensor, ends: Tensor, first: int) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2])


def _weight(rows: Tensor, grad: Tensor, ends: Tensor, first: int, experts: int) -> Tensor:
    """[k, t], [t, n] -> [e, k, n]"""
    t = rows.shape[1]
    if rows.device.type == "cpu":
        out = rows.new_zeros(experts, rows.shape[0], grad.shape[1])
        for expert, (low, high) in enumerate(_bounds(ends, first, experts)):
            torch.mm(rows[:, low:high], grad[low:high], out=out[expert])
        return out
    start, own = _own(ends, first, experts)
    place = (torch.arange(t, device=rows.device) + start) % t
    made: Tensor = aten._grouped_mm(rows.index_select(1, place), grad.index_select(0, place), own)
    return made.contiguous()


def _weight_fake(rows: Tensor, grad: Tensor, ends: Tensor, first: int, experts: int) -> Tensor:
    return rows.new_empty(experts, rows.shape[0], grad.shape[1])


def _backward(rows: Tensor, weight: Tensor, ends: Tensor, grad: Tensor, first: int) -> tuple[Tensor, Tensor]:
    dx = _forward(grad, weight.transpose(1, 2), ends, first)
    return dx, _weight(rows.t(), grad, ends, first, weight.shape[0])


def _backward_fake(rows: Tensor, weight: Tensor, ends: Tensor, grad: Tensor, first: int) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weight.new_empty(weight.shape)


define("grouped_mm_part(Tensor rows, Tensor weight, Tensor ends, SymInt first) -> Tensor", _forward, _forward_fake)
define(
    "grouped_mm_part_weight(Tensor rows, Tensor grad, Tensor ends, SymInt first, SymInt experts) -> Tensor",
    _weight,
    _weight_fake,
)
define(
    "grouped_mm_part_backward(Tensor rows, Tensor weight, Tensor ends, Tensor grad, SymInt first) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
for _name in ("grouped_mm_part", "grouped_mm_part_weight", "grouped_mm_part_backward"):
    once_differentiable(_name)
