"""Compare predicted and measured steps and peaks of models of real sizes on this machine's GPU, beside eager PyTorch.

    python benchmarks/one_gpu.py [--cluster FILE] [--models bert vit ...] [--budgets 1 .6] [--inductor] [--json FILE]

A step is a forward and a backward; it is timed without the optimizer, and the peak is that of a step with AdamW. The
prediction is of the device; where the host takes longer to launch a step, that is what it takes.
Without a cluster file of `autopar profile` the machine is profiled first. With a budget of .6, the plan has to hold
.6 of the peak that it has without one, so it recomputes or offloads.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import autopar
from autopar.mesh import Cluster, Mesh
from autopar.profiling import profile_cluster

Record = dict[str, Any]
Made = tuple[nn.Module, dict[str, Tensor]]


def _language(model: nn.Module, vocabulary: int, batch: int, length: int) -> Made:
    ids = torch.randint(3, vocabulary, (batch, length))
    return model, {"input_ids": ids, "labels": ids}


def llama(share: int) -> Made:
    """The shape of TinyLlama 1.1B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048 // share,
        intermediate_size=5632 // share,
        num_hidden_layers=22 // share,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000 // share,
        use_cache=False,
    )
    return _language(LlamaForCausalLM(config), 32000 // share, 4, 2048 // share)


def gpt2(share: int) -> Made:
    """GPT-2 medium."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1024 // share, n_layer=24 // share, n_head=16, vocab_size=50257 // share)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    config.use_cache = False
    return _language(GPT2LMHeadModel(config), 50257 // share, 8, 1024 // share)


def bert(share: int) -> Made:
    """BERT large."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=1024 // share,
        num_hidden_layers=24 // share,
        num_attention_heads=16,
        intermediate_size=4096 // share,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _language(BertForMaskedLM(config), 30522, 16, 512 // share)


def vit(share: int) -> Made:
    """ViT large, patches of 16."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=1024 // share,
        num_hidden_layers=24 // share,
        num_attention_heads=16,
        intermediate_size=4096 // share,
        num_labels=1000,
    )
    images = torch.randn(64 // share, 3, 224, 224)
    return ViTForImageClassification(config), {"pixel_values": images, "labels": torch.randint(0, 1000, (len(images),))}


def resnet(share: int) -> Made:
    """ResNet-50."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(num_labels=1000)
    images = torch.randn(128 // share, 3, 224, 224)
    labels = torch.randint(0, 1000, (len(images),))
    return ResNetForImageClassification(config), {"pixel_values": images, "labels": labels}


def mixtral(share: int) -> Made:
    """Eight layers of eight experts, two of which take each token."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=1024 // share,
        intermediate_size=3584 // share,
        num_hidden_layers=8 // share,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000 // share,
        use_cache=False,
    )
    return _language(MixtralForCausalLM(config), 32000 // share, 4, 2048 // share)


MODELS: Mapping[str, Callable[[int], Made]] = {
    "llama": llama,
    "gpt2": gpt2,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
    "mixtral": mixtral,
}


def made(name: str, options: argparse.Namespace) -> Made:
    """Return the model in bfloat16 and its batch on the device."""
    torch.manual_seed(0)
    with torch.device(options.device):
        model, inputs = MODELS[name](8 if options.quick else 1)
    return model.bfloat16(), {k: t.bfloat16() if t.is_floating_point() else t for k, t in inputs.items()}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(model: nn.Module, inputs: Mapping[str, Tensor], steps: int, before: int) -> Record:
    """Return the mean seconds of steps without the optimizer, one right after the other, and the peak bytes of one
    with it; and the least seconds in which the host launched a step."""

    def step() -> float:
        loss = model(**inputs).loss
        loss.backward()
        return float(loss.detach())

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    losses, launched = [], []
    for i in range(2):
        if i and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        losses.append(step())
        optimizer.step()
        optimizer.zero_grad()
    synchronize()
    peak = torch.cuda.max_memory_allocated() - before if torch.cuda.is_available() else 0
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        begun = time.perf_counter()
        model.zero_grad()
        model(**inputs).loss.backward()
        launched.append(time.perf_counter() - begun)
    synchronize()
    taken = (time.perf_counter() - start) / steps
    return {"measured_s": taken, "host_s": min(launched), "measured_bytes": peak, "losses": losses}


def freed() -> int:
    gc.collect()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()


def records_of(name: str, cluster: Cluster, options: argparse.Namespace) -> list[Record]:
    before = freed()
    model, inputs = made(name, options)
    found = [{"what": f"{name}, plain"} | measured(model, inputs, options.steps, before)]
    say(found[-1])
    del model, inputs
    ways = [("eager", share) for share in options.budgets]
    ways += [("inductor", 1.0)] if options.inductor else []
    free = 0.0
    for backend, share in ways:
        before = freed()
        model, inputs = made(name, options)
        budget = {"memory_budget": share * free} if free and share < 1 else {}
        start = time.perf_counter()
        try:
            parallel = autopar.autoparallelize(model, inputs, mesh=(1,), cluster=cluster, backend=backend, **budget)
        except autopar.AutoparError as error:
            say({"what": f"{name} at {share:g}: {error.what}"})
            continue
        planning = time.perf_counter() - start
        plan = parallel.plan
        free = free or plan.peak_memory
        found.append(
            {
                "what": f"{name}, autopar"
                + (" and Inductor" if backend == "inductor" else "")
                + (f", budget {share:g}" if budget else ""),
                "predicted_s": plan.step_time,
                "predicted_bytes": plan.peak_memory,
                "planning_s": planning,
            }
            | measured(parallel, inputs, options.steps, before)
        )
        say(found[-1])
        del model, parallel, inputs, plan
    return found


def say(record: Record) -> None:
    print(json.dumps(record), file=sys.stderr, flush=True)


def table(records: list[Record]) -> Table:
    columns = (
        "model and way",
        "predicted ms",
        "measured ms",
        "error",
        "host ms",
        "of eager",
        "predicted GiB",
        "measured GiB",
        "of it",
    )
    shown, eager = Table(*columns), 1.0
    for r in records:
        eager = r["measured_s"] if "predicted_s" not in r else eager
        seconds, held = r["measured_s"], r["measured_bytes"]
        said = r.get("predicted_s", 0.0), r.get("predicted_bytes", 0)
        shown.add_row(
            r["what"],
            f"{said[0] * 1e3:.1f}" if said[0] else "",
            f"{seconds * 1e3:.1f}",
            f"{said[0] / seconds - 1:+.0%}" if said[0] else "",
            f"{r['host_s'] * 1e3:.1f}",
            f"{seconds / eager:.3f}",
            f"{said[1] / 2**30:.3f}" if said[1] else "",
            f"{held / 2**30:.3f}",
            f"{held / said[1]:.3f}" if said[1] else "",
        )
    return shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", help="a file of autopar profile, instead of profiling")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--budgets", nargs="+", type=float, default=[1.0, 0.6], help="shares of the peak without one")
    parser.add_argument("--inductor", action="store_true", help="the Inductor back end too")
    parser.add_argument("--steps", type=int, default=9, help="steps that are timed")
    parser.add_argument("--quick", action="store_true", help="an eighth of the sizes, on a CPU, to see that it runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.quick:
        print("benchmarks/one_gpu.py needs a GPU: this machine has none. Nothing was measured.")
        return 0
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    warnings.simplefilter("ignore")
    store = dist.HashStore()
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    cluster = Cluster.load(options.cluster) if options.cluster else profile_cluster(Mesh((1,)), name="here")
    records = [r for name in options.models for r in records_of(name, cluster, options)]
    device = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{device}, torch {torch.__version__}, {cluster.description}")
    Console(width=130).print(table(records))
    if options.json:
        found = {"device": device, "torch": torch.__version__, "records": records}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
