"""Models on which recomputation rules are compared: a chain of blocks, and small transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A linear layer, its activation and a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(width, 4 * width), nn.LayerNorm(4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(nn.functional.gelu(self.up(x))))


class Chain(nn.Module):
    """Blocks one after the other, and a loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        return x.square().mean()


def mlp(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    return Chain(layers, 128), {"x": torch.randn(2048, 128)}


def gpt2(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    config = transformers.GPT2Config(
        n_layer=layers,
        n_embd=128,
        n_head=4,
        vocab_size=512,
        n_positions=128,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    ids = torch.randint(512, (8, 128))
    return model, {"input_ids": ids, "labels": ids}


def llama(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=128,
        use_cache=False,
    )
    ids = torch.randint(512, (8, 128))
    return transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


MODELS: Mapping[str, Callable[[int], tuple[nn.Module, dict[str, Tensor]]]] = {"mlp": mlp, "gpt2": gpt2, "llama": llama}
