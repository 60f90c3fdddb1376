"""Fit a line alpha + beta * bytes to measured times of a collective."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np


class Line(NamedTuple):
    """The line ``alpha_s + beta_s_per_byte * bytes``. ``error`` is the median relative error at the fitted points."""

    alpha_s: float
    beta_s_per_byte: float
    error: float


def fit_line(nbytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Return the positive line with the least sum of absolute relative errors.

    Absolute errors make it robust: a point that a busy machine spoiled has no more influence than any other. Relative
    errors give latency, which only small messages show, as much weight as bandwidth. Such a line passes through two of
    the points (Bloomfield and Steiger, "Least Absolute Deviations", 1983), so every pair is tried, and, in case noise
    leaves no pair with a positive line, also lines that start at the shortest time.
    """
    x, t = np.asarray(nbytes, np.float64), np.asarray(seconds, np.float64)
    lines = [_through((x[i], t[i]), (x[j], t[j])) for i, j in combinations(range(len(x)), 2) if x[i] != x[j]]
    least = float(t.min())
    lines += [
        (least * share, max(float(s) - least * share, least * 1e-3) / b)
        for b, s in zip(x, t, strict=True)
        for share in (0.5, 1.0)
    ]
    alpha, beta = min((line for line in lines if min(line) > 0), key=lambda line: _deviation(line, x, t).sum())
    return Line(alpha, beta, float(np.median(_deviation((alpha, beta), x, t))))


def _through(p: tuple[float, float], q: tuple[float, float]) -> tuple[float, float]:
    beta = (q[1] - p[1]) / (q[0] - p[0])
    return float(p[1] - beta * p[0]), float(beta)


def _deviation(line: tuple[float, float], x: np.ndarray, t: np.ndarray) -> np.ndarray:
    return np.asarray(np.abs(line[0] + line[1] * x - t) / t)
