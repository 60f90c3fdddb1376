"""Small models like those that users train, with batches, for tests that compare ranks with one process."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import autopar

Batch = dict[str, Tensor]


def gpt2(**changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = dict(n_layer=2, n_embd=32, n_head=4, vocab_size=66, n_positions=16)
    quiet = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **quiet, **changes}))


def llama(**changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=66, max_position_embeddings=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **changes}))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=6, layer_type="basic")
    return ResNetForImageClassification(ResNetConfig(**sizes))


class Mlp(nn.Module):
    """Returns its output without a loss. Its seven columns do not divide by two or four."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(8, 13)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(13, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(torch.relu(self.up(x))))


def tokens(batch: int = 8, length: int = 8) -> Batch:
    ids = torch.randint(0, 66, (batch, length))
    return {"input_ids": ids, "labels": ids}


def images(batch: int = 8) -> Batch:
    return {"pixel_values": torch.randn(batch, 3, 16, 16), "labels": torch.randint(0, 6, (batch,))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch]]] = {
    "gpt2": (gpt2, tokens),
    "llama": (llama, tokens),
    "resnet": (resnet, images),
}

SHARDED: dict[str, dict[str, str]] = {
    "gpt2": {
        "transformer.wte.weight": "S0R",
        "*.c_attn.weight": "RS0",
        "*.c_proj.weight": "S0R",
        "*.c_fc.weight": "RS0",
    },
    "llama": {"*_proj.weight": "S0R", "model.embed_tokens.weight": "RS0"},
    "resnet": {"*.convolution.weight": "S0RRR", "input:pixel_values": "S0RRR"},
    "mlp": {"up.weight": "S0R", "up.bias": "S0", "down.weight": "RS0"},
}
"""Constraints that cut parameters over axis 0, one of thirteen rows among them."""


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make()


def pair(model: nn.Module, inputs: Any, mesh: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return a copy of ``model`` for one device, and ``model`` made parallel."""
    warnings.simplefilter("ignore")
    reference = copy.deepcopy(model)
    return reference, autopar.autoparallelize(model, inputs, mesh=mesh, **options)


def is_cut(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and not all(isinstance(p, Replicate) for p in tensor.placements)


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def distance(a: Any, b: Any) -> float:
    """Return the largest difference relative to the largest element of ``b``."""
    a, b = whole(a).detach().double(), whole(b).detach().double()
    assert a.shape == b.shape, f"{tuple(a.shape)} is not {tuple(b.shape)}"
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) if a.numel() else 0.0


def gradient_distance(model: nn.Module, reference: nn.Module) -> float:
    """Return the largest relative difference of gradients; those far below the model's largest count as zero."""
    pairs = list(zip(model.parameters(), reference.parameters(), strict=True))
    assert [p.grad is None for p, _ in pairs] == [r.grad is None for _, r in pairs]
    largest = max(float(r.grad.abs().max()) for _, r in pairs if r.grad is not None)
    return max(
        float((whole(p.grad) - r.grad).abs().max()) / max(float(r.grad.abs().max()), 1e-3 * largest)
        for p, r in pairs
        if r.grad is not None
    )


def state_distance(model: nn.Module, reference: nn.Module) -> float:
    ours, theirs = model.state_dict(), reference.state_dict()
    assert list(ours) == list(theirs)
    return max(distance(ours[k], theirs[k]) for k in theirs)
