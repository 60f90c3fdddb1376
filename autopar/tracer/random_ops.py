"""Expresses random ops by counter-based numbers: the same on every mesh, under recomputation and on one device.

Every random op of torch becomes arithmetic on ``autopar.uniform``, whose numbers depend only on the seed, the position
in the program and the global index. Other random ops are refused, since ranks would draw different numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopar.errors import CaptureError
from autopar.tracer.convert import source_line
from autopar.tracer.flat import Flat, materialize
from autopar.tracer.replacements import Operand, base_of, like, replaces

aten = torch.ops.aten
ops = torch.ops.autopar


@replaces(aten.dropout.default)
def dropout(tracer: Any, x: Operand, p: float, train: bool) -> Any:
    if not train or p == 0:
        return x
    base = base_of(x)
    shape, offset = list(base.shape), [0] * base.ndim
    return like(x, ops.dropout(base, tracer.seed, p=p, site=tracer.next_site(), global_shape=shape, offset=offset))


@replaces(aten.dropout_.default)
def dropout_(tracer: Any, x: Operand, p: float, train: bool) -> Any:
    plain = x.materialize() if isinstance(x, Flat) else x
    return plain.copy_(dropout(tracer, plain, p, train)) if train and p else plain


def _uniform(tracer: Any, shape: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
    """Return numbers in [0, 1) that depend only on the seed, the position in the program and the global index."""
    sizes = [int(n) for n in shape]
    kind = dtype or torch.get_default_dtype()
    result: torch.Tensor = ops.uniform(
        tracer.seed, site=tracer.next_site(), global_shape=sizes, shape=sizes, offset=[0] * len(sizes), dtype=kind
    )
    return result


def _normal(tracer: Any, shape: Sequence[int], dtype: torch.dtype | None) -> torch.Tensor:
    """Draw normal numbers by Box-Muller from two uniform numbers, the first from (0, 1]."""
    radius = (-2 * (1 - _uniform(tracer, shape, dtype)).log()).sqrt()
    return radius * (2 * math.pi * _uniform(tracer, shape, dtype)).cos()


def _exponential(tracer: Any, shape: Sequence[int], dtype: torch.dtype | None, rate: float = 1.0) -> torch.Tensor:
    """Draw as minus the logarithm of a number from (0, 1]; never zero, since users divide by it or take logarithms."""
    drawn = -(1 - _uniform(tracer, shape, dtype)).log()
    return drawn.clamp(min=torch.finfo(drawn.dtype).tiny) / rate


@replaces(aten.rand.default)
def rand(tracer: Any, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return _uniform(tracer, size, dtype)


@replaces(aten.rand_like.default)
def rand_like(tracer: Any, x: Operand, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return like(x, _uniform(tracer, base_of(x).shape, dtype or base_of(x).dtype))


@replaces(aten.randn.default)
def randn(tracer: Any, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return _normal(tracer, size, dtype)


@replaces(aten.randn_like.default)
def randn_like(tracer: Any, x: Operand, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return like(x, _normal(tracer, base_of(x).shape, dtype or base_of(x).dtype))


@replaces(aten.randint.low)
def randint_low(
    tracer: Any, low: int, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> Any:
    return (_uniform(tracer, size, torch.float64) * (high - low) + low).floor().to(dtype or torch.int64)


@replaces(aten.randint.default)
def randint(tracer: Any, high: int, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return randint_low(tracer, 0, high, size, dtype=dtype)


@replaces(aten.randperm.default)
def randperm(tracer: Any, n: int, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return _uniform(tracer, [n], torch.float64).argsort().to(dtype or torch.int64)


@replaces(aten.bernoulli.default)
def bernoulli(tracer: Any, x: Operand, *, generator: Any = None) -> Any:
    base = base_of(x)
    return like(x, (_uniform(tracer, base.shape, base.dtype) < base.detach()).to(base.dtype))


@replaces(aten.bernoulli.p)
def bernoulli_p(tracer: Any, x: Operand, p: float, *, generator: Any = None) -> Any:
    base = base_of(x)
    return like(x, (_uniform(tracer, base.shape, torch.float32) < p).to(base.dtype))


@replaces(aten.bernoulli_.float)
def bernoulli_(tracer: Any, x: Operand, p: float = 0.5, *, generator: Any = None) -> Any:
    plain = x.materialize() if isinstance(x, Flat) else x
    return plain.copy_((_uniform(tracer, plain.shape, torch.float32) < p).to(plain.dtype))


@replaces(aten.uniform_.default)
def uniform_(tracer: Any, x: Operand, low: float = 0, high: float = 1, *, generator: Any = None) -> Any:
    plain = x.materialize() if isinstance(x, Flat) else x
    return plain.copy_(_uniform(tracer, plain.shape, plain.dtype) * (high - low) + low)


@replaces(aten.normal_.default)
def normal_(tracer: Any, x: Operand, mean: float = 0, std: float = 1, *, generator: Any = None) -> Any:
    plain = x.materialize() if isinstance(x, Flat) else x
    return plain.copy_(_normal(tracer, plain.shape, plain.dtype) * std + mean)


@replaces(aten.randint_like.default)
def randint_like(tracer: Any, x: Operand, high: int, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    return randint_like_low(tracer, x, 0, high, dtype=dtype)


@replaces(aten.randint_like.low_dtype)
def randint_like_low(
    tracer: Any, x: Operand, low: int, high: int, *, dtype: torch.dtype | None = None, **_: Any
) -> Any:
    base = base_of(x)
    return like(x, randint_low(tracer, low, high, base.shape, dtype=dtype or base.dtype))


@replaces(aten.normal.Tensor_Tensor)
def normal_of_tensors(tracer: Any, mean: Operand, std: Operand, *, generator: Any = None) -> Any:
    center, spread = materialize(mean), materialize(std)
    shape = (center + spread).shape
    return (_normal(tracer, shape, center.dtype) * spread + center).detach()


@replaces(aten.normal.Tensor_float)
def normal_of_mean(tracer: Any, mean: Operand, std: float = 1, *, generator: Any = None) -> Any:
    base = base_of(mean)
    return like(mean, (_normal(tracer, base.shape, base.dtype) * std + base).detach())


@replaces(aten.normal.float_Tensor)
def normal_of_std(tracer: Any, mean: float, std: Operand, *, generator: Any = None) -> Any:
    base = base_of(std)
    return like(std, (_normal(tracer, base.shape, base.dtype) * base + mean).detach())


@replaces(aten.normal.float_float)
def normal_of_numbers(
    tracer: Any, mean: float, std: float, size: Sequence[int], *, dtype: torch.dtype | None = None, **_: Any
) -> Any:
    return _normal(tracer, size, dtype) * std + mean


Draw = Callable[..., torch.Tensor]


def _in_place(op: Any, draw: Draw) -> None:
    """Register ``draw(tracer, shape, dtype, *args)`` as what ``x.op_(*args)`` writes."""

    @replaces(op)
    def write(tracer: Any, x: Operand, *args: Any, generator: Any = None, **options: Any) -> Any:
        plain = materialize(x)
        kind = plain.dtype if plain.is_floating_point() else torch.float64
        return plain.copy_(draw(tracer, plain.shape, kind, *args, **options).to(plain.dtype))


def _cauchy(tracer: Any, shape: Sequence[int], dtype: Any, median: float = 0, sigma: float = 1) -> torch.Tensor:
    return median + sigma * (math.pi * (_uniform(tracer, shape, dtype) - 0.5)).tan()


def _log_normal(tracer: Any, shape: Sequence[int], dtype: Any, mean: float = 1, std: float = 2) -> torch.Tensor:
    return (_normal(tracer, shape, dtype) * std + mean).exp()


def _geometric(tracer: Any, shape: Sequence[int], dtype: Any, p: float) -> torch.Tensor:
    """Draw the number of trials up to the first success, at least one."""
    return (_exponential(tracer, shape, dtype) / -math.log1p(-p)).ceil()


def _below(tracer: Any, shape: Sequence[int], dtype: Any, high: int) -> torch.Tensor:
    return (_uniform(tracer, shape, torch.float64) * high).floor()


_in_place(aten.exponential_.default, _exponential)
_in_place(aten.cauchy_.default, _cauchy)
_in_place(aten.log_normal_.default, _log_normal)
_in_place(aten.geometric_.default, _geometric)
_in_place(aten.random_.to, _below)


@replaces(aten.bernoulli_.Tensor)
def bernoulli_of(tracer: Any, x: Operand, p: Operand, *, generator: Any = None) -> Any:
    plain, chance = materialize((x, p))
    return plain.copy_((_uniform(tracer, plain.shape, torch.float32) < chance).to(plain.dtype))


@replaces(aten.multinomial.default)
def multinomial(tracer: Any, p: Operand, n: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """Draw the ``n`` winners of a race with exponential times, or, with replacement, by inverting cumulative sums."""
    chance = materialize(p).detach()
    if not replacement:
        race = chance / _exponential(tracer, chance.shape, chance.dtype)
        return race.topk(n, -1)[1]
    sums = chance.cumsum(-1)
    drawn = _uniform(tracer, [*chance.shape[:-1], n], chance.dtype) * sums[..., -1:]
    return torch.searchsorted(sums, drawn, right=True).clamp(max=chance.shape[-1] - 1)


@replaces(aten.rrelu.default)
def rrelu(
    tracer: Any, x: Operand, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    base = base_of(x)
    drawn: Any = _uniform(tracer, base.shape, base.dtype) if training else 0.5
    slope = drawn * (upper - lower) + lower
    return like(x, torch.where(base > 0, base, base * slope))


def _kept(tracer: Any, shape: Sequence[int], p: float, dtype: torch.dtype) -> torch.Tensor:
    return (_uniform(tracer, shape, torch.float32) >= p).to(dtype)


def _feature_shape(x: torch.Tensor) -> list[int]:
    """Return the shape with one number for each channel of each sample."""
    return [*x.shape[:2], *[1] * (x.ndim - 2)]


@replaces(aten.feature_dropout.default)
def feature_dropout(tracer: Any, x: Operand, p: float, train: bool) -> Any:
    if not train or p == 0:
        return x
    plain = materialize(x)
    return plain * (_kept(tracer, _feature_shape(plain), p, plain.dtype) * (1 / (1 - p) if p < 1 else 0.0))


ALPHA = 1.7580993408473766
"""Minus the value at which SELU saturates (Klambauer et al., "Self-normalizing neural networks", 2017)."""


def _alpha_dropped(tracer: Any, x: torch.Tensor, p: float, shape: Sequence[int]) -> torch.Tensor:
    kept = _kept(tracer, shape, p, x.dtype)
    scale = 1 / math.sqrt((ALPHA * ALPHA * p + 1) * (1 - p)) if p < 1 else 0.0
    return x * (kept * scale) + ((kept - 1) * (ALPHA * scale) + ALPHA * scale * p)


@replaces(aten.alpha_dropout.default)
def alpha_dropout(tracer: Any, x: Operand, p: float, train: bool) -> Any:
    if not train or p == 0:
        return x
    plain = materialize(x)
    return _alpha_dropped(tracer, plain, p, plain.shape)


@replaces(aten.feature_alpha_dropout.default)
def feature_alpha_dropout(tracer: Any, x: Operand, p: float, train: bool) -> Any:
    if not train or p == 0:
        return x
    plain = materialize(x)
    return _alpha_dropped(tracer, plain, p, _feature_shape(plain))


def refuse_random(graph: torch.fx.Graph) -> None:
    """Refuse ops that draw from a generator of their own.

    Raises:
        CaptureError: there is such an op.
    """
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        # Attention has the tag because of its dropout, which has been replaced by now.
        if torch.Tag.nondeterministic_seeded in tags and "attention" not in str(node.target):
            raise CaptureError(
                "The forward draws random numbers in a way that would differ between ranks.",
                found=f"{node.target}, {source_line(node.meta)}",
                hint="draw with torch.rand, randn, bernoulli, multinomial or dropout, or pass the numbers as an input.",
            )
