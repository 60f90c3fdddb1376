"""HiGHS as the integer programming back end, through ``highspy``."""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from autopar.errors import InfeasibleError, SolverError
from autopar.solver.clock import PRICES_S, counted, late_after, tick, tick_up_to, until_the_limit
from autopar.solver.integer.ilp import IlpLimits, IlpResult, Model
from autopar.solver.problem import Array

FEASIBILITY_TOLERANCE = 1e-8

STEP, ENTRIES = 0.4, 180_000
"""Of the price of a step of the simplex method, what any takes, and entries of a program that take all of it: steps
took 80, 56, 41, 73, 60, 217, 102 and 2,189 us in programs of .17, .28, .33, .51, .80, .96, 1.2 and 7.1 million."""

TREE = "iteration of a tree"
ITERATION = 1 / 250_000
PRESOLVING = 1 / 40
ROOT = 1 / 20
EVENT, EVENT_OF_TREE, EVENT_ENTRIES = 1 / 130, 1 / 800, 30_000
"""By entry of an integer program, in iterations of a small one: what an iteration takes more, what takes place before
the first event, the iterations of the root, and what takes place between two events there and below it, where no more
than so many entries count. HiGHS tells only at the end how many iterations there were. Programs of 9, 11, 40, 48, 166,
213, 268 and 278 thousand entries took 260, 290, 150, 560, 420, 670, 1,020 and 610 us for each, and in all one for each
7 to 18 entries."""


def root_seconds(entries: int) -> float:
    """About what the linear program at the root of an integer one takes, which cannot be cut short by counted work."""
    return PRICES_S[TREE] * entries * (PRESOLVING + ROOT * (1 + ITERATION * entries))


def is_installed() -> bool:
    return importlib.util.find_spec("highspy") is not None


def solve_highs(model: Model, limits: IlpLimits, start: Array | None) -> IlpResult:
    """Solve with one thread and a fixed seed; ``start`` are the values of a feasible point.

    Raises:
        SolverError: highspy is not installed.
    """
    try:
        import highspy
    except ImportError as error:
        raise SolverError(
            "The HiGHS back end is not installed.", hint="pip install highspy, or backend='cbc'"
        ) from error
    begin()
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in _options(limits.gap, until_the_limit(max(limits.seconds, 0.01))).items():
        solver.setOptionValue(name, value)
    if solver.passModel(_as_lp(highspy, model)) == highspy.HighsStatus.kError:
        raise SolverError("HiGHS did not accept the integer program.", hint="try backend='cbc'")
    if start is not None:
        point = highspy.HighsSolution()
        point.col_value = start.tolist()
        point.value_valid = True
        solver.setSolution(point)
    entries = len(model.values)
    tick(TREE, PRESOLVING * entries)
    began, told = counted(), min(entries, EVENT_ENTRIES)
    late = [late_after(limits.seconds, TREE, each * told) for each in (EVENT, EVENT_OF_TREE)]
    solver.cbMipInterrupt.subscribe(_interrupt(lambda event: late[event.data_out.mip_node_count > 1]()))
    if limits.report is not None:
        _report_progress(solver, model, limits)
    _run(highspy, solver)
    iterations = max(solver.getInfo().simplex_iteration_count, 0)
    tick_up_to(began, TREE, iterations * (1 + ITERATION * entries))
    return _read(highspy, solver, model)


@dataclass(frozen=True, eq=False)
class Relaxation:
    """An optimal vertex of the linear program of ``model``.

    Args:
        objective: as the model scales it, as are reduced costs.
    """

    model: Model
    objective: float
    values: Array
    reduced_costs: Array
    row_duals: Array


def solve_relaxation(model: Model, seconds: float) -> Relaxation | None:
    """The linear program without integrality; None where it did not end in time.

    Raises:
        InfeasibleError: nothing is allowed.
    """
    import highspy

    begin()
    solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for name, value in _options(0.0, until_the_limit(max(seconds, 0.01))).items():
        solver.setOptionValue(name, value)
    late = late_after(seconds, "simplex step", STEP + len(model.values) / ENTRIES)
    solver.cbSimplexInterrupt.subscribe(_interrupt(lambda _: late()))
    solver.setOptionValue("presolve", "off")  # graphs are reduced already: it takes longer than it saves
    lp = _as_lp(highspy, model)
    lp.integrality_ = []
    solver.passModel(lp)
    _run(highspy, solver)
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        raise InfeasibleError("No choice is allowed.", found="a linear program without a solution")
    if status != highspy.HighsModelStatus.kOptimal:
        return None
    found = solver.getSolution()
    values, reduced, duals = (np.array(a) for a in (found.col_value, found.col_dual, found.row_dual))
    return Relaxation(model, solver.getInfo().objective_function_value, values, reduced, duals)


_beginning = threading.Lock()


def begin() -> None:
    """Makes the first solver of this process, where HiGHS is installed. HiGHS 1.16 greets then on the standard output,
    where the user's own lines or JSON are, before it can be told not to; and the first run says how many threads all
    others have: one."""
    with _beginning:  # two at once would take each other's silence for the output
        _begin()


@cache
def _begin() -> None:
    if not is_installed():
        return
    import highspy

    try:
        sys.stdout.flush()
        flush, shown = ctypes.CDLL(None).fflush, os.dup(1)
    except (OSError, ValueError, AttributeError, TypeError):  # closed, or none; or no C library by that name
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        try:
            solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
            for name, value in _options(0.0, 1.0).items():
                solver.setOptionValue(name, value)
            solver.run()
        finally:
            flush(None)  # into nowhere, not later
            os.dup2(shown, 1)
            os.close(shown)


def _run(highspy: Any, solver: Any) -> None:
    """One thread; or, where others use HiGHS in this process, the threads that it has for them, of which one works:
    their number is one for all, and HiGHS refuses another."""
    if solver.run() == highspy.HighsStatus.kError and solver.getModelStatus() == highspy.HighsModelStatus.kNotset:
        solver.setOptionValue("threads", 0)
        solver.run()


def _options(gap: float, wall_s: float) -> dict[str, Any]:
    return {
        "output_flag": False,
        "time_limit": wall_s,
        "mip_rel_gap": gap,
        "mip_abs_gap": 0.0,
        "mip_feasibility_tolerance": FEASIBILITY_TOLERANCE,
        "primal_feasibility_tolerance": FEASIBILITY_TOLERANCE,
        "dual_feasibility_tolerance": FEASIBILITY_TOLERANCE,
        "threads": 1,
        "parallel": "off",
        "random_seed": 0,
    }


def _as_lp(highspy: Any, model: Model) -> Any:
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(model.cost), len(model.row_lower)
    lp.col_cost_ = model.cost
    lp.col_lower_, lp.col_upper_ = np.zeros(len(model.cost)), model.upper
    lp.row_lower_, lp.row_upper_ = model.row_lower, model.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = model.starts.astype(np.int32)
    lp.a_matrix_.index_ = model.columns.astype(np.int32)
    lp.a_matrix_.value_ = model.values
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[int(integer)] for integer in model.integer]
    return lp


def _report_progress(solver: Any, model: Model, limits: IlpLimits) -> None:
    def on_event(event: Any) -> None:
        assert limits.report is not None
        told = event.data_out
        if limits.report(told.mip_primal_bound * model.scale, told.mip_dual_bound * model.scale):
            event.interrupt()

    solver.cbMipInterrupt.subscribe(on_event)  # not where it logs, which hangs on the time on the wall


def _interrupt(is_late: Callable[[Any], bool]) -> Callable[[Any], None]:
    def on_event(event: Any) -> None:
        if is_late(event):
            event.interrupt()

    return on_event


def _read(highspy: Any, solver: Any, model: Model) -> IlpResult:
    status = solver.getModelStatus()
    interrupted = status == highspy.HighsModelStatus.kInterrupt
    if status == highspy.HighsModelStatus.kInfeasible:
        return IlpResult(None, math.inf, finished=True)
    if not interrupted and status not in (highspy.HighsModelStatus.kOptimal, highspy.HighsModelStatus.kTimeLimit):
        raise SolverError("HiGHS failed.", found=solver.modelStatusToString(status), hint="try backend='cbc'")
    info = solver.getInfo()
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    choice = model.choice(np.array(solver.getSolution().col_value)) if found else None
    bound = info.mip_dual_bound * model.scale
    return IlpResult(choice, bound, finished=status == highspy.HighsModelStatus.kOptimal)
