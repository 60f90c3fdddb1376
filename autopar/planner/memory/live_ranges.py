"""Live ranges: the program points between which the memory constraints count what is held.

A result that one op reads in another spec lives until just before its reader, and its redistributed operand lives only
while the reader runs. Ops that are run again for a node have points of their own, each before that node's. The memory
of a value that nobody reads any more passes to its views.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple

from autopar.holding import Event
from autopar.ir import Graph, Node, Phase, Value
from autopar.planner.footprint.layouts import MAYBE_VIEWS
from autopar.planner.footprint.overwriting import may_overwrite
from autopar.planner.graphs.accumulation import is_gradient
from autopar.planner.memory.points import ProgramPoint, after, before, before_operands, replaced, rerun
from autopar.planner.problem.variables import Decisions, Variable, copy_key, forced_key, hold_key

PHASES: tuple[Phase, ...] = ("forward", "backward")


@dataclass(frozen=True)
class LiveRanges:
    """When values are read: indices of nodes, and points.

    Args:
        at: the index of each node.
        forward: the last read in the forward, also through views; for what the caller gets, the end of the step.
        backward: the first and last point at which the backward has each forward value.
        earliest: the first point at which it may have to have it.
        reads: the first and last read of each value, by phase.
        stored: gradients, which their parameters' variables hold.
        turn: the node with which the backward begins.
        released_by: by phase, the op that lets go of a value's original: the last one that reads it from its copy
            variable or its hold variable, or the only one that reads it as made. If that op takes the value in another
            spec, only the redistributed operand is held while it runs.
    """

    at: Mapping[str, int]
    forward: Mapping[Value, int]
    backward: Mapping[Value, tuple[ProgramPoint, ProgramPoint]]
    earliest: Mapping[Value, ProgramPoint]
    reads: Mapping[Phase, tuple[Mapping[Value, int], Mapping[Value, int]]]
    stored: Collection[Value]
    turn: int
    released_by: Mapping[Phase, MutableMapping[Value, str]]


def live_ranges(d: Decisions, *, holds: bool = True) -> LiveRanges:
    """Compute the live ranges of ``d``.

    Args:
        holds: count what is held for the backward for as long as these ranges say.
    """
    graph, at = d.graph, d.graph.order
    turn = graph.turn
    first, last = _backward_reads(graph, at)
    mutated = {o.value: turn - 1 for o in graph.outputs if o.kind == "mutation"}
    returned = dict.fromkeys(d.returned, turn - 1) | dict.fromkeys(d.kept_by_caller, len(at))
    reads = {
        phase: (_first_reads(graph, at, phase), _last_reads(graph, at, phase, mutated if phase == "forward" else {}))
        for phase in PHASES
    }
    forward = _through_views(d, _last_reads(graph, at, "forward", returned))
    found = LiveRanges(
        at,
        forward,
        {v: (first[v], last[v]) for v in first},
        _earliest_reads(graph),
        reads,
        {o.value for o in graph.outputs if is_gradient(o)},
        turn,
        {phase: {} for phase in PHASES},
    )
    _find_released(d, found, holds=holds)
    return found


def replaces_original(d: Decisions, copy: Variable) -> bool:
    """Whether a copy variable's spec soon becomes the only one in which its value is held, because all read it from
    there.

    This is never so for values that are no op's results, such as parameters: they stay in memory anyway.
    """
    return _serves_all(d, copy) and copy.value is not None and not _shared(d, copy.value)


def _serves_all(d: Decisions, copy: Variable) -> bool:
    """Whether nobody reads a value in the spec in which an op makes it once a copy is there."""
    value = copy.value
    if value is None or copy.key != copy_key(value, copy.phase) or forced_key(value) in d.index:
        return False
    both = hold_key(value) not in d.index and copy_key(value, "backward") in d.index
    later = both and (copy.phase == "forward" or value in d.returned)
    return _made_by_op(d, value) and not later


class CopyRange(NamedTuple):
    """When a copy variable holds its value for all readers of a phase, as it was made or redistributed.

    Args:
        made: the point up to which the original is held.
        first, last: the points between which the copy is held.
        share: of the value's bytes that are the original's own.
    """

    made: ProgramPoint
    first: ProgramPoint
    last: ProgramPoint
    share: float


def copy_range(d: Decisions, copy: Variable, live: LiveRanges) -> CopyRange | None:
    """Return when a copy holds its value; None if the original stays in memory beside it.

    A copy that replaces its original is made at once in the phase in which the value is made, and any other before its
    first reader, when other operands may be redistributed too: at that moment only the copy counts.
    """
    value, (first, last) = copy.value, live.reads[copy.phase]
    if value is None or value not in first or not _serves_all(d, copy):
        return None
    made, start = before_operands(first[value]), before(first[value])
    if d.graph.by_name[value.node].phase == copy.phase:
        at_once = replaced(live.at[value.node], value.index)
        if not _shared(d, value):
            made, start = at_once, at_once.next
        elif hold_key(value) in d.index or value in d.returned:
            made = at_once  # what is held or returned in the copy's spec is made at once, and read from there
    share = own_share(d, value, start, live)
    end = before(last[value]) if value in live.released_by[copy.phase] else ProgramPoint(last[value])
    return CopyRange(made, start, end, share) if share else None


def last_in_made_spec(d: Decisions, value: Value, live: LiveRanges) -> ProgramPoint:
    """Return the last point at which a result is held in the spec in which it is made."""
    at = live.at[value.node]
    ends = [replaced(at, value.index) if value in live.stored else ProgramPoint(at)]
    for phase in _phases(d, value):
        copy = d.index.get(copy_key(value, phase))
        held = copy_range(d, d.variables[copy], live) if copy is not None else None
        last = live.reads[phase][1].get(value, at)
        if held is not None:
            ends.append(held.made)
        else:
            ends.append(before(last) if value in live.released_by[phase] else ProgramPoint(last))
    return max(ends)


def last_read(d: Decisions, value: Value, live: LiveRanges) -> int:
    """Return the last point at which an op makes or reads a value; afterwards only the caller may hold it."""
    return max(live.at[value.node], *(live.reads[phase][1].get(value, -1) for phase in _phases(d, value)))


def _phases(d: Decisions, value: Value) -> tuple[Phase, ...]:
    """Return the phases in which a value is read as it was made. What is held for the backward has a variable of its
    own."""
    return PHASES if hold_key(value) not in d.index else PHASES[:1]


def _shared(d: Decisions, value: Value) -> bool:
    """Whether a value shares its memory with another value that is also read, or is in memory anyway."""
    node = d.graph.by_name[value.node]
    if node.name not in d.views:
        return False
    base = node.inputs[0]
    others = len(d.graph.consumers[base]) > 1 or base in d.returned or hold_key(base) in d.index
    return others or d.graph.by_name[base.node].op == "placeholder" or _shared(d, base)


def _made_by_op(d: Decisions, value: Value) -> bool:
    node = d.variables[d.index[value.node]].node
    return node is not None and node.op != "placeholder"


def may_be_view(d: Decisions, node: Node) -> bool:
    """Whether a node's result may share the memory of its operand on a rank."""
    return node.name in d.views or is_reshape(d, node)


def is_reshape(d: Decisions, node: Node) -> bool:
    """Whether a node copies whole tensors, but perhaps no shards."""
    return node.packet in MAYBE_VIEWS and node.name not in d.views and d.mesh.size > 1


def inherited_memory(d: Decisions, view: Node, live: LiveRanges) -> tuple[ProgramPoint, float]:
    """Return the first point at which a view's memory counts as its own, and the share of its bytes that counts then.

    Until then the memory counts as that of the value that it is a view of. Several views of a value may overlap, or be
    larger than it together. The share is 0 where the value is in memory anyway.
    """
    value, phase = view.inputs[0], view.phase
    base = d.graph.by_name[value.node]
    if base.op == "placeholder" or value in d.returned:
        return ProgramPoint(0), 0.0
    views = [n for n, _ in d.graph.consumers[value] if may_be_view(d, n) and n.phase == phase]
    size = sum(m.bytes for n in views for m in n.outputs if m is not None)
    share = min(1.0, d.graph.meta(value).bytes / size) if size else 1.0
    read = ProgramPoint(live.reads[phase][1].get(value, live.at[view.name]))
    first = max(last_in_made_spec(d, value, live), read).next
    if may_be_view(d, base):
        earlier, part = inherited_memory(d, base, live)
        return max(first, earlier), share * part
    return first, share


def own_share(d: Decisions, value: Value, point: ProgramPoint, live: LiveRanges) -> float:
    """Return the share of a value's bytes that count at ``point`` as its own: 0 of a view while its base counts."""
    node = d.graph.by_name[value.node]
    first, share = inherited_memory(d, node, live) if may_be_view(d, node) else (point, 1.0)
    return share if first <= point else 0.0


def held_points(d: Decisions, value: Value, live: LiveRanges) -> dict[Event, ProgramPoint]:
    """Return the point of each event of a value that the backward reads; none where it does not.

    Where it is not certain when an event comes, it is the latest point for one with which memory is taken, and for one
    with which it is given back the earliest, so that constraints never count more than is held.
    """
    if value not in live.backward:
        return {}
    first, last = live.backward[value]
    base = value
    while base.node in d.views:
        base = d.graph.by_name[base.node].inputs[0]
    at = {
        Event.MADE: after(live.at[value.node]),
        Event.LEFT: after(live.forward.get(base, live.at[value.node])),
        Event.BACK: first.preparing,
        Event.RESTORED: live.earliest[value].preparing,
        Event.DONE: last.preparing if value in live.released_by["backward"] or value in d.returned else last,
    }
    if value.node not in d.views:
        again = rerun(d.graph, value.node, first)
        overwrites = may_overwrite(d.graph.by_name[value.node], d.graph)
        return at | {Event.REMADE: again.next if overwrites else again}
    gone = base_live_until(d, value, live)
    return at if gone is None else at | {Event.REMADE: gone.next}


def base_live_until(d: Decisions, value: Value, live: LiveRanges) -> ProgramPoint | None:
    """Return the point up to which the memory of a recomputed view may count as that of the value that it is a view of.

    None if that value is in memory anyway, or if other views may show the same part of it.
    """
    node, end = d.graph.by_name[value.node], ProgramPoint(0)
    while node.name in d.views:
        base = node.inputs[0]
        views = [n for n, _ in d.graph.consumers[base] if n.name in d.views and n.phase == node.phase]
        size = sum(m.bytes for n in views for m in n.outputs if m is not None)
        if hold_key(base) not in d.index or size > d.graph.meta(base).bytes:
            return None
        end = max(end, live.backward[base][1]) if base in live.backward else end
        node = d.graph.by_name[base.node]
    return end


def _find_released(d: Decisions, live: LiveRanges, *, holds: bool) -> None:
    """Find the op that releases each value, by phase, makers before readers. A hold variable is no reader: it holds the
    value from its making on."""
    readers: dict[tuple[int, int], list[Variable]] = {}
    for use in d.uses:
        if not use.rerun and not use.kept and d.variables[use.target].kind != "hold":
            readers.setdefault((use.source, use.out), []).append(d.variables[use.target])
    for (source, out), targets in readers.items():
        s = d.variables[source]
        nodes = [t.node.name for t in targets if t.kind == "op" and t.node is not None]
        if not nodes or (len(nodes) < len(targets) if s.kind != "hold" else not holds):
            continue
        last = max(nodes, key=d.graph.order.__getitem__)
        value = s.value if s.node is None else Value(s.node.name, out)
        if value is not None and _is_released(d, s, value, last, live, alone=len(nodes) == 1):
            live.released_by[targets[0].phase][value] = last


def _is_released(d: Decisions, source: Variable, value: Value, reader: str, live: LiveRanges, *, alone: bool) -> bool:
    if source.kind == "copy":
        return copy_range(d, source, live) is not None
    if source.kind == "hold":
        return value not in d.returned and not _base_is_there(d, value, ProgramPoint(live.at[reader]), live)
    return alone and source.kind == "op" and own_share(d, value, ProgramPoint(live.at[reader]), live) > 0


def _base_is_there(d: Decisions, view: Value, point: ProgramPoint, live: LiveRanges) -> bool:
    """Whether memory that a view shares may be counted at a point of the backward as that of another value."""
    node = d.graph.by_name[view.node]
    if not may_be_view(d, node):
        return False
    base = node.inputs[0]
    views = [n for n, _ in d.graph.consumers[base] if may_be_view(d, n) and n.phase == node.phase]
    size = sum(m.bytes for n in views for m in n.outputs if m is not None)
    read = base in live.backward and live.backward[base][1] >= point
    outside = base in d.returned or d.graph.by_name[base.node].op == "placeholder"
    return read or outside or size > d.graph.meta(base).bytes or _base_is_there(d, base, point, live)


def _first_reads(graph: Graph, at: Mapping[str, int], phase: Phase) -> dict[Value, int]:
    found = ((v, [at[n.name] for n, _ in readers if n.phase == phase]) for v, readers in graph.consumers.items())
    return {value: min(points) for value, points in found if points}


def _last_reads(graph: Graph, at: Mapping[str, int], phase: Phase, ends: Mapping[Value, int]) -> dict[Value, int]:
    """Return the point of the last reader of each value, or that in ``ends`` if it is later."""
    last: dict[Value, int] = {}
    for value, readers in graph.consumers.items():
        points = [at[n.name] for n, _ in readers if n.phase == phase]
        if points:
            last[value] = max(points)
    return last | {value: max(point, last.get(value, -1)) for value, point in ends.items()}


def _through_views(d: Decisions, last: dict[Value, int]) -> dict[Value, int]:
    for node in reversed(d.graph.nodes):
        if node.name in d.views:
            found = [last[v] for i in range(len(node.outputs)) if (v := Value(node.name, i)) in last]
            if found:
                last[node.inputs[0]] = max([last.get(node.inputs[0], -1), *found])
    return last


def _earliest_reads(graph: Graph) -> dict[Value, ProgramPoint]:
    """Return the earliest point in the backward at which each forward value may be read, by whatever runs again."""
    found: dict[Value, ProgramPoint] = {}
    for node in reversed(graph.nodes):
        if node.phase == "backward" and node.op != "placeholder":
            point = ProgramPoint(graph.order[node.name])
        else:
            made = [found[v] for i in range(len(node.outputs)) if (v := Value(node.name, i)) in found]
            if not made:
                continue
            point = rerun(graph, node.name, min(made))
        for value in node.inputs:
            found[value] = min(found.get(value, point), point)
    return found


def _backward_reads(graph: Graph, at: Mapping[str, int]) -> tuple[dict[Value, ProgramPoint], dict[Value, ProgramPoint]]:
    """Return the points in the backward between which each forward value is there, for values that the backward reads.

    An op is run again just before its first reader, which may itself be run again at any earlier point. Values that the
    backward reads directly are taken to be recomputed for those reads, and not to be read afterwards. Of values that
    only ops read that may or may not run again, it is unknown which of them will: such a value is counted from the last
    of these points to the first. Otherwise the constraints would count more than is held.
    """
    first: dict[Value, ProgramPoint] = {}
    last: dict[Value, ProgramPoint] = {}
    direct: set[Value] = set()
    for node in reversed(graph.nodes):
        backward = node.phase == "backward" and node.op != "placeholder"
        made = (Value(node.name, i) for i in range(len(node.outputs)))
        points = (
            [ProgramPoint(at[node.name])]
            if backward
            else [rerun(graph, node.name, first[v]) for v in made if v in first]
        )
        for value in dict.fromkeys(node.inputs) if points else ():
            if backward:
                first[value] = points[0]
                last.setdefault(value, points[0])
                direct.add(value)
            elif value not in direct:
                first[value] = max(first.get(value, points[0]), *points)
                last[value] = min(last.get(value, points[0]), *points)
    return first, last
