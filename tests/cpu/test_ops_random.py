import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.ops import random

OPS = torch.ops.autopar
MASK = (1 << 64) - 1


def _dropout(x, seed=5, site=3, p=0.25, global_shape=None, offset=None):
    shape = list(x.shape)
    return OPS.dropout(
        x, torch.tensor(seed), p=p, site=site, global_shape=global_shape or shape, offset=offset or [0] * len(shape)
    )


def _uniform(shape, seed=5, site=3, dtype=torch.float64, global_shape=None, offset=None):
    return OPS.uniform(
        torch.tensor(seed),
        site=site,
        global_shape=global_shape or shape,
        shape=shape,
        offset=offset or [0] * len(shape),
        dtype=dtype,
    )


def _mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def test_the_finalizer_is_splitmix64s():
    """The generator's first outputs from state 1234567, as its reference implementation prints them."""
    state = torch.tensor([1234567], dtype=torch.int64)
    outputs = [int(random.mix_(state + random._signed(n * random.GAMMA))) & MASK for n in range(1, 4)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_the_bits_are_those_of_the_definition():
    """Plain integers: word i // 2 of the sequence that starts at the mixed seed and site, low half first."""
    gamma, seed, site = 0x9E3779B97F4A7C15, 5, 3
    state = _mix((_mix((seed + gamma) & MASK) + (site + 1) * gamma) & MASK)
    for i, number in enumerate(_uniform([11]).tolist()):
        word = _mix((state + (i // 2 + 1) * gamma) & MASK)
        half = (word >> 32 * (i % 2)) & 0xFFFFFFFF
        assert number == ((half + 2**31) % 2**32) / 2**32


@st.composite
def shards(draw):
    global_shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    bounds = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in global_shape]
    return global_shape, [low for low, _ in bounds], [high - low for low, high in bounds]


@given(shards(), st.integers(-(2**63), 2**63 - 1), st.integers(0, 1000), st.sampled_from([1, 3, 8, 1 << 16]))
def test_a_shard_draws_what_the_whole_tensor_draws_there(shard, seed, site, block):
    global_shape, offset, shape = shard
    where = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    whole = _uniform(global_shape, seed, site)
    x = torch.ones(global_shape, dtype=torch.float64)
    dropped = _dropout(x, seed, site)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "CPU_BLOCK", block)
        assert torch.equal(_uniform(shape, seed, site, global_shape=global_shape, offset=offset), whole[where])
        found = _dropout(x[where], seed, site, global_shape=global_shape, offset=offset)
    assert torch.equal(found, dropped[where])


def test_indices_beyond_32_bits_are_distinct():
    shape = [2**20, 2**20]
    draws = [_uniform([1, 8], global_shape=shape, offset=[row, 0]) for row in (0, 2**11, 2**12, 2**13, 2**19)]
    for a, b in itertools.combinations(draws, 2):
        assert not (a == b).any()


def keep_mask(p: float, shape: list[int], seed: int, site: int) -> torch.Tensor:
    """Return which elements of a whole tensor dropout keeps: those whose bits reach the threshold of ``p``."""
    mask = torch.empty(math.prod(shape), dtype=torch.bool)
    for part, bits in random.random_bits(torch.tensor(seed), site, shape, shape, [0] * len(shape), mask.device):
        torch.ge(bits, min(round(p * 2**32), 2**32 - 1) - 2**31, out=mask[part].view(bits.shape))
    return mask.view(*shape)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_and_layout_drops_the_same_elements(dtype):
    x = torch.ones(64, 48, dtype=dtype)
    kept = _dropout(torch.ones(64, 48, dtype=torch.float64)) != 0
    assert torch.equal(_dropout(x) != 0, kept)
    assert torch.equal(_dropout(x.t().contiguous().t()) != 0, kept)
    assert torch.equal(keep_mask(0.25, [64, 48], seed=5, site=3), kept)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_uniform_numbers_of_every_dtype_are_below_one_and_agree(dtype):
    numbers, exact = _uniform([100_000], dtype=dtype), _uniform([100_000])
    assert numbers.dtype == dtype
    assert 0 <= numbers.min() <= numbers.max() < 1
    assert (exact - numbers.double()).abs().max() <= 2.0 ** -random.SIGNIFICANT_BITS[dtype]
    assert (numbers.double() <= exact).all()


def test_kept_elements_are_scaled_and_the_gradient_is_dropped_alike():
    x = torch.randn(30, 20, dtype=torch.float64, requires_grad=True)
    y = _dropout(x, p=0.25)
    kept = y != 0
    torch.testing.assert_close(y, torch.where(kept, x / 0.75, 0.0))
    (grad,) = torch.autograd.grad(y, x, torch.full_like(y, 3.0))
    assert torch.equal(grad, torch.where(kept, 4.0, 0.0).double())
    assert torch.equal(_dropout(x, p=0.25), y)


def test_dropping_nothing_and_dropping_all():
    x = torch.randn(10, 10, requires_grad=True)
    assert torch.equal(_dropout(x, p=0.0), x)
    assert torch.equal(_dropout(x, p=1.0), torch.zeros(10, 10))
    assert torch.equal(torch.autograd.grad(_dropout(x, p=1.0).sum(), x)[0], torch.zeros(10, 10))
    assert _dropout(torch.ones(0, 3)).shape == (0, 3)
    assert torch.equal(_dropout(torch.tensor(2.0), p=0.0), torch.tensor(2.0))


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("seed", [0, 1, -1, 2**62])
def test_the_fraction_kept_is_that_asked_for(p, seed):
    """Within five standard deviations of a binomial's mean: false alarms have a chance of 6e-7 each."""
    n = 200_000
    kept = (_dropout(torch.ones(n), seed=seed, p=p) != 0).sum().item()
    assert abs(kept - n * (1 - p)) < 5 * math.sqrt(n * p * (1 - p))


def _correlation(a, b):
    return float(np.corrcoef(a.numpy(), b.numpy())[0, 1]) * math.sqrt(len(a))


def test_neighbouring_elements_sites_and_seeds_are_unrelated():
    """Of n independent pairs the correlation times sqrt(n) is normal: five standard deviations."""
    n = 100_000
    numbers = _uniform([n + 4096])
    for lag in (1, 2, 3, 4, 8, 64, 1000, 4096):
        assert abs(_correlation(numbers[:n], numbers[lag : n + lag])) < 5, f"{lag} elements apart"
    for seed, site in [(6, 3), (4, 3), (5, 4), (5, 2), (4, 4), (6, 2), (3, 5), (5 + 2**32, 3), (-5, 3)]:
        other = _uniform([n], seed, site)
        assert not torch.equal(other, numbers[:n])
        assert abs(_correlation(other, numbers[:n])) < 5, f"seed {seed}, site {site}"


def test_uniform_numbers_fill_the_interval_evenly():
    """Chi-squared over 256 cells of the upper and of the lower bits, 5 standard deviations from its mean."""
    n = 1 << 20
    bits = (_uniform([n]) * 2**32).to(torch.int64)
    for cells in (bits >> 24, bits & 255, (bits >> 12) & 255):
        counts = torch.bincount(cells, minlength=256).double()
        chi_squared = ((counts - n / 256) ** 2 / (n / 256)).sum().item()
        assert abs(chi_squared - 255) < 5 * math.sqrt(2 * 255)


def test_shapes_that_differ_in_rank_are_refused():
    with pytest.raises(AutoparError, match="each dim"):
        _dropout(torch.ones(3, 4), global_shape=[12])
