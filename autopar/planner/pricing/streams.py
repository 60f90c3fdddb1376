"""The seconds of a phase where gathers run at most a section ahead: what the paths say where nothing limits that.

A program holds what it has gathered until it is read, so it gathers only a little ahead. With the names of
``critical_paths``: computation of section s begins at ``b[s]``, when section s - 1 is computed and gathered; its
gathers follow those of section s - 1, no earlier than ``b[s - 1]``; its reductions follow those before, no earlier than
``b[s]``; and what it waits for comes after the reductions of sections before on the same axis, since an axis sends in
the order of the program. As in every schedule of a flow shop, the phase ends no earlier than any path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir import Phase
from autopar.planner.pricing.critical_paths import CostTerm, Sections, Work
from autopar.solver.problem import Array, IndexArray


@dataclass(frozen=True, eq=False)
class PhaseStreams:
    """A phase in one of the forms in which it runs.

    Args:
        share: the share of micro-batches that run it in this form.
        compute: the cost term of the computation of each section.
        sent: the cost terms of what is gathered, waited for and, where it is, reduced, each by section and axis.
    """

    share: float
    compute: IndexArray
    sent: tuple[IndexArray, ...]

    @staticmethod
    def of(
        order: Sequence[CostTerm], cut: Sections, axes: int, phase: Phase, share: float, reducing: bool
    ) -> PhaseStreams:
        at, sections = {term: i for i, term in enumerate(order)}, range(cut.count(phase))
        works: tuple[Work, ...] = ("gather", "wait", "reduce") if reducing else ("gather", "wait")
        sent = (np.array([[at[CostTerm(w, phase, s, a)] for a in range(axes)] for s in sections]) for w in works)
        return PhaseStreams(share, np.array([at[CostTerm("compute", phase, s)] for s in sections]), tuple(sent))

    def seconds(self, term_s: Array) -> Array:
        """The seconds of the phase for those of the cost terms, in the last dimension."""
        gather, wait, *reduce = (term_s[..., terms] for terms in self.sent)
        compute = term_s[..., self.compute] + wait.sum(axis=-1)
        computed, begun = np.zeros(term_s.shape[:-1]), np.zeros(term_s.shape[:-1])
        gathered = reduced = np.zeros((*term_s.shape[:-1], gather.shape[-1]))
        for s in range(len(self.compute)):
            begins = np.maximum(computed, gathered.max(axis=-1))
            gathered = np.maximum(gathered, begun[..., None]) + gather[..., s, :]
            queued = np.where(wait[..., s, :] > 0, reduced + wait[..., s, :], 0.0)
            computed = np.maximum(begins + compute[..., s], queued.max(axis=-1))
            for each in reduce:
                reduced = np.maximum(reduced, begins[..., None]) + each[..., s, :]
            begun = begins
        queues = sum(each.sum(axis=-2) for each in (gather, wait, *reduce))
        return np.asarray(np.maximum(computed, np.maximum.reduce([gathered, reduced, queues]).max(axis=-1)))


def streams(order: Sequence[CostTerm], cut: Sections, axes: int, accumulation_steps: int) -> tuple[PhaseStreams, ...]:
    """The phases, in the forms of ``phase_paths``."""
    n = accumulation_steps
    found = [
        PhaseStreams.of(order, cut, axes, "forward", 1.0, reducing=False),
        PhaseStreams.of(order, cut, axes, "backward", 1 / n, reducing=True),
    ]
    if n > 1:
        found.append(PhaseStreams.of(order, cut, axes, "backward", (n - 1) / n, reducing=False))
    return tuple(found)
