"""Times of collectives and kernels that `autopar profile` measured over sizes, in place of formulas.

A curve interpolates log(seconds) linearly over log(amount). Below the smallest measured amount it is flat, where
latency dominates; above the largest it is proportional, where bandwidth dominates. Since its points are monotone, so is
the curve.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Union

import numpy as np
from numpy.typing import NDArray

from autopar.errors import MeshError
from autopar.mesh.tables import Table, toml_value

Floats = NDArray[np.float64]

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "broadcast")
UNITS = ("flops", "bytes")


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of an amount, from measured points.

    Args:
        amounts: positive and strictly increasing.
        seconds: positive and non-decreasing.

    Raises:
        MeshError: if there are no points, the numbers differ, or the values are not as above.
    """

    amounts: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        a, s = self.amounts, self.seconds
        ordered = _ascends(a) and sorted(s) == list(s)
        if not a or len(a) != len(s) or not ordered or not all(0 < x < math.inf for x in (*a, *s)):
            raise MeshError(
                "A measured curve needs positive increasing amounts, and as many non-decreasing seconds.",
                found=f"{a} and {s}",
                hint="valid lines are: bytes = [8, 65536] and seconds = [2e-5, 6e-5]",
            )

    @cached_property
    def _logs(self) -> tuple[Floats, Floats]:
        return np.log(np.array(self.amounts)), np.log(np.array(self.seconds))

    def at(self, amounts: Any) -> Floats:
        """Return the seconds at each of ``amounts``; 0 where the amount is 0 or less."""
        given = np.asarray(amounts, np.float64)
        within = np.clip(given, self.amounts[0], self.amounts[-1])
        read = np.exp(np.interp(np.log(within), *self._logs))
        grown = np.maximum(given / self.amounts[-1], 1.0)
        return np.where(given > 0, np.maximum(read * grown, 0.0), 0.0)

    def scaled(self, factor: float) -> Curve:
        """Return the curve of a device that takes ``factor`` times as long."""
        return Curve(self.amounts, tuple(s * factor for s in self.seconds))


def _ascends(values: Sequence[float]) -> bool:
    return sorted(set(values)) == list(values)


def rising(amounts: Sequence[float], seconds: Sequence[float]) -> Curve:
    """Fit a monotone curve to noisy measurements, in which a larger amount may have been faster than a smaller one.

    The fit is the monotone sequence with the least mean square of logarithms, found by pooling adjacent violators
    (Ayer et al., 1955).
    """
    blocks: list[tuple[float, int]] = []
    for s in seconds:
        mean, count = math.log(s), 1
        while blocks and blocks[-1][0] > mean:
            before, n = blocks.pop()
            mean, count = (before * n + mean * count) / (n + count), n + count
        blocks.append((mean, count))
    pooled = [math.exp(mean) for mean, count in blocks for _ in range(count)]
    return Curve(tuple(map(float, amounts)), tuple(pooled))


@dataclass(frozen=True)
class CollectiveTimes:
    """Times of one kind of collective in groups of ``nodes`` nodes with ``ranks_per_node`` ranks each.

    Args:
        kind: one of `COLLECTIVES`.
        curve: seconds over bytes, counted as in `cost_models.CollectiveCosts`.
        alpha_s: latency of the best-fitting line alpha_s + beta_s_per_byte * bytes.
        beta_s_per_byte: slope of that line.
        error: median relative error of that line at the measured points.
    """

    kind: str
    ranks_per_node: int
    nodes: int
    curve: Curve
    alpha_s: float
    beta_s_per_byte: float
    error: float

    def __post_init__(self) -> None:
        positive = self.alpha_s > 0 and self.beta_s_per_byte > 0
        if self.kind not in COLLECTIVES or not positive or self.ranks_per_node * self.nodes < 2:
            raise MeshError(
                "A measured collective needs a kind, at least two ranks, and positive alpha_s and beta_s_per_byte.",
                found=f"{self.kind} of {self.ranks_per_node} x {self.nodes} ranks, "
                f"{self.alpha_s} s + {self.beta_s_per_byte} s/B",
                hint=f"kinds are {', '.join(COLLECTIVES)}; a valid line is: alpha_s = 2e-5",
            )


@dataclass(frozen=True)
class KernelTimes:
    """Times of one kind of kernel.

    Args:
        kind: "matmul", "attention", "memory" (any op that streams its operands), or an op such as "aten.gelu".
        dtype: dtype of the operands.
        unit: the amount of ``curve``: "flops", or "bytes" read and written.
        curve: seconds over the amount.
        error: median relative spread of repeated measurements.
    """

    kind: str
    dtype: str
    unit: str
    curve: Curve
    error: float

    def __post_init__(self) -> None:
        if self.unit not in UNITS or not self.kind or not self.dtype:
            raise MeshError(
                "Measured times of a kernel need a kind, a dtype, and flops or bytes as unit.",
                found=f"{self.kind} {self.dtype} over {self.unit!r}",
                hint='a valid line is: unit = "flops"',
            )


@dataclass(frozen=True)
class Measured:
    """All measurements of a cluster; empty if it was not measured.

    Args:
        collectives: one entry per kind of collective and kind of group.
        kernels: one entry per kind of kernel and dtype.
        call_s: overhead of calling one op, whatever its size, if the device cannot hide it. On CPUs views have it too.
        overlap: share of a collective's time that concurrent computation hides, from 0 (none) to 1.
    """

    collectives: tuple[CollectiveTimes, ...] = ()
    kernels: tuple[KernelTimes, ...] = ()
    call_s: float = 0.0
    overlap: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.overlap <= 1 or not 0 <= self.call_s < math.inf:
            raise MeshError(
                "measured.overlap must lie between 0 and 1, and measured.call_s must not be negative.",
                found=f"overlap = {self.overlap}, call_s = {self.call_s}",
                hint="a valid line is: overlap = 0.5",
            )

    def collective(self, kind: str, ranks_per_node: int, nodes: int) -> CollectiveTimes | None:
        """Return the times of ``kind`` in such groups, or None if they were not measured."""
        return self._collectives.get((kind, ranks_per_node, nodes))

    def kernel(self, kind: str, dtype: str) -> KernelTimes | None:
        """Return the times of ``kind`` on ``dtype``, or None if they were not measured."""
        return self._kernels.get((kind, dtype))

    @cached_property
    def _collectives(self) -> dict[tuple[str, int, int], CollectiveTimes]:
        return {(c.kind, c.ranks_per_node, c.nodes): c for c in self.collectives}

    @cached_property
    def _kernels(self) -> dict[tuple[str, str], KernelTimes]:
        return {(k.kind, k.dtype): k for k in self.kernels}

    def slowed(self, factor: float) -> Measured:
        """Return the times on devices that ``factor`` times as many processes share."""
        if factor == 1 or not (self.kernels or self.call_s):
            return self
        kernels = tuple(replace(k, curve=k.curve.scaled(factor)) for k in self.kernels)
        return replace(self, kernels=kernels, call_s=self.call_s * factor)

    def __bool__(self) -> bool:
        return self != Measured()


def read_measured(table: Table) -> Measured:
    """Read ``[measured]``, ``[[measured.collectives]]`` and ``[[measured.kernels]]`` of a cluster file."""
    table.only(["collectives", "kernels", "call_s", "overlap"])
    return Measured(
        tuple(map(_read_collective, table.tables("collectives"))),
        tuple(map(_read_kernel, table.tables("kernels"))),
        call_s=table.at_least_zero("call_s", 0.0),
        overlap=table.at_least_zero("overlap", 1.0),
    )


def _read_collective(table: Table) -> CollectiveTimes:
    table.only(["kind", "ranks_per_node", "nodes", "alpha_s", "beta_s_per_byte", "error", "bytes", "seconds"])
    return CollectiveTimes(
        table.choice("kind", COLLECTIVES),
        table.count("ranks_per_node"),
        table.count("nodes", 1),
        _curve(table, "bytes"),
        table.number("alpha_s"),
        table.number("beta_s_per_byte"),
        table.at_least_zero("error"),
    )


def _read_kernel(table: Table) -> KernelTimes:
    unit = "bytes" if "bytes" in table.values else "flops"
    table.only(["kind", "dtype", "error", "seconds", unit])
    return KernelTimes(table.text("kind"), table.text("dtype"), unit, _curve(table, unit), table.at_least_zero("error"))


def _curve(table: Table, amounts: str) -> Curve:
    a, s = table.numbers(amounts), table.numbers("seconds")
    if len(a) != len(s):
        raise table.error(f"must have as many entries as {amounts}.", "seconds", f"{len(s)} and {len(a)}")
    for key, values, rises in ((amounts, a, _ascends(a)), ("seconds", s, sorted(s) == list(s))):
        if not rises:
            raise table.error("must be increasing.", key, repr(list(values)))
    return Curve(a, s)


Line = Union[str, float, Sequence[float]]


def measured_lines(measured: Measured) -> list[str]:
    """Return ``measured`` as lines of TOML, which `read_measured` reads back."""
    if not measured:
        return []
    figures = {"call_s": measured.call_s, "overlap": measured.overlap}
    lines = ["", "[measured]", *_lines(figures)]
    for c in measured.collectives:
        lines += [
            "",
            "[[measured.collectives]]",
            *_lines(
                {
                    "kind": c.kind,
                    "ranks_per_node": c.ranks_per_node,
                    "nodes": c.nodes,
                    "alpha_s": c.alpha_s,
                    "beta_s_per_byte": c.beta_s_per_byte,
                    "error": c.error,
                    "bytes": c.curve.amounts,
                    "seconds": c.curve.seconds,
                }
            ),
        ]
    for k in measured.kernels:
        lines += [
            "",
            "[[measured.kernels]]",
            *_lines(
                {
                    "kind": k.kind,
                    "dtype": k.dtype,
                    "error": k.error,
                    k.unit: k.curve.amounts,
                    "seconds": k.curve.seconds,
                }
            ),
        ]
    return lines


def _lines(values: Mapping[str, Line]) -> list[str]:
    return [f"{key} = {_text(value)}" for key, value in values.items()]


def _text(value: Line) -> str:
    if isinstance(value, (str, int, float)):
        return toml_value(value)
    return f"[{', '.join(map(toml_value, value))}]"
