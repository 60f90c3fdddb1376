"""Offloading to the host: the time of transfers, whether all of them can hide, and where in the program they begin.

Transfers run on a stream of their own alongside computation (as in Rhu et al., vDNN, 2016), so that hidden ones cost
next to nothing. The time to hide them is limited: what is offloaded has to be copied while the forward still computes.
A few more constraints of the problem see to that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from autopar.holding import Rates, Stored
from autopar.mesh import Link
from autopar.planner.footprint.op_work import local_bytes
from autopar.planner.problem.variables import Decisions, Variable
from autopar.program import Op, Program, turn_of
from autopar.solver import Usage
from autopar.strategies import flops

Array = npt.NDArray[np.float64]

EXPOSED_SHARE = 0.02
"""The share of a transfer's seconds that counts while it hides. It takes a little memory bandwidth, and of two plans
the one that moves less is better."""

HIDING_SHARE = 0.9
"""The share of the forward's seconds of computation in which copies to the host may hide."""

FORWARD_PARTS = 4
"""The number of parts of the forward. What is made in a part or after it has to hide in that part or after it."""


def store_seconds(d: Decisions, v: Variable, rates: Rates, counted: Callable[[Stored], float] = lambda _: 1.0) -> Array:
    """Return the seconds for which each option of a hold variable stores its value, times what ``counted`` says of its
    action. It takes as long to restore it."""
    assert v.value is not None
    meta = d.graph.meta(v.value)
    found = np.zeros(len(v.options))
    for i, action in enumerate(v.actions):
        if isinstance(action, Stored):
            whole, stored = (local_bytes(m, v.options[i].inputs[0], d.mesh) for m in (meta, action.form(meta)))
            found[i] = action.seconds(whole, stored, rates) * counted(action)
    return found


def copied(action: Stored) -> float:
    """Count what is copied to the host."""
    return float(action.on_host)


def hold_seconds(d: Decisions, v: Variable, rates: Rates) -> Array:
    """Return what each option of a hold variable adds to the step by storing and restoring: of what hides, little."""
    return 2 * store_seconds(d, v, rates, lambda action: EXPOSED_SHARE if action.on_host else 1.0)


def state_seconds(sizes: Sequence[int], host: Link) -> Array:
    """Return the seconds to fetch these bytes of optimizer state for the step and to send them back; nothing hides
    them."""
    return np.array([2 * host.copy_seconds(size) if size else 0.0 for size in sizes])


def host_usages(
    d: Decisions, rates: Rates, hideable_s: float, time: int, limit: float, parts: int = FORWARD_PARTS
) -> tuple[Usage, ...]:
    """Return constraints at ``time`` and after that let all offloading hide.

    What is made in the last part of the forward is copied by its end, and so on for several such parts. What comes back
    has the backward, which is longer.

    Args:
        hideable_s: seconds of computation in the forward.
        limit: what a constraint may use in all: the problem's limit, so that the solver needs no second one.
        parts: how many of ``FORWARD_PARTS`` constraints to make, from that for the whole forward on.
    """
    made = _forward_progress(d)
    offloading = [
        (i, v)
        for i, v in enumerate(d.variables)
        if v.kind == "hold" and any(isinstance(a, Stored) and a.on_host for a in v.actions)
    ]
    found = []
    for i, v in offloading:
        assert v.value is not None
        store = partial(store_seconds, d, v, rates, copied)
        seconds = d.interned.memo.of("store", (v.options, v.actions, rates), store, d.graph.meta(v.value))
        for part in range(parts):
            if made[v.value.node] >= part / FORWARD_PARTS:
                room_s = max(hideable_s * (1 - part / FORWARD_PARTS) * HIDING_SHARE, 1e-12)
                found.append(Usage(i, seconds * (limit / room_s), time + part, time + part + 1))
    return tuple(found)


def hides_transfers(
    d: Decisions, choice: Sequence[int], rates: Rates, hideable_s: float, parts: int = FORWARD_PARTS
) -> bool:
    """Whether the constraints of ``host_usages`` allow what ``choice`` offloads."""
    used = [0.0] * parts
    for row in host_usages(d, rates, hideable_s, 0, 1.0, parts):
        used[row.start] += float(row.option[choice[row.node]])
    return max(used) <= 1


def exposed_seconds(program: Program) -> float:
    """Return the seconds that the forward of ``program`` waits at its end for copies to the host that found no time to
    hide."""
    now_s = free_s = 0.0
    for op in program.ops:
        if op.phase == "forward":
            now_s += op.computing_s
            free_s = max(free_s, now_s) + op.seconds if op.kind == "offload" else free_s
    return max(free_s - now_s, 0.0)


def forward_seconds(program: Program) -> float:
    """Return the seconds of computation in the forward of ``program``."""
    return sum(op.computing_s for op in program.ops if op.phase == "forward")


def _forward_progress(d: Decisions) -> dict[str, float]:
    """Return the share of the forward's FLOPs that are done after each of its nodes."""
    done = 0.0
    before: dict[str, float] = {}
    for node in d.graph.nodes:
        if node.phase == "forward":
            done += flops(node, tuple(d.graph.meta(v) for v in node.inputs)) if node.op != "placeholder" else 0.0
            before[node.name] = done
    return {name: at / done if done else 0.0 for name, at in before.items()}


def place_transfers(ops: Sequence[Op]) -> tuple[Op, ...]:
    """Place waits for offloads where they should be done, and begin each fetch as early as necessary.

    Transfers go one after the other. Nothing is stored that is never restored.
    """
    restored = {name for op in ops if op.restores for name in op.reads}
    ops = [op for op in ops if not op.stores or op.writes[0].name in restored]
    return tuple(_begin_fetches(_end_offloads(ops)))


def _end_offloads(ops: Sequence[Op]) -> list[Op]:
    """Add waits in the forward where computation has taken as long as the copies before it, the rest at its end."""
    placed: list[Op] = []
    under_way: list[tuple[float, Op]] = []
    now_s = free_s = 0.0
    for op in ops:
        while under_way and (under_way[0][0] <= now_s or op.phase == "backward"):
            placed.append(_wait(under_way.pop(0)[1]))
        placed.append(op)
        now_s += op.computing_s
        if op.kind == "offload":
            free_s = max(free_s, now_s) + op.seconds
            under_way.append((free_s, op))
    return placed + [_wait(op) for _, op in under_way]


def _wait(op: Op) -> Op:
    return replace(
        op, name=f"{op.name}|done", kind="wait", reads=(op.reads[0], op.writes[0].name), writes=(), seconds=0.0
    )


def _begin_fetches(ops: Sequence[Op]) -> list[Op]:
    """Move fetches up, from the last to the first, to where the computation until their reader hides them."""
    backward = turn_of(ops)
    placed: list[Op] = []
    waiting: list[tuple[float, Op]] = []
    now_s = needed_s = 0.0  # counted back from the end of the step
    for at in range(len(ops) - 1, -1, -1):
        op = ops[at]
        if op.kind == "fetch" and at >= backward:
            needed_s = max(needed_s, now_s) + op.seconds
            waiting.append((needed_s, op))
            continue
        while waiting and (waiting[0][0] <= now_s or at < backward):
            placed.append(waiting.pop(0)[1])
        placed.append(op)
        now_s += op.computing_s
    placed += [op for _, op in waiting]
    return placed[::-1]
