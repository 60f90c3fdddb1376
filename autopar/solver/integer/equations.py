"""Equations between the options of several nodes, for linear programs: weighted nodes whose values add up to 0, option
by option."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from autopar.solver.integer.ilp import Model
from autopar.solver.problem import Array
from autopar.solver.reduce.graph import Graph

Equations: TypeAlias = Sequence[Sequence[tuple[int, float]]]
"""Of each its terms: a node and its weight."""


def coupled(model: Model, graph: Graph, equations: Equations) -> Model:
    """``model`` of ``graph`` with these rows behind its own."""
    start_of = dict(zip(model.nodes, model.first[:-1].tolist(), strict=True))
    starts, columns, values = [model.starts], [model.columns], [model.values]
    end, rows = int(model.starts[-1]), 0
    for option, terms in _rows(graph, equations):
        entries = [
            (start_of[node] + int(np.searchsorted(graph.options[node], option)), weight)
            for node, weight in terms
            if option in graph.options[node]
        ]
        columns.append(np.array([c for c, _ in entries], dtype=np.int64))
        values.append(np.array([w for _, w in entries]))
        end += len(entries)
        starts.append(np.array([end], dtype=np.int64))
        rows += 1
    zeros = np.zeros(rows)
    return replace(
        model,
        starts=np.concatenate(starts),
        columns=np.concatenate(columns),
        values=np.concatenate(values),
        row_lower=np.concatenate([model.row_lower, zeros]),
        row_upper=np.concatenate([model.row_upper, zeros]),
    )


def paid(graph: Graph, part: Graph, equations: Equations, duals: Array) -> Graph:
    """``graph`` without the equations, which are paid for: ``duals`` in seconds, of those of ``part`` of it. Whatever
    they are, no choice that keeps the equations costs more than before."""
    found = graph.copy()
    for dual, (option, terms) in zip(duals.tolist(), _rows(part, equations), strict=True):
        for node, weight in terms:
            at = int(np.searchsorted(graph.options[node], option))
            if dual and at < len(graph.options[node]) and graph.options[node][at] == option:
                price = np.zeros(len(graph.options[node]))
                price[at] = -weight * dual
                found.add_cost(node, price)
    return found


def _rows(graph: Graph, equations: Equations) -> Iterator[tuple[int, Sequence[tuple[int, float]]]]:
    for terms in equations:
        for option in np.unique(np.concatenate([graph.options[node] for node, _ in terms])).tolist():
            yield option, terms
