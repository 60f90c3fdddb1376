"""Compare pipelines with those that people write by hand with torch.distributed.pipelining, and with no pipeline.

    python benchmarks/pipeline.py [--rounds 10] [--layers 8] [--only NAME ...] [--json FILE]   # measured, on gloo
    python benchmarks/pipeline.py --predicted [--only NAME ...] [--json FILE]                  # predicted, for clusters

Measured: a step is forward, backward and AdamW of the same decoder and batch, in the same schedule, on two ranks along
the pipeline, with one thread a process. Where two ranks share each stage, FSDP2 is applied by hand to each block and
each stage, whose parameters stay gathered from its first forward to its last backward, and each of the two takes half
of the batch; autopar chooses shardings itself. The two programs alternate step by step, so that other work on the
machine affects both alike. The table has the median over the rounds of the ratio of their times in one round, and how
far the loss of the first step, whose labels are uneven over the micro-batches, is from that of one process.

Bytes are those of live tensors on each rank at the peak of three steps in a row, since what a step leaves in reference
cycles lives until Python collects it, and those that a step sends from stage to stage. FSDP2 gathers parameters into
storages that it makes once and resizes, past the dispatcher where tensors are counted, so resizing is counted as well.

Predicted: the step of the chosen pipeline beside that of the best plan without one.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

import autopar
from autopar.runtime.meter import MemoryMeter
from autopar.spmd.pipeline.links import Links
from tests.ranks import run_ranks

WIDTH, VOCABULARY, LENGTH, BATCH, MICRO_BATCHES = 256, 512, 64, 16, 4
STEPS_METERED = 3
PRECISION = {"parameter": "bf16", "reduce": "fp32", "master": "fp32"}


class Block(nn.Module):
    """A pre-norm layer of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(x), labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    lengths = torch.linspace(4, LENGTH, BATCH)[:, None]
    return ids, torch.where(torch.arange(LENGTH) < lengths, ids, -100)


def built(layers: int) -> Decoder:
    torch.manual_seed(0)
    return Decoder(layers)


@dataclass(frozen=True)
class Written:
    """A schedule of torch's runtime, and how many stages each of two ranks holds; in a V the last is with the first."""

    schedule: Any
    chunks: int = 1
    turns: bool = False

    def stages(self, position: int) -> list[int]:
        """Return the numbers of the stages at a position along the pipeline."""
        return [position, 3 - position] if self.turns else [position + 2 * i for i in range(self.chunks)]


BY_HAND = {
    "gpipe": Written(ScheduleGPipe),
    "1f1b": Written(Schedule1F1B),
    "interleaved": Written(ScheduleInterleaved1F1B, 2),
    "zbv": Written(ScheduleZBVZeroBubble, 2, turns=True),
}


class ByHand:
    """Stages of equal numbers of layers under torch's runtime, with FSDP2 inside where ``dp`` ranks share each."""

    def __init__(self, schedule: str, layers: int, dp: int) -> None:
        written, mesh = BY_HAND[schedule], init_device_mesh("cpu", (2, dp), mesh_dim_names=("pp", "dp"))
        self.share = mesh.get_local_rank("dp"), dp
        numbers = written.stages(mesh.get_local_rank("pp"))
        self.begins = 0 in numbers
        parts = [parts_of(built(layers), 2 * written.chunks)[n] for n in numbers]
        if dp > 1:
            for module in [m for part in parts for m in [*part, part] if isinstance(m, Block | nn.Sequential)]:
                fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        stages = [
            PipelineStage(part, n, 2 * written.chunks, torch.device("cpu"), group=mesh.get_group("pp"))
            for n, part in zip(numbers, parts, strict=True)
        ]
        several = written.chunks > 1
        self.schedule = written.schedule(stages if several else stages[0], MICRO_BATCHES, loss_fn=loss_of)
        self.optimizer = torch.optim.AdamW(p for part in parts for p in part.parameters())

    def step(self) -> float:
        rank, dp = self.share
        ids, labels = (each.chunk(dp)[rank] for each in batch())
        losses: list[Tensor] = []
        self.schedule.step(*[ids] * self.begins, target=labels, losses=losses, return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).mean().detach()) if losses else float("nan")


def parts_of(model: Decoder, count: int) -> list[nn.Sequential]:
    """Cut a model into parts of equal numbers of layers."""
    size = len(model.blocks) // count
    parts = [[*model.blocks[n * size : (n + 1) * size]] for n in range(count)]
    return [nn.Sequential(*part) for part in [[model.embed, *parts[0]], *parts[1:-1], [*parts[-1], model.head]]]


class Ours:
    """The same model and schedule, cut by autopar, which chooses the shardings where ``dp`` ranks share each stage."""

    def __init__(self, schedule: str, layers: int, dp: int) -> None:
        chunks = BY_HAND[schedule].chunks
        self.model = autopar.autoparallelize(
            built(layers),
            batch(),
            mesh={"pp": 2, "dp": dp} if dp > 1 else {"pp": 2},
            pipeline=autopar.Pipeline(micro_batches=MICRO_BATCHES, schedule=schedule, chunks=chunks),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> float:
        loss = self.model(*batch())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


PROGRAMS: dict[str, type[ByHand | Ours]] = {"by hand": ByHand, "autopar": Ours}


def measure(schedule: str, layers: int, dp: int, rounds: int) -> dict[str, Any]:
    """Run on every rank: measure what each program holds and sends, then alternate steps of both."""
    warnings.simplefilter("ignore")
    both, losses, held, sent = {}, {}, {}, {}
    for name, program in PROGRAMS.items():
        others = {*map(id, tensors())}
        both[name] = program(schedule, layers, dp)
        losses[name] = both[name].step()
        held[name], sent[name] = held_and_sent(both[name], others)
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(rounds):
        for name, each in both.items():
            dist.barrier()
            began = time.perf_counter()
            each.step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
    return {"losses": losses, "seconds": seconds, "held": held, "sent": sent}


def tensors() -> list[Tensor]:
    """Return all tensors that have memory of their own, with the shards of DTensors."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]


class Meter(MemoryMeter):
    """Counts storages that are resized at their new sizes."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        torch.empty(0, dtype=torch.uint8).set_(storage)  # counts it if it is not counted yet
        size, key = storage.nbytes(), storage._cdata
        self.held += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.held)


def held_and_sent(program: ByHand | Ours, others: set[int]) -> tuple[int, int]:
    """Return the most bytes that tensors but ``others`` hold in a few steps, and those sent between stages in one."""
    total, send, made, resize = 0, Links.send, dist.P2POp.__init__, torch.UntypedStorage.resize_

    def counted_send(links: Links, to: int, tensor: Tensor) -> Any:
        nonlocal total
        total += tensor.nbytes
        return send(links, to, tensor)

    def counted_op(op: dist.P2POp, function: Any, tensor: Tensor, *more: Any, **named: Any) -> None:
        nonlocal total
        total += tensor.nbytes if function is dist.isend else 0
        made(op, function, tensor, *more, **named)

    def counted_resize(storage: torch.UntypedStorage, size: int) -> Any:
        resize(storage, size)
        meter.resized(storage)
        return storage

    program.step()
    kept = [each for each in tensors() if id(each) not in others]
    with (
        patch.object(Links, "send", counted_send),
        patch.object(dist.P2POp, "__init__", counted_op),
        patch.object(torch.UntypedStorage, "resize_", counted_resize),
        Meter() as meter,
    ):
        meter.hold(kept)
        del kept
        for _ in range(STEPS_METERED):
            program.step()
    return meter.peak, total // STEPS_METERED


def measured(layers: int, rounds: int, only: list[str]) -> list[dict[str, Any]]:
    expected = float(built(layers)(*batch()).detach())
    rows = []
    for dp, inside in ((1, "one device"), (2, "FSDP2 on 2")):
        for schedule in BY_HAND:
            if only and not any(part in f"{schedule}, {inside}" for part in only):
                continue
            ranks = run_ranks(2 * dp, measure, schedule, layers, dp, rounds, timeout=600.0)
            rows.append({"schedule": schedule, "inside": inside, **compared(ranks, expected)})
    return rows


def compared(ranks: list[dict[str, Any]], expected: float) -> dict[str, Any]:
    """Return a row of the table from what ``measure`` returned on each rank, and the loss of one process."""
    seconds = ranks[0]["seconds"]
    ratios = (ours / theirs for ours, theirs in zip(seconds["autopar"], seconds["by hand"], strict=True))
    row = {f"{name}, s": statistics.median(each) for name, each in seconds.items()}
    row |= {"ratio": statistics.median(ratios)}
    row |= {f"{name}, MiB": ", ".join(f"{r['held'][name] / 2**20:.1f}" for r in ranks) for name in PROGRAMS}
    row |= {f"{name}, sent MiB": sum(r["sent"][name] for r in ranks) / 2**20 for name in PROGRAMS}
    for name in PROGRAMS:
        loss = statistics.mean(r["losses"][name] for r in ranks if not math.isnan(r["losses"][name]))
        row[f"{name}, loss off"] = abs(loss - expected) / expected
    return row


@dataclass(frozen=True)
class SetUp:
    """A model on a cluster. ``mesh`` is that of the pipeline, ``plain`` that without one."""

    config: Any
    batch: int
    length: int
    cluster: str
    mesh: dict[str, int]
    plain: tuple[int, ...]


def _slow_network() -> str:
    """Return nodes of eight GPUs that share one network card of 25 Gb/s."""
    text = autopar.Cluster.load("dgx-h100").to_toml()
    within, between = text.split("[inter_node]")
    between = re.sub(r"(?m)^bandwidth_bytes_per_s = .*$", "bandwidth_bytes_per_s = 3.125e9", between, count=1)
    return f"{within}[inter_node]{between.replace('nics = 8', 'nics = 1')}"


def set_ups() -> dict[str, SetUp]:
    llama = transformers.LlamaConfig
    eight = llama(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    thirteen = llama(
        hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40, vocab_size=32000
    )
    gpt3 = llama(
        hidden_size=12288, intermediate_size=32768, num_hidden_layers=96, num_attention_heads=96, vocab_size=50304
    )
    largest = llama(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    return {
        "llama-3-8b, 4 x DGX H100": SetUp(eight, 64, 4096, "dgx-h100", {"pp": 4, "dp": 8}, (4, 8)),
        "13B, 4 nodes of one 25 Gb/s card": SetUp(thirteen, 128, 2048, "slow", {"pp": 4, "dp": 8}, (4, 8)),
        "175B, 16 nodes of one 25 Gb/s card": SetUp(gpt3, 256, 2048, "slow", {"pp": 16, "tp": 8}, (16, 8)),
        "llama-3-405b, 2,048 x DGX H100": SetUp(
            largest, 512, 8192, "dgx-h100", {"pp": 16, "dp": 32, "cp": 4, "tp": 8}, (512, 4, 8)
        ),
    }


def predicted(only: list[str]) -> list[dict[str, Any]]:
    rows = []
    for name, s in set_ups().items():
        if only and not any(part in name for part in only):
            continue
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(s.config)
            ids = torch.empty(s.batch, s.length, dtype=torch.int64)
        inputs = {"input_ids": ids, "labels": ids}
        cluster = autopar.Cluster.from_toml(_slow_network()) if s.cluster == "slow" else s.cluster
        began = time.process_time()
        piped = autopar.plan(model, inputs, s.mesh, cluster, mixed_precision=PRECISION)
        took = time.process_time() - began
        plain = autopar.plan(model, inputs, s.plain, cluster, mixed_precision=PRECISION)
        rows.append(
            {
                "set-up": name,
                "pipeline": f"{piped.schedule.name}, {piped.micro_batches} micro-batches",
                "step, s": piped.step_time,
                "bound, s": piped.lower_bound,
                "waiting": piped.bubble,
                "peak, GiB": piped.peak_memory / 2**30,
                "without, s": plain.step_time,
                "without, peak, GiB": plain.peak_memory / 2**30,
                "planning, s": took,
            }
        )
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=160).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predicted", action="store_true", help="predict for clusters instead of measuring here")
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of rows, as in 'zbv, FSDP2'")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = predicted(given.only) if given.predicted else measured(given.layers, given.rounds, given.only)
    _print(rows)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
