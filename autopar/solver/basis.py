"""Where a linear program ended, carried over to one like it by the names of columns and rows.

A round with one more row of usage is another program with nearly the same columns, and ends near the last one: from
there the simplex method takes a tenth of the steps. What the last program did not have begins at zero, its rows slack;
how many columns are basic may then be wrong, which the solver mends.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.solver.ilp import Model
from autopar.solver.problem import Basis, IndexArray

_MIX = np.int64(0x5851F42D4C957F2D)
"""Knuth's multiplier (MMIX): numbers of several parts become one, equal ones by chance hardly ever."""


def named(model: Model, status: object) -> Basis:
    """Where the program of ``model`` ended, with the solver's ``status``."""
    return Basis(*_names(model), status)


def carried(highspy: Any, basis: Basis, model: Model) -> Any:
    """The solver's start for ``model`` from where another one ended."""
    columns, rows = _names(model)
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


def _names(model: Model) -> tuple[IndexArray, IndexArray]:
    """A number for each column and each row: what it stands for."""
    nodes, sizes = np.array(model.nodes, dtype=np.int64), np.diff(model.first)
    option = np.arange(model.first[-1]) - np.repeat(model.first[:-1], sizes)
    columns, rows = [_mixed(np.repeat(nodes, sizes), -1, option, 0)], [_mixed(nodes, -1, 0, 0)]
    node_at = dict(zip(model.first[:-1].tolist(), model.nodes, strict=True))
    for edge in model.edges:
        u, v, network = node_at[edge.u], node_at[edge.v], edge.network
        columns.append(_mixed(network.tails, network.heads, u, v))
        rows.append(_mixed(np.arange(network.nodes), -2, u, v))
    left = len(model.row_lower) - sum(map(len, rows))
    rows.append(_mixed(np.arange(-left, 0), -3, 0, 0))  # by the place from the end: rows of usage come before the last
    return np.concatenate(columns), np.concatenate(rows)


def _mixed(first: IndexArray, *others: IndexArray | int) -> IndexArray:
    mixed = first.astype(np.int64)
    for part in others:
        mixed = mixed * _MIX + part
    return mixed
