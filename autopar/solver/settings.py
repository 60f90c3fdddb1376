"""The numbers that steer the search under a limit, each with its unit and what it was chosen by.

S, K (29 and 35 thousand nodes) and V (816 nodes, a duality gap of 20 %) are instances of the contest that
``benchmarks/iopddl.py`` reads; seconds are of one core.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PriceSettings:
    """Of ``priced``: prices of the limit, exact moves, repairs."""

    seed: int = 0
    """Of all that is random there."""

    leaving: float = 3e4
    """Elements of a table over a node that leaves under every price and its neighbours, at most: 72 % of the nodes of S
    and 78 % of those of K are leaves, and the others' tables stay small."""

    moving: float = 3e5
    """The same in a move, whose tables are made anew for each: .04 s a move on S."""

    most_elements: float = 1e8
    """Elements of the tables of all edges up to which there is such a search: each takes 32 bytes. With 372 million, of
    an 8B model over three mesh axes, it took 24 GB; S has 5 million."""

    barred: float = 100.0
    """What a forbidden option costs, in multiples of the dearest choice of all nodes and one edge: more than any choice
    that is worth comparing, and few enough digits above it."""

    sharpness: float = 40.0
    """First prices at times go with the exponential of so many times the share of the limit that is used at least: 60
    overshoots later on, 20 is slow at first (S, K)."""

    first_factors: tuple[float, ...] = (30.0, 1000.0, 30000.0)
    """First prices of all of the limit, in multiples of what a choice costs without prices, until something fits."""

    repairs: int = 4
    """Rounds in which what is over the limit gets dearer."""

    dearer: float = 0.04
    """In the first of them, as a share of the prices' sum; in each that follows four times as much."""

    most_over: float = 0.5
    """Of the limit, above it: choices that are further over are not repaired."""

    step: float = 0.7
    """Exponent of prices for a use beyond the limit by all of it; a price moves by e at most and halves at least."""

    shorter: float = 0.8
    """Times the step where the bound has not risen for ``patience`` rounds; never below ``least_step``."""

    patience: int = 4
    least_step: float = 0.05

    faster: float = 1.15
    """Times the step of a time that is over, or under, the limit another time in a row, up to ``fastest``: one row of S
    that is 11 % over needs it."""

    fastest: float = 5.0

    least_price: float = 1e-5
    """Of the mean price: from zero no factor leads anywhere."""

    polishing: tuple[float, float] = (0.5, 1.5)
    """Seconds for better choices near the best, for each of messages: while the bound rises, and when it rises by less
    than a hundredth in ten rounds."""

    programs: int = 8
    """Ways to move, each with hubs of its own; another one every fourth round."""


@dataclass(frozen=True)
class PartSettings:
    """Of ``dual/neighbourhood.py``: parts solved by an integer program, the rest held fixed."""

    seed: int = 0

    most_pairs: int = 40_000
    """Pairs of options of a part. With 150,000 each took 8 s on V and none found anything for 20 s; with these V's
    optimum was found within 8 s."""

    seconds: float = 2.0
    """For one part; most take .15 s."""

    patience: float = 0.5
    """Share of the time without a better choice after which it ends, but never before ``least`` parts."""

    least: int = 50


@dataclass(frozen=True)
class ProgramSettings:
    """Of integer programs, and of reductions before them."""

    most_limited_flows: int = 30_000
    """With a limit the cuts at the root take longer: programs of 74, 77 and 102 thousand flows had none done that told
    anything after 24, 7 and 33 s; those of 6 to 10 thousand took 1 to 11 s."""

    flows_a_second: int = 3_000
    """Flows for each second that is left: HiGHS tells little of how long the cuts at the root take. Those of 24 and 36
    thousand flows took 7 and 14 s (a way to shard BLOOM 7B, whose attention is written out), those of 6 to 10 thousand
    under a limit 1 to 11 s."""

    work: float = 1.5e8
    """Element operations that looking for dominated options may take: some tenths of a second."""

    each: float = 3e5
    """Of them one product of two matrices, as long as message passing has not told which options are superfluous."""


PRICES, PARTS, PROGRAMS = PriceSettings(), PartSettings(), ProgramSettings()
