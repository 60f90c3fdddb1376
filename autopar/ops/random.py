"""Random numbers that depend on what they are for, not on where or when they are drawn.

Element ``i`` (its linear index in the global tensor) at a site takes 32 bits of word number ``i // 2`` of the sequence
splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) whose state starts at
``key(seed, site)``; an even element takes the low half, an odd one the high half. So every mesh, device and dtype sees
the same bits, and recomputation repeats them with nothing saved.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar._torch import active_fake_mode
from autopar.errors import AutoparError
from autopar.ops.registration import define, differentiate

# Elements hashed at a time. On a CPU the 64-bit words of a block stay in the second-level cache.
CPU_BLOCK = 1 << 16
BLOCK = 1 << 26
# Significant bits of each dtype: with more, the numbers next to 1 would round up to it.
SIGNIFICANT_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 32}


def _signed(word: int) -> int:
    """The int64 of the same 64 bits; torch has no arithmetic on uint64."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


GAMMA = _signed(0x9E3779B97F4A7C15)
MULTIPLIERS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _xor_shift_(x: Tensor, shift: int) -> Tensor:
    """In place, x ^ (x >> shift) of unsigned words."""
    return x.bitwise_xor_(torch.bitwise_right_shift(x, shift).bitwise_and_((1 << (64 - shift)) - 1))


def mix_(x: Tensor) -> Tensor:
    """splitmix64's finalizer, in place on int64 words, with one temporary."""
    _xor_shift_(x, 30).mul_(MULTIPLIERS[0])
    _xor_shift_(x, 27).mul_(MULTIPLIERS[1])
    return _xor_shift_(x, 31)


def key(seed: Tensor, site: int) -> Tensor:
    """Where the sequence of (seed, site) starts: an int64 scalar. Both are mixed, so that neighbours are unrelated."""
    words = mix_(seed.detach().reshape(()).to(torch.int64) + GAMMA)
    return mix_(words + _signed((site + 1) * GAMMA))


def _multiples(count: int, device: torch.device) -> Tensor:
    # Kept on a CPU only: under the capture of a CUDA graph it would be kept without having been computed.
    if device.type == "cpu" and active_fake_mode() is None:
        return _multiples_on_cpu(count)
    return torch.arange(1, count + 1, device=device) * GAMMA


@functools.lru_cache(maxsize=16)
def _multiples_on_cpu(count: int) -> Tensor:
    return torch.arange(1, count + 1, device="cpu") * GAMMA


def _runs(
    global_shape: Sequence[int], shape: Sequence[int], offset: Sequence[int], device: torch.device
) -> tuple[Tensor, int, int | None]:
    """The local tensor as runs of elements that are neighbours in the global one too.

    Returns:
        The global linear index of each run's first element, int64 [runs]; the length of a run; and what
        all those indices are modulo 2, None where they differ.
    """
    if not len(global_shape) == len(shape) == len(offset):
        raise AutoparError(
            "A random op needs one global length and one offset for each dim.",
            found=f"shape {list(shape)}, global shape {list(global_shape)}, offset {list(offset)}",
        )
    strides = [math.prod(global_shape[dim + 1 :]) for dim in range(len(shape))]
    length, cut = 1, len(shape)
    while cut and (length == math.prod(global_shape[cut:]) or shape[cut - 1] == 1):
        cut -= 1
        length *= shape[cut]
    first = sum(start * stride for start, stride in zip(offset, strides, strict=True))
    odd = any(shape[dim] > 1 and strides[dim] % 2 for dim in range(cut))
    starts = torch.full((1,), first, dtype=torch.int64, device=device)
    for dim in range(cut):
        steps = torch.arange(shape[dim], device=device) * strides[dim]
        starts = (starts[:, None] + steps).reshape(-1)
    return starts, length, None if odd else first % 2


def _bits_of_runs(state: Tensor, starts: Tensor, length: int, parity: int | None) -> Tensor:
    """32 random bits for each element of runs of equal length: int32 [runs, length], uniform over all of int32."""
    words = (starts >> 1).mul_(GAMMA).add_(state)[:, None] + _multiples(length // 2 + 1, starts.device)
    halves = mix_(words).view(torch.int32)
    if parity is not None:
        return halves[:, parity : parity + length]
    odd = starts.bitwise_and(1).bool()
    return torch.where(odd[:, None], halves[:, 1 : length + 1], halves[:, :length])


def random_bits(
    seed: Tensor,
    site: int,
    global_shape: Sequence[int],
    shape: Sequence[int],
    offset: Sequence[int],
    device: torch.device,
) -> Iterator[tuple[slice, Tensor]]:
    """32 random bits for each element of a local tensor, by blocks.

    Yields:
        A slice of the flattened local tensor and its bits: int32 [elements], uniform over all of int32.
    """
    if math.prod(shape) == 0:
        return
    state = key(seed, site).to(device)
    starts, length, parity = _runs(global_shape, shape, offset, device)
    block = CPU_BLOCK if device.type == "cpu" else BLOCK
    if length <= block:
        rows = block // length
        for row in range(0, len(starts), rows):
            bits = _bits_of_runs(state, starts[row : row + rows], length, parity)
            yield slice(row * length, (row + len(bits)) * length), bits.reshape(-1)
        return
    for row in range(len(starts)):
        for column in range(0, length, block):
            width = min(block, length - column)
            start_parity = None if parity is None else (parity + column) % 2
            bits = _bits_of_runs(state, starts[row : row + 1] + column, width, start_parity)
            yield slice(row * length + column, row * length + column + width), bits[0]


def keeps(bits: Tensor, p: float) -> Tensor:
    """Which elements a dropout of probability ``p`` keeps, exact to 2^-32."""
    return bits >= min(round(p * 2**32), 2**32 - 1) - 2**31


def keep_mask(
    seed: Tensor,
    site: int,
    p: float,
    global_shape: Sequence[int],
    shape: Sequence[int],
    offset: Sequence[int],
    device: torch.device,
) -> Tensor:
    """Which elements of the local tensor, bool of its shape, ``dropout`` would keep."""
    mask = torch.empty(math.prod(shape), dtype=torch.bool, device=device)
    for part, bits in random_bits(seed, site, global_shape, shape, offset, device):
        mask[part] = keeps(bits, p)
    return mask.view(*shape)


def _dropout(x: Tensor, seed: Tensor, *, p: float, site: int, global_shape: list[int], offset: list[int]) -> Tensor:
    if p == 0:
        return x.clone(memory_format=torch.contiguous_format)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format)
    if p == 1:
        return out
    flat_x, flat_out = x.reshape(-1), out.view(-1)
    for part, bits in random_bits(seed, site, global_shape, list(x.shape), offset, x.device):
        torch.mul(flat_x[part], keeps(bits, p), out=flat_out[part]).mul_(1 / (1 - p))
    return out


def _dropout_fake(x: Tensor, seed: Tensor, **_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _dropout_context(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.options = keyword_only_inputs


def _dropout_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (seed,) = ctx.saved_tensors
    return torch.ops.autopar.dropout(grad, seed, **ctx.options), None


def _uniform(
    seed: Tensor, *, site: int, global_shape: list[int], shape: list[int], offset: list[int], dtype: torch.dtype
) -> Tensor:
    out = torch.empty(math.prod(shape), dtype=dtype, device=seed.device)
    significant = SIGNIFICANT_BITS[dtype]
    for part, bits in random_bits(seed, site, global_shape, shape, offset, seed.device):
        # The signed shift keeps the upper bits as they are; adding half the range makes them unsigned.
        upper = (bits >> (32 - significant)).to(torch.float64).add_(2.0 ** (significant - 1))
        out[part] = upper.mul_(2.0**-significant).to(dtype)
    return out.view(*shape)


def _uniform_fake(seed: Tensor, *, shape: list[int], dtype: torch.dtype, **_: Any) -> Tensor:
    return seed.new_empty(shape, dtype=dtype)


define(
    "dropout(Tensor x, Tensor seed, *, float p, int site, SymInt[] global_shape, SymInt[] offset) -> Tensor",
    _dropout,
    _dropout_fake,
)
differentiate("dropout", _dropout_gradient, _dropout_context)
define(
    "uniform(Tensor seed, *, int site, SymInt[] global_shape, SymInt[] shape, SymInt[] offset, ScalarType dtype)"
    " -> Tensor",
    _uniform,
    _uniform_fake,
)
