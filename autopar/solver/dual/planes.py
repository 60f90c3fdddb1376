"""The highest point under planes: where cutting planes for weights are asked next."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from autopar.solver.integer import highs
from autopar.solver.problem import Array


def highest_point(constants: Sequence[float], slopes: Sequence[Array], ranges: Sequence[slice]) -> tuple[float, Array]:
    """How large the least of ``constant + slope @ weights`` can be with weights >= 0 that sum to 1 in each of
    ``ranges``, and by which weights."""
    import pulp

    scale = max(map(abs, constants), default=0.0) or 1.0
    with warnings.catch_warnings():
        # PuLP 3.3 deprecates for 4.0 what earlier versions only have.
        warnings.simplefilter("ignore", DeprecationWarning)
        model = pulp.LpProblem("weights", pulp.LpMaximize)
        top = pulp.LpVariable("top")
        weights = [pulp.LpVariable(f"weight_{i}", 0.0, 1.0) for i in range(len(slopes[0]))]
        model += top
        for among in ranges:
            model += pulp.lpSum(weights[among]) == 1
        for constant, slope in zip(constants, slopes, strict=True):
            plane = pulp.lpSum(float(s) / scale * w for s, w in zip(slope, weights, strict=True))
            model += top - plane <= constant / scale
        highs.begin()
        model.solve(pulp.HiGHS(msg=False) if highs.is_installed() else pulp.PULP_CBC_CMD(msg=False))
    found = np.array([max(float(w.value() or 0.0), 0.0) for w in weights])
    for among in ranges:
        found[among] /= found[among].sum()  # no more than 1, or the sum of planes would be no bound
    return float(top.value()) * scale, found
