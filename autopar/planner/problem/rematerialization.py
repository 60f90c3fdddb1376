"""How values are held for the backward, in the same problem as the sharding.

Every forward value that the backward can use gets a *hold* variable. The value is kept in one spec (possibly a shard of
what was computed), stored in another place or form in that spec, recomputed in the backward, or absent there. Every
forward op gets a *rerun* variable: it is not run again, or is run again with one of its strategies, on operands that
are themselves held. Beaumont et al. (2019, 2021) and Jain et al. (Checkmate, 2020) choose what to keep or offload for a
fixed program; here the shardings are chosen with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from autopar.holding import ABSENT, KEEP, RECOMPUTE, Action, Stored, stores
from autopar.ir import Graph, Value
from autopar.planner.problem.variables import (
    Decisions,
    InternedOptions,
    Use,
    Variable,
    hold_key,
    rerun_key,
    spec_made,
    spec_read,
)
from autopar.sharding import ShardingSpec, Strategy

MIN_STORED_SHARE = 1e-3
"""Share of the largest forward value's bytes below which a value is not worth storing elsewhere."""

NOTHING = Strategy((), ())
"""The option of an op that is not run again, and of a value that the backward does without."""

_Options = tuple[Strategy, ...]
_Found = tuple[_Options, Callable[[Strategy, int], ShardingSpec | None], int]
"""Options, and where each of them has a value."""


def eligible(graph: Graph) -> frozenset[str]:
    """Return the forward ops whose results the backward reads, or that could recompute such results."""
    needed: set[str] = set()
    for node in reversed(graph.nodes):
        if node.op == "placeholder" or node.phase == "backward":
            continue
        readers = [r for i in range(len(node.outputs)) for r, _ in graph.consumers.get(Value(node.name, i), ())]
        if any(r.phase == "backward" or r.name in needed for r in readers):
            needed.add(node.name)
    return frozenset(needed)


def min_stored_bytes(graph: Graph) -> float:
    """Return the bytes below which a value is kept as it is or not at all."""
    made = (m for n in graph.nodes if n.phase == "forward" and n.op != "placeholder" for m in n.outputs if m)
    return MIN_STORED_SHARE * max((m.bytes for m in made), default=0)


def add_reruns(d: Decisions, names: frozenset[str]) -> None:
    """Add a rerun variable for every eligible op."""
    for node in d.graph.nodes:
        if node.name in names:
            once = d.variables[d.index[node.name]].options
            options, actions = d.interned.memo.of("rerun", (once,), partial(_ways_to_rerun, d.interned, once))
            d.add(Variable(rerun_key(node.name), "rerun", options, "backward", node, actions=actions))


def _ways_to_rerun(interned: InternedOptions, once: _Options) -> tuple[_Options, tuple[Action, ...]]:
    """Return the options of a rerun variable and their actions."""
    return interned.of((NOTHING, *once)), (ABSENT, *(RECOMPUTE for _ in once))


def add_hold(d: Decisions, value: Value, source: int, out: int, readers: list[tuple[int, int]]) -> None:
    """Add the hold variable of ``value`` and its uses.

    Args:
        source, out: where the value is found in the forward.
        readers: its readers in the backward.
    """
    meta = d.graph.meta(value)
    rerun, reruns = d.index[rerun_key(value.node)], rerun_readers(d, value)
    remade = d.variables[rerun].options
    kept: list[_Found] = []
    if value not in d.inside_kernels:
        kept = [(d.variables[source].options, spec_made, out)]
        kept += [(d.variables[target].options, spec_read, position) for target, position in readers]
    stored = tuple(way for way in stores() if meta.bytes >= d.min_stored_bytes and way.serves(meta))
    options, actions = d.interned.memo.of(
        "held",
        (remade, *(options for options, _, _ in kept)),
        lambda: _ways_to_hold(d.interned, kept, remade, value.index, stored),
        value.index,
        stored,
        *(at for _, _, at in kept),
    )
    held = d.add(Variable(hold_key(value), "hold", options, "backward", value=value, actions=actions))
    d.uses.append(Use(source, out, held, 0, meta))
    d.uses.append(Use(rerun, value.index, held, 0, meta, rerun=True))
    for target, position in (*readers, *reruns):
        d.uses.append(Use(held, 0, target, position, meta))


def rerun_readers(d: Decisions, value: Value) -> list[tuple[int, int]]:
    """Return the rerun variables that read ``value``, with the operand's position."""
    readers = d.graph.consumers.get(value, ())
    return [(d.index[rerun_key(n.name)], i) for n, i in readers if rerun_key(n.name) in d.index]


def _ways_to_hold(
    interned: InternedOptions, kept: Sequence[_Found], remade: _Options, out: int, stored: Sequence[Stored]
) -> tuple[_Options, tuple[Action, ...]]:
    """Return the options of a hold variable and their actions. Worth keeping are the specs of ``kept``, which the
    forward has or the backward reads, without partial sums."""
    worth = [s for s in _distinct(of(o, at) for options, of, at in kept for o in options) if not s.partial]
    ways = [(action, spec) for action in (KEEP, *stored) for spec in worth]
    ways += [(RECOMPUTE, spec) for spec in _distinct(o.outputs[out] for o in remade[1:])]
    options = interned.of((*(Strategy((spec,), (spec,)) for _, spec in ways), NOTHING))
    return options, (*(action for action, _ in ways), ABSENT)


def _distinct(specs: Iterable[ShardingSpec | None]) -> tuple[ShardingSpec, ...]:
    return tuple(dict.fromkeys(s for s in specs if s is not None))
