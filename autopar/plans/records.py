"""What a plan says about single tensors and collectives."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir import Phase
from autopar.sharding import ShardingSpec, StepKind


@dataclass(frozen=True)
class Activation:
    """What happens between forward and backward to a value that the backward reads.

    Args:
        action: the name of one of ``holding.ACTIONS``: kept, recomputed in the backward, offloaded to the host, ...
        spec: the spec in which it is kept.
        bytes: bytes that it takes on the fullest device.
    """

    action: str
    spec: ShardingSpec
    bytes: int


@dataclass(frozen=True)
class Collective:
    """One launch of a collective.

    Args:
        tensors: what it carries: names of parameters, buffers, inputs, outputs and gradients
            (``lm_head.weight.grad``), node names of other values.
        axis: the mesh axis over which it runs.
        bytes: message size: the gathered size of an all-gather, the local input size of any other.
        seconds: predicted time.
    """

    kind: StepKind
    tensors: tuple[str, ...]
    axis: int
    bytes: int
    seconds: float
    phase: Phase


@dataclass(frozen=True)
class SearchRecord:
    """What a phase of the search left.

    Args:
        phase: its name.
        work: counted seconds of work since the search began; the same on every machine.
        seconds: since then, on the wall.
        cost: seconds of the cheapest plan so far; None where there is none.
        bound: seconds that no plan can beat, as far as that is proven.
    """

    phase: str
    work: float
    seconds: float
    cost: float | None
    bound: float


@dataclass(frozen=True)
class BaselineRecord:
    """A known way to train in parallel, completed, priced and simulated like the plan itself.

    Args:
        name: ``DDP``, ``ZeRO-3``, ``FSDP x TP``, ...
        objective: the solver's cost in seconds.
        step_time: simulated seconds of a step.
        bytes: all messages of a step, counted as for `Collective`.
        peak_memory: bytes on the fullest device.
        fits: whether it stays within the memory budget.
    """

    name: str
    objective: float
    step_time: float
    bytes: int
    peak_memory: int
    fits: bool


def ring_bytes(kind: StepKind, size: int, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring: 2(N-1)/N S for an all-reduce, (N-1)/N S for all others.

    Source: Thakur, Rabenseifner and Gropp, 2005.
    """
    return size * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1)
