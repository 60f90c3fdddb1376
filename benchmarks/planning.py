"""How long planning takes, stage by stage, and how large the problem is that the solver gets.

    python benchmarks/planning.py [--models gpt2 llama3-8b] [--layers 2 4 8] [--meshes 8 2x4 32x8] [--json FILE]

Models are those of Hugging Face on the meta device: GPT-2 small in float32 with 4 x 1,024 tokens a device,
Llama-3-8B in bfloat16 with 1 x 4,096 tokens a device, their depth changed to ``--layers``. The cluster is "dgx-h100",
and its 80 GB a device are the budget. No GPU is used.

``--markdown FILE`` writes the table with the machine, the date and the versions, as in benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import autopar

STAGES = ("capture", "strategies", "build", "solve", "lower")
Record = dict[str, Any]


class Shape(NamedTuple):
    """A model's batch, on each device."""

    batch: int
    length: int


SHAPES = {"gpt2": Shape(4, 1024), "llama3-8b": Shape(1, 4096)}


def build(model: str, layers: int) -> nn.Module:
    import transformers

    with torch.device("meta"):
        if model == "gpt2":
            gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=layers, use_cache=False))
            gpt2.loss_type = "ForCausalLM"  # its default, named so that transformers does not warn
            return gpt2
        config = transformers.LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            rope_theta=500000.0,
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(config).bfloat16()


def measure(model: str, layers: int, mesh: tuple[int, ...], time_limit: float) -> Record:
    """Plan one case; what went wrong is recorded too."""
    shape = SHAPES[model]
    batch = shape.batch * math.prod(mesh)
    ids = torch.empty(batch, shape.length, dtype=torch.long, device="meta")
    record: Record = {"model": model, "layers": layers, "mesh": list(mesh), "batch": batch, "length": shape.length}
    module = build(model, layers)
    start_s, cpu_start_s = time.perf_counter(), time.process_time()
    try:
        plan = autopar.plan(
            module, {"input_ids": ids, "labels": ids}, mesh=mesh, cluster="dgx-h100", time_limit=time_limit
        )
    except autopar.AutoparError as error:
        spent = {"total_s": time.perf_counter() - start_s, "cpu_s": time.process_time() - cpu_start_s}
        return record | spent | {"error": str(error)}
    record["total_s"] = time.perf_counter() - start_s
    record["cpu_s"] = time.process_time() - cpu_start_s
    record |= {f"{stage}_s": plan.timings.get(stage, 0.0) for stage in STAGES}
    return record | {
        "solver": dict(plan.solver),
        "gap": plan.gap,
        "step_time_s": plan.step_time,
        "peak_memory_bytes": plan.peak_memory,
        "ops": len(plan.program.ops),
        "collectives": len(plan.collectives),
    }


COLUMNS = (
    "model", "layers", "mesh", *STAGES, "total", "CPU", "variables", "options", "pairs", "options left", "ILP",
    "gap", "step", "peak",
)  # fmt: skip


def cells(record: Record) -> list[str]:
    """One row of the table. Times are seconds, the last two columns predictions for an H100."""
    head = [record["model"], str(record["layers"]), "x".join(map(str, record["mesh"]))]
    totals = [f"{record[key]:.1f}" if key in record else "-" for key in ("total_s", "cpu_s")]
    if "error" in record:
        return [*head, *("-" * len(STAGES)), *totals, *("-" * 7), record["error"].split("\n")[0]]
    solver = record["solver"]
    return [
        *head,
        *(f"{record[f'{stage}_s']:.2f}" for stage in STAGES),
        *totals,
        *(f"{solver.get(key, 0):,}" for key in ("nodes", "options", "pairs", "reduced_options", "ilp_variables")),
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


def machine() -> str:
    """What this ran on."""
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
        "Stages and `total` are seconds on the clock, `CPU` those of the processor. `variables`, `options` and",
        "`pairs` are the problem as the planner states it; `options left` is what remained of them when the solver",
        "had last reduced it; `ILP` is the variables of the integer program, 0 where message passing needed none or",
        "where it would have been too large (then there is a gap). `step` and `peak` are predictions for one H100,",
        "not measurements.",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--meshes", nargs="+", default=["8", "2x4", "32x8"])
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the solver (default 60)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("once")
    records: list[Record] = []
    console = Console(width=None if sys.stdout.isatty() else 200)
    for model in options.models:
        for mesh in options.meshes:
            for layers in options.layers:
                records.append(measure(model, layers, tuple(map(int, mesh.split("x"))), options.time_limit))
                console.print("  ".join(cells(records[-1])), highlight=False)
                if options.json:
                    described = {"machine": machine(), "records": records}
                    options.json.write_text(json.dumps(described, indent=1) + "\n")
    console.print(table(records))
    if options.markdown:
        chosen = (("models", options.models), ("layers", options.layers), ("meshes", options.meshes))
        arguments = " ".join(f"--{name} {' '.join(map(str, values))}" for name, values in chosen)
        options.markdown.write_text(markdown(records, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
