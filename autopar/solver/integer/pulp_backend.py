"""CBC, and any other solver that PuLP knows, as the integer programming back end."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from autopar import settings
from autopar.errors import SolverError
from autopar.solver.clock import now, on_the_wall, tick
from autopar.solver.integer import highs
from autopar.solver.integer.ilp import IlpLimits, IlpResult, Model
from autopar.solver.problem import Array

ELSEWHERE = 1 / 5
"""Iterations of a tree in HiGHS by entry: what another program takes for all of its own, about."""

_BOUND_LINES = (
    r"^Lower bound:\s+(\S+)",
    r"best possible (-?[\d.]+(?:e[+-]?\d+)?)",
    r"^Continuous objective value is (\S+)",
)


def solve_pulp(model: Model, limits: IlpLimits, start: Array | None, name: str) -> IlpResult:
    """Solve with the PuLP solver of this name ("cbc" is the one that PuLP brings).

    Raises:
        SolverError: PuLP, or the solver's program, is missing or failed.
    """
    try:
        import pulp
    except ImportError as error:
        raise SolverError("PuLP is not installed.", hint="pip install pulp, or backend='highs'") from error
    try:
        with warnings.catch_warnings():
            # PuLP 3.3 deprecates for 4.0 what earlier versions only have.
            warnings.simplefilter("ignore", DeprecationWarning)
            return _solve(pulp, model, limits, start, name)
    except (pulp.PulpError, OSError) as error:
        raise SolverError(f"The solver {name!r} failed.", found=str(error), hint=_missing_hint(pulp)) from error


def _solve(pulp: Any, model: Model, limits: IlpLimits, start: Array | None, name: str) -> IlpResult:
    problem, variables = _as_pulp(pulp, model, start)
    if name == "cbc":
        return _solve_cbc(pulp, problem, variables, model, limits, start is not None)
    return _solve_named(pulp, problem, variables, model, limits, name)


def _missing_hint(pulp: Any) -> str:
    return f"available to PuLP here: {', '.join(pulp.listSolvers(onlyAvailable=True)) or 'none'}"


def _as_pulp(pulp: Any, model: Model, start: Array | None) -> tuple[Any, list[Any]]:
    problem = pulp.LpProblem("autopar", pulp.LpMinimize)
    variables = [
        pulp.LpVariable(f"x{column}", 0, float(model.upper[column]), pulp.LpInteger if integer else pulp.LpContinuous)
        for column, integer in enumerate(model.integer.tolist())
    ]
    if start is not None:
        for variable, value in zip(variables, start.tolist(), strict=True):
            variable.setInitialValue(value)
    problem += pulp.LpAffineExpression(list(zip(variables, model.cost.tolist(), strict=True)))
    columns, values = model.columns.tolist(), model.values.tolist()
    for row in range(len(model.row_lower)):
        span = range(int(model.starts[row]), int(model.starts[row + 1]))
        total = pulp.LpAffineExpression([(variables[columns[entry]], values[entry]) for entry in span])
        upper = float(model.row_upper[row])
        problem += total <= upper if model.row_lower[row] == -np.inf else total == upper
    return problem, variables


def _solve_named(
    pulp: Any, problem: Any, variables: list[Any], model: Model, limits: IlpLimits, name: str
) -> IlpResult:
    highs.begin()
    seconds = on_the_wall(max(limits.seconds, 1.0))
    tick("iteration of a tree", ELSEWHERE * len(model.values))
    problem.solve(pulp.getSolver(name, msg=False, timeLimit=seconds, gapRel=limits.gap))
    return _read(pulp, problem, variables, model, -math.inf, limits)


def _read(
    pulp: Any, problem: Any, variables: list[Any], model: Model, logged_bound: float, limits: IlpLimits
) -> IlpResult:
    """PuLP's ``status`` says Optimal even when time stopped the search; only ``sol_status`` tells."""
    if problem.status == pulp.LpStatusInfeasible:
        return IlpResult(None, math.inf, finished=True)
    if problem.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return IlpResult(None, logged_bound, finished=False)
    values = np.array([variable.value() or 0.0 for variable in variables])
    finished = problem.sol_status == pulp.LpSolutionOptimal
    bound = logged_bound
    if finished and not math.isfinite(bound):
        objective = float(model.cost @ values) * model.scale
        bound = objective - limits.gap * abs(objective)
    return IlpResult(model.choice(values), bound, finished)


def solver_name(name: str) -> str:
    """``name`` as the solver knows it: its own three are written in any case, PuLP's as PuLP writes them."""
    own = str(name).lower()
    return own if own in ("auto", "cbc", "highs") else name


def check_solver(name: str) -> None:
    """Fail before any work, rather than after the reductions.

    Raises:
        SolverError: PuLP is missing, has no solver of that name, or its program cannot be run.
    """
    try:
        import pulp
    except ImportError as error:
        raise SolverError("PuLP is not installed.", found=str(error), hint="pip install pulp highspy") from error
    if name == "cbc":
        cbc_path()
    elif name not in pulp.listSolvers(onlyAvailable=True):
        raise SolverError(f"There is no solver {name!r} here.", found=repr(name), hint=_missing_hint(pulp))


def cbc_path() -> str:
    """PuLP's own CBC.

    Raises:
        SolverError: it is missing or may not be executed.
    """
    import pulp

    path = str(pulp.PULP_CBC_CMD(msg=False).path)
    if not os.access(path, os.X_OK):
        raise SolverError(
            "The CBC program that PuLP brings cannot be run.",
            found=f"{path}: {'not executable' if Path(path).exists() else 'missing'}",
            hint=f"chmod +x {path}, reinstall pulp, or pip install highspy",
        )
    return path


def _solve_cbc(pulp: Any, problem: Any, variables: list[Any], model: Model, limits: IlpLimits, warm: bool) -> IlpResult:
    path = cbc_path()
    began = now()
    with tempfile.TemporaryDirectory(prefix="autopar-cbc-") as folder:
        mps, solution, log = (str(Path(folder, name)) for name in ("model.mps", "model.sol", "cbc.log"))
        cbc = pulp.PULP_CBC_CMD(msg=False)
        written, names, rows, _ = problem.writeMPS(mps, rename=True)
        command = [path, mps]
        if warm:
            cbc.writesol(str(Path(folder, "start.mst")), problem, written, names, rows)
            command += ["-mips", str(Path(folder, "start.mst"))]
        seconds = on_the_wall(max(limits.seconds - (now() - began), 0.1))
        command += ["-sec", f"{seconds:.2f}", "-ratio", repr(limits.gap), "-allow", "0", "-threads", "0"]
        command += ["-randomS", "1", "-randomC", "1", "-timeMode", "elapsed", "-solve", "-solution", solution]
        tick("iteration of a tree", ELSEWHERE * len(model.values))
        _run(command, log, seconds)
        text = Path(log).read_text(errors="replace")
        if not Path(solution).exists():
            return IlpResult(None, _bound(text) * model.scale, finished=False)
        status, found, _, _, _, sol_status = cbc.readsol_MPS(solution, problem, written, names, rows)
        problem.assignVarsVals(found)
        problem.assignStatus(status, sol_status)
    return _read(pulp, problem, variables, model, _bound(text) * model.scale, limits)


def _run(command: list[str], log: str, seconds: float) -> None:
    """CBC looks at the clock seldom: interrupt it when its time is up, kill it when it still goes on."""
    with Path(log).open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            process.wait(seconds + settings.LEAST_S / 2)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(settings.LEAST_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        except BaseException:
            process.kill()
            raise


def _bound(log: str) -> float:
    """The best bound in CBC's log: its last summary, else the tree's, else the relaxation's; -inf without any."""
    if "Result - Optimal solution found" in log and not re.search(_BOUND_LINES[0], log, re.MULTILINE):
        return -math.inf
    for pattern in _BOUND_LINES:
        found = re.findall(pattern, log, re.MULTILINE)
        if found:
            return float(found[-1].rstrip("."))
    return -math.inf
