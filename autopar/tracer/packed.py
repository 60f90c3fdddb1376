"""Packed sequences: the number of rows in a pack depends on values, so no graph can hold one.

During an export, packing selects from the padded batch with a mask (``autopar.tracer.masked``), recurrent layers step
over all of it and keep the state of a sequence that has ended, and unpacking writes back with the same mask. Nothing is
sorted, since nothing depends on the order of sequences.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence

import autopar.ops  # noqa: F401  registers torch.ops.autopar
from autopar.errors import CaptureError

States = tuple[Tensor, ...]
_STEPS = "_autopar_steps"


@dataclass(frozen=True)
class _Steps:
    """Which steps of the padded batch belong to its sequences.

    Args:
        mask: [steps, batch]
        known: whether the longest sequence is known to have all steps.
    """

    mask: Tensor
    lengths: Tensor
    known: bool

    def unpacked(self, data: Tensor, value: Tensor | float = 0.0) -> Tensor:
        """Scatter [selected, ...] into [steps, batch, ...], with ``value`` where nothing was selected."""
        padded = torch.zeros((*self.mask.shape, *data.shape[1:]), dtype=data.dtype) + value
        padded[self.mask] = data
        return padded


@contextlib.contextmanager
def packed_by_mask() -> Iterator[None]:
    """Patch packing, unpacking and recurrent layers during an export."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_with_code(rnn.pack_padded_sequence, _pack))
        stack.enter_context(_with_code(rnn.pad_packed_sequence, _pad))
        for layer in (nn.LSTM, nn.GRU, nn.RNN):
            stack.enter_context(mock.patch.object(layer, "forward", _forward(layer.forward)))
        yield


@contextlib.contextmanager
def _with_code(function: Any, other: Any) -> Iterator[None]:
    """Replace the code of ``function`` itself, since models import functions by name."""
    ordinary, function.__code__ = function.__code__, other.__code__
    try:
        yield
    finally:
        function.__code__ = ordinary


def _pack(input: Any, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> Any:  # noqa: A002
    import importlib  # this code runs with the globals of torch's module

    return importlib.import_module("autopar.tracer.packed").pack(input, lengths, batch_first)


def _pad(sequence: Any, batch_first: bool = False, padding_value: float = 0.0, total_length: Any = None) -> Any:
    import importlib

    return importlib.import_module("autopar.tracer.packed").pad(sequence, batch_first, padding_value, total_length)


def pack(padded: Tensor, lengths: Tensor | Sequence[int], batch_first: bool) -> PackedSequence:
    """Pack like ``pack_padded_sequence``; lengths are assumed to be positive, and sorted if the call says so."""
    x = padded.transpose(0, 1) if batch_first else padded
    known = not isinstance(lengths, Tensor)
    x = x[: max(lengths)] if known else x
    n = torch.as_tensor(lengths, dtype=torch.int64)
    mask = torch.arange(x.shape[0]).unsqueeze(1) < n
    batch_sizes = mask.sum(1)
    setattr(batch_sizes, _STEPS, _Steps(mask, n, known))
    return PackedSequence(x[mask], batch_sizes)


def pad(
    sequence: PackedSequence, batch_first: bool, padding_value: float, total_length: int | None
) -> tuple[Tensor, Tensor]:
    """Unpack like ``pad_packed_sequence``.

    Its result is as long as the longest sequence, which must be all steps: if not, the program raises when it runs.
    """
    steps = _steps(sequence)
    n = steps.mask.shape[0]
    value = torch.full((), padding_value, dtype=sequence.data.dtype)
    if not steps.known and (total_length is None or total_length < n):
        longest, exact = steps.lengths.amax(), total_length is None
        value = torch.ops.autopar.checked_length(value, longest, steps=n if exact else total_length, exact=exact)
    padded = steps.unpacked(sequence.data, value)
    if total_length is not None:
        missing = max(total_length - n, 0)
        padded = torch.cat([padded, value.expand(missing, *padded.shape[1:])]) if missing else padded[:total_length]
    return padded.transpose(0, 1) if batch_first else padded, steps.lengths


def _steps(sequence: PackedSequence) -> _Steps:
    found = getattr(sequence.batch_sizes, _STEPS, None)
    if found is None:
        raise CaptureError(
            "This packed sequence was not packed in forward, so its lengths are unknown.",
            found="how long each of its steps is, which depends on values",
            hint="pass the padded batch and its lengths, and call pack_padded_sequence in forward.",
        )
    return found  # type: ignore[no-any-return]


def _forward(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input: Any, hx: Any = None) -> Any:  # noqa: A002  named as torch names it
        if not isinstance(input, PackedSequence):
            return original(self, input, hx)
        steps = _steps(input)
        out, last = _run(self, steps.unpacked(input.data), steps.mask, hx)
        return PackedSequence(out[steps.mask], input.batch_sizes), last if len(last) > 1 else last[0]

    return forward


def _run(layer: Any, x: Tensor, mask: Tensor, hx: Any) -> tuple[Tensor, States]:
    """Run all layers: [steps, batch, features] -> last layer's outputs, last states [layers and directions, ...]."""
    states: list[States] = []
    directions = ("", "_reverse") if layer.bidirectional else ("",)
    for k in range(layer.num_layers):
        found = []
        for suffix in directions:
            first = _first(layer, x, hx, len(states))
            out, last = _direction(layer, f"_l{k}{suffix}", x, mask, first)
            found.append(out)
            states.append(last)
        x = torch.cat(found, -1)
        if layer.dropout and k < layer.num_layers - 1:
            x = functional.dropout(x, layer.dropout, layer.training)
    return x, tuple(torch.stack(each) for each in zip(*states, strict=True))


def _first(layer: Any, x: Tensor, hx: Any, at: int) -> States:
    if hx is not None:
        return tuple(state[at] for state in (hx if isinstance(hx, tuple) else (hx,)))
    sizes = [layer.proj_size or layer.hidden_size, layer.hidden_size][: 2 if layer.mode == "LSTM" else 1]
    return tuple(x.new_zeros(x.shape[1], size) for size in sizes)


def _direction(layer: Any, name: str, x: Tensor, mask: Tensor, states: States) -> tuple[Tensor, States]:
    bias = getattr(layer, f"bias_ih{name}") if layer.bias else None
    gates = functional.linear(x, getattr(layer, f"weight_ih{name}"), bias)
    out: list[Tensor] = []
    order = list(range(x.shape[0]))
    for step in reversed(order) if name.endswith("_reverse") else order:
        new = _cell(layer, name, gates[step], states)
        valid = mask[step].unsqueeze(1)
        states = tuple(torch.where(valid, n, old.to(n.dtype)) for n, old in zip(new, states, strict=True))
        out.append(new[0])
    return torch.stack(out[::-1] if name.endswith("_reverse") else out), states


def _cell(layer: Any, name: str, gates: Tensor, states: States) -> States:
    bias = getattr(layer, f"bias_hh{name}") if layer.bias else None
    own = functional.linear(states[0], getattr(layer, f"weight_hh{name}"), bias)
    if layer.mode == "GRU":
        (r, z, n), (own_r, own_z, own_n) = gates.chunk(3, -1), own.chunk(3, -1)
        z, n = (z + own_z).sigmoid(), (n + (r + own_r).sigmoid() * own_n).tanh()
        return (n + z * (states[0] - n),)
    if layer.mode != "LSTM":
        total = gates + own
        return (total.relu() if layer.mode == "RNN_RELU" else total.tanh(),)
    i, f, g, o = (gates + own).chunk(4, -1)
    cell = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    hidden = o.sigmoid() * cell.tanh()
    return functional.linear(hidden, getattr(layer, f"weight_hr{name}")) if layer.proj_size else hidden, cell
