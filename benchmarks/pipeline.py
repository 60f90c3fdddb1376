"""Compare pipelines with those that people write by hand with torch.distributed.pipelining, and with no pipeline.

    python benchmarks/pipeline.py [--rounds 10] [--layers 8] [--json FILE]      # measured, on two gloo processes
    python benchmarks/pipeline.py --predicted [--only NAME ...] [--json FILE]   # predicted, for clusters

Measured: a step is forward, backward and AdamW of the same decoder and batch, in the same schedule, with one thread a
process. The two programs alternate step by step, so that other work on the machine affects both alike. The table has
the median over the rounds of the ratio of their times in one round, and how far the loss of the first step, whose
labels are uneven over the micro-batches, is from that of one process. Bytes are those of live tensors on each rank at
the peak of a step, and those sent from stage to stage.

Predicted: the step of the chosen pipeline beside that of the best plan without one.
"""

from __future__ import annotations

import argparse
import json
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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

sys.path.insert(0, str(Path(__file__).parents[1]))

import autopar
from autopar.runtime.meter import MemoryMeter
from autopar.spmd.pipeline.links import Links
from tests.ranks import run_ranks

WIDTH, VOCABULARY, LENGTH, BATCH, MICRO_BATCHES = 256, 512, 64, 16, 4
PRECISION = {"parameter": "bf16", "reduce": "fp32", "master": "fp32"}
BY_HAND = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


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


class ByHand:
    """Two stages of equal numbers of layers under torch's runtime."""

    def __init__(self, schedule: str, layers: int) -> None:
        model, rank = built(layers), dist.get_rank()
        half = layers // 2
        parts = (
            nn.Sequential(model.embed, *model.blocks[:half]),
            nn.Sequential(*model.blocks[half:], model.head),
        )
        self.part = parts[rank]
        stage = PipelineStage(self.part, rank, 2, torch.device("cpu"))
        self.schedule = BY_HAND[schedule](stage, MICRO_BATCHES, loss_fn=loss_of)
        self.optimizer = torch.optim.AdamW(self.part.parameters())

    def step(self) -> float:
        ids, labels = batch()
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            self.schedule.step(ids)
        else:
            self.schedule.step(target=labels, losses=losses)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(torch.stack(losses).mean().detach()) if losses else float("nan")


class Ours:
    """The same model and schedule, cut by autopar."""

    def __init__(self, schedule: str, layers: int) -> None:
        self.model = autopar.autoparallelize(
            built(layers),
            batch(),
            mesh={"pp": 2},
            pipeline=autopar.Pipeline(micro_batches=MICRO_BATCHES, schedule=schedule),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> float:
        loss = self.model(*batch())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def measure(schedule: str, layers: int, rounds: int) -> dict[str, Any]:
    """Run on every rank: alternate steps of both programs."""
    warnings.simplefilter("ignore")
    both = {"by hand": ByHand(schedule, layers), "autopar": Ours(schedule, layers)}
    losses = {name: program.step() for name, program in both.items()}
    seconds: dict[str, list[float]] = {name: [] for name in both}
    for _ in range(rounds):
        for name, program in both.items():
            dist.barrier()
            began = time.perf_counter()
            program.step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - began)
    held = {name: held_and_sent(program) for name, program in both.items()}
    return {"losses": losses, "seconds": seconds, "held": held}


def held_and_sent(program: ByHand | Ours) -> tuple[int, int]:
    """Return the most bytes that tensors hold in a step, parameters and optimizer state included, and those sent."""
    total, send, made = 0, Links.send, dist.P2POp.__init__

    def counted_send(links: Links, to: int, tensor: Tensor) -> Any:
        nonlocal total
        total += tensor.nbytes
        return send(links, to, tensor)

    def counted_op(op: dist.P2POp, function: Any, tensor: Tensor, *others: Any, **named: Any) -> None:
        nonlocal total
        total += tensor.nbytes if function is dist.isend else 0
        made(op, function, tensor, *others, **named)

    program.step()
    states = [v for state in program.optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    parameters = [p for group in program.optimizer.param_groups for p in group["params"]]
    with (
        patch.object(Links, "send", counted_send),
        patch.object(dist.P2POp, "__init__", counted_op),
        MemoryMeter() as meter,
    ):
        meter.hold([*parameters, *states])
        program.step()
    return meter.peak, total


def measured(layers: int, rounds: int) -> list[dict[str, Any]]:
    expected = float(built(layers)(*batch()).detach())
    rows = []
    for schedule in BY_HAND:
        ranks = run_ranks(2, measure, schedule, layers, rounds, timeout=600.0)
        last = ranks[1]
        peak, sent = ({k: [r["held"][k][i] for r in ranks] for k in last["held"]} for i in (0, 1))
        pairs = zip(last["seconds"]["autopar"], last["seconds"]["by hand"], strict=True)
        rows.append(
            {
                "schedule": schedule,
                "by hand, s": statistics.median(last["seconds"]["by hand"]),
                "autopar, s": statistics.median(last["seconds"]["autopar"]),
                "ratio": statistics.median(ours / theirs for ours, theirs in pairs),
                "by hand, MiB": " and ".join(f"{b / 2**20:.1f}" for b in peak["by hand"]),
                "autopar, MiB": " and ".join(f"{b / 2**20:.1f}" for b in peak["autopar"]),
                "by hand, sent MiB": sum(sent["by hand"]) / 2**20,
                "autopar, sent MiB": sum(sent["autopar"]) / 2**20,
                "by hand, loss off": abs(last["losses"]["by hand"] - expected) / expected,
                "autopar, loss off": abs(last["losses"]["autopar"] - expected) / expected,
            }
        )
    return rows


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
    parser.add_argument("--only", nargs="*", default=[], help="parts of the names of set-ups")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    rows = predicted(given.only) if given.predicted else measured(given.layers, given.rounds)
    _print(rows)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
