"""A choice as a program, which gives way to a memory budget.

A part that is kept for the backward keeps the whole that it is a view of. Where the program is over the budget then, it
keeps a copy of the part: cheap, and what the constraints of the search count.

What runs beside the computation holds memory for it: a fetch that begins early, so that it hides, holds its result; an
offload that is waited for late holds what it copies. Where the program is still over the budget, it fetches later and
waits sooner; for collectives too, which hold what they send until they are waited for. That may leave a transfer
exposed, which the simulated step shows, but never excludes a plan that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar import settings
from autopar.ir import Graph
from autopar.planner.memory.exact import MemoryProfile, profile
from autopar.planner.options import Options
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.variables import Decisions
from autopar.planner.schedule.copied_parts import with_parts_copied
from autopar.planner.schedule.schedule import schedule
from autopar.planner.schedule.waits import between, wait_sooner
from autopar.program import Op, Program


def scheduled(
    d: Decisions, choice: Sequence[int], prices: Prices, options: Options, budget: float
) -> tuple[Program, MemoryProfile]:
    """The program of ``choice`` and its exact memory, within ``budget`` bytes where transfers can see to it."""
    program = schedule(d, choice, prices)
    return fitted(program, profile(program, d.graph, d.mesh, options), d.graph, prices, options, budget)


def fitted(
    program: Program, memory: MemoryProfile, graph: Graph, prices: Prices, options: Options, budget: float
) -> tuple[Program, MemoryProfile]:
    """``program``, whose exact memory is ``memory``, and its own, with copies of parts, and transfers that give way,
    where it is over ``budget`` bytes. What overwrites its operands still does."""
    ways: list[Callable[..., Program | None]] = [_given_way, wait_sooner]
    # The constraints of one device hold a view as its whole, and its bound is a proof.
    if prices.mesh.size > 1:
        ways.insert(0, partial(with_parts_copied, prices=prices))
    for _ in range(settings.ROUNDS):  # what gives way at one moment may be in the way at another
        before = program
        for give_way in ways:
            if memory.peak_bytes <= budget:
                return program, memory
            moved = give_way(program, timeline=memory.timeline, budget=budget)
            now = profile(moved, graph, prices.mesh, options) if moved is not None else memory
            lower = memory.peak_bytes - now.peak_bytes
            # Of equal peaks the one that holds less elsewhere above the budget is better.
            if moved is not None and (lower > 0 or (lower == 0 and _excess(now, budget) < _excess(memory, budget))):
                program, memory = moved, now
        if program is before:
            break
    return program, memory


def _excess(memory: MemoryProfile, budget: float) -> float:
    return sum(max(held - budget, 0) for held in memory.timeline)


def _given_way(program: Program, timeline: Sequence[int], budget: float) -> Program | None:
    """Transfers that are in flight where ``timeline`` is over ``budget`` begin after that, or end before it; None where
    there are none."""
    over = [at for at in range(len(program.ops)) if timeline[at] > budget]
    read = program.first_read
    begun = {op.writes[0].name: at for at, op in enumerate(program.ops) if op.kind == "offload"}
    places = {
        at: place for at, op in enumerate(program.ops) if (place := _place(at, op, over, read, begun)) is not None
    }
    return replace(program, ops=tuple(_moved(program.ops, places))) if places else None


def _place(at: int, op: Op, over: Sequence[int], read: Mapping[str, int], begun: Mapping[str, int]) -> int | None:
    """The position before which ``op`` should stand; None where it may stay."""
    if op.kind == "fetch":
        # What is over the budget in the reader itself is no fetch's fault: it is needed there.
        there = between(over, at, read[op.writes[0].name])
        return over[there[-1]] + 1 if there else None
    if op.kind == "wait" and len(op.reads) > 1:
        there = between(over, begun[op.reads[1]], at)
        return over[there[0]] if there else None
    return None


def _moved(ops: Sequence[Op], places: dict[int, int]) -> list[Op]:
    arriving: dict[int, list[Op]] = {}
    for at, place in places.items():
        arriving.setdefault(place, []).append(ops[at])
    return [each for at, op in enumerate(ops) for each in (*arriving.get(at, ()), *(() if at in places else (op,)))]
