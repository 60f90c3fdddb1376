"""A strategy: one way to run one op on a mesh."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.sharding.spec import ShardingSpec

MOVED = ">"
"""Between the factors that an axis cuts outside and inside of an op."""

RING = "+"
"""Between two factors that an axis cuts, the blocks of the second of which go round a ring."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """The specs that an op's operands must have, and those that its results then have.

    Args:
        inputs: one spec for each entry of ``Node.inputs``.
        outputs: one spec for each result; None if the result is absent.
        axes: what each mesh axis does: ``""`` replicates the work, a factor's name divides it, ``"P0"`` passes on
            partial sums of the first set of operands in which the op is linear, ``"a>e"`` divides factor ``a``
            outside of the op and ``e`` inside, and ``"s+t"`` divides both and passes blocks of ``t`` round a ring.
        work: share of the op's total work that one rank does.
    """

    inputs: tuple[ShardingSpec, ...]
    outputs: tuple[ShardingSpec | None, ...]
    axes: tuple[str, ...] = ()
    work: float = 1.0

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"


def moved_axes(strategy: Strategy) -> tuple[int, ...]:
    """Return the axes whose ranks exchange what the op reads: they cut one factor outside, and another inside."""
    return tuple(axis for axis, choice in enumerate(strategy.axes) if MOVED in choice)


def ring_axes(strategy: Strategy) -> tuple[int, ...]:
    """Return the axes along which blocks of operands go round a ring."""
    return tuple(axis for axis, choice in enumerate(strategy.axes) if RING in choice)
