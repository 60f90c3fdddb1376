"""What can hide behind what: the sections of each phase, and the paths of which the longest is the phase's time.

Gathers of what is available when a phase begins, such as shards of parameters, can be launched ahead of their readers.
The reduction of a gradient runs alongside what is computed after it, and while the program waits. A phase is
cut into n sections (what comes before repeated blocks, these blocks, and what follows). With ``G[s]`` the seconds of
the gathers that section s reads, ``C[s]`` those of its computation and of what it waits for, and ``R[s]`` those of the
reductions of the gradients that it makes, the phase takes as long as the longest *path*::

    G[0] + ... + G[k - 1]  +  C[k] + ... + C[l - 1]  +  R[l] + ... + R[n - 1]        for k <= l

which gathers for the first k sections, computes up to section l and reduces what the others make; or as long as all its
communication, since one collective runs at a time. This is the bound for flow shops of two machines (Johnson 1954).
Collectives of different mesh axes run concurrently: G and R are then those of one axis each, and there is a path for
each pair of axes.

A run of equal blocks is several sections, so that it counts which of its blocks send (``streams``). Paths here begin
and end where runs do, so that they weigh all blocks of a run alike: a problem is a sum of them, and repeats what the
model does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.ir import Phase
from autopar.planner.graphs.ahead import casts_of_parameters
from autopar.planner.problem.variables import Decisions, Use, Variable
from autopar.solver import Run

Array: TypeAlias = npt.NDArray[np.float64]
Work: TypeAlias = Literal["gather", "compute", "wait", "reduce"]

SENT: tuple[Work, ...] = ("gather", "wait", "reduce")
"""Work of the streams that communicate, of which there is one for each mesh axis."""

EVEN_SECTIONS = 4
"""The number of equal sections of a phase that repeats nothing."""

MAX_SPANS = 2
"""The number of runs of blocks in a phase that get sections of their own."""

RUN_SECTIONS = 8
"""Sections of a run of blocks at most."""

AVAILABLE = ("parameter", "buffer", "input", "received", "tangent")
"""Kinds of variables whose values are available when a phase begins."""


class CostTerm(NamedTuple):
    """Seconds that the objective weights alike. What is sent has a term for each mesh axis."""

    work: Work
    phase: Phase
    section: int
    axis: int = 0


@dataclass(frozen=True)
class Sections:
    """The node index at which each section of a phase starts. ``wholes``: of those at which a run of blocks begins or
    ends, the numbers, and so of the first; by default of all."""

    starts: Mapping[Phase, tuple[int, ...]]
    wholes: Mapping[Phase, tuple[int, ...]] = field(default_factory=dict)

    def borders(self, phase: Phase) -> tuple[int, ...]:
        return self.wholes.get(phase, tuple(range(self.count(phase))))

    def whole(self, section: int, phase: Phase) -> int:
        """The first section of the run that a section is in, else itself."""
        borders = self.borders(phase)
        return borders[bisect_right(borders, section) - 1]

    def of(self, position: int, phase: Phase) -> int:
        return max(bisect_right(self.starts[phase], position) - 1, 0)

    def count(self, phase: Phase) -> int:
        return len(self.starts[phase])


def sections(d: Decisions, runs: Sequence[Run]) -> Sections:
    """Cut the phases into sections: each run of blocks into a few, and what lies between runs."""
    starts: dict[Phase, tuple[int, ...]] = {}
    wholes: dict[Phase, tuple[int, ...]] = {}
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        positions = [i for i, n in enumerate(d.graph.nodes) if n.phase == phase and n.op != "placeholder"] or [0]
        layers = [layer for run in runs for layer in _layers(d, run, phase)]
        spans = _merged((min(of)[0], max(of)[1]) for run in runs if (of := _layers(d, run, phase)))
        if not spans:
            starts[phase] = tuple(
                dict.fromkeys(positions[len(positions) * i // EVEN_SECTIONS] for i in range(EVEN_SECTIONS))
            )
            continue
        coarse = {positions[0], *(at for first, last in spans for at in (first, last + 1) if at <= positions[-1])}
        within = (sorted(at for at, _ in layers if first < at <= last) for first, last in spans)
        fine = {of[len(of) * i // RUN_SECTIONS] for of in within if of for i in range(RUN_SECTIONS)}
        starts[phase] = tuple(sorted(coarse | fine))
        wholes[phase] = tuple(i for i, at in enumerate(starts[phase]) if at in coarse)
    return Sections(starts, wholes)


def _layers(d: Decisions, run: Run, phase: Phase) -> list[tuple[int, int]]:
    """The first and last node index of each block of a run in a phase."""
    found = []
    for block in run.copies.tolist():
        variables = [d.variables[i] for i in block]
        at = [d.graph.order[v.node.name] for v in variables if v.kind == "op" and v.node and v.phase == phase]
        if at:
            found.append((min(at), max(at)))
    return found


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping spans, and drop the shortest where there are more than ``MAX_SPANS``."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return sorted(sorted(merged, key=lambda s: s[0] - s[1])[:MAX_SPANS])


@dataclass(frozen=True)
class TermAssignment:
    """The cost term that the seconds of each variable and each use belong to, if they take any.

    A use that sends has a term for each mesh axis.
    """

    variables: tuple[CostTerm | None, ...]
    uses: tuple[tuple[CostTerm, ...], ...]


def assign_terms(d: Decisions, cut: Sections) -> TermAssignment:
    """Assign each variable and use to its cost terms."""
    return _Assigner(d, cut).found()


@dataclass
class _Assigner:
    d: Decisions
    cut: Sections

    def found(self) -> TermAssignment:
        variables = tuple(map(self._term_of_variable, self.d.variables))
        return TermAssignment(variables, tuple(map(self._terms_of_use, self.d.uses)))

    def _term_of_variable(self, v: Variable) -> CostTerm | None:
        section = self._section(v)
        return None if section is None or v.kind == "copy" else CostTerm("compute", v.phase, section)

    def _terms_of_use(self, use: Use) -> tuple[CostTerm, ...]:
        source, target = self.d.variables[use.source], self.d.variables[use.target]
        if reduces(self.d, use):
            return self._sent_terms("reduce", "backward", self._section(source))
        if use.kept or use.rerun or use.source == use.target:
            return ()
        section = self._section(target)
        if section is not None and self._is_available(source):
            return self._sent_terms("gather", target.phase, section)
        phase = target.phase if section is not None else source.phase
        section = self._section(source) if section is None else section  # a result, or a hold variable
        return self._sent_terms("wait", phase, section)

    def _is_available(self, source: Variable) -> bool:
        """Whether what the variable has is there when a phase begins, or can be."""
        made = source.value.node if source.value is not None else source.node.name if source.node is not None else ""
        return source.kind in AVAILABLE or (source.kind in ("op", "hold") and made in self._ahead)

    @cached_property
    def _ahead(self) -> frozenset[str]:
        return casts_of_parameters(self.d.graph)

    def _sent_terms(self, work: Work, phase: Phase, section: int | None) -> tuple[CostTerm, ...]:
        axes = range(self.d.mesh.ndim)
        return () if section is None else tuple(CostTerm(work, phase, section, axis) for axis in axes)

    def _section(self, v: Variable) -> int | None:
        """Return the section in which a variable's op runs; for a copy variable, the one in which it is first read."""
        if v.kind == "op" and v.node is not None:
            return self.cut.of(self.d.graph.order[v.node.name], v.phase)
        if v.kind == "rerun" and v.node is not None:
            return self._reruns_in[self.cut.of(self.d.graph.order[v.node.name], "forward")]
        if v.kind == "copy" and v.value is not None:
            readers = (n for n, _ in self.d.graph.consumers.get(v.value, ()) if n.phase == v.phase)
            return self.cut.of(min((self.d.graph.order[n.name] for n in readers), default=0), v.phase)
        return None

    @cached_property
    def _reruns_in(self) -> list[int]:
        """For each section of the forward, the section of the backward that reads most of what it makes."""
        graph, count = self.d.graph, np.zeros((self.cut.count("forward"), self.cut.count("backward")), dtype=int)
        for value, readers in graph.consumers.items():
            made = graph.by_name[value.node]
            if made.phase == "forward" and made.op != "placeholder":
                section = self.cut.of(graph.order[made.name], "forward")
                for reader, _ in readers:
                    if reader.phase == "backward":
                        count[section, self.cut.of(graph.order[reader.name], "backward")] += 1
        return [int(section) for section in count.argmax(axis=1)]


def reduces(d: Decisions, use: Use) -> bool:
    """Whether a use takes a gradient to its parameter. Nothing in the program waits for that."""
    return use.position < 0 and d.variables[use.source].phase == "backward" and use.source != use.target


@dataclass(frozen=True, eq=False)
class PhasePaths:
    """A phase in one of the forms in which it runs, and its paths.

    Args:
        share: the share of micro-batches that run it in this form.
        works: 1 for each cost term whose seconds it takes.
        paths: a row for each path, with 1 for each cost term on it.
        computing: the index of the path that only computes.
    """

    share: float
    works: Array
    paths: Array
    computing: int


def cost_terms(cut: Sections, axes: int) -> list[CostTerm]:
    """List every cost term, in the order in which their seconds are listed."""
    works: tuple[Work, ...] = ("gather", "compute", "wait", "reduce")
    return [
        CostTerm(work, phase, s, axis)
        for phase in cut.starts
        for work in works
        for s in range(cut.count(phase))
        for axis in range(axes if work in SENT else 1)
        if (work, phase) != ("reduce", "forward")
    ]


def phase_paths(cut: Sections, axes: int, accumulation_steps: int) -> list[PhasePaths]:
    """Return the forward and the backward. Where gradients accumulate, the last backward, which reduces them, and the
    others are separate."""
    order, n = cost_terms(cut, axes), accumulation_steps
    forward = _phase_paths(order, cut, axes, "forward", 1.0, reducing=False)
    last = _phase_paths(order, cut, axes, "backward", 1 / n, reducing=True)
    others = [_phase_paths(order, cut, axes, "backward", (n - 1) / n, reducing=False)] if n > 1 else []
    return [forward, last, *others]


def _phase_paths(
    order: Sequence[CostTerm], cut: Sections, axes: int, phase: Phase, share: float, *, reducing: bool
) -> PhasePaths:
    def row(among: Callable[[CostTerm], bool]) -> list[float]:
        return [float(b.phase == phase and (reducing or b.work != "reduce") and among(b)) for b in order]

    def path(k: int, end: int, gathered: int, reduced: int) -> list[float]:
        within = {"gather": range(k), "compute": range(k, end), "wait": range(k, end), "reduce": range(end, n)}
        on = {"gather": gathered, "reduce": reduced}  # waits on any axis
        return row(lambda b: b.section in within[b.work] and b.axis == on.get(b.work, b.axis))

    def sent(axis: int) -> list[float]:
        return row(lambda b: b.work in SENT and b.axis == axis)

    n = cut.count(phase)
    borders = (*cut.borders(phase), n)
    ends = borders if reducing else (n,)
    pairs = list(product(range(axes), repeat=2))
    found = [path(k, end, a, b) for end in ends for k in borders if k <= end for a, b in pairs]
    found += [sent(axis) for axis in range(axes)]
    paths = list(dict.fromkeys(map(tuple, found)))
    return PhasePaths(share, np.array(row(lambda _: True)), np.array(paths), paths.index(tuple(path(0, n, 0, 0))))
