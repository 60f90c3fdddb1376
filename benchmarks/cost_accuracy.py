"""Compare predicted and measured times on this machine: single ops, collectives, and whole training steps.

    python benchmarks/cost_accuracy.py [--nproc 2] [--json FILE] [--markdown FILE] [--cluster FILE] [--steps N]

Profiles the machine first, unless a cluster file of `autopar profile` is given; then predicts, and then measures. A
step is a forward and a backward of a model, without the optimizer. Some steps cut one long sequence, or send rows to
experts.

On CPUs a step's processor time, summed over the threads of the busiest rank, is reported beside its wall-clock time. It
excludes other programs on the machine and waiting for messages. With a core for each rank, an undisturbed step takes at
least that long, and little more where collectives overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[1]))

import autopar
from autopar.cost_models import CollectiveCosts, ComputeCosts
from autopar.mesh import Cluster, Mesh
from autopar.profiling import join, launched, profile_cluster
from autopar.profiling.collectives import KINDS, Launch, prepared
from autopar.profiling.kernels import MOST_SETS, Rotation, among_others, rotated_bytes
from autopar.profiling.timing import Stopwatch
from autopar.spmd import ProcessRank
from tests.favoured import RING, attention_by

Record = dict[str, Any]
PLANS = ("DDP", "ZeRO-3", "TP", "TP+SP")
PRODUCTS = ((48, 96, 48), (512, 96, 96), (1024, 256, 768), (1024, 768, 256), (16, 2048, 2048), (2048, 1024, 512))
MESSAGES = (3_000, 100_000, 3_000_000, 50_000_000)


def multilayer_perceptron():
    sizes = [512, 2048, 2048, 512]
    layers = [layer for a, b in zip(sizes, sizes[1:], strict=False) for layer in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*layers), (torch.randn(256, 512),)


def _language(model: nn.Module, batch: int = 8, sequence: int = 128):
    ids = torch.randint(3, 2048, (batch, sequence))
    return model, {"input_ids": ids, "labels": ids}


def gpt2():
    import transformers as t

    sizes = dict(n_layer=4, n_embd=256, n_head=4, vocab_size=2048, n_positions=128)
    return _language(t.GPT2LMHeadModel(t.GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)))


def llama():
    import transformers as t

    sizes = dict(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        max_position_embeddings=128,
    )
    return _language(t.LlamaForCausalLM(t.LlamaConfig(**sizes, use_cache=False)))


def vit():
    import transformers as t

    sizes = dict(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=64,
        patch_size=8,
        num_labels=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = t.ViTForImageClassification(t.ViTConfig(**sizes))
    return model, {"pixel_values": torch.randn(16, 3, 64, 64), "labels": torch.randint(0, 64, (16,))}


def resnet():
    import transformers as t

    config = t.ResNetConfig(embedding_size=32, hidden_sizes=[64, 128], depths=[2, 2], num_labels=64, layer_type="basic")
    model = t.ResNetForImageClassification(config)
    return model, {"pixel_values": torch.randn(8, 3, 96, 96), "labels": torch.randint(0, 64, (8,))}


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "mlp": multilayer_perceptron,
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
    "resnet": resnet,
}


def long_rows():
    """One row whose sequence is long enough for attention to count."""
    import transformers as t

    sizes = dict(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        max_position_embeddings=4096,
    )
    return _language(t.LlamaForCausalLM(t.LlamaConfig(**sizes, use_cache=False)), 1, 4096)


def mixtral():
    import transformers as t

    sizes = dict(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=2048,
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    return _language(t.MixtralForCausalLM(t.MixtralConfig(**sizes, use_cache=False)))


MORE = {"llama of long rows": long_rows, "mixtral": mixtral}

SEQUENCES = {"rows lent": ("CP", "s"), "keys on a ring": ("CP", RING), "heads": ("CP", "g")}
"""Baseline, and what attention does with the axis."""

EXPERTS = ("EP x FSDP", "ZeRO-3", "DDP")


def single_ops(rank: ProcessRank, cluster: Cluster, watch: Stopwatch) -> list[Record]:
    """Time ops of sizes and shapes that were not profiled, amid others as in a program; on CPUs, in processor time."""
    costs, records = ComputeCosts(cluster), []
    timed_among = among_others(rank.device, watch)
    aten = torch.ops.aten

    def add(
        name: str, make: Callable[[], Callable[[], object]], flops: float, nbytes: float, kind: str, op: str = ""
    ) -> None:
        predicted = costs.seconds(flops, nbytes, "float32", kind, op)
        sets = min(max(int(rotated_bytes(rank.device) / nbytes), 2), MOST_SETS)
        measured = timed_among(Rotation.of([make() for _ in range(sets)])).seconds
        records.append({"what": name, "predicted_s": predicted, "measured_s": measured})

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=rank.device)

    for m, k, n in PRODUCTS:
        nbytes = 4.0 * (m * k + n * k + m * n)
        make = partial(_product, rand, m, k, n)
        add(f"contract {m} x {k} x {n}", make, 2.0 * m * k * n, nbytes, "matmul")
    for rows in (30, 700, 9000):
        size = 4.0 * rows * 384
        for name in ("relu", "gelu", "tanh", "neg"):
            op = getattr(aten, name).default
            add(f"{name} {rows} x 384", partial(_of, op, rand, rows), 0, 2 * size, "memory", f"aten.{name}")
        add(f"sum {rows} x 384", partial(_of, aten.sum.dim_IntList, rand, rows, [0]), 0, size, "memory", "aten.sum")
        w = torch.ones(384, device=rank.device)
        norm = partial(_of, aten.native_layer_norm.default, rand, rows, [384], w, w, 1e-5)
        add(f"native_layer_norm {rows} x 384", norm, 0, 2 * size, "memory", "aten.native_layer_norm")
    return records


def _product(rand: Callable[..., torch.Tensor], m: int, k: int, n: int) -> Callable[[], object]:
    return partial(torch.ops.autopar.contract, rand(m, k), rand(n, k), "mk,nk->mn")


def _of(op: Callable[..., object], rand: Callable[..., torch.Tensor], rows: int, *rest: object) -> Callable[[], object]:
    return partial(op, rand(rows, 384), *rest)


def collectives(rank: ProcessRank, cluster: Cluster, watch: Stopwatch) -> list[Record]:
    """Time messages of sizes that were not profiled."""
    costs, records = CollectiveCosts(rank.mesh, cluster), []
    for kind in KINDS if rank.mesh.size > 1 else ():
        for size in MESSAGES:
            nbytes = size // 1024 * 1024
            predicted = costs.seconds(kind, nbytes, 0)
            measured = watch.time(prepared(Launch(kind, 0, nbytes), rank)).seconds
            records.append({"what": f"{kind} of {nbytes:,} B", "predicted_s": predicted, "measured_s": measured})
    return records


def step_of(made: nn.Module, inputs: Any) -> Callable[[], None]:
    def step() -> None:
        made.zero_grad()
        out = made(**inputs) if isinstance(inputs, dict) else made(*inputs)
        (out.loss if hasattr(out, "loss") else out.pow(2).mean()).backward()

    return step


def whole_steps(rank: ProcessRank, cluster: Cluster, steps: int) -> list[Record]:
    """Time models under forced plans; a plan that does not apply to a model is skipped."""
    records = []
    cases = [(name, plan) for name in MODELS for plan in (PLANS if rank.mesh.size > 1 else ("joint",))]
    if rank.mesh.size > 1:
        cases += [("llama of long rows", plan) for plan in SEQUENCES]
        cases += [("mixtral", plan) for plan in EXPERTS]
    for name, plan in cases:
        torch.manual_seed(0)
        model, inputs = (MODELS | MORE)[name]()
        baseline, choice = SEQUENCES.get(plan, (plan, ""))
        search = plan if plan == "joint" else f"baseline:{baseline}"
        try:
            with attention_by(choice) if choice else nullcontext():
                made = autopar.autoparallelize(model, inputs, mesh=rank.mesh.shape, cluster=cluster, search=search)
        except autopar.AutoparError as error:
            say(f"{name} under {plan}: {error.what}")
            continue
        step = step_of(made, inputs)
        step()
        step()
        taken, worked = zip(*(timed(step) for _ in range(steps)), strict=True)
        measured, processor = statistics.median(taken), statistics.median(worked)
        spread = statistics.median(abs(t - measured) for t in taken) / measured
        record = {"what": f"{name}, {plan}", "predicted_s": made.plan.step_time, "measured_s": measured}
        record |= {"processor_s": processor, "spread": spread, "collectives": len(made.plan.collectives)}
        records.append(record)
        say(f"{name}, {plan}: " + ", ".join(f"{k} {record[k]:.4g}" for k in record if k.endswith("_s")))
    return records


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Return the wall-clock seconds of the slowest rank and the processor seconds of the busiest."""
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    mine = time.perf_counter() - start, time.process_time() - busy
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    walls, processors = zip(*everyone, strict=True)
    return max(walls), max(processors)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's correlation of the ranks."""
    x, y = (np.argsort(np.argsort(values)).astype(float) for values in (a, b))
    return float(np.corrcoef(x, y)[0, 1])


def summary(records: Sequence[Record]) -> Record:
    predicted, measured = ([r[key] for r in records] for key in ("predicted_s", "measured_s"))
    errors = [abs(p - m) / m for p, m in zip(predicted, measured, strict=True)]
    correlation = rank_correlation(predicted, measured) if len(records) > 1 else None
    return {
        "count": len(records),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "rank_correlation": correlation,
    }


def columns(part: str) -> list[str]:
    return [part, "predicted", "measured", "error", *(["processor"] if part == "steps" else [])]


def row(r: Record) -> list[str]:
    p, m = r["predicted_s"], r["measured_s"]
    cells = [r["what"], f"{p * 1e3:.4g} ms", f"{m * 1e3:.4g} ms", f"{p / m - 1:+.0%}"]
    return [*cells, *([f"{r['processor_s'] * 1e3:.4g} ms"] if "processor_s" in r else [])]


def tables(result: Record, console: Console) -> None:
    for part in ("ops", "collectives", "steps"):
        if not result[part]:
            continue
        table = Table(*columns(part))
        for r in result[part]:
            table.add_row(*row(r))
        console.print(table)
    for part, s in result["summary"].items():
        console.print(f"{part}: median error {s['median_error']:.1%}, rank correlation {s['rank_correlation']:.3f}")


def markdown(result: Record) -> str:
    machine = result["machine"]
    load = f"Load average {machine['load_before']:.1f} before and {machine['load_after']:.1f} after."
    lines = [
        "# Predicted against measured times",
        "",
        f"{machine['description']}. {load} Written by",
        "`benchmarks/cost_accuracy.py`. A load above the number of CPUs, beyond the benchmark itself, means that other",
        "programs used the machine. Wall-clock figures then say more about those than about the cost models, and a",
        "step's processor time, which excludes other programs and waiting, is the better measure.",
        "",
        "| part | count | median error | worst error | rank correlation |",
        "|---|---|---|---|---|",
    ]
    for part, s in result["summary"].items():
        figures = f"{s['median_error']:.1%} | {s['worst_error']:.0%} | {s['rank_correlation']:.3f}"
        lines.append(f"| {part} | {s['count']} | {figures} |")
    for part in ("ops", "collectives", "steps"):
        if result[part]:
            names = columns(part)
            lines += ["", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
            lines += [f"| {' | '.join(row(r))} |" for r in result[part]]
    return "\n".join(lines) + "\n"


def run(options: argparse.Namespace) -> Record:
    mesh = Mesh((dist.get_world_size(),))
    load_before = os.getloadavg()[0]
    say("profiling ...")
    cluster = Cluster.load(options.cluster) if options.cluster else profile_cluster(mesh, name="here")
    device_type = "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
    rank = ProcessRank(init_device_mesh(device_type, mesh.shape))
    on_cpu = device_type == "cpu"
    watch = Stopwatch(rank.device, budget_s=0.05, quantile=0.0 if on_cpu else 0.5)
    kernels = replace(watch, clock=time.thread_time, quantile=0.25) if on_cpu else watch
    result: Record = {
        "ops": single_ops(rank, cluster, kernels),
        "collectives": collectives(rank, cluster, watch),
        "steps": whole_steps(rank, cluster, options.steps),
    }
    result["summary"] = {part: summary(records) for part, records in result.items() if records}
    if device_type == "cpu" and result["steps"]:
        busy = [r | {"measured_s": r["processor_s"]} for r in result["steps"]]
        result["summary"]["steps, processor time"] = summary(busy)
    result["machine"] = {
        "description": f"{cluster.description}, {platform.machine()}, {os.cpu_count()} CPUs",
        "overlap": cluster.measured.overlap,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
    }
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--backend")
    parser.add_argument("--cluster", help="a file of autopar profile, instead of profiling")
    parser.add_argument("--steps", type=int, default=9, help="training steps of which the median is taken")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args(arguments)
    if not launched():
        given = list(sys.argv[1:] if arguments is None else arguments)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.nproc}"]
        return subprocess.run([*launcher, __file__, *given], check=False).returncode
    warnings.simplefilter("ignore")
    join(options.backend)
    result = run(options)
    if dist.get_rank() == 0:
        tables(result, Console(width=100))
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
        if options.markdown:
            options.markdown.write_text(markdown(result))
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
