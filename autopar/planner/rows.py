"""Memory as the solver sees it: the bytes that every option holds at chosen moments of the program.

The rows leave out redistributed operands, which ``copies`` adds, and the copies that contractions and collectives make
on the way; the exact liveness of the scheduled program has the last word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autopar.ir import ITEMSIZE, Graph, Phase, TensorMeta, Value
from autopar.planner.in_place import may_overwrite
from autopar.planner.kernels import VIEWS, local_bytes
from autopar.planner.options import Options
from autopar.planner.pricing import state_bytes
from autopar.planner.transients import least_transients
from autopar.planner.variables import Decisions, Variable, hold_key, spec_made
from autopar.sharding import Strategy
from autopar.solver import Usage

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Lives:
    """Positions in the graph between which a value's memory, and that of its views, is read."""

    at: Mapping[str, int]
    forward: Mapping[Value, int]
    backward: Mapping[Value, tuple[int, int]]
    whole: Mapping[Value, int]
    stored: frozenset[Value]


def usages(d: Decisions, options: Options, positions: Sequence[int]) -> tuple[Usage, ...]:
    """What every option holds at each of ``positions`` (indices of graph nodes; the graph's length is the end).

    Time ``t`` of the result is ``positions[t]``.
    """
    lives = _lives(d.graph)
    made = _gradients_made(d.graph, lives.at)
    found: list[Usage] = []
    for i, v in enumerate(d.variables):
        for size, start, end in _held(d, v, options, lives, made):
            if size.any():
                found += [Usage(i, size, t, t + 1) for t, p in enumerate(positions) if start <= p <= end]
    for t, p in enumerate(positions):
        found += _while_running(d, options, p, t)
    return tuple(found)


def _while_running(d: Decisions, options: Options, place: float, time: int) -> list[Usage]:
    """What the node at ``place`` holds beside its operands and results, while it runs."""
    if place != int(place) or place >= len(d.graph.nodes):
        return []
    node = d.graph.nodes[int(place)]
    at = d.index.get(node.name)
    if at is None or d.variables[at].kind != "op":
        return []
    metas = tuple(d.graph.meta(v) for v in node.inputs)
    held = [least_transients(node, o, metas, d.mesh, options.device) for o in d.variables[at].options]
    return [Usage(at, np.array(held, dtype=np.float64), time, time + 1)] if any(held) else []


def static_usages(
    d: Decisions, options: Options, place: float, time: int, *, holds: bool, tied: bool
) -> list[Usage]:  # fmt: skip
    """What every option holds at one place among the graph's nodes, as time ``time``.

    Args:
        holds: also what hold variables keep for the backward; of it, with ``tied``, nothing for views.
    """
    lives = _lives(d.graph)
    made = _gradients_made(d.graph, lives.at)
    found: list[Usage] = []
    for i, v in enumerate(d.variables):
        view = v.kind == "hold" and v.value is not None and d.graph.by_name[v.value.node].packet in VIEWS
        if v.kind == "hold" and (not holds or (view and tied)):
            continue
        for size, start, end in _held(d, v, options, lives, made):
            if start <= place <= end and size.any():
                found.append(Usage(i, size, time, time + 1))
    return found + _while_running(d, options, place, time)


def _held(
    d: Decisions, v: Variable, options: Options, lives: _Lives, made: Mapping[str, int]
) -> Iterator[tuple[Array, int, int]]:
    """(bytes of each option, first position, last position) of what a variable holds."""
    end = len(d.graph.nodes)
    if v.kind == "parameter" and v.node is not None and v.node.outputs[0] is not None:
        meaning, meta = d.graph.input_of[v.node.name], v.node.outputs[0]
        specs = [s for o in v.options if (s := spec_made(o, 0)) is not None]
        parts = [state_bytes(meta, s, d.mesh, meaning.trainable, options) for s in specs]
        away = np.array(v.away or (0,) * len(parts), dtype=np.float64)
        yield np.array([float(p.parameter + p.optimizer) for p in parts]) - away, 0, end
        gradients = np.array([float(p.gradient) for p in parts])
        reduced = d.reduced_dtype.get(meaning.name, meta.dtype)
        yield gradients * (ITEMSIZE[reduced] / meta.itemsize), made.get(meaning.name, end), end - 1
        yield gradients, end, end
        yield np.array([float(p.step) for p in parts]) * (away == 0), end, end
    elif v.kind == "accumulator" and v.node is not None and v.node.outputs[0] is not None:
        yield _sizes(d, v.node.outputs[0], v.options, 0), 0, lives.whole[Value(v.node.name)]
    elif v.node is not None and v.node.op == "placeholder" and v.node.outputs[0] is not None:
        meta = v.node.outputs[0]
        whole = v.kind == "input" and options.batch == "global"
        yield np.full(len(v.options), float(meta.bytes)) if whole else _sizes(d, meta, v.options, 0), 0, end
    elif v.kind == "copy" and any(v.kept) and v.value is not None:
        size = _sizes(d, d.graph.meta(v.value), v.options, 0) * np.array(v.kept)
        yield size, lives.forward.get(v.value, 0), lives.backward.get(v.value, (0, -1))[1]
    elif v.kind == "hold" and v.value is not None:
        size = _sizes(d, d.graph.meta(v.value), v.options, 0)
        first, last = lives.backward.get(v.value, (end, -1))
        kept, remade, offloaded = (
            np.array([a == action for a in v.actions]) for action in ("keep", "recompute", "offload")
        )
        yield size * kept, lives.forward.get(v.value, lives.at[v.value.node]) + 1, last
        yield size * offloaded, first, last
        if d.graph.by_name[v.value.node].packet not in VIEWS:
            yield size * remade, first, last
    elif v.kind == "op" and v.node is not None and v.node.packet not in VIEWS:
        for out, result in enumerate(v.node.outputs):
            value = Value(v.node.name, out)
            if result is not None:
                reads = lives.forward if hold_key(value) in d.index else lives.whole
                at = lives.at[v.node.name]
                last = max(reads.get(value, -1), -1 if value in lives.stored else at)
                # While it runs it may be in the place of an operand: rows are not above what is held.
                yield _sizes(d, result, v.options, out), at + may_overwrite(v.node, d.graph), last


def _sizes(d: Decisions, meta: TensorMeta, options: Sequence[Strategy], out: int) -> Array:
    specs = [spec_made(o, out) for o in options]
    return np.array([float(local_bytes(meta, s, d.mesh)) if s is not None else 0.0 for s in specs])


def _gradients_made(graph: Graph, at: Mapping[str, int]) -> dict[str, int]:
    return {o.name: at[o.value.node] for o in graph.outputs if o.kind == "gradient"}


def _lives(graph: Graph) -> _Lives:
    at = {n.name: i for i, n in enumerate(graph.nodes)}
    forward = _last_reads(graph, at, "forward")
    first, last = _backward_reads(graph, at)
    stored = frozenset(o.value for o in graph.outputs if o.kind == "gradient" and not o.name.startswith("input:"))
    return _Lives(at, forward, {v: (first[v], last[v]) for v in first}, _last_reads(graph, at, None), stored)


def _last_reads(graph: Graph, at: Mapping[str, int], phase: Phase | None) -> dict[Value, int]:
    """Position of the last reader (of one phase) of each value's memory, through views; outputs live to the end."""
    last: dict[Value, int] = {}
    for value, readers in graph.consumers.items():
        places = [at[n.name] for n, _ in readers if phase is None or n.phase == phase]
        if places:
            last[value] = max(places)
    for output in graph.outputs:
        if output.kind != "gradient" or output.name.startswith("input:"):
            last[output.value] = len(graph.nodes)
    for node in reversed(graph.nodes):
        if node.packet in VIEWS and node.inputs:
            ends = [last.get(Value(node.name, i), -1) for i in range(len(node.outputs))]
            last[node.inputs[0]] = max([last.get(node.inputs[0], -1), *ends])
    return last


def _backward_reads(graph: Graph, at: Mapping[str, int]) -> tuple[dict[Value, int], dict[Value, int]]:
    """First and last position in the backward at which each forward value is read, if it is there at all.

    An op is run again just before its first reader. That may be another that is run again, as early as one likes; but
    what the backward itself reads is taken to be made for that, so that the rows are not above what is held.
    """
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    direct: set[Value] = set()
    for node in reversed(graph.nodes):
        backward = node.phase == "backward" and node.op != "placeholder"
        made = (Value(node.name, i) for i in range(len(node.outputs)))
        places = [at[node.name]] if backward else [first[v] for v in made if v in first]
        for value, place in dict.fromkeys(node.inputs, min(places)).items() if places else ():
            if backward or value not in direct:
                first[value] = min(first.get(value, place), place)
            last[value] = max(last.get(value, place), place)
            if backward:
                direct.add(value)
    return first, last
