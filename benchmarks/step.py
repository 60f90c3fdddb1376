"""Compare whole training steps with programs that people write by hand: DDP, FSDP2 and torch's tensor parallel.

    python benchmarks/step.py [--nproc 2] [--only gpt2 llama] [--rounds 20] [--cluster FILE] [--json FILE]

A step is forward, backward and AdamW on the same model and batch, with the same number of threads. The programs
alternate step by step, so that other work on the machine affects all of them alike. The table shows the median over the
rounds of the ratio of their times in one round. The losses of the first steps must agree. Batch norm in DDP, FSDP2 and
the tensor parallel program normalises over the batch of one rank. ``ddp-sync`` and ``fsdp2-sync`` use a hand-written
batch norm over all ranks, whose losses agree with those of one device, as autopar's do.

Profiles the machine first, unless ``--cluster`` names a file of `autopar profile`, or is ``none``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
import transformers as t
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import autopar
from autopar.mesh import Cluster, Mesh
from autopar.profiling import join, launched, profile_cluster

Batch = dict[str, Tensor]
TOLERANCE = 2e-4
CHECKED = 3
"""First steps whose losses are compared."""


class Model(NamedTuple):
    """A model with its batch, the layers that FSDP2 wraps, and its hand-written tensor parallel program, if any."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    layers: Callable[[nn.Module], list[nn.Module]]
    tensor_parallel: Callable[[nn.Module, DeviceMesh], nn.Module] | None


def tokens(batch: int = 8, length: int = 128) -> Batch:
    ids = torch.randint(3, 4096, (batch, length))
    return {"input_ids": ids, "labels": ids}


def images(batch: int, size: int) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 64, (batch,))}


def gpt2() -> nn.Module:
    sizes = dict(n_layer=4, n_embd=384, n_head=6, vocab_size=4096, n_positions=128, use_cache=False)
    return t.GPT2LMHeadModel(t.GPT2Config(**sizes, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0))


def llama() -> nn.Module:
    sizes = dict(hidden_size=384, intermediate_size=1024, num_hidden_layers=4, vocab_size=4096, use_cache=False)
    heads = dict(num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=128)
    return t.LlamaForCausalLM(t.LlamaConfig(**sizes, **heads))


def bert() -> nn.Module:
    sizes = dict(hidden_size=384, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=6, vocab_size=4096)
    quiet = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=128)
    return t.BertForMaskedLM(t.BertConfig(**sizes, **quiet))


def vit() -> nn.Module:
    sizes = dict(hidden_size=384, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=6, num_labels=64)
    rest = dict(image_size=64, patch_size=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return t.ViTForImageClassification(t.ViTConfig(**sizes, **rest))


def resnet() -> nn.Module:
    sizes = dict(embedding_size=64, hidden_sizes=[64, 128, 256], depths=[2, 2, 2], num_labels=64, layer_type="basic")
    return t.ResNetForImageClassification(t.ResNetConfig(**sizes))


COLUMN, ROW = ColwiseParallel, RowwiseParallel


def llama_by_hand(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {}
    for i in range(len(model.model.layers)):
        at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        plan |= {f"{at}.{n}_proj": COLUMN() for n in "qkv"} | {f"{at}.o_proj": ROW(), f"{mlp}.down_proj": ROW()}
        plan |= {f"{mlp}.gate_proj": COLUMN(), f"{mlp}.up_proj": COLUMN()}
    return parallelize_module(model, mesh, plan)


def bert_by_hand(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {}
    for i in range(len(model.bert.encoder.layer)):
        layer = f"bert.encoder.layer.{i}"
        plan |= {f"{layer}.attention.self.{n}": COLUMN() for n in ("query", "key", "value")}
        plan |= {f"{layer}.attention.output.dense": ROW(), f"{layer}.output.dense": ROW()}
        plan |= {f"{layer}.intermediate.dense": COLUMN()}
    return parallelize_module(model, mesh, plan)


def vit_by_hand(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan: dict[str, Any] = {}
    for i in range(len(model.vit.layers)):
        layer = f"vit.layers.{i}"
        plan |= {f"{layer}.attention.{n}_proj": COLUMN() for n in "qkv"} | {f"{layer}.attention.o_proj": ROW()}
        plan |= {f"{layer}.mlp.fc1": COLUMN(), f"{layer}.mlp.fc2": ROW()}
    return parallelize_module(model, mesh, plan)


def gpt2_by_hand(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Turn Conv1D into Linear, and put the fused projection's rows in the order of the ranks that hold them."""
    ways = mesh.size()
    for block in model.transformer.h:
        for part, name in ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj")):
            setattr(part, name, _linear(getattr(part, name), ways if name == "c_attn" else 1))
        block.attn.split_size //= ways
        attention = {"attn.c_attn": COLUMN(), "attn.c_proj": ROW(), "mlp.c_fc": COLUMN(), "mlp.c_proj": ROW()}
        parallelize_module(block, mesh, attention)
    return model


def _linear(conv: Any, ways: int) -> nn.Linear:
    made = nn.Linear(*conv.weight.shape)

    def by_rank(x: Tensor) -> Tensor:
        """[q; k; v] -> for each rank [its q; its k; its v]"""
        return x.unflatten(0, (3, ways, -1)).transpose(0, 1).flatten(0, 2) if ways > 1 else x

    with torch.no_grad():
        made.weight.copy_(by_rank(conv.weight.T))
        made.bias.copy_(by_rank(conv.bias))
    return made


MODELS = {
    "gpt2": Model(gpt2, tokens, lambda m: list(m.transformer.h), gpt2_by_hand),
    "llama": Model(llama, tokens, lambda m: list(m.model.layers), llama_by_hand),
    "bert": Model(bert, tokens, lambda m: list(m.bert.encoder.layer), bert_by_hand),
    "vit": Model(vit, lambda: images(16, 64), lambda m: list(m.vit.layers), vit_by_hand),
    "resnet": Model(resnet, lambda: images(16, 96), lambda m: list(m.resnet.encoder.stages), None),
}


class SyncBatchNorm(nn.Module):
    """Batch norm over the batch of all ranks; torch's own runs on GPUs only."""

    def __init__(self, like: nn.BatchNorm2d) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.momentum = like.weight, like.bias, like.eps, like.momentum
        self.register_buffer("running_mean", like.running_mean)
        self.register_buffer("running_var", like.running_var)

    def forward(self, x: Tensor) -> Tensor:
        count = x.numel() // x.shape[1] * dist.get_world_size()
        mean = collectives.all_reduce(x.sum((0, 2, 3))) / count
        centred = x - mean[:, None, None]
        var = collectives.all_reduce(centred.square().sum((0, 2, 3))) / count
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self.momentum)
        scale = self.weight * (var + self.eps).rsqrt()
        return centred * scale[:, None, None] + self.bias[:, None, None]


def with_sync_batch_norm(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        if isinstance(child, nn.BatchNorm2d):
            setattr(module, name, SyncBatchNorm(child))
        else:
            with_sync_batch_norm(child)
    return module


def fsdp2(module: nn.Module, model: Model, mesh: DeviceMesh) -> nn.Module:
    for layer in (*model.layers(module), module):
        fully_shard(layer, mesh=mesh)
    return module


class Way(NamedTuple):
    """One way to train: the module, its batch, and its optimizer."""

    module: nn.Module
    batch: Batch
    optimizer: torch.optim.Optimizer
    averaged: bool


def ways(name: str, cluster: Cluster | None, mesh: DeviceMesh, time_limit: float) -> tuple[dict[str, Way], Any]:
    """Return every way to train ``name``, starting from equal parameters, and autopar's plan."""
    model = MODELS[name]
    torch.manual_seed(0)
    start, whole = model.build(), model.batch()
    rank, size = dist.get_rank(), dist.get_world_size()
    part = {k: v.chunk(size)[rank] for k, v in whole.items()}
    made: dict[str, Way] = {}

    def add(way: str, module: nn.Module, batch: Batch, *, averaged: bool) -> None:
        made[way] = Way(module, batch, torch.optim.AdamW(module.parameters(), lr=1e-4), averaged)

    add("ddp", DistributedDataParallel(copy.deepcopy(start)), part, averaged=True)
    add("fsdp2", fsdp2(copy.deepcopy(start), model, mesh), part, averaged=True)
    if model.tensor_parallel is not None:
        add("tp", model.tensor_parallel(copy.deepcopy(start), mesh), whole, averaged=False)
    if any(isinstance(m, nn.BatchNorm2d) for m in start.modules()):
        add("ddp-sync", DistributedDataParallel(with_sync_batch_norm(copy.deepcopy(start))), part, averaged=True)
        add("fsdp2-sync", fsdp2(with_sync_batch_norm(copy.deepcopy(start)), model, mesh), part, averaged=True)
    options = dict(mesh=mesh, cluster=cluster, time_limit=time_limit)
    own = autopar.autoparallelize(copy.deepcopy(start), whole, **options)
    add("autopar", own, whole, averaged=False)
    return made, own.plan


def step(way: Way) -> Tensor:
    way.optimizer.zero_grad()
    loss = way.module(**way.batch).loss
    loss.backward()
    way.optimizer.step()
    return loss.detach()


def global_loss(way: Way, loss: Tensor) -> float:
    value = (loss.full_tensor() if isinstance(loss, DTensor) else loss).clone()
    if way.averaged:
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return float(value)


def timed(way: Way) -> tuple[float, float]:
    """Return the wall-clock seconds and this rank's processor seconds."""
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    step(way)
    busy = time.process_time() - busy
    dist.barrier()
    return time.perf_counter() - start, busy


def measure(name: str, cluster: Cluster | None, mesh: DeviceMesh, rounds: int, time_limit: float) -> dict[str, Any]:
    """Return the median seconds of each way, and the ratios of autopar's seconds to them."""
    made, plan = ways(name, cluster, mesh, time_limit)
    losses = {way: [global_loss(w, step(w)) for _ in range(CHECKED)] for way, w in made.items()}
    taken: dict[str, list[float]] = {way: [] for way in made}
    busy: dict[str, list[float]] = {way: [] for way in made}
    for turn in range(rounds + 1):
        order = list(made) if turn % 2 else list(reversed(made))
        for way in order:
            clock, processor = timed(made[way])
            if turn:
                taken[way].append(clock)
                busy[way].append(processor)

    def ratio(of: dict[str, list[float]], way: str) -> float:
        return statistics.median(a / b for a, b in zip(of["autopar"], of[way], strict=True))

    others = [way for way in made if way != "autopar"]
    return {
        "model": name,
        "losses": losses,
        "agree": agreeing(losses),
        "seconds": {way: statistics.median(x) for way, x in taken.items()},
        "processor_seconds": {way: statistics.median(x) for way, x in busy.items()},
        "ratio": {way: ratio(taken, way) for way in others},
        "processor_ratio": {way: ratio(busy, way) for way in others},
        "plan": {
            "predicted_s": plan.step_time,
            "collectives": len(plan.collectives),
            "tensors": sum(len(c.tensors) for c in plan.collectives),
            "solver": plan.solver["method"],
        },
    }


def agreeing(losses: dict[str, list[float]]) -> dict[str, bool]:
    """Say whether each way's losses agree with autopar's."""
    own = losses["autopar"]
    return {
        way: all(abs(a - b) <= TOLERANCE * abs(b) for a, b in zip(of, own, strict=True)) for way, of in losses.items()
    }


def say(record: dict[str, Any]) -> None:
    print(f"{record['model']}: autopar {record['seconds']['autopar'] * 1e3:.1f} ms, {record['plan']}")
    for way, ratio in record["ratio"].items():
        agree = "losses agree" if record["agree"][way] else "other losses"
        processor = record["processor_ratio"][way]
        print(f"  {record['seconds'][way] * 1e3:8.1f} ms {way:9} ratio {ratio:.3f}, processor {processor:.3f}, {agree}")


def run(arguments: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    join("gloo")
    size = dist.get_world_size()
    torch.set_num_threads(max((os.cpu_count() or 1) // size, 1))
    mesh = init_device_mesh("cpu", (size,))
    cluster = None
    if arguments.cluster not in ("", "none"):
        cluster = Cluster.load(arguments.cluster)
    elif not arguments.cluster:
        cluster = profile_cluster(Mesh((size,)))
    records = []
    for name in arguments.only or MODELS:
        records.append(measure(name, cluster, mesh, arguments.rounds, arguments.time_limit))
        if dist.get_rank() == 0:
            say(records[-1])
    if dist.get_rank() == 0 and arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"processes": size, "torch": torch.__version__, "records": records}, file, indent=1)
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=list(MODELS), default=[])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--time-limit", type=float, default=20.0)
    parser.add_argument("--cluster", default="")
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    if launched():
        run(arguments)
        return 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arguments.nproc}"]
    return subprocess.run([*command, __file__, *sys.argv[1:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
