"""Prices by which attention on a ring is cheaper than whole keys, as it seldom is in small models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from autopar.planner.pricing.prices import Prices
from autopar.program import Op, Program, Sent
from autopar.sharding.strategy import ring_axes


@contextmanager
def lending_is_slow() -> Iterator[None]:
    lent = Prices._lent

    def slow(*given: object) -> Iterator[Sent]:
        return (replace(s, seconds=1.0) for s in lent(*given))  # type: ignore[arg-type]

    Prices._lent = slow  # type: ignore[assignment]
    try:
        yield
    finally:
        Prices._lent = lent  # type: ignore[method-assign]


def on_rings(program: Program) -> list[Op]:
    """Return the ops of the program that pass blocks round a ring."""
    return [op for op in program.ops if op.strategy is not None and ring_axes(op.strategy)]
