"""What the planner makes of published set-ups: how soon it has a plan, how good that is, and within which memory.

    python benchmarks/workloads.py --json workloads.json             # all of them: hours
    python benchmarks/workloads.py --only 'gpt2*' resnet-50@0.8 --time-limit 20
    python benchmarks/workloads.py --json workloads.json --resume    # goes on where the last run was ended
    python benchmarks/workloads.py --capture --only 'llama*'         # only captures: nodes, parameters and seconds

The set-ups are those of benchmarks/workloads.toml; a case is one with one of its budgets, ``gpt2-small@0.8``. Each case
is planned by ``autopar.plan`` with its defaults, in a process of its own that is ended after ``--wall-limit`` seconds,
with an empty cache. A budget that is a share of the free plan's peak needs that plan first; it is taken from an
earlier case of the same set-up where there is one, and its seconds are not among those shown. Models are on the meta
device, and nothing runs.

Seconds are of the clock on the wall; on a busy machine ``--counted`` keeps it from ending a search, so that plans are
those of a quiet one. `first` and `to 1%` are seconds until there is a plan, and until there is one whose cost is
within 1% of the last one's, by ``plan.trace``; a dash stands where a plan has no trace. `step` and `peak` are
predictions. `baseline` is the step of the fastest baseline within the budget, among those that might have been better
than the plan; ``--compare`` measures all of them, and so takes longer.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import math
import multiprocessing
import os
import re
import resource
import signal
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))  # set-ups name modules of benchmarks and tests

from autopar.errors import InfeasibleError
from benchmarks.workload_models.setups import Budget, Workload, read

UNLIMITED = "1000000TB"
NEAR = 0.01
"""Relative distance from the last cost at which a plan counts as found."""

SLOWER = 1e-6
"""Relative difference of two predicted steps that is rounding."""

ENDING_S = 10.0
"""Seconds that a process has to end once it has sent its record."""

Record = dict[str, Any]


class Case(NamedTuple):
    """A set-up within one budget."""

    workload: Workload
    budget: Budget

    @property
    def name(self) -> str:
        return f"{self.workload.name}@{self.budget}"


def cases(workloads: Mapping[str, Workload], patterns: Sequence[str]) -> list[Case]:
    """Those whose own name, or whose set-up's, matches a pattern; all where there is none."""
    every = [Case(w, b) for w in workloads.values() for b in w.budgets]
    return [
        case
        for case in every
        if not patterns or any(fnmatch.fnmatchcase(n, p) for n in (case.name, case.workload.name) for p in patterns)
    ]


def planned(case: Case, free_peak: int | None, time_limit: float, *, compare: bool, counted: bool) -> Record:
    """Plan one case in this process; an error is recorded."""
    import torch

    import autopar
    from autopar.solver.clock import only_counted

    torch.set_num_threads(1)
    workload, record = case.workload, {}
    try:
        model, inputs = workload.build()

        def plan(budget: int | str | None, **more: Any) -> Any:
            return autopar.plan(
                model, inputs, memory_budget=budget, time_limit=time_limit, **workload.options(), **more
            )

        with only_counted() if counted else contextlib.nullcontext():
            budget, found = budget_of(case, free_peak, plan)
            record |= found
            started_s, cpu_started_s = time.perf_counter(), time.process_time()
            made = plan(budget, compare=compare)
        record["total_s"] = time.perf_counter() - started_s
        record["cpu_s"] = time.process_time() - cpu_started_s
        record |= described(made)
    except Exception as error:  # noqa: BLE001  whatever fails is in the table
        record["error"] = failure(error)
        record["traceback"] = traceback.format_exc()
    return record | {"resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def budget_of(case: Case, free_peak: int | None, plan: Callable[[int | str], Any]) -> tuple[int | str | None, Record]:
    """What ``autopar.plan`` takes, and what had to be planned to know it."""
    if case.budget == "device":
        return None, {}
    started_s = time.perf_counter()
    if case.budget == "least":
        least, so_far = least_budget(plan)
        return least, {"least_so_far": so_far, "least_s": time.perf_counter() - started_s}
    if isinstance(case.budget, str):
        return case.budget, {}
    found: Record = {}
    if free_peak is None:
        free_peak = int(plan(UNLIMITED).peak_memory)
        found["free_s"] = time.perf_counter() - started_s
    return int(case.budget * free_peak), found | {"free_peak_bytes": free_peak}


def least_budget(plan: Callable[[int], Any]) -> tuple[int, bool]:
    """The smallest budget that works, in bytes, as the error of a budget of one byte names it; and whether the error
    says that more time may find a smaller one."""
    try:
        plan(1)
    except InfeasibleError as error:
        named = re.search(r"memory_budget=(\d+)", error.hint)
        if named is None:
            raise
        return int(named[1]), "so far" in error.hint
    raise ValueError("a budget of one byte was met")


def failure(error: Exception) -> str:
    """The first line of an error, after its type."""
    return f"{type(error).__name__}: {str(error).strip().split(chr(10))[0]}"


def described(plan: Any) -> Record:
    """What is kept of a plan."""
    fitting = [b for b in plan.baselines if b.fits]
    best = min(fitting, key=lambda b: b.step_time, default=None)
    trace = [_step(r) for r in getattr(plan, "trace", ())]
    return {
        "nodes": len(plan.facts.nodes),
        "parameters": sum(math.prod(plan.facts.shapes[name][0]) for name in plan.parameters),
        "capture_s": plan.timings.get("capture"),
        "first_s": _reached(trace, math.inf),
        "near_s": _reached(trace, plan.objective * (1 + NEAR)),
        "objective_s": plan.objective,
        "bound_s": plan.lower_bound,
        "gap": plan.gap,
        "step_s": plan.step_time,
        "baseline": best and best.name,
        "baseline_s": best and best.step_time,
        "baselines": {b.name: {"step_s": b.step_time, "peak_bytes": b.peak_memory} for b in plan.baselines},
        "peak_bytes": plan.peak_memory,
        "budget_bytes": plan.budget,
        "digest": plan.digest,
        "timings": dict(plan.timings),
        "trace": trace,
    }


def _step(record: Any) -> Record:
    """A line of ``plan.trace``, without what is not finite: before the first plan there is no cost."""
    names = ("phase", "work", "seconds", "cost", "bound")
    values = record if isinstance(record, tuple) else [getattr(record, name) for name in names]
    said = dict(zip(names, values, strict=True))
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in said.items()}


def _reached(trace: Sequence[Record], cost: float) -> float | None:
    """Seconds until the search had a plan of at most ``cost``."""
    return next((r["seconds"] for r in trace if r["cost"] is not None and r["cost"] <= cost), None)


def alone(work: Callable[[], Record], limit_s: float) -> Record:
    """What ``work`` returns in a process of its own, which is ended with all that it started after ``limit_s``."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as cache:
        process = context.Process(target=_send, args=(work, sender, cache))
        process.start()
        sender.close()
        try:
            came = receiver.poll(limit_s)
            record = receiver.recv() if came else {"error": f"ended after {limit_s:.0f} s"}
            process.join(ENDING_S if came else 0)
        except EOFError:
            process.join()
            record = {"error": f"the process ended with {process.exitcode}"}
        finally:
            if process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.join()
    return record


def _send(work: Callable[[], Record], sender: Connection, cache: str) -> None:
    os.setsid()
    os.environ["AUTOPAR_CACHE_DIR"] = cache
    warnings.simplefilter("ignore")
    sender.send(work())


class Work(NamedTuple):
    """``planned`` with its arguments, as another process can receive it."""

    case: Case
    free_peak: int | None
    time_limit: float
    compare: bool
    counted: bool

    def __call__(self) -> Record:
        return planned(self.case, self.free_peak, self.time_limit, compare=self.compare, counted=self.counted)


class Captured(NamedTuple):
    """Captures a set-up and returns the size of its graph."""

    workload: Workload

    def __call__(self) -> Record:
        started_s = time.perf_counter()
        try:
            nodes, parameters = captured(self.workload)
        except Exception as error:  # noqa: BLE001  as in planned
            return {"error": failure(error), "traceback": traceback.format_exc()}
        return {"nodes": nodes, "parameters": parameters, "capture_s": time.perf_counter() - started_s}


def captured(workload: Workload) -> tuple[int, int]:
    """Nodes of the graph, and elements of its parameters."""
    from autopar.mesh import Cluster
    from autopar.planner import Options
    from autopar.planning import capture_model
    from autopar.precision import as_precision
    from autopar.tracer.calls import bind
    from autopar.tracer.tracer import as_call

    model, inputs = workload.build()
    parameters = sum(p.numel() for p in model.parameters())
    size = math.prod(workload.mesh)
    Cluster.load(workload.cluster).sized(size)
    precision = as_precision(workload.mixed_precision)
    options = Options(mixed_precision=precision, accumulation_steps=workload.accumulation_steps)
    return len(capture_model(model, bind(model, *as_call(inputs)), options, size).graph.nodes), parameters


COLUMNS = (
    "case",
    "mesh",
    "nodes",
    "capture",
    "first",
    "to 1%",
    "total",
    "gap",
    "objective",
    "bound",
    "step",
    "baseline",
    "peak",
    "budget",
)


def cells(record: Record) -> list[str]:
    """One row of the table."""
    head = [record["case"], f"{record['mesh']} {record['cluster']}"]
    if "error" in record:
        return [*head, record["error"]]
    return [
        *head,
        f"{record['nodes']:,}",
        *(_seconds(record[key]) for key in ("capture_s", "first_s", "near_s", "total_s")),
        f"{record['gap']:.2%}",
        *(_milliseconds(record[key]) for key in ("objective_s", "bound_s", "step_s")),
        f"{_milliseconds(record['baseline_s'])} {record['baseline'] or ''}".strip(),
        f"{record['peak_bytes'] / 1e9:.2f} GB",
        f"{record['budget_bytes'] / 1e9:.2f} GB",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.2f} ms"


def table(records: Sequence[Record]) -> Table:
    shown = Table(title="Plans of published set-ups")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column in ("case", "mesh") else "right", overflow="fold")
    for record in records:
        if "error" not in record:
            shown.add_row(*cells(record))
    return shown


def summary(records: Sequence[Record]) -> str:
    """Gaps, and how many cases have no plan or a worse one than a baseline."""
    made = [r for r in records if "error" not in r]
    slower = [r["case"] for r in made if is_slower(r)]
    gaps = [(r["gap"], r["case"]) for r in made]
    lines = [f"{len(records)} cases, {len(records) - len(made)} without a plan"]
    if gaps:
        worst, where = max(gaps)
        lines.append(f"gap: median {statistics.median(g for g, _ in gaps):.2%}, worst {worst:.2%} of {where}")
    lines.append(f"{len(slower)} slower than the best baseline{': ' + ', '.join(slower) if slower else ''}")
    return "\n".join([*lines, *(f"{r['case']}: {r['error']}" for r in records if "error" in r)])


def is_slower(record: Record) -> bool:
    """Whether a baseline that fits has a shorter step."""
    baseline = record.get("baseline_s")
    return baseline is not None and record["step_s"] > baseline * (1 + SLOWER)


def stored(path: Path | None) -> dict[str, Record]:
    if path is None or not path.exists():
        return {}
    return {record["case"]: record for record in json.loads(path.read_text())}


def store(path: Path | None, records: Mapping[str, Record]) -> None:
    """Writes the file anew, so that it is whole whenever the program is ended."""
    if path is not None:
        whole = path.with_name(f"{path.name}.new")
        whole.write_text(json.dumps(list(records.values()), indent=1) + "\n")
        whole.replace(path)


def free_peak(workload: Workload, records: Mapping[str, Record]) -> int | None:
    """Of the plan without a budget, where an earlier case of the set-up needed it."""
    peaks = (r.get("free_peak_bytes") for r in records.values() if r["workload"] == workload.name)
    return next((peak for peak in peaks if peak), None)


def run_all(asked: argparse.Namespace, chosen: Sequence[Case], console: Console) -> list[Record]:
    records = stored(asked.json) if asked.resume else {}
    for case in chosen:
        if case.name not in records:
            work = Work(case, free_peak(case.workload, records), asked.time_limit, asked.compare, asked.counted)
            about = {
                "case": case.name,
                "workload": case.workload.name,
                "mesh": "x".join(map(str, case.workload.mesh)),
                "cluster": case.workload.cluster,
            }
            records[case.name] = about | alone(work, asked.wall_limit)
            store(asked.json, records)
        console.print("  ".join(cells(records[case.name])), highlight=False, markup=False)
    return [records[case.name] for case in chosen]


def captures(workloads: Iterator[Workload], asked: argparse.Namespace, console: Console) -> int:
    """Captures each set-up in turn; how many failed."""
    failed = 0
    for workload in workloads:
        record = alone(Captured(workload), asked.wall_limit)
        failed += "error" in record
        console.print(f"{workload.name:28}", record.get("error") or _size(record), highlight=False, markup=False)
        if asked.verbose and "traceback" in record:
            console.print(record["traceback"], highlight=False, markup=False)
    return failed


def _size(record: Record) -> str:
    billions = record["parameters"] / 1e9
    return f"{record['nodes']:>8,} nodes  {billions:>9.3f} B parameters  {record['capture_s']:>6.1f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="names of set-ups or cases")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for a search (default 60)")
    parser.add_argument("--wall-limit", type=float, default=900.0, help="seconds for a case's process (default 900)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here, after each case")
    parser.add_argument("--resume", action="store_true", help="skip the cases that the JSON file has")
    parser.add_argument("--compare", action="store_true", help="measure all baselines")
    parser.add_argument("--counted", action="store_true", help="let counted work alone end searches: on a busy machine")
    parser.add_argument("--capture", action="store_true", help="capture the set-ups, and plan none")
    parser.add_argument("--verbose", action="store_true", help="with --capture, also print tracebacks")
    asked = parser.parse_args()
    if asked.resume and asked.json is None:
        parser.error("--resume needs the --json FILE to go on with")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the process of a case is ended too
    console = Console(width=None if sys.stdout.isatty() else 240)
    chosen = cases(read(), asked.only)
    if not chosen:
        parser.error(f"no set-up matches {' '.join(asked.only)}")
    if asked.capture:
        return int(captures(iter({c.workload.name: c.workload for c in chosen}.values()), asked, console) > 0)
    records = run_all(asked, chosen, console)
    console.print(table(records))
    console.print(summary(records), highlight=False, markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
