"""List the plans of many cases, to compare them before and after a change that should leave plans alone.

    python benchmarks/plan_table.py --json before.json          # before the change
    python benchmarks/plan_table.py --against before.json       # after it: shows differences, and exits with 1

Each row is a plan: its digest, cost, bound, predicted step and peak, and the processor seconds that it took. Small
models are planned on several meshes within shares of the peak of their free plan, large ones on the meta device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import autopar

transformers.logging.set_verbosity_error()

SHARES = (1.0, 0.75, 0.5)
MESHES = ((4,), (2, 2))


def _tokens(vocabulary: int, batch: int, length: int, device: str = "cpu") -> dict[str, Tensor]:
    ids = torch.zeros(batch, length, dtype=torch.int64, device=device)
    return {"input_ids": ids, "labels": ids}


def mlp() -> tuple[nn.Module, Any]:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)), torch.empty(32, 64)


def gpt2(layers: int = 2) -> tuple[nn.Module, Any]:
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=64, n_head=4, vocab_size=256, n_positions=32, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), _tokens(256, 8, 32)


def llama() -> tuple[nn.Module, Any]:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
    )
    return transformers.LlamaForCausalLM(config), _tokens(256, 8, 32)


def resnet() -> tuple[nn.Module, Any]:
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10, layer_type="basic"
    )
    batch = {"pixel_values": torch.empty(8, 3, 32, 32), "labels": torch.zeros(8, dtype=torch.int64)}
    return transformers.ResNetForImageClassification(config), batch


def llama_8b() -> tuple[nn.Module, Any]:
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
    )
    return _on_meta(lambda: transformers.LlamaForCausalLM(config)), _tokens(128_256, 8, 2048, "meta")


def mixtral() -> tuple[nn.Module, Any]:
    config = transformers.MixtralConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32_000,
    )
    return _on_meta(lambda: transformers.MixtralForCausalLM(config)), _tokens(32_000, 8, 1024, "meta")


def vit_g() -> tuple[nn.Module, Any]:
    config = transformers.ViTConfig(
        hidden_size=1664, intermediate_size=8192, num_hidden_layers=12, num_attention_heads=16, num_labels=1000
    )
    model = _on_meta(lambda: transformers.ViTForImageClassification(config))
    batch = {"pixel_values": torch.empty(64, 3, 224, 224, device="meta", dtype=torch.bfloat16)}
    return model, batch | {"labels": torch.zeros(64, dtype=torch.int64, device="meta")}


def _on_meta(build: Any) -> nn.Module:
    with torch.device("meta"):
        made: nn.Module = build().to(torch.bfloat16)
    return made


SMALL = {"mlp": mlp, "gpt2": gpt2, "llama": llama, "resnet": resnet}
LARGE = {"llama-8b-16": llama_8b, "mixtral-8": mixtral, "vit-g-12": vit_g}


def rows(names: list[str], time_limit: float) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names:
        meshes, shares = (MESHES, SHARES) if name in SMALL else (((8,), (2, 4)), SHARES[:1])
        model, batch = (SMALL | LARGE)[name]()
        for mesh in meshes:
            peak = None
            for share in shares:
                budget = None if peak is None else int(share * peak)
                started = time.process_time()
                made: Any
                try:
                    made = autopar.plan(
                        model, batch, mesh=mesh, cluster="dgx-h100", memory_budget=budget, time_limit=time_limit
                    )
                except autopar.AutoparError as error:
                    yield f"{name} {mesh} {share}", {"error": type(error).__name__}
                    continue
                peak = peak or made.peak_memory
                yield (
                    f"{name} {mesh} {share}",
                    {
                        "digest": made.digest,
                        "objective": made.objective,
                        "bound": made.lower_bound,
                        "step": made.step_time,
                        "peak": made.peak_memory,
                        "seconds": round(time.process_time() - started, 2),
                    },
                )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*SMALL, *LARGE], choices=[*SMALL, *LARGE])
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="write the table here")
    parser.add_argument("--against", type=Path, help="a table that was written before")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    before = json.loads(arguments.against.read_text()) if arguments.against else {}
    found, differing = {}, 0
    for name, row in rows(arguments.only, arguments.time_limit):
        found[name] = row
        said = " ".join(f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        old = {k: v for k, v in before.get(name, row).items() if k != "seconds"}
        differs = old != {k: v for k, v in row.items() if k != "seconds"}
        differing += differs
        print(f"{name:24} {said}{'   DIFFERS from ' + str(old) if differs else ''}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    if before:
        print(f"{differing} of {len(found)} plans differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
