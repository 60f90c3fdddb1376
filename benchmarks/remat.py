"""Plot step time over memory budget: autopar and known recomputation rules on one process, and joint and two-stage
search on a mesh.

    python benchmarks/remat.py [--models mlp gpt2 llama] [--points 6] [--measure] [--json FILE]
    python benchmarks/remat.py --of FILE... [--markdown FILE] [--plot FILE]

Every rule decides what to keep on the same captured graph, and all plans are scheduled, timed and measured by the same
models, so they differ only in these decisions:

none        keeps everything that the backward reads
blocks      keeps the input of every block, and runs the block again
selective   keeps products and attention, and recomputes the rest, as torch's examples do
sqrt        keeps what crosses evenly spaced cuts (Chen et al., 2016), for every number of cuts
torch       keeps what takes longest for its bytes, up to a share of all bytes, as
            torch._functorch.config.activation_memory_budget does, for shares from 0 to 1
rotor       keeps all of a block, its input, or nothing (Beaumont et al., 2019): the best of all such choices in which
            nothing runs more than twice

``--measure`` also runs the steps on this machine. Seconds are medians of processor time, and bytes are those that the
simulation counts. It also runs torch.compile with activation_memory_budget, on torch's own graph, and measures its
seconds and the bytes that it saves for the backward. ``--of`` shows the results of earlier runs together, and
``--markdown`` writes them as tables. ``--plot`` needs matplotlib.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import math
import platform
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from recomputing.models import MODELS, gpt2
from recomputing.rules import RULES, Case
from recomputing.runs import compiled, measured
from rich.console import Console
from rich.table import Table

from autopar import planner
from autopar.arguments import canonical_names
from autopar.errors import InfeasibleError
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options, Planned
from autopar.program import AGAIN
from autopar.tracer import ColoTracer

Record = dict[str, Any]


def curve(case: Case, rule: str) -> list[Planned]:
    """Return a rule's plans, none of which is both slower and larger than another."""
    every = sorted(
        (case.keep(kept) for kept in dict.fromkeys(RULES[rule](case))),
        key=lambda p: (p.memory.peak_bytes, p.timeline.seconds),
    )
    best: list[Planned] = []
    for plan in every:
        if not best or plan.timeline.seconds < best[-1].timeline.seconds:
            best.append(plan)
    return best


def within(plans: Sequence[Planned], budget: float) -> Planned | None:
    """Return the fastest plan that fits."""
    fitting = [p for p in plans if p.memory.peak_bytes <= budget]
    return min(fitting, key=lambda p: p.timeline.seconds, default=None)


def smallest(case: Case) -> float:
    """Return the smallest budget that was found to work."""
    try:
        return case.planned(1).memory.peak_bytes
    except InfeasibleError as error:
        found = re.search(r"memory_budget=(\d+)", str(error))
        assert found is not None
        return int(found.group(1))


def described(plan: Planned) -> Record:
    again = sum(op.kind == "compute" and op.name.endswith(AGAIN) for op in plan.program.ops)
    offloaded = sum(op.kind == "offload" for op in plan.program.ops)
    return {
        "step_s": plan.timeline.seconds,
        "peak_bytes": plan.memory.peak_bytes,
        "again": again,
        "offloaded": offloaded,
        "gap": plan.solution.gap if plan.solution.lower_bound else None,
    }


def compare(case: Case, points: int, *, run: bool) -> list[Record]:
    """Return the rows of the table: one for each budget, from the smallest to that without recomputation."""
    curves = {rule: curve(case, rule) for rule in RULES}
    free = curves["none"][0].memory.peak_bytes
    least = min(smallest(case), *(p.memory.peak_bytes for plans in curves.values() for p in plans))
    rows = []
    for i in range(points):
        budget = least + (free - least) * i / (points - 1)
        found: dict[str, Planned | None] = {rule: within(plans, budget) for rule, plans in curves.items()}
        found = {"autopar": _ours(case, budget), **found}
        rows.append(
            {
                "model": case.name,
                "budget": budget,
                "share": budget / free,
                "plans": {
                    k: described(p) | (measured(case, p) if run else {}) for k, p in found.items() if p is not None
                },
            }
        )
    return rows


def _ours(case: Case, budget: float) -> Planned | None:
    try:
        return case.planned(math.ceil(budget))
    except InfeasibleError:
        return None


def joint_gain(points: int, time_limit_s: float) -> list[Record]:
    """Compare the joint and the two-stage search, on four devices and budgets below the free plan's peak."""
    model, inputs = gpt2(2)
    graph = ColoTracer().capture(model, inputs).graph
    mesh, cluster = Mesh((4,)), Cluster.load("dgx-h100").sized(4)

    def step(budget: float | None, search: str) -> Planned | None:
        options = Options(
            None if budget is None else int(budget),
            aliases=canonical_names(model),
            time_limit_s=time_limit_s,
            search=search,
        )
        try:
            return planner.plan_graph(graph, mesh, cluster, options, compare=False)
        except InfeasibleError:
            return None

    free = step(None, "joint")
    assert free is not None
    rows = []
    for i in range(1, points + 1):
        budget = free.memory.peak_bytes * (1 - 0.8 * i / points)
        plans = {search: step(budget, search) for search in ("joint", "two-stage")}
        rows.append(
            {
                "model": "gpt2 on 4 devices",
                "budget": budget,
                "share": budget / free.memory.peak_bytes,
                "plans": {k: described(p) for k, p in plans.items() if p is not None},
            }
        )
    return rows


def table(rows: Sequence[Record], columns: Sequence[str]) -> Table:
    """Return the milliseconds of a step by budget; a dash where nothing fits."""
    shown = Table(title=f"{rows[0]['model']}: ms a step")
    for column in ("budget", "share", *columns):
        shown.add_column(column, justify="right")
    for row in rows:
        cells = [_cell(row["plans"].get(name)) for name in columns]
        shown.add_row(f"{row['budget'] / 1e6:.1f} MB", f"{row['share']:.0%}", *cells)
    return shown


def _cell(plan: Record | None) -> str:
    if plan is None:
        return "-"
    measured = f" ({plan['measured_s'] * 1e3:.1f})" if "measured_s" in plan else ""
    return f"{plan['step_s'] * 1e3:.3f}{measured}"


def beaten(rows: Sequence[Record], tolerance: float) -> list[str]:
    """List where another rule is predicted to be faster than autopar by more than the solver's gap."""
    found = []
    for row in rows:
        ours = row["plans"].get("autopar")
        limit = math.inf if ours is None else ours["step_s"] * (1 + tolerance)
        for name, plan in row["plans"].items():
            if name != "autopar" and (ours is None or plan["step_s"] * (1 + tolerance) < ours["step_s"]):
                found.append(f"{row['model']} at {row['share']:.0%}: {name} {plan['step_s']:.6f} s, ours {limit:.6f} s")
    return found


COLUMNS = ("autopar", *RULES)


def markdown(found: Record, lost: Sequence[str]) -> str:
    """Return all tables, with the command, machine and date."""
    lines = [
        "# Recomputation: step time against memory budget",
        "",
        "Predicted milliseconds for a step on one process; in brackets, medians of real steps in processor time. All",
        "plans are of the same graph, scheduled, timed and measured by the same models. A dash means that nothing of",
        "that kind fits. `torch` and `rotor` are those rules applied to autopar's graph; the docstring of",
        "`benchmarks/remat.py` defines them.",
        "",
        *(f"`python benchmarks/remat.py {r['arguments']}`, {r['machine']}, {r['date']}." for r in found["runs"]),
        "",
        "; ".join(lost) or "autopar is on or below every other curve at every budget.",
        "",
        "The curves are in [remat.png](remat.png).",
    ]
    for title, rows, columns in (
        *((m, [r for r in found["rows"] if r["model"] == m], COLUMNS) for m in _models(found["rows"])),
        ("Joint and two-stage search, gpt2 on 4 devices", found["joint"], ("joint", "two-stage")),
    ):
        cells = [
            [f"{r['budget'] / 1e6:.1f} MB", f"{r['share']:.0%}", *(_cell(r["plans"].get(c)) for c in columns)]
            for r in rows
        ]
        head = ["budget", "share", *columns]
        lines += ["", f"## {title}", "", *(f"| {' | '.join(c)} |" for c in (head, ["---"] * len(head), *cells))]
    for model in _models(found["torch.compile"]):
        runs = [r for r in found["torch.compile"] if r["model"] == model]
        each = "; ".join(
            f"budget {r['share']:g}: {r['measured_s'] * 1e3:.1f} ms, saves {r['saved_bytes'] / 1e6:.1f} MB"
            for r in runs
        )
        lines += ["", f"torch.compile itself on {model} (`aot_eager_decomp_partition`): {each}."]
    return "\n".join(lines) + "\n"


def _models(rows: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(r["model"] for r in rows))


def plot(rows: Sequence[Record], path: Path) -> None:
    """Plot step time over the budget, with a panel for each model."""
    import matplotlib.pyplot as plt

    models = _models(rows)
    _, panels = plt.subplots(1, len(models), figsize=(5 * len(models), 4), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        for name in COLUMNS:
            points = [
                (r["budget"] / 1e6, r["plans"][name]["step_s"] * 1e3)
                for r in rows
                if r["model"] == model and name in r["plans"]
            ]
            panel.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if name == "autopar" else 1)
        panel.set(title=model, xlabel="budget, MB", ylabel="predicted step, ms")
    panels[0][0].legend()
    plt.tight_layout()
    plt.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--points", type=int, default=6, help="budgets (default 6)")
    parser.add_argument("--cluster", default="cpu-2")
    parser.add_argument("--offload", action="store_true", help="let autopar offload too, which no rule here does")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for the solver (default 30)")
    parser.add_argument("--measure", action="store_true", help="run the steps too")
    parser.add_argument("--no-joint", action="store_true", help="leave the joint and the two-stage search out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--of", nargs="+", type=Path, help="show these files of --json instead of running")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    found = _read(options.of) if options.of else _run(options)
    console = Console(width=None if sys.stdout.isatty() else 160)
    lost = beaten(found["rows"], 1e-4)
    console.print("\n".join(lost) or "autopar is on or below every other curve at every budget")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(found, lost))
    if options.plot:
        plot(found["rows"], options.plot)
    return bool(lost)


def _read(files: Sequence[Path]) -> Record:
    every = [json.loads(file.read_text()) for file in files]
    return {key: [x for one in every for x in one[key]] for key in every[0]}


def _run(options: argparse.Namespace) -> Record:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    console = Console(width=None if sys.stdout.isatty() else 160)
    cluster = Cluster.load(options.cluster).sized(1)
    if not options.offload:
        cluster = dataclasses.replace(cluster, host=dataclasses.replace(cluster.host, bandwidth_bytes_per_s=1.0))
    rows: list[Record] = []
    by_torch: list[Record] = []
    for name in options.models:
        model, inputs = MODELS[name](options.layers)
        case = Case(name, model, inputs, cluster, options.time_limit)
        rows += compare(case, options.points, run=options.measure)
        console.print(table([r for r in rows if r["model"] == name], COLUMNS))
        if options.measure:
            by_torch += compiled(case)
            for row in by_torch[-5:]:
                figures = f"{row['measured_s'] * 1e3:.1f} ms, saves {row['saved_bytes'] / 1e6:.1f} MB"
                console.print(f"torch.compile, activation_memory_budget {row['share']}: {figures}")
    gains = [] if options.no_joint else joint_gain(4, options.time_limit)
    if gains:
        console.print(table(gains, ("joint", "two-stage")))
    cpu = platform.processor() or platform.machine()
    run = {
        "arguments": " ".join(sys.argv[1:]),
        "date": f"{dt.datetime.now(dt.timezone.utc):%Y-%m-%d}",
        "machine": f"{cpu}, Python {platform.python_version()}, torch {torch.__version__}",
    }
    return {"runs": [run], "rows": rows, "torch.compile": by_torch, "joint": gains}


if __name__ == "__main__":
    sys.exit(main())
