"""Measure how long planning takes, stage by stage, and how large the solver's problem is.

    python benchmarks/planning.py [--only llama3-8b vit-g] [--layers 8 32] [--meshes 8 32x8 8x8x8] [--repeat 3]
    python benchmarks/planning.py --main --repeat 3 --markdown benchmarks/results/planning.md
    python benchmarks/planning.py --only gpt2 --meshes 8 2x4 --shares 0.8 0.6 0.45
    python benchmarks/planning.py --only gpt2-tiny llama-tiny --meshes 4 2x2 --shares 0.9 0.75 0.6 0.45

The models are from Hugging Face, on the meta device, in bfloat16 except the two GPT-2, with the batch of ``MODELS`` on
each device. ``--layers`` changes their depth; 0 keeps it. The cluster is "dgx-h100". There is no memory budget unless
``--budget`` names one, so that all models can be planned on all meshes. No GPU is used. A model is captured once for
each mesh; the rest is repeated, and medians are shown.

``--shares`` also plans each case within these shares of the peak of its plan without a budget, and shows how many times
as many processor seconds that takes.

``--markdown FILE`` writes the table with the machine, the date and the versions, as in benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar
from autopar import codegen, passes
from autopar.arguments import as_bytes
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options, plan_graph
from autopar.planner.answers.make_plan import make_plan
from autopar.solver import clock
from autopar.solver.problem import relative_gap
from autopar.tracer import Capture

UNLIMITED = "1000000TB"
STAGES = ("capture", "strategies", "build", "baselines", "solve", "lower")
MAIN = (
    ("llama3-8b", (8, 32, 126), ("8", "32x8")),
    ("llama3-8b", (0,), ("8x8x8",)),
    ("llama3-70b", (0,), ("8", "32x8")),
    ("vit-g", (0,), ("8", "32x8", "8x8x8")),
    ("gpt3-175b", (0,), ("8", "8x8x8")),
    ("mixtral-8x7b", (0,), ("8", "8x8x8")),
    ("t5-11b", (0,), ("8", "8x8x8")),
    ("llama3-405b", (0,), ("8", "32x8")),
)
"""Models, layers and meshes of the table in benchmarks/results."""

NEAR = 0.01
"""The gap whose seconds are shown beside the total (column ``to 1%``)."""

Record = dict[str, Any]


class Shape(NamedTuple):
    """How to build a model with a number of layers, its own number, and the batch and length on each device."""

    build: Callable[[int], nn.Module]
    layers: int
    batch: int
    length: int


def gpt(width: int, heads: int, length: int, dtype: torch.dtype, vocabulary: int = 50257) -> Callable[[int], nn.Module]:
    def build(layers: int) -> nn.Module:
        config = transformers.GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=heads,
            n_positions=length,
            use_cache=False,
            vocab_size=vocabulary,
            bos_token_id=0,
            eos_token_id=0,
        )
        model = transformers.GPT2LMHeadModel(config)
        model.loss_type = "ForCausalLM"  # its default, named so that transformers does not warn
        return model.to(dtype)

    return build


def llama(width: int, hidden: int, heads: int, vocabulary: int = 128256) -> Callable[[int], nn.Module]:
    def build(layers: int) -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(config).bfloat16()

    return build


def mixtral(layers: int) -> nn.Module:
    config = transformers.MixtralConfig(num_hidden_layers=layers, use_cache=False, experts_implementation="grouped_mm")
    return transformers.MixtralForCausalLM(config).bfloat16()


def vit(layers: int) -> nn.Module:
    config = transformers.ViTConfig(
        num_hidden_layers=layers,
        hidden_size=1664,
        intermediate_size=8192,
        num_attention_heads=16,
        patch_size=14,
        num_labels=1000,
    )
    return transformers.ViTForImageClassification(config).bfloat16()


def t5(layers: int) -> nn.Module:
    config = transformers.T5Config(
        d_model=1024,
        d_ff=65536,
        d_kv=128,
        num_heads=128,
        num_layers=layers,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).bfloat16()


MODELS = {
    "gpt2-tiny": Shape(gpt(128, 4, 128, torch.float32, 512), 2, 2, 128),
    "llama-tiny": Shape(llama(128, 352, 8, 512), 2, 2, 128),
    "gpt2": Shape(gpt(768, 12, 1024, torch.float32), 12, 4, 1024),
    "llama3-8b": Shape(llama(4096, 14336, 32), 32, 1, 4096),
    "llama3-70b": Shape(llama(8192, 28672, 64), 80, 1, 4096),
    "llama3-405b": Shape(llama(16384, 53248, 128), 126, 1, 4096),
    "gpt3-175b": Shape(gpt(12288, 96, 2048, torch.bfloat16), 96, 1, 2048),
    "vit-g": Shape(vit, 48, 16, 224),
    "mixtral-8x7b": Shape(mixtral, 32, 1, 4096),
    "t5-11b": Shape(t5, 24, 4, 512),
}


def inputs(model: str, devices: int) -> dict[str, torch.Tensor]:
    shape = MODELS[model]
    batch = shape.batch * devices
    with torch.device("meta"):
        if model == "vit-g":
            images = torch.empty(batch, 3, shape.length, shape.length, dtype=torch.bfloat16)
            return {"pixel_values": images, "labels": torch.empty(batch, dtype=torch.long)}
        ids = torch.empty(batch, shape.length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def measure(
    model: str, layers: int, mesh: tuple[int, ...], options: Options, repeat: int, shares: Sequence[float] = ()
) -> Record:
    """Capture one case, plan it ``repeat`` times and within ``shares`` of its peak, and record errors too."""
    shape = MODELS[model]
    depth, devices = layers or shape.layers, math.prod(mesh)
    record: Record = {"model": model, "layers": depth, "mesh": list(mesh), "batch": shape.batch * devices}
    try:
        with torch.device("meta"):
            module = shape.build(depth)
        started_s = time.perf_counter()
        capture = autopar.ColoTracer().capture(module, inputs(model, devices))
        record["capture_s"] = time.perf_counter() - started_s
        runs = [planned(capture, mesh, options) for _ in range(repeat)]
    except autopar.AutoparError as error:
        return record | {"error": str(error)}
    times = {key: statistics.median(run[key] for run in runs) for key in runs[0] if key.endswith("_s")}
    found = record | runs[-1] | times | {"runs": [run["total_s"] for run in runs]}
    return found | {"shares": [within(capture, mesh, options, share, found) for share in shares]}


def within(capture: Capture, mesh: tuple[int, ...], options: Options, share: float, free: Record) -> Record:
    """Plan within a share of the peak of the plan without a budget, and record how much longer that takes."""
    budget = int(share * free["peak_memory_bytes"])
    try:
        found = planned(capture, mesh, replace(options, memory_budget_bytes=budget))
    except autopar.AutoparError as error:
        return {"share": share, "error": str(error)}
    return found | {"share": share, "times": found["cpu_s"] / free["cpu_s"]}


def planned(capture: Capture, mesh: tuple[int, ...], options: Options) -> Record:
    """Do everything after capture, once."""
    cluster = Cluster.load("dgx-h100").sized(math.prod(mesh))
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    graph, on = capture.graph, Mesh(mesh)
    with clock.limited(options.time_limit_s):
        found = plan_graph(graph, on, cluster, options)
        counted_s = clock.counted()
    lowered_s = time.perf_counter()
    lowered = passes.lower(found.program, graph, on)
    source = codegen.emit(lowered, on, [])
    ends_s, cpu_end_s = time.perf_counter(), time.process_time()
    plan = make_plan(found, graph, on, cluster, options, source, ())
    record: Record = {f"{stage}_s": found.timings.get(stage, 0.0) for stage in STAGES[1:]}
    record["lower_s"] += ends_s - lowered_s
    before_s = sum(record[f"{stage}_s"] for stage in ("strategies", "build", "baselines"))
    near = (e.seconds for e in found.solution.trace if relative_gap(e.objective, e.lower_bound) <= NEAR)
    shown_s = sum(record[f"{stage}_s"] for stage in STAGES[1:])
    return record | {
        "finalists_s": max(ends_s - start_s - shown_s, 0.0),
        "total_s": ends_s - start_s,
        "cpu_s": cpu_end_s - cpu_start_s,
        "counted_s": counted_s,
        "near_s": before_s + next(near, math.inf),
        "solver": dict(plan.solver),
        "gap": plan.gap,
        "cost_s": plan.objective,
        "step_time_s": plan.step_time,
        "peak_memory_bytes": plan.peak_memory,
        "ops": len(plan.program.ops),
        "collectives": len(plan.collectives),
    }


COLUMNS = (
    "model",
    "layers",
    "mesh",
    *STAGES,
    "candidates",
    "total",
    "CPU",
    "counted",
    "to 1%",
    "variables",
    "folded",
    "gap",
    "step",
    "peak",
)


def cells(record: Record) -> list[str]:
    """Return one row of the table. Times are seconds; the last two columns are predictions for an H100."""
    head = [record["model"], str(record["layers"]), "x".join(map(str, record["mesh"]))]
    totals = [f"{record[key]:.2f}" if key in record else "-" for key in ("total_s", "cpu_s", "counted_s", "near_s")]
    if "error" in record:
        return [*head, *("-" * (len(STAGES) + 1)), *totals, *("-" * 4), record["error"].split("\n")[0]]
    solver = record["solver"]
    return [
        *head,
        *(f"{record[f'{stage}_s']:.2f}" for stage in (*STAGES, "candidates")),
        *totals,
        *(f"{solver[key]:,}" if key in solver else "-" for key in ("nodes", "folded_nodes")),
        f"{record['gap']:.2%}",
        f"{record['step_time_s'] * 1e3:.0f} ms",
        f"{record['peak_memory_bytes'] / 1e9:.1f} GB",
    ]


def table(records: Sequence[Record]) -> Table:
    shown = Table(title="Seconds of planning, and the problem's size")
    for i, column in enumerate(COLUMNS):
        shown.add_column(column, justify="left" if i in (0, 2) else "right", overflow="fold")
    for record in records:
        shown.add_row(*cells(record))
    return shown


def share_table(records: Sequence[Record]) -> Table:
    """Return the table of plans within budgets; the first row of each case has no budget."""
    shown = Table(title="Seconds of planning within a budget")
    for i, column in enumerate(("model", "layers", "mesh", "budget", "CPU", "times", "cost", "gap", "step")):
        shown.add_column(column, justify="left" if i in (0, 2) else "right")
    for record in records:
        head = [record["model"], str(record["layers"]), "x".join(map(str, record["mesh"]))]
        for row in ({**record, "times": 1.0}, *record.get("shares", ())):
            share = f"{row['share']:g}" if "share" in row else "none"
            told = (
                [row["error"].split("\n")[0]]
                if "error" in row
                else [
                    f"{row['cpu_s']:.2f}",
                    f"{row['times']:.1f}",
                    f"{row['cost_s'] * 1e3:.2f} ms",
                    f"{row['gap']:.2%}",
                    f"{row['step_time_s'] * 1e3:.2f} ms",
                ]
            )
            shown.add_row(*head, share, *told)
    return shown


def machine() -> str:
    """Describe the processor and the versions."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((x.split(": ")[1] for x in info.read_text().splitlines() if x.startswith("model name")), cpu)
    found = [f"{name} {_version(name)}" for name in ("torch", "transformers", "highspy")]
    return f"{cpu}, {os.cpu_count()} cores; Python {platform.python_version()}, {', '.join(found)}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"


def markdown(records: Sequence[Record], arguments: str) -> str:
    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, records)]
    lines = [
        "# Time of planning",
        "",
        f"`python benchmarks/planning.py {arguments}`, {dt.datetime.now(dt.timezone.utc):%Y-%m-%d},",
        f"on {machine()}, one thread.",
        "",
        "Stages are wall-clock seconds. `total` is everything after capture, and `CPU` is the same in processor",
        "seconds. `counted` is the time on the search's own clock up to the plan, and `to 1%` is when the gap of the",
        "last problem fell to 1%. Cases that were repeated show medians. `candidates` is the rest: scheduling,",
        "arranging and measuring the plan and the baselines that may be better. There was no memory budget unless the",
        "command names one. `variables` is the size of the problem that the planner states, and `folded` its size once",
        "equal blocks are tied; a dash means that a baseline's plan was taken. `step` and `peak` are predictions for",
        "one H100, not measurements.",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layers", nargs="+", type=int, default=[0], help="0, the default: the model's own")
    parser.add_argument("--main", action="store_true", help="the cases of benchmarks/results instead")
    parser.add_argument("--meshes", nargs="+", default=["8", "32x8", "8x8x8"])
    parser.add_argument("--repeat", type=int, default=1, help="plans of each case, whose median is shown (default 1)")
    parser.add_argument("--budget", default=UNLIMITED, help="memory of a device, as 80GB (default: any)")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the solver (default 60)")
    parser.add_argument("--shares", nargs="+", type=float, default=[], help="of a case's peak, budgets to plan within")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("once")
    records: list[Record] = []
    console = Console(width=None if sys.stdout.isatty() else 200)
    asked = Options(as_bytes(options.budget), time_limit_s=options.time_limit)
    groups = MAIN if options.main else [(model, options.layers, options.meshes) for model in options.only]
    cases = [(model, layers, mesh) for model, depths, meshes in groups for mesh in meshes for layers in depths]
    for model, layers, mesh in cases:
        on = tuple(map(int, mesh.split("x")))
        records.append(measure(model, layers, on, asked, options.repeat, options.shares))
        console.print("  ".join(cells(records[-1])), highlight=False)
        if options.json:
            described = {"machine": machine(), "records": records}
            options.json.write_text(json.dumps(described, indent=1) + "\n")
    console.print(table(records))
    if options.shares:
        console.print(share_table(records))
    if options.markdown:
        chosen = (
            ("only", options.only),
            ("layers", options.layers),
            ("meshes", options.meshes),
            ("repeat", [options.repeat]),
        )
        arguments = " ".join(f"--{name} {' '.join(map(str, values))}" for name, values in chosen)
        arguments = f"--main --repeat {options.repeat}" if options.main else arguments
        options.markdown.write_text(markdown(records, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
