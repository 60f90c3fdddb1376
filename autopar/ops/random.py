"""Random numbers that depend on what they are for, not on where or when they are drawn.

Element ``i`` (its linear index in the global tensor) at a site takes 32 bits of word ``i // 2`` of the splitmix64
sequence (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) that starts at
``key(seed, site)``: an even element the low half, an odd one the high half. So every mesh, device and dtype sees the
same bits, and recomputation repeats them without saved state.
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

# Elements hashed at a time. On a CPU the 64-bit words of a block fit the second-level cache.
CPU_BLOCK = 1 << 17
BLOCK = 1 << 26
# Significant bits of each dtype: with more, the numbers next to 1 would round up to it.
SIGNIFICANT_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 32}


def _signed(word: int) -> int:
    """Return the int64 with the same 64 bits, since torch has no arithmetic on uint64."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


GAMMA = _signed(0x9E3779B97F4A7C15)
MULTIPLIERS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _xor_shift_(x: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """Compute x ^ (x >> shift) of unsigned words in place."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (64 - shift)) - 1))


def mix_(x: Tensor, scratch: Tensor | None = None) -> Tensor:
    """Apply splitmix64's finalizer to int64 words in place. ``scratch`` has their shape and is overwritten."""
    scratch = torch.empty_like(x) if scratch is None else scratch
    _xor_shift_(x, 30, scratch).mul_(MULTIPLIERS[0])
    _xor_shift_(x, 27, scratch).mul_(MULTIPLIERS[1])
    return _xor_shift_(x, 31, scratch)


def key(seed: Tensor, site: int) -> Tensor:
    """Return the start of the sequence of (seed, site), an int64 scalar. Both are mixed to decorrelate neighbours."""
    if seed.device.type == "cpu" and active_fake_mode() is None:
        return torch.tensor(_key_of(int(seed), site))
    words = mix_(seed.detach().reshape(()).to(torch.int64) + GAMMA)
    return mix_(words + _signed((site + 1) * GAMMA))


@functools.lru_cache(maxsize=1024)
def _key_of(seed: int, site: int) -> int:
    """Compute ``key`` in Python: a dozen ops on one element would take longer than hashing a block."""
    return _signed(_mixed(_mixed(seed + GAMMA) + (site + 1) * GAMMA))


def _mixed(word: int) -> int:
    mask = (1 << 64) - 1
    word &= mask
    word = ((word ^ (word >> 30)) * MULTIPLIERS[0]) & mask
    word = ((word ^ (word >> 27)) * MULTIPLIERS[1]) & mask
    return word ^ (word >> 31)


def _multiples(count: int, device: torch.device) -> Tensor:
    # Cached only on a CPU: during the capture of a CUDA graph it would be cached without having been computed.
    if device.type == "cpu" and active_fake_mode() is None:
        return _multiples_on_cpu(count)
    return torch.arange(1, count + 1, device=device) * GAMMA


@functools.lru_cache(maxsize=16)
def _multiples_on_cpu(count: int) -> Tensor:
    return torch.arange(1, count + 1, device="cpu") * GAMMA


def _runs(
    global_shape: Sequence[int], shape: Sequence[int], offset: Sequence[int], device: torch.device
) -> tuple[Tensor, int, int | None]:
    """Split the local tensor into runs of elements that are also contiguous in the global tensor.

    Returns:
        The global linear index of each run's first element, int64 [runs]; the length of a run; and the common parity of
        these indices, None if they differ.
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


def _bits_of_runs(state: Tensor, starts: Tensor, length: int, parity: int | None, words: Tensor) -> Tensor:
    """Return 32 random bits for each element of runs of equal length: int32 [runs, length], uniform over all of int32.

    Args:
        words: int64 [2, at least runs * (length // 2 + 1)], overwritten; the bits are a view of it.
    """
    shape = (len(starts), length // 2 + 1)
    drawn, scratch = (part[: shape[0] * shape[1]].view(shape) for part in words.unbind())
    torch.add((starts >> 1).mul_(GAMMA).add_(state)[:, None], _multiples(shape[1], starts.device), out=drawn)
    halves = mix_(drawn, scratch).view(torch.int32)
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
    """Yield 32 random bits for each element of a local tensor, block by block.

    Yields:
        A slice of the flattened local tensor and its bits, which the next block overwrites: int32 [runs, elements of a
        run], uniform over all of int32.
    """
    if math.prod(shape) == 0:
        return
    state = key(seed, site).to(device)
    starts, length, parity = _runs(global_shape, shape, offset, device)
    block = CPU_BLOCK if device.type == "cpu" else BLOCK
    rows, width = (min(block // length, len(starts)), length) if length <= block else (1, block)
    words = torch.empty(2, rows * (width // 2 + 1), dtype=torch.int64, device=device)
    for row in range(0, len(starts), rows):
        for column in range(0, length, width):
            wide = min(width, length - column)
            start_parity = None if parity is None else (parity + column) % 2
            bits = _bits_of_runs(state, starts[row : row + rows] + column, wide, start_parity, words)
            first = row * length + column
            yield slice(first, first + bits.numel()), bits


def _threshold(p: float) -> int:
    """Return the least int32 value that dropout with probability ``p`` keeps, exact to 2^-32."""
    return min(round(p * 2**32), 2**32 - 1) - 2**31


def _kept_bits_(bits: Tensor, p: float) -> Tensor:
    """Set the int32 of kept elements to all ones and of the others to zero, in place, to use as bit masks.

    Comparisons would give booleans, which cost a CPU more to create and to multiply by than everything else here.
    """
    least = _threshold(p)
    if least == -(2**31):
        return bits.fill_(-1)
    return torch.sub(least - 1, bits.clamp_(least - 1, least), out=bits)


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by item size, to view the bits of numbers."""


def keep_scale(
    seed: Tensor, site: int, p: float, global_shape: Sequence[int], offset: Sequence[int], like: Tensor
) -> Tensor:
    """Return the factors of ``dropout`` for a tensor like ``like``: 1 / (1 - p) where it keeps, else 0."""
    out = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
    if p < 1:
        integers = INTEGERS[out.element_size()]
        scale = torch.full((), 1 / (1 - p), dtype=like.dtype, device=like.device).view(integers)
        for part, bits in random_bits(seed, site, global_shape, list(like.shape), offset, like.device):
            kept = _kept_bits_(bits, p).to(integers)
            torch.bitwise_and(kept, scale, out=out[part].view(integers).view(bits.shape))
    return out.view(like.shape)


def _dropout(x: Tensor, seed: Tensor, *, p: float, site: int, global_shape: list[int], offset: list[int]) -> Tensor:
    if p == 0:
        return x.clone(memory_format=torch.contiguous_format)
    if p == 1:
        return torch.zeros_like(x, memory_format=torch.contiguous_format)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    flat_x, flat_out, integers = x.reshape(-1), out.view(-1), INTEGERS[x.element_size()]
    for part, bits in random_bits(seed, site, global_shape, list(x.shape), offset, x.device):
        kept, source = _kept_bits_(bits, p).to(integers), flat_x[part].view(integers).view(bits.shape)
        torch.bitwise_and(source, kept, out=flat_out[part].view(integers).view(bits.shape))
        flat_out[part].mul_(1 / (1 - p))
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
        # The signed shift preserves the upper bits, and adding half the range makes them unsigned.
        upper = (bits.reshape(-1) >> (32 - significant)).to(torch.float64).add_(2.0 ** (significant - 1))
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
