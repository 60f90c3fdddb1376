"""Step time against memory budget on one process: autopar beside the known ways to recompute, and joint beside
two-stage search on a mesh.

    python benchmarks/remat.py [--models mlp gpt2 llama] [--points 6] [--measure] [--json FILE] [--plot FILE]

Every rule decides what is kept on the same captured graph, and all are scheduled, timed and measured by the same
models, so that they differ in their decisions alone:

none        everything that the backward reads is kept
blocks      of every block its input is kept, and the block is run again
selective   products and attention are kept, all else is made again: the policy of torch's examples
sqrt        what crosses evenly spaced cuts is kept (Chen et al., 2016), for every number of cuts
torch       of what takes longest for its bytes as much as a share of all bytes allows, as with
            torch._functorch.config.activation_memory_budget, for shares from 0 to 1
rotor       for every block: keep all of it, its input, or nothing (Beaumont et al., 2019), the best of all such
            choices in which nothing runs more than twice

``--measure`` also runs the steps, on this machine: seconds of the processor are medians, bytes those that the
simulation counts while it runs. It runs torch.compile with activation_memory_budget too, whose graph is another: its
seconds are measured, and the bytes that it saves for the backward. ``--plot`` needs matplotlib.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import math
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar import codegen, passes, planner
from autopar.arguments import canonical_names
from autopar.errors import InfeasibleError
from autopar.ir import Value
from autopar.mesh import Cluster, Mesh
from autopar.planner import Options, Planned
from autopar.planner.constraints import resolve
from autopar.planner.decisions import decide
from autopar.planner.keeping import Keeping
from autopar.planner.objective import Objective
from autopar.planner.predictions import make_plan
from autopar.planner.pricing import Prices
from autopar.planner.schedule import AGAIN
from autopar.planner.timeline import simulate_streams
from autopar.planner.two_stage import CheckpointSearch
from autopar.solver import Solution
from autopar.strategies import flops
from autopar.tracer import Capture, ColoTracer

ONE = Mesh((1,))
Record = dict[str, Any]
Kept = frozenset[Value]


class Block(nn.Module):
    """A linear layer, its activation and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, 4 * width), nn.LayerNorm(4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(nn.functional.gelu(self.up(x))))


class Chain(nn.Module):
    """Blocks one after the other, and a loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x.square().mean()


def mlp(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return Chain(layers, 128), {"x": torch.randn(2048, 128)}


def gpt2(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers, n_embd=128, n_head=4, vocab_size=512, n_positions=128, use_cache=False,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    ids = torch.randint(512, (8, 128))
    return model, {"input_ids": ids, "labels": ids}


def llama(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=512, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    ids = torch.randint(512, (8, 128))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


MODELS: Mapping[str, Callable[[int], tuple[nn.Module, dict[str, Tensor]]]] = {"mlp": mlp, "gpt2": gpt2, "llama": llama}


@dataclasses.dataclass
class Case:
    """A model with its capture, on one device of ``cluster``."""

    name: str
    model: nn.Module
    inputs: dict[str, Tensor]
    cluster: Cluster
    time_limit_s: float

    @cached_property
    def capture(self) -> Capture:
        return ColoTracer().capture(self.model, self.inputs)

    def options(self, budget: float | None = None, search: str = "joint") -> Options:
        return Options(
            None if budget is None else int(budget), "sgd", aliases=canonical_names(self.model),
            time_limit_s=self.time_limit_s, search=search, device=self.cluster.device.kind,
        )  # fmt: skip

    def planned(self, budget: float | None = None) -> Planned:
        return planner.plan_graph(self.capture.graph, ONE, self.cluster, self.options(budget), compare=False)

    @cached_property
    def search(self) -> CheckpointSearch:
        graph, options = self.capture.graph, self.options()
        d = decide(graph, ONE, options, resolve(graph, ONE, {}, options.aliases), recompute=True)
        return CheckpointSearch(Objective(d, Prices(ONE, self.cluster)), options, [None] * len(d.variables))

    @cached_property
    def keeping(self) -> Keeping:
        assert self.search.rules is not None
        return self.search.rules

    def keep(self, kept: Kept) -> Planned:
        """The plan that keeps just these values."""
        choice = self.keeping.choosing(kept)
        program, memory = self.search.measured(choice)
        solution = Solution(choice, self.search.objective.seconds(choice), 0.0, proven=False)
        timeline = simulate_streams(program, self.search.prices.overlap)
        return Planned(program, self.search.decisions, solution, memory, timeline)

    @cached_property
    def blocks(self) -> dict[str, int]:
        """The block of each forward node that is in one."""
        found: dict[str, int] = {}
        for node in self.capture.graph.nodes:
            inside = re.search(r"(?:^|\.)(?:h|layers)\.(\d+)(?:\.|$)", node.module)
            if node.phase == "forward" and inside:
                found[node.name] = int(inside.group(1))
        return found

    @cached_property
    def outside(self) -> Kept:
        """What is made outside of blocks, which every rule keeps."""
        return frozenset(v for v in self.keeping.storages if v.node not in self.blocks)

    def into(self, block: int) -> Kept:
        """What a block reads of what was made before it."""
        first = min(i for i, n in enumerate(self.capture.graph.nodes) if self.blocks.get(n.name) == block)
        return self.keeping.crossing(first)

    def inside(self, block: int) -> Kept:
        return frozenset(v for v in self.keeping.storages if self.blocks.get(v.node) == block)


def none(case: Case) -> Iterator[Kept]:
    yield frozenset(case.keeping.storages)


def blocks(case: Case) -> Iterator[Kept]:
    yield case.outside.union(*(case.into(b) for b in set(case.blocks.values())))


def selective(case: Case) -> Iterator[Kept]:
    graph = case.capture.graph
    heavy = [v for v in case.keeping.storages if _flops(case, v) > 0]
    kept = case.outside.union(*(case.into(b) for b in set(case.blocks.values())))
    yield kept | {v for v in heavy if graph.by_name[v.node].outputs[v.index]}
    yield kept | {v for i, v in enumerate(heavy) if i % 2}


def _flops(case: Case, value: Value) -> float:
    graph = case.capture.graph
    node = graph.by_name[value.node]
    return flops(node, tuple(graph.meta(v) for v in node.inputs))


def sqrt(case: Case) -> Iterator[Kept]:
    for pieces in range(1, 3 * math.isqrt(len(case.keeping.storages)) + 1):
        yield case.keeping.cuts(pieces)


def torch_budget(case: Case) -> Iterator[Kept]:
    """What takes longest for its bytes, until the share of all bytes is full."""
    graph, seconds = case.capture.graph, case.keeping.seconds
    size = {v: graph.meta(v).bytes for v in case.keeping.storages}
    worth = sorted(size, key=lambda v: -seconds.get(case.keeping.position[v.node], 0.0) / max(size[v], 1))
    for share in range(21):
        kept, left = set[Value](), sum(size.values()) * share / 20
        for value in worth:
            if size[value] <= left:
                kept.add(value)
                left -= size[value]
        yield frozenset(kept)


ROTOR_MOST = 6
"""Blocks that are told apart: beyond, neighbours are decided alike, so that all choices can be tried."""


def rotor(case: Case) -> Iterator[Kept]:
    order = sorted(set(case.blocks.values()))
    stages = [order[i * len(order) // ROTOR_MOST : (i + 1) * len(order) // ROTOR_MOST] for i in range(ROTOR_MOST)]
    stages = [s for s in stages if s]
    into = {b: case.into(b) for b in order}
    inside = {b: case.inside(b) for b in order}
    for ways in itertools.product(("all", "input", "nothing"), repeat=len(stages)):
        kept = set(case.outside)
        for stage, way in zip(stages, ways, strict=True):
            if way != "nothing":
                kept |= into[stage[0]]
            if way == "all":
                kept |= frozenset().union(*(inside[b] | into[b] for b in stage))
        yield frozenset(kept)


RULES: Mapping[str, Callable[[Case], Iterator[Kept]]] = {
    "none": none, "blocks": blocks, "selective": selective, "sqrt": sqrt, "torch": torch_budget, "rotor": rotor,
}  # fmt: skip


def curve(case: Case, rule: str) -> list[Planned]:
    """A rule's plans, none of which is both slower and larger than another."""
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
    """The fastest plan that fits."""
    fitting = [p for p in plans if p.memory.peak_bytes <= budget]
    return min(fitting, key=lambda p: p.timeline.seconds, default=None)


def smallest(case: Case) -> float:
    """The least budget that was found to work."""
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
        "step_s": plan.timeline.seconds, "peak_bytes": plan.memory.peak_bytes, "again": again, "offloaded": offloaded,
        "gap": plan.solution.gap if plan.solution.lower_bound else None,
    }  # fmt: skip


def compare(case: Case, points: int, *, measured: bool) -> list[Record]:
    """Rows of the table: one for each budget, from the least to that of no recomputation."""
    curves = {rule: curve(case, rule) for rule in RULES}
    free = curves["none"][0].memory.peak_bytes
    least = min(smallest(case), *(p.memory.peak_bytes for plans in curves.values() for p in plans))
    rows = []
    for i in range(points):
        budget = least + (free - least) * i / (points - 1)
        found: dict[str, Planned | None] = {rule: within(plans, budget) for rule, plans in curves.items()}
        found = {"autopar": _ours(case, budget), **found}
        rows.append({
            "model": case.name, "budget": budget, "share": budget / free,
            "plans": {k: described(p) | (_run(case, p) if measured else {}) for k, p in found.items() if p is not None},
        })  # fmt: skip
    return rows


def _ours(case: Case, budget: float) -> Planned | None:
    try:
        return case.planned(math.ceil(budget))
    except InfeasibleError:
        return None


REPEATS = 7


def _run(case: Case, planned: Planned) -> Record:
    """Median seconds of real steps in this process, and the bytes that a simulated one holds at most."""
    graph = case.capture.graph
    lowered = passes.lower(planned.program, graph, ONE)
    source = codegen.emit(lowered, ONE, [case.name])
    plan = make_plan(planned, graph, ONE, case.cluster, case.options(), source, ())
    held = autopar.simulate(case.model, case.inputs, plan=plan).peak_memory
    model = autopar.autoparallelize(copy.deepcopy(case.model), case.inputs, plan=plan)
    taken = []
    for _ in range(REPEATS + 1):
        model.zero_grad(set_to_none=True)
        start_s = time.process_time()
        returned = model(**case.inputs)
        (returned if isinstance(returned, Tensor) else returned.loss).backward()
        taken.append(time.process_time() - start_s)
    return {"measured_s": statistics.median(taken[1:]), "measured_bytes": held}


def compiled(case: Case) -> list[Record]:
    """What torch.compile takes under its own budgets, without fusing: seconds, and bytes saved for the backward."""
    import torch._dynamo
    import torch._functorch.config as functorch

    def step(model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        returned = model(**case.inputs)
        (returned if isinstance(returned, Tensor) else returned.loss).backward()

    rows = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        torch._dynamo.reset()
        saved: dict[int, int] = {}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with functorch.patch(activation_memory_budget=share):
            model = torch.compile(copy.deepcopy(case.model), backend="aot_eager_decomp_partition")
            own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *case.inputs.values())}
            step(model)
            taken = []
            for _ in range(REPEATS):
                start_s = time.process_time()
                step(model)
                taken.append(time.process_time() - start_s)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                step(model)
        held = sum(size for at, size in saved.items() if at not in own)
        rows.append({
            "model": case.name, "share": share, "measured_s": statistics.median(taken), "saved_bytes": held,
        })  # fmt: skip
    return rows


def joint_gain(points: int, time_limit_s: float) -> list[Record]:
    """The joint search beside the two-stage one, on four devices and budgets below the free plan's peak."""
    model, inputs = gpt2(2)
    graph = ColoTracer().capture(model, inputs).graph
    mesh, cluster = Mesh((4,)), Cluster.load("dgx-h100").sized(4)

    def step(budget: float | None, search: str) -> Planned | None:
        options = Options(
            None if budget is None else int(budget), aliases=canonical_names(model), time_limit_s=time_limit_s,
            search=search,
        )  # fmt: skip
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
        rows.append({
            "model": "gpt2 on 4 devices", "budget": budget, "share": budget / free.memory.peak_bytes,
            "plans": {k: described(p) for k, p in plans.items() if p is not None},
        })  # fmt: skip
    return rows


def table(rows: Sequence[Record], columns: Sequence[str]) -> Table:
    """Milliseconds a step by budget; a dash where nothing fits."""
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
    """Where another rule is predicted faster than autopar by more than the solver's gap."""
    found = []
    for row in rows:
        ours = row["plans"].get("autopar")
        limit = math.inf if ours is None else ours["step_s"] * (1 + tolerance)
        for name, plan in row["plans"].items():
            if name != "autopar" and (ours is None or plan["step_s"] * (1 + tolerance) < ours["step_s"]):
                found.append(f"{row['model']} at {row['share']:.0%}: {name} {plan['step_s']:.6f} s, ours {limit:.6f} s")
    return found


def plot(rows: Sequence[Record], path: Path) -> None:
    """Step time over the budget, a panel for each model."""
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(r["model"] for r in rows))
    _, panels = plt.subplots(1, len(models), figsize=(5 * len(models), 4), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        for name in ("autopar", *RULES):
            points = [(r["budget"] / 1e6, r["plans"][name]["step_s"] * 1e3) for r in rows
                      if r["model"] == model and name in r["plans"]]  # fmt: skip
            panel.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if name == "autopar" else 1)
        panel.set(title=model, xlabel="budget, MB", ylabel="predicted step, ms")
    panels[0][0].legend()
    plt.tight_layout()
    plt.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--points", type=int, default=6, help="budgets (default 6)")
    parser.add_argument("--cluster", default="cpu-2")
    parser.add_argument("--offload", action="store_true", help="let autopar offload too, which no rule here does")
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for the solver (default 30)")
    parser.add_argument("--measure", action="store_true", help="run the steps too")
    parser.add_argument("--no-joint", action="store_true", help="leave the joint and the two-stage search out")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
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
        rows += compare(case, options.points, measured=options.measure)
        console.print(table([r for r in rows if r["model"] == name], ("autopar", *RULES)))
        if options.measure:
            by_torch += compiled(case)
            for row in by_torch[-5:]:
                figures = f"{row['measured_s'] * 1e3:.1f} ms, saves {row['saved_bytes'] / 1e6:.1f} MB"
                console.print(f"torch.compile, activation_memory_budget {row['share']}: {figures}")
    lost = beaten(rows, 1e-4)
    console.print("\n".join(lost) or "autopar is on or below every other curve at every budget")
    gains = [] if options.no_joint else joint_gain(4, options.time_limit)
    if gains:
        console.print(table(gains, ("joint", "two-stage")))
    if options.json:
        cpu = platform.processor() or platform.machine()
        on = f"{cpu}, Python {platform.python_version()}, torch {torch.__version__}"
        everything = {"machine": on, "rows": rows, "torch.compile": by_torch, "joint": gains}
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
