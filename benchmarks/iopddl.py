"""Solve instances of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism (google/iopddl).

    python -m benchmarks.iopddl FILE... [--time-limit S] [--solution OUT.json] [--json FILE]

Prints cost, bound, gap and seconds of each. FILE may be gzipped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopar.solver import Edge, Problem, Solution, Usage, solve

FORBIDDEN = 1e18


def read(path: Path) -> Problem:
    """The problem in a file of the contest's format; equal matrices become one array."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    data = json.loads(text)["problem"]
    nodes, edges = data["nodes"], data["edges"]
    costs = tuple(_costs(values) for values in nodes["costs"])
    shared: dict[tuple[object, ...], np.ndarray] = {}
    joined = []
    for (u, v), values in zip(edges["nodes"], edges["costs"], strict=True):
        matrix = _costs(values).reshape(len(costs[u]), len(costs[v]))
        joined.append(Edge(u, v, shared.setdefault((matrix.shape, matrix.tobytes()), matrix)))
    usages = tuple(
        Usage(node, np.array(amounts, dtype=float), start, end)
        for node, ((start, end), amounts) in enumerate(zip(nodes["intervals"], nodes.get("usages", []), strict=False))
    )
    return Problem(costs, tuple(joined), usages, float(data.get("usage_limit", np.inf)))


def _costs(values: Sequence[float]) -> np.ndarray:
    array = np.array(values, dtype=float)
    array[array >= FORBIDDEN] = np.inf
    return array


def _record(path: Path, solution: Solution) -> dict[str, Any]:
    return {
        "file": path.name,
        "cost": solution.objective,
        "bound": solution.lower_bound,
        "gap": solution.gap,
        "proven": solution.proven,
        "seconds": solution.seconds,
        "method": solution.method,
        **solution.size,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each file (default 60)")
    parser.add_argument("--backend", default="auto", help="auto, cbc, highs, or a solver that PuLP knows")
    parser.add_argument("--gap", type=float, default=0.0, help="relative gap at which to stop (default 0)")
    parser.add_argument("--solution", type=Path, help="write the strategy of each node of the last file")
    parser.add_argument("--json", type=Path, help="write all the records")
    options = parser.parse_args(arguments)
    records = []
    print(f"{'file':<16}{'cost':>16}{'bound':>18}{'gap':>9}{'seconds':>9}")
    for path in options.files:
        solution = solve(read(path), time_limit=options.time_limit, backend=options.backend, gap=options.gap)
        record = _record(path, solution)
        records.append(record)
        print(
            f"{path.name:<16}{solution.objective:>16,.0f}{solution.lower_bound:>18,.1f}"
            f"{solution.gap:>9.3%}{solution.seconds:>9.2f}",
            flush=True,
        )
        if options.solution is not None:
            options.solution.write_text(json.dumps(list(solution.choice)))
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
