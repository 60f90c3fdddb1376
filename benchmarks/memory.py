"""Compare the predicted and measured peak memory of training steps, over models, meshes, budgets and optimizers.

    python benchmarks/memory.py [--models gpt2 bert ...] [--meshes 1 2x2 8] [--budgets 1 0.85] [--json FILE]

Each model is planned for a CPU cluster, once without a budget and then within shares of that peak. The emitted program
of every rank that differs from the others then runs two steps on fake tensors (forward, backward and optimizer), under
a meter that counts every storage that the dispatcher sees. The peak is that of the second step, when the optimizer has
its state. A program allocates the same on fake tensors as on real ones. No GPU is used.

``--markdown FILE`` writes the table with the date and the versions, as in benchmarks/results.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import math
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import autopar
from autopar import codegen
from autopar._torch import FakeTensorMode
from autopar.ir import Graph
from autopar.mesh import Cluster, Mesh
from autopar.planner.footprint.ranks import unequal_ranks
from autopar.plans import Plan
from autopar.runtime.meter import MemoryMeter
from autopar.spmd.ranks import Exchange

Record = dict[str, Any]
Inputs = dict[str, Tensor]
OPTIMIZERS: Mapping[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "adamw for-loop": partial(torch.optim.AdamW, foreach=False),
    "adamw foreach": partial(torch.optim.AdamW, foreach=True),
    "adamw fused": partial(torch.optim.AdamW, fused=True),
    "sgd momentum foreach": partial(torch.optim.SGD, momentum=0.9, foreach=True),
}


@dataclass(frozen=True)
class LoneRank:
    """One rank of a mesh without the others: a collective receives uninitialized memory, and keeps what it sends alive
    until it is waited for."""

    mesh: Mesh
    coordinate: tuple[int, ...]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    sent: dict[int, Tensor] = field(default_factory=dict)

    def launch(self, buffer: Tensor, exchange: Exchange) -> Tensor:
        if exchange.kind == "all_reduce":
            return buffer if exchange.in_place else buffer.clone()
        ways = self.mesh.shape[exchange.axis] if exchange.axis >= 0 else 1
        rows = {"all_gather": buffer.shape[0] * ways, "reduce_scatter": buffer.shape[0] // ways}
        shape = (rows.get(exchange.kind, buffer.shape[0]), *buffer.shape[1:])
        received = buffer.new_empty(exchange.shape if exchange.kind == "permute" else shape)
        self.sent[id(received)] = buffer
        return received

    def finish(self, received: Tensor) -> Tensor:
        self.sent.pop(id(received), None)
        return received


def measured_peak(plan: Plan, graph: Graph, optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> int:
    """Return the peak bytes of the second step on the fullest rank; only one of several equal ranks is run."""
    program = codegen.load(plan.source, f"measured_{plan.digest}")
    found = []
    for coordinate in unequal_ranks(plan.program, plan.mesh):
        with FakeTensorMode():
            found.append(_Run(plan, graph, LoneRank(plan.mesh, coordinate), program, optimizer).peak())
    return max(found)


@dataclass
class _Run:
    plan: Plan
    graph: Graph
    rank: LoneRank
    program: Mapping[str, Any]
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    held: tuple[Tensor, ...] = ()

    def peak(self) -> int:
        inputs = [op for op in self.plan.program.ops if op.kind == "input"]
        meanings = {op.node: self.graph.input_of[op.node] for op in inputs}
        fed = [op for op in inputs if meanings[op.node].kind != "tangent"]
        whole = {op.node: self._made(op.writes[0].meta.shape, op) for op in fed if meanings[op.node].kind == "input"}
        state = {op.node: self._shard(op) for op in fed if meanings[op.node].kind != "input"}
        parameters = {meanings[op.node].name: state[op.node] for op in fed if meanings[op.node].kind == "parameter"}
        trained = [m.name for m in meanings.values() if m.trainable]
        optimizer = self.optimizer([parameters[n] for n in trained])
        meter = MemoryMeter()
        meter.hold([*whole.values(), *state.values()])
        with meter:
            for _ in range(2):
                meter.reset()
                self._step(fed, inputs, whole, state, parameters)
                optimizer.step()
                for parameter in parameters.values():
                    parameter.grad = None
        return meter.peak - self._on_host(optimizer, parameters)

    def _on_host(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> int:
        """Return the bytes of optimizer state that the plan keeps on the host, which here is the measured device. What
        comes back for the step, a few parameters at a time, is not measured."""
        away = [parameters[n] for n in self.plan.program.offloaded_optimizer]
        state = (t for p in away for t in optimizer.state[p].values())
        return sum(t.nbytes for t in state if isinstance(t, Tensor) and t.ndim)

    def _made(self, shape: Sequence[int], op: Any) -> Tensor:
        return torch.empty(tuple(shape), dtype=getattr(torch, op.writes[0].meta.dtype))

    def _shard(self, op: Any) -> Tensor:
        tensor = op.writes[0]
        return self._made(tensor.spec.local_shape(tensor.meta.shape, self.plan.mesh, self.rank.coordinate), op)

    def _step(self, fed: Any, inputs: Any, whole: Any, state: Any, parameters: Mapping[str, Tensor]) -> None:
        self.held = ()
        feeds = [self._part(op, whole[op.node]) if op.node in whole else state[op.node] for op in fed]
        results = [o for o, name in self.plan.program.results if self._phase(name) == "forward"]
        gradients = [o for o, name in self.plan.program.results if self._phase(name) == "backward"]
        with torch.no_grad():
            made = self.program["forward"](self.rank, feeds)
            self.held = tuple(v for o, v in zip(results, made, strict=False) if o.kind == "output")
            back = list(made[len(results) :])
            del made
            back += [self._shard(op).fill_(1) for op in inputs if self.graph.input_of[op.node].kind == "tangent"]
            for output, gradient in zip(gradients, self.program["backward"](self.rank, back), strict=True):
                if output.name in parameters:
                    parameters[output.name].grad = gradient

    def _part(self, op: Any, whole: Tensor) -> Tensor:
        spec = op.writes[0].spec
        if spec.is_replicated:
            return whole
        return whole[spec.local_slices(tuple(whole.shape), self.plan.mesh, self.rank.coordinate)].clone()

    def _phase(self, name: str) -> str:
        program = self.plan.program
        return program.ops[program.writer[name]].phase


def cluster(size: int) -> Cluster:
    """Return a cluster of CPUs, so that CPU kernels run, which are slow beside their links, so that plans shard."""
    base = Cluster.load("cpu-2")
    device = replace(base.device, memory_bytes=10**13)
    link = replace(base.intra_node, latency_s=1e-6, bandwidth_bytes_per_s=50e9)
    return replace(base, device=device, intra_node=link).sized(size)


def text_inputs(vocabulary: int, batch: int, length: int) -> Inputs:
    ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids.clone()}


def image_inputs(batch: int, size: int) -> Inputs:
    pixels = torch.zeros(batch, 3, size, size, device="meta")
    return {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.int64, device="meta")}


def models() -> dict[str, Callable[[], tuple[nn.Module, Inputs]]]:
    import transformers as hf

    def text(kind: Any, config: Any, batch: int, length: int) -> tuple[nn.Module, Inputs]:
        return kind(config), text_inputs(config.vocab_size, batch, length)

    llama = dict(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=8192,
        use_cache=False,
    )
    t5 = dict(num_layers=3, num_decoder_layers=3, decoder_start_token_id=0, use_cache=False)
    return {
        "gpt2": lambda: text(hf.GPT2LMHeadModel, hf.GPT2Config(n_layer=6, use_cache=False), 8, 256),
        "llama": lambda: text(hf.LlamaForCausalLM, hf.LlamaConfig(**llama), 8, 512),
        "llama-bf16": lambda: _bf16(text(hf.LlamaForCausalLM, hf.LlamaConfig(**llama), 8, 512)),
        "bert": lambda: text(hf.BertForMaskedLM, hf.BertConfig(num_hidden_layers=4), 8, 128),
        "t5": lambda: text(hf.T5ForConditionalGeneration, hf.T5Config(**t5), 8, 128),
        "vit": lambda: (hf.ViTForImageClassification(hf.ViTConfig(num_hidden_layers=4)), image_inputs(16, 224)),
        "resnet": lambda: (hf.ResNetForImageClassification(hf.ResNetConfig(depths=[1] * 4)), image_inputs(16, 224)),
    }


def _bf16(made: tuple[nn.Module, Inputs]) -> tuple[nn.Module, Inputs]:
    return made[0].bfloat16(), made[1]


def measure(
    name: str, mesh: tuple[int, ...], shares: Sequence[float], optimizer: str, time_limit: float
) -> list[Record]:
    """Return one record for each budget; the first is the plan without one."""
    warnings.simplefilter("ignore")
    with torch.device("meta"):
        model, inputs = models()[name]()
    records: list[Record] = []
    free = 0
    for share in shares:
        budget = int(free * share) if free else None
        record: Record = {"model": name, "mesh": list(mesh), "optimizer": optimizer, "share": share, "budget": budget}
        try:
            plan = autopar.plan(
                model,
                inputs,
                mesh=mesh,
                cluster=cluster(math.prod(mesh)),
                memory_budget=budget,
                optimizer=optimizer,
                time_limit=time_limit,
            )
        except autopar.errors.InfeasibleError as error:
            records.append({**record, "infeasible": error.hint})
            continue
        free = free or plan.peak_memory
        graph = autopar.tracer.ColoTracer().capture(model, autopar.tracer.calls.bind(model, (), inputs)).graph
        measured = measured_peak(plan, graph, OPTIMIZERS[optimizer])
        records.append(
            {
                **record,
                "predicted": plan.peak_memory,
                "measured": measured,
                "ratio": plan.peak_memory / measured,
                "recomputed": sum(a.action == "recompute" for a in plan.activations.values()),
                "optimizer_on_host": len(plan.program.offloaded_optimizer),
            }
        )
    return records


COLUMNS = ("model", "mesh", "optimizer", "budget", "predicted bytes", "measured bytes", "ratio", "recomputed")


def cells(record: Record) -> tuple[str, ...]:
    mesh = "x".join(map(str, record["mesh"]))
    budget = "none" if record["budget"] is None else f"{record['budget']:,} ({record['share']:g})"
    head = (record["model"], mesh, record["optimizer"], budget)
    if "infeasible" in record:
        return (*head, "infeasible", "", "", "")
    numbers = (f"{record[column]:,}" for column in ("predicted", "measured"))
    host = " h" if record.get("optimizer_on_host") else ""
    return (*head, *numbers, f"{record['ratio']:.4f}{host}", str(record["recomputed"]))


def markdown(records: Sequence[Record], arguments: str) -> str:
    rows = [COLUMNS, ["---"] * len(COLUMNS), *map(cells, records)]
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    ratios = [r["ratio"] for r in records if "ratio" in r and not r.get("optimizer_on_host")]
    lines = [
        "# Peak memory, predicted and measured",
        "",
        f"`python benchmarks/memory.py {arguments}`, {dt.datetime.now(dt.timezone.utc):%Y-%m-%d}, {versions}.",
        "",
        "Bytes on the fullest rank at the worst moment of a training step, optimizer step included. `predicted` is the",
        "plan's peak. `measured` counts every storage that the emitted program makes in its second step, on fake",
        "tensors, including temporaries inside autopar's own ops. `ratio` is predicted over measured. `budget` is a",
        "share of the peak of the plan without one, and `recomputed` is how many activations the plan recomputes. `h`",
        "means that optimizer state is on the host, whose transfers during the step are not measured here.",
        "",
        f"Ratios without `h` lie between {min(ratios):.4f} and {max(ratios):.4f}.",
        "",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(models()), choices=list(models()))
    parser.add_argument("--meshes", nargs="+", default=["1", "4", "2x2", "2x4"])
    parser.add_argument("--budgets", nargs="+", type=float, default=[1.0, 0.85], help="shares; the first is free")
    parser.add_argument("--optimizers", nargs="+", default=["adamw for-loop"], choices=list(OPTIMIZERS))
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for the solver (default 30)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    records: list[Record] = []
    console = Console(width=None if sys.stdout.isatty() else 200)
    for model in options.models:
        for mesh in options.meshes:
            for optimizer in options.optimizers:
                shape = tuple(map(int, mesh.split("x")))
                for record in measure(model, shape, options.budgets, optimizer, options.time_limit):
                    records.append(record)
                    console.print("  ".join(cells(record)), highlight=False)
                if options.json:
                    options.json.write_text(json.dumps({"records": records}, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(records, " ".join(sys.argv[1:])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
