"""Compare the emitted program with the plain model on one process, as the ratio of medians of alternating steps.

A step is forward and backward only, in processor seconds, which exclude other work on the machine. Each call also
checks that nothing the program was captured from has changed; the share of that check is shown too.
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
import transformers
from torch import Tensor, nn

import autopar
from autopar.runtime.tables import tables

transformers.logging.set_verbosity_error()

VOCABULARY, SEQUENCE, BATCH = 8_192, 128, 4


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPT2Config(
        n_layer=4,
        n_embd=256,
        n_head=8,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        bos_token_id=0,
        eos_token_id=0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config), _tokens()


def gpt2_small() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    ids = torch.randint(config.vocab_size, (1, SEQUENCE))
    return transformers.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def gpt2_dropout() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.GPT2Config(
        n_layer=4, n_embd=256, n_head=8, vocab_size=VOCABULARY, n_positions=SEQUENCE, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config), _tokens()


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=SEQUENCE,
    )
    return transformers.LlamaForCausalLM(config), _tokens()


def resnet() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], num_labels=10, layer_type="basic"
    )
    batch = {"pixel_values": torch.randn(8, 3, 96, 96), "labels": torch.randint(0, 10, (8,))}
    return transformers.ResNetForImageClassification(config), batch


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE))
    return {"input_ids": ids, "labels": ids}


MODELS = {"gpt2": gpt2, "gpt2-small": gpt2_small, "gpt2-dropout": gpt2_dropout, "llama": llama, "resnet": resnet}


def step(model: nn.Module, batch: dict[str, Tensor]) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    model(**batch).loss.backward()


def measured(made: Callable[[], tuple[nn.Module, dict[str, Tensor]]], steps: int, backend: str) -> dict[str, float]:
    torch.manual_seed(0)
    plain, batch = made()
    plain.train()
    parallel = autopar.autoparallelize(copy.deepcopy(plain), batch, mesh=(1,), backend=backend, time_limit=20)
    reference = torch.compile(plain) if backend == "inductor" else plain
    for _ in range(3):
        step(reference, batch)
        step(parallel, batch)
    spent: dict[str, list[float]] = {"plain": [], "autopar": []}
    for turn in range(steps):
        pair = (("plain", reference), ("autopar", parallel))
        for name, model in pair if turn % 2 else reversed(pair):
            start = time.process_time()
            step(model, batch)
            spent[name].append(time.process_time() - start)
    plain_s, parallel_s = (statistics.median(spent[name]) for name in ("plain", "autopar"))
    check_s = checking_s(parallel)
    return {
        "plain_s": round(plain_s, 6),
        "autopar_s": round(parallel_s, 6),
        "ratio": round(parallel_s / plain_s, 3),
        "check_s": round(check_s, 7),
        "check_share": round(check_s / parallel_s, 6),
    }


def checking_s(model: nn.Module) -> float:
    """Return the seconds of one check that what capture read is unchanged."""
    (variant,) = model._autopar.programs
    stored, spent = tables(model), []
    for _ in range(200):
        start = time.process_time()
        assert stored.meet(variant.guards, model)
        spent.append(time.process_time() - start)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["gpt2", "llama", "resnet"], choices=sorted(MODELS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--backend", default="eager", help="inductor is compared with torch.compile of the model")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = {}
    for name in arguments.models:
        found[name] = measured(MODELS[name], arguments.steps, arguments.backend)
        plain_ms, parallel_ms = found[name]["plain_s"] * 1e3, found[name]["autopar_s"] * 1e3
        check = f"check {found[name]['check_s'] * 1e6:6.1f} us, {found[name]['check_share']:.3%}"
        print(
            f"{name:13} {plain_ms:8.2f} ms   autopar {parallel_ms:8.2f} ms   {found[name]['ratio']:.3f}   {check}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"backend": arguments.backend, "models": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
