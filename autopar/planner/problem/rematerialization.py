"""How values are held for the backward, in the same problem as the sharding.

Every forward value that the backward can use gets a *hold* variable. The value is kept in one spec (possibly a shard of
what was computed), stored in another place or form in that spec, recomputed in the backward, or absent there. Every
forward op gets a *rerun* variable: it is not run again, or is run again with one of its strategies, on operands that
are themselves held. Beaumont et al. (2019, 2021) and Jain et al. (Checkmate, 2020) choose what to keep or offload for a
fixed program; here the shardings are chosen with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.holding import ABSENT, KEEP, RECOMPUTE, stores
from autopar.ir import Graph, Value
from autopar.planner.problem.variables import Decisions, Use, Variable, hold_key, rerun_key, spec_made, spec_read
from autopar.sharding import ShardingSpec, Strategy

MIN_STORED_SHARE = 1e-3
"""Share of the largest forward value's bytes below which a value is not worth storing elsewhere."""

NOTHING = Strategy((), ())
"""The option of an op that is not run again, and of a value that the backward does without."""


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
            options = d.variables[d.index[node.name]].options
            actions = (ABSENT,) + (RECOMPUTE,) * len(options)
            d.add(Variable(rerun_key(node.name), "rerun", (NOTHING, *options), "backward", node, actions=actions))


def add_hold(d: Decisions, value: Value, source: int, out: int, readers: list[tuple[int, int]]) -> None:
    """Add the hold variable of ``value`` and its uses.

    Args:
        source, out: where the value is found in the forward.
        readers: its readers in the backward.
    """
    meta = d.graph.meta(value)
    rerun = d.index[rerun_key(value.node)]
    reruns = rerun_readers(d, value)
    kept = () if value in d.inside_kernels else _kept_specs(d, source, out, readers)
    remade = _distinct(o.outputs[value.index] for o in d.variables[rerun].options[1:])
    stored = [way for way in stores() if meta.bytes >= d.min_stored_bytes and way.serves(meta)]
    ways = [(action, spec) for action in (KEEP, *stored) for spec in kept] + [(RECOMPUTE, spec) for spec in remade]
    options = (*(Strategy((spec,), (spec,)) for _, spec in ways), NOTHING)
    actions = (*(action for action, _ in ways), ABSENT)
    held = d.add(Variable(hold_key(value), "hold", options, "backward", value=value, actions=actions))
    d.uses.append(Use(source, out, held, 0, meta))
    d.uses.append(Use(rerun, value.index, held, 0, meta, rerun=True))
    for target, position in (*readers, *reruns):
        d.uses.append(Use(held, 0, target, position, meta))


def rerun_readers(d: Decisions, value: Value) -> list[tuple[int, int]]:
    """Return the rerun variables that read ``value``, with the operand's position."""
    readers = d.graph.consumers.get(value, ())
    return [(d.index[rerun_key(n.name)], i) for n, i in readers if rerun_key(n.name) in d.index]


def _kept_specs(d: Decisions, source: int, out: int, readers: list[tuple[int, int]]) -> tuple[ShardingSpec, ...]:
    """Return the specs worth keeping: what the forward has and what the backward reads, without partial sums."""
    made = [spec_made(o, out) for o in d.variables[source].options]
    wanted = [spec_read(o, p) for t, p in readers for o in d.variables[t].options]
    return tuple(s for s in _distinct((*made, *wanted)) if not s.partial)


def _distinct(specs: Iterable[ShardingSpec | None]) -> tuple[ShardingSpec, ...]:
    return tuple(dict.fromkeys(s for s in specs if s is not None))
