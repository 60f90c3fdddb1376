"""Samples of every op that has a rule, by kind of op."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.cpu.rule_samples_network import (
    contraction,
    convolution,
    indexing,
    linear_algebra,
    losses,
    normalization,
    resampling,
)
from tests.cpu.rule_samples_own import attention, batch_norm, contractions, experts, positional
from tests.cpu.rule_samples_pointwise import pointwise
from tests.cpu.rule_samples_shape import creation, reductions, views
from tests.cpu.rule_simulation import Sample

KINDS: dict[str, Callable[[], Iterator[Sample]]] = {
    f.__name__: f
    for f in (
        contraction,
        pointwise,
        views,
        reductions,
        creation,
        normalization,
        convolution,
        resampling,
        indexing,
        linear_algebra,
        losses,
        contractions,
        experts,
        attention,
        positional,
        batch_norm,
    )
}
