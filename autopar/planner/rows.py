"""Memory as the solver sees it: the bytes that every option holds at chosen moments of the program.

The rows leave out redistributed operands, which ``copies`` adds, and the copies that contractions and collectives make
on the way; the exact liveness of the scheduled program has the last word.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.ir import ITEMSIZE, Node, TensorMeta, Value
from autopar.planner.in_place import may_overwrite
from autopar.planner.kernels import local_bytes
from autopar.planner.lives import (
    BEFORE,
    Lives,
    again,
    inherited,
    last_as_made,
    last_read,
    lives_of,
    outlived,
    taken_over,
    takes_over,
)
from autopar.planner.options import Options
from autopar.planner.pricing import state_bytes
from autopar.planner.transients import least_transients
from autopar.planner.variables import Decisions, Variable, spec_made, spec_read
from autopar.sharding import ShardingSpec, Strategy
from autopar.solver import Usage
from autopar.solver.clock import tick

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Holdings:
    """What options hold for more than one op: of variable ``variables[i]`` each option ``sizes[i]`` bytes, from place
    ``first[i]`` to ``last[i]``."""

    d: Decisions
    options: Options
    variables: Sequence[int]
    sizes: Sequence[Array]
    first: Array
    last: Array

    @classmethod
    def of(cls, d: Decisions, options: Options) -> Holdings:
        tick("held variable", len(d.variables))
        lives, made = lives_of(d), _gradients_made(d)
        found = [
            (i, size, first, last)
            for i, v in enumerate(d.variables)
            for size, first, last in _held(d, v, options, lives, made)
            if size.any()
        ]
        variables, sizes, first, last = zip(*found, strict=True) if found else ((), (), (), ())
        return cls(d, options, variables, sizes, np.array(first), np.array(last))

    def usages(self, places: Sequence[float]) -> tuple[Usage, ...]:
        """What every option holds at each of ``places``; that of the graph's length is the end of the step.

        Time ``t`` of the result is ``places[t]``.
        """
        found: list[Usage] = []
        for t, place in enumerate(places):
            there = np.flatnonzero((self.first <= place) & (place <= self.last)).tolist()
            found += [Usage(self.variables[i], self.sizes[i], t, t + 1) for i in there]
            found += _while_running(self.d, self.options, place, t)
        tick("usage", len(found))
        return tuple(found)


def usages(d: Decisions, options: Options, places: Sequence[float]) -> tuple[Usage, ...]:
    """`Holdings.usages`, for who asks once."""
    return Holdings.of(d, options).usages(places)


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
    lives = lives_of(d, holds=holds)
    made = _gradients_made(d)
    found: list[Usage] = []
    for i, v in enumerate(d.variables):
        view = v.kind == "hold" and v.value is not None and v.value.node in d.views
        if v.kind == "hold" and (not holds or (view and tied)):
            continue
        for size, start, end in _held(d, v, options, lives, made):
            if start <= place <= end and size.any():
                found.append(Usage(i, size, time, time + 1))
    return found + _while_running(d, options, place, time)


def _held(
    d: Decisions, v: Variable, options: Options, lives: Lives, made: Mapping[str, _Made]
) -> Iterator[tuple[Array, float, float]]:
    """(bytes of each option, first place, last place) of what a variable holds."""
    end = len(d.graph.nodes)
    if v.kind == "parameter" and v.node is not None:
        yield from _of_parameter(d, v, options, made)
    elif v.kind == "accumulator" and v.node is not None and v.node.outputs[0] is not None:
        yield _sizes(d, v.node.outputs[0], v.options, 0), 0, lives.reads["backward"][1][Value(v.node.name)]
    elif v.node is not None and v.node.op == "placeholder" and v.node.outputs[0] is not None:
        meta = v.node.outputs[0]
        whole = v.kind == "input" and options.batch == "global"
        yield np.full(len(v.options), float(meta.bytes)) if whole else _sizes(d, meta, v.options, 0), 0, end
    elif v.kind == "copy" and v.value is not None:
        yield from _of_copy(d, v, v.value, lives)
    elif v.kind == "output" and v.value is not None:
        yield _sizes(d, d.graph.meta(v.value), v.options, 0), last_read(d, v.value, lives) + BEFORE, end
    elif v.kind == "hold" and v.value is not None:
        size = _sizes(d, d.graph.meta(v.value), v.options, 0)
        first, last = lives.backward.get(v.value, (end, -1))
        last -= BEFORE * (v.value in lives.handed["backward"])
        kept, remade, offloaded = (
            np.array([a == action for a in v.actions]) for action in ("keep", "recompute", "offload")
        )
        yield size * kept, lives.forward.get(v.value, lives.at[v.value.node]) + BEFORE, last
        yield size * offloaded, first if first % 1 else first - BEFORE, last  # a node that is run again has one place
        if v.value.node not in d.views:
            yield size * remade, again(d.graph, v.value.node, first), last
        elif (gone := outlived(d, v.value, lives)) is not None:
            yield size * remade, math.nextafter(gone, math.inf), last
    elif v.kind == "op" and v.node is not None:
        yield from _of_op(d, v, v.node, lives)


def _of_parameter(
    d: Decisions, v: Variable, options: Options, made: Mapping[str, _Made]
) -> Iterator[tuple[Array, float, float]]:  # fmt: skip
    assert v.node is not None and v.node.outputs[0] is not None
    end, meaning, meta = len(d.graph.nodes), d.graph.input_of[v.node.name], v.node.outputs[0]
    specs = [s for o in v.options if (s := spec_made(o, 0)) is not None]
    parts = [state_bytes(meta, s, d.mesh, meaning.trainable, options) for s in specs]
    away = np.array(v.away or (0,) * len(parts), dtype=np.float64)
    yield np.array([float(p.parameter + p.optimizer) for p in parts]) - away, 0, end
    gradients = np.array([float(p.gradient) for p in parts])
    as_made = gradients * (ITEMSIZE[d.reduced_dtype.get(meaning.name, meta.dtype)] / meta.itemsize)
    at, settled = made.get(meaning.name, (end, end))
    yield np.minimum(as_made, as_made.max(initial=0.0) / d.mesh.size), at + 1, settled - BEFORE
    yield as_made, settled, end - BEFORE
    yield gradients, end, end
    yield np.array([float(p.step) for p in parts]) * (away == 0), end, end


def _of_copy(d: Decisions, v: Variable, value: Value, lives: Lives) -> Iterator[tuple[Array, float, float]]:
    size = _sizes(d, d.graph.meta(value), v.options, 0)
    kept = np.array(v.kept or (False,) * len(v.options))
    if takes_over(d, v):
        beside, last = taken_over(d, v, lives)
        yield size * ~kept, beside + BEFORE, last
    if kept.any():  # until then it is the forward's own copy
        yield size * kept, lives.forward.get(value, -1) + BEFORE, lives.backward.get(value, (0, -1))[1]


def _of_op(d: Decisions, v: Variable, node: Node, lives: Lives) -> Iterator[tuple[Array, float, float]]:
    at = lives.at[node.name]
    for value in dict.fromkeys(node.inputs):
        if lives.handed[node.phase].get(value) == node.name:
            position = node.inputs.index(value)
            yield _bytes(d, d.graph.meta(value), [spec_read(o, position) for o in v.options]), at, at
    # While it runs it may be in the place of an operand: rows are not above what is held.
    first, share = at + BEFORE * may_overwrite(node, d.graph), 1.0
    if node.name in d.views:
        first, share = inherited(d, node, lives)
    for out, result in enumerate(node.outputs if share else ()):
        if result is not None:
            yield share * _sizes(d, result, v.options, out), first, last_as_made(d, Value(node.name, out), lives)


def _sizes(d: Decisions, meta: TensorMeta, options: Sequence[Strategy], out: int) -> Array:
    return _bytes(d, meta, [spec_made(o, out) for o in options])


def _bytes(d: Decisions, meta: TensorMeta, specs: Sequence[ShardingSpec | None]) -> Array:
    return np.array([float(local_bytes(meta, s, d.mesh)) if s is not None else 0.0 for s in specs])


class _Made(NamedTuple):
    """The place at which a gradient is made, and that from which on it is surely in its parameter's spec."""

    at: int
    settled: int


def _gradients_made(d: Decisions) -> dict[str, _Made]:
    """Every further step of a gradient's redistribution comes when the next result is there."""
    places = sorted({d.graph.order[o.value.node] for o in d.graph.outputs})
    ends = [*places, *[len(d.graph.nodes)] * 2 * d.mesh.ndim]
    settled = {place: ends[i + 2 * d.mesh.ndim - 1] for i, place in enumerate(places)}
    found = ((o.name, d.graph.order[o.value.node]) for o in d.graph.outputs if o.kind == "gradient")
    return {name: _Made(at, max(settled[at], at + 1)) for name, at in found}
