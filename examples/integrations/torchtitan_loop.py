"""A training loop like torchtitan's in which one call replaces FSDP2's calls for every module.

torchrun --nproc-per-node 2 examples/integrations/torchtitan_loop.py

before                                          now
mesh = init_device_mesh("cuda", (dp, tp), ...)  mesh={"dp": dp, "tp": tp}
parallelize_module(model, mesh["tp"], plan)     |
for layer in model.layers:                      | model = autopar.autoparallelize(model, batch, ...)
    checkpoint_wrapper(layer)                   |
    fully_shard(layer, mesh=mesh["dp"])         |
fully_shard(model, mesh=mesh["dp"])             |
model.to_empty(device="cuda"); init_weights()   | (a model on the meta device is initialised shard by shard)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import autopar


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = self.wqkv(self.norm1(x)).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(y.transpose(1, 2).reshape(b, s, d))
        h = self.norm2(x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h))


class Transformer(nn.Module):
    def __init__(self, vocabulary: int = 64, dim: int = 32, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        logits = self.output(self.norm(h))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main(steps: int = 6, local_batch: int = 2) -> list[float]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer()
    world, rank = dist.get_world_size(), dist.get_rank()
    ids = torch.empty(local_batch, 16, dtype=torch.long)
    # with batch="local" each rank passes its own samples, as with FSDP2; the loss is the mean over all samples
    model = autopar.autoparallelize(model, (ids, ids), mesh=(world,), batch="local", mixed_precision="bf16")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 3))
    losses = []
    for step in range(steps):
        every = torch.randint(64, (world * local_batch, 17), generator=torch.Generator().manual_seed(step % 2))
        own = every[rank * local_batch : (rank + 1) * local_batch]
        loss = model(own[:, :-1], own[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if rank == 0:
            print(f"step {step}  loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    autopar.launch_from_torch()
    main()
    dist.destroy_process_group()
