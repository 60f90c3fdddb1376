"""Compare a program compiled by Inductor with ``torch.compile`` of the plain model, on one process with one thread.

    python benchmarks/inductor.py [--models gpt2 mlp] [--steps 20] [--json FILE]

A step is forward and backward. The two alternate step by step. The table shows the ratio of the medians of their
processor seconds, which exclude other work on the machine, and the seconds that each took to compile.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import transformers as t
from overhead import gpt2, gpt2_dropout, llama, resnet, step
from torch import Tensor, nn

import autopar

Made = tuple[nn.Module, dict[str, Tensor]]


class MLP(nn.Module):
    """Eight layers with a loss, called as the other models are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, target: Tensor) -> t.modeling_outputs.ImageClassifierOutput:
        for layer in self.layers:
            x = nn.functional.gelu(layer(x))
        return t.modeling_outputs.ImageClassifierOutput(loss=nn.functional.mse_loss(self.norm(x), target))


def mlp() -> Made:
    return MLP(512), {"x": torch.randn(256, 512), "target": torch.randn(256, 512)}


def bert() -> Made:
    config = t.BertConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        vocab_size=4096,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=128,
    )
    ids = torch.randint(3, 4096, (4, 128))
    return t.BertForMaskedLM(config), {"input_ids": ids, "labels": ids}


def vit() -> Made:
    config = t.ViTConfig(
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_labels=64,
        image_size=64,
        patch_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    batch = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.randint(0, 64, (8,))}
    return t.ViTForImageClassification(config), batch


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": gpt2,
    "gpt2-dropout": gpt2_dropout,
    "llama": llama,
    "bert": bert,
    "vit": vit,
    "resnet": resnet,
    "mlp": mlp,
}


def measured(made: Callable[[], Made], steps: int) -> dict[str, float]:
    torch.manual_seed(0)
    plain, batch = made()
    plain.train()
    parallel = autopar.autoparallelize(copy.deepcopy(plain), batch, mesh=(1,), backend="inductor", time_limit=20)
    ways = {"compile": torch.compile(plain), "autopar": parallel}
    first: dict[str, float] = {}
    for name, model in ways.items():
        torch.compiler.reset()
        start = time.process_time()
        step(model, batch)
        first[name] = time.process_time() - start
        step(model, batch)
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(steps):
        for name in ways if turn % 2 else reversed(ways):
            start = time.process_time()
            step(ways[name], batch)
            spent[name].append(time.process_time() - start)
    compile_s, own_s = (statistics.median(spent[name]) for name in ways)
    return {
        "compile_s": round(compile_s, 6),
        "autopar_s": round(own_s, 6),
        "ratio": round(own_s / compile_s, 3),
        "compile_first_s": round(first["compile"], 2),
        "autopar_first_s": round(first["autopar"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    t.logging.set_verbosity_error()
    torch.set_num_threads(1)
    found = {}
    print(f"{'model':13} {'compile, ms':>12} {'autopar, ms':>12} {'ratio':>6}   first step, s: compile, autopar")
    for name in arguments.models:
        found[name] = row = measured(MODELS[name], arguments.steps)
        print(
            f"{name:13} {row['compile_s'] * 1e3:12.2f} {row['autopar_s'] * 1e3:12.2f} {row['ratio']:6.3f}   "
            f"{row['compile_first_s']:.1f} {row['autopar_first_s']:.1f}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"torch": torch.__version__, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
