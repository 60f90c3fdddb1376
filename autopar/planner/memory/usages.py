"""Memory as the solver sees it: the bytes that every option holds at chosen moments of the program.

The rows leave out redistributed operands, which ``copies`` adds, and the copies that contractions and collectives make
on the way; the exact liveness of the scheduled program has the last word.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from autopar.ir import ITEMSIZE, Node, TensorMeta, Value
from autopar.planner.footprint.op_work import local_bytes
from autopar.planner.footprint.overwriting import may_overwrite
from autopar.planner.footprint.state import state_bytes
from autopar.planner.footprint.transients import least_transients
from autopar.planner.memory.live_ranges import (
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
from autopar.planner.problem.variables import Decisions, Variable, spec_made, spec_read
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
        lives, made, sizes_of = lives_of(d), _gradients_made(d), _Sizes(d, options)
        found = [
            (i, size, first, last)
            for i, v in enumerate(d.variables)
            for size, first, last in _held(sizes_of, v, lives, made)
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


def static_usages(d: Decisions, options: Options, place: float, time: int, *, holds: bool, tied: bool) -> list[Usage]:
    """What every option holds at one place among the graph's nodes, as time ``time``.

    Args:
        holds: also what hold variables keep for the backward; of it, with ``tied``, nothing for views.
    """
    lives = lives_of(d, holds=holds)
    made, sizes = _gradients_made(d), _Sizes(d, options)
    found: list[Usage] = []
    for i, v in enumerate(d.variables):
        view = v.kind == "hold" and v.value is not None and v.value.node in d.views
        if v.kind == "hold" and (not holds or (view and tied)):
            continue
        for size, start, end in _held(sizes, v, lives, made):
            if start <= place <= end and size.any():
                found.append(Usage(i, size, time, time + 1))
    return found + _while_running(d, options, place, time)


@dataclass(frozen=True, eq=False)
class _Sizes:
    """Bytes of the largest shard by option: of equal options and tensors looked at once, so not to be changed."""

    d: Decisions
    options: Options
    known: dict[object, Array] = field(default_factory=dict)

    def made(self, meta: TensorMeta, options: tuple[Strategy, ...], out: int) -> Array:
        """Of result ``out``, a tensor of ``meta``."""
        return self._of(meta, options, out, spec_made)

    def read(self, meta: TensorMeta, options: tuple[Strategy, ...], position: int) -> Array:
        """Of operand ``position``."""
        return self._of(meta, options, position, spec_read)

    def _of(
        self,
        meta: TensorMeta,
        options: tuple[Strategy, ...],
        at: int,
        spec_of: Callable[[Strategy, int], ShardingSpec | None],
    ) -> Array:
        options = self.d.shared(options)
        key = id(options), at, meta, spec_of
        if key not in self.known:
            specs = (spec_of(o, at) for o in options)
            self.known[key] = np.array([float(local_bytes(meta, s, self.d.mesh)) if s else 0.0 for s in specs])
        return self.known[key]

    def state(self, meta: TensorMeta, options: tuple[Strategy, ...], trainable: bool) -> Array:
        """Of a parameter by options: a row for itself, its optimizer state, its gradient and the step."""
        options = self.d.shared(options)
        key = id(options), meta, trainable
        if key not in self.known:
            specs = (s for o in options if (s := spec_made(o, 0)) is not None)
            found = [state_bytes(meta, s, self.d.mesh, trainable, self.options) for s in specs]
            self.known[key] = np.array([(s.parameter, s.optimizer, s.gradient, s.step) for s in found], dtype=float).T
        return self.known[key]


def _held(sizes: _Sizes, v: Variable, lives: Lives, made: Mapping[str, _Made]) -> Iterator[tuple[Array, float, float]]:
    """(bytes of each option, first place, last place) of what a variable holds."""
    d, options = sizes.d, sizes.options
    end = len(d.graph.nodes)
    if v.kind == "parameter" and v.node is not None:
        yield from _of_parameter(sizes, v, made)
    elif v.kind == "accumulator" and v.node is not None and v.node.outputs[0] is not None:
        yield sizes.made(v.node.outputs[0], v.options, 0), 0, lives.reads["backward"][1][Value(v.node.name)]
    elif v.node is not None and v.node.op == "placeholder" and v.node.outputs[0] is not None:
        meta = v.node.outputs[0]
        whole = v.kind == "input" and options.batch == "global"
        yield np.full(len(v.options), float(meta.bytes)) if whole else sizes.made(meta, v.options, 0), 0, end
    elif v.kind == "copy" and v.value is not None:
        yield from _of_copy(sizes, v, v.value, lives)
    elif v.kind == "output" and v.value is not None:
        yield sizes.made(d.graph.meta(v.value), v.options, 0), last_read(d, v.value, lives) + BEFORE, end
    elif v.kind == "hold" and v.value is not None:
        size = sizes.made(d.graph.meta(v.value), v.options, 0)
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
        yield from _of_op(sizes, v, v.node, lives)


def _of_parameter(sizes: _Sizes, v: Variable, made: Mapping[str, _Made]) -> Iterator[tuple[Array, float, float]]:
    assert v.node is not None and v.node.outputs[0] is not None
    d = sizes.d
    end, meaning, meta = len(d.graph.nodes), d.graph.input_of[v.node.name], v.node.outputs[0]
    parameters, optimizer, gradients, step = sizes.state(meta, v.options, meaning.trainable)
    away = np.array(v.away or (0,) * len(v.options), dtype=np.float64)
    yield parameters + optimizer - away, 0, end
    as_made = gradients * (ITEMSIZE[d.reduced_dtype.get(meaning.name, meta.dtype)] / meta.itemsize)
    at, settled = made.get(meaning.name, (end, end))
    yield np.minimum(as_made, as_made.max(initial=0.0) / d.mesh.size), at + 1, settled - BEFORE
    yield as_made, settled, end - BEFORE
    yield gradients, end, end
    yield step * (away == 0), end, end


def _of_copy(sizes: _Sizes, v: Variable, value: Value, lives: Lives) -> Iterator[tuple[Array, float, float]]:
    d = sizes.d
    size = sizes.made(d.graph.meta(value), v.options, 0)
    kept = np.array(v.kept or (False,) * len(v.options))
    if takes_over(d, v):
        beside, last = taken_over(d, v, lives)
        yield size * ~kept, beside + BEFORE, last
    if kept.any():  # until then it is the forward's own copy
        yield size * kept, lives.forward.get(value, -1) + BEFORE, lives.backward.get(value, (0, -1))[1]


def _of_op(sizes: _Sizes, v: Variable, node: Node, lives: Lives) -> Iterator[tuple[Array, float, float]]:
    d = sizes.d
    at = lives.at[node.name]
    for value in dict.fromkeys(node.inputs):
        if lives.handed[node.phase].get(value) == node.name:
            yield sizes.read(d.graph.meta(value), v.options, node.inputs.index(value)), at, at
    # While it runs it may be in the place of an operand: rows are not above what is held.
    first, share = at + BEFORE * may_overwrite(node, d.graph), 1.0
    if node.name in d.views:
        first, share = inherited(d, node, lives)
    for out, result in enumerate(node.outputs if share else ()):
        if result is not None:
            yield share * sizes.made(result, v.options, out), first, last_as_made(d, Value(node.name, out), lives)


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
