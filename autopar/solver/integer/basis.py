"""Where a linear program ended, carried over to one like it by the names of columns and rows.

A round with one more row of usage is another program with nearly the same columns, and ends near the last one. What the
last program did not have begins at zero, its rows slack; how many columns are basic may then be wrong, which the solver
mends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.solver.integer.ilp import Model
from autopar.solver.problem import Basis, IndexArray


def carried(highspy: Any, basis: Basis, model: Model) -> Any:
    """The solver's start for ``model`` from where another one ended."""
    columns, rows = model.names
    if np.array_equal(columns, basis.columns) and np.array_equal(rows, basis.rows):
        return basis.status
    kinds, ended, start = highspy.HighsBasisStatus, basis.status, highspy.HighsBasis()
    start.col_status = _looked_up(columns, basis.columns, ended.col_status, kinds.kLower)
    start.row_status = _looked_up(rows, basis.rows, ended.row_status, kinds.kBasic)
    start.valid = start.alien = True
    return start


def _looked_up(names: IndexArray, known: IndexArray, status: list[Any], other: Any) -> list[Any]:
    if not len(known):
        return [other] * len(names)
    order = np.argsort(known)
    at = order[np.searchsorted(known, names, sorter=order).clip(max=len(known) - 1)]
    found = (known[at] == names).tolist()
    return [status[i] if there else other for i, there in zip(at.tolist(), found, strict=True)]
