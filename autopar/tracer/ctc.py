"""CTC loss: torch's own version creates a table whose shape depends on values, which no graph can hold."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor, fx

import autopar.ops  # noqa: F401  registers torch.ops.autopar

MEAN, SUM = 1, 2
_PACKED = "_autopar_packed_from"
_ordinary, _masked_select = torch.ctc_loss, Tensor.masked_select


@contextlib.contextmanager
def ctc_losses_as_ops() -> Iterator[None]:
    """Compute CTC losses with an op of our own during an export, and unpack labels that were packed for it."""
    with (
        mock.patch.object(torch, "ctc_loss", _ctc_loss),
        mock.patch.object(Tensor, "masked_select", _recording_select),
    ):
        yield


def drop_packed_selections(graph: fx.Graph) -> None:
    """Drop masked selections that only the loss read, and lengths of selections, which only checks still read."""
    aten = torch.ops.aten
    for node in [n for n in graph.nodes if n.target in (aten.masked_select.default, aten.sym_size.int)]:
        after = _dependents(node)
        if all(n is node or _is_check(n) for n in after):
            for n in reversed(after):
                graph.erase_node(n)


def _dependents(node: fx.Node) -> list[fx.Node]:
    """Return the node and everything that depends on it, in order."""
    found = {node}
    for n in node.graph.nodes:
        if found & set(n.all_input_nodes):
            found.add(n)
    return [n for n in node.graph.nodes if n in found]


def _is_check(node: fx.Node) -> bool:
    name = str(node.target)
    arithmetic = getattr(node.target, "__module__", "") == "_operator"
    return arithmetic or any(part in name for part in ("sym_", "assert", "_check"))


def _recording_select(x: Tensor, mask: Tensor) -> Tensor:
    packed = _masked_select(x, mask)
    setattr(packed, _PACKED, (x, mask))
    return packed


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """Compute the loss with ``torch.ops.autopar.ctc``; the arguments are those of ``torch.ctc_loss``."""
    frames, labels = (torch.as_tensor(lengths, dtype=torch.int64) for lengths in (input_lengths, target_lengths))
    if log_probs.dim() != 3:
        return _ordinary(log_probs, targets, frames, labels, blank, reduction, zero_infinity)
    rows = targets if targets.dim() == 2 else _unpacked(targets, labels)
    losses: Tensor
    losses, _ = torch.ops.autopar.ctc(log_probs, rows, frames, labels, blank=blank, zero_infinity=zero_infinity)
    if reduction == MEAN:
        return (losses / labels.clamp(min=1).to(losses.dtype)).mean()
    return losses.sum() if reduction == SUM else losses


def _unpacked(targets: Tensor, lengths: Tensor) -> Tensor:
    """Return labels that are packed in one row [sum of lengths] as rows [n, at most that many]."""
    if hasattr(targets, _PACKED):
        x, mask = getattr(targets, _PACKED)
        first = torch.argsort((~mask).expand_as(x).reshape(-1).to(torch.int64), stable=True)
        targets = x.reshape(-1)[first]
    starts = lengths.cumsum(0) - lengths
    places = starts.unsqueeze(1) + torch.arange(targets.shape[0], device=targets.device)
    return targets[places.clamp(max=targets.shape[0] - 1)]
