"""Solve instances of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism (google/iopddl).

    python -m benchmarks.iopddl FILE... [--time-limit S] [--solution OUT.json] [--json FILE]

Prints the cost, bound, gap and seconds of each instance; the seconds include reading the file. FILE may be gzipped, and
several back ends can be compared.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopar.errors import AutoparError, InputError
from autopar.solver import Edge, Problem, Solution, Usage, solve, solver_name
from autopar.solver.problem import USAGE_TOLERANCE

FORBIDDEN = 1e18

KEPT_BACK = 0.02
"""Share of the time limit, up to one second, that is reserved for what follows the search."""


def read(path: Path) -> Problem:
    """Read a problem in the contest's format; equal matrices become one array.

    Raises:
        InputError: the file cannot be read, or is not an instance.
        SolverError: a number is negative or not a number, or a usage does not fit its node.
    """
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        data = json.loads(text)["problem"]
        nodes, edges = data["nodes"], data["edges"]
        costs = tuple(map(_costs, nodes["costs"]))
        usages = _usages(nodes, len(costs))
        return Problem(costs, _edges(edges, costs), usages, _limit(data.get("usage_limit"), usages))
    except OSError as error:
        raise InputError("The file cannot be read.", found=str(error)) from error
    except KeyError as error:
        raise _no_instance(f"no {error}") from error
    except (ArithmeticError, EOFError, IndexError, TypeError, ValueError, zlib.error) as error:
        raise _no_instance(f"{type(error).__name__}: {error}") from error


def _no_instance(found: str) -> InputError:
    hint = 'see github.com/google/iopddl; {"problem": {"nodes": {"intervals", "costs", "usages"}, "edges": ...}}.'
    return InputError("This is no instance of the contest.", found=found, hint=hint)


def _edges(edges: dict[str, Any], costs: Sequence[np.ndarray]) -> tuple[Edge, ...]:
    shared: dict[tuple[object, ...], np.ndarray] = {}
    joined = []
    for ends, values in zip(edges["nodes"], edges["costs"], strict=True):
        if len(ends) != 2 or not all(0 <= end < len(costs) for end in ends):
            raise _no_instance(f"an edge between nodes {ends}, where there are {len(costs)}")
        u, v = ends
        matrix = _costs(values).reshape(len(costs[u]), len(costs[v]))
        joined.append(Edge(u, v, shared.setdefault((matrix.shape, matrix.tobytes()), matrix)))
    return tuple(joined)


def _usages(nodes: dict[str, Any], count: int) -> tuple[Usage, ...]:
    amounts = nodes.get("usages") or [[]] * count
    intervals = nodes["intervals"]
    if not len(intervals) == len(amounts) == count:
        raise _no_instance(f"{count} nodes with {len(intervals)} intervals and {len(amounts)} usages")
    return tuple(
        Usage(node, np.array(used, dtype=float), start, end)
        for node, ((start, end), used) in enumerate(zip(intervals, amounts, strict=True))
        if start < end and len(used)
    )


def _limit(limit: float | None, usages: Sequence[Usage]) -> float:
    """Return the limit for the solver, lowered by its tolerance, so that no choice uses one byte too many."""
    if limit is None:
        return np.inf
    whole = float(limit).is_integer() and all((usage.option == np.floor(usage.option)).all() for usage in usages)
    return (float(limit) + (0.5 if whole else 0.0)) / (1 + USAGE_TOLERANCE)


def _costs(values: Sequence[float]) -> np.ndarray:
    array = np.array(values, dtype=float)
    array[array >= FORBIDDEN] = np.inf
    return array


def _record(path: Path, solution: Solution, backend: str, seconds: float) -> dict[str, Any]:
    return {
        "file": path.name,
        "backend": backend,
        "cost": solution.objective,
        "bound": solution.lower_bound,
        "gap": solution.gap,
        "proven": solution.proven,
        "seconds": seconds,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "method": solution.method,
        **solution.size,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each file (default 60)")
    parser.add_argument(
        "--backend",
        nargs="+",
        default=["auto"],
        type=solver_name,
        help="auto, cbc, highs, or solvers that PuLP knows, in turn",
    )
    parser.add_argument("--gap", type=float, default=0.0, help="relative gap at which to stop (default 0)")
    parser.add_argument("--solution", type=Path, help="write the strategy of each node of the last file")
    parser.add_argument("--json", type=Path, help="write all the records")
    options = parser.parse_args(arguments)
    for place in filter(None, (options.solution, options.json)):
        if not place.parent.is_dir():
            parser.error(f"there is no folder for {place}")
    records, failed = [], False
    print(f"{'file':<16}{'cost':>18}{'bound':>20}{'gap':>9}{'seconds':>9}  back end")
    for path in options.files:
        for backend in options.backend:
            started = time.monotonic()
            try:
                problem = read(path)
                kept_back = min(KEPT_BACK * options.time_limit, 1.0)
                left = max(options.time_limit - kept_back - (time.monotonic() - started), 0.5)
                solution = solve(problem, time_limit=left, backend=backend, gap=options.gap)
            except AutoparError as error:
                print(f"{path.name}: {error}", file=sys.stderr, flush=True)
                failed = True
                continue
            record = _record(path, solution, backend, time.monotonic() - started)
            records.append(record)
            print(
                f"{path.name:<16}{solution.objective:>18,.0f}{solution.lower_bound:>20,.1f}"
                f"{solution.gap:>9.3%}{record['seconds']:>9.2f}  {backend}",
                flush=True,
            )
            if options.solution is not None:
                options.solution.write_text(json.dumps(list(solution.choice)))
    if options.json is not None:
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
