"""Identical rows of a matrix, merged: options that differ only for other neighbours cost the same to one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autopar.solver.problem import Array, IndexArray


class Alike(NamedTuple):
    """``first``: one row of each class; ``number``: the class of every row."""

    first: IndexArray
    number: IndexArray


def alike(matrix: Array) -> Alike:
    """Classes of rows that are equal, bit by bit."""
    rows = np.ascontiguousarray(matrix)
    whole = rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).ravel()
    _, first, number = np.unique(whole, return_index=True, return_inverse=True)
    return Alike(first, number)
