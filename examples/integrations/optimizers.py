"""Optimizers of torch.optim on parallel parameters, fused ones too, and one that keeps its state in 8 bits.

torchrun --nproc-per-node 2 examples/integrations/optimizers.py
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torchrun_script import batch, build_model

import autopar

optim = torch.optim


class Adam8bit(optim.Optimizer):
    """Adam on each rank's shard, with both moments as 8-bit integers and one scale per block of 256.

    Libraries with kernels for this, such as bitsandbytes, can step on the local shard in the same way.
    """

    BLOCK = 256

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p, group):
        local, grad = (t.to_local() if isinstance(t, DTensor) else t for t in (p, p.grad))
        state = self.state[p]
        if not state:
            state.update(step=0, m=self.pack(torch.zeros_like(local)), v=self.pack(torch.zeros_like(local)))
        state["step"] += 1
        b1, b2 = group["betas"]
        m = self.unpack(state["m"], local).lerp_(grad, 1 - b1)
        v = self.unpack(state["v"], local).square_().lerp_(grad.square(), 1 - b2)
        state["m"], state["v"] = self.pack(m), self.pack(v.sqrt())  # the square root needs fewer bits
        scale = group["lr"] / (1 - b1 ** state["step"])
        local.sub_(scale * m / ((v / (1 - b2 ** state["step"])).sqrt() + group["eps"]))

    def pack(self, t):
        flat = nn.functional.pad(t.reshape(-1), (0, -t.numel() % self.BLOCK)).reshape(-1, self.BLOCK)
        scale = flat.abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        return (flat / scale).round().to(torch.int8), scale

    def unpack(self, packed, like):
        values, scale = packed
        return (values * scale).reshape(-1)[: like.numel()].reshape(like.shape)


OPTIMIZERS = {
    "sgd": functools.partial(optim.SGD, lr=0.1, momentum=0.9),
    "adam": functools.partial(optim.Adam, lr=1e-2),
    "adamw, fused": functools.partial(optim.AdamW, lr=1e-2, fused=True),
    "adamw, foreach": functools.partial(optim.AdamW, lr=1e-2, foreach=True),
    "adagrad": functools.partial(optim.Adagrad, lr=1e-1),
    "rmsprop": functools.partial(optim.RMSprop, lr=1e-3),
    "nadam": functools.partial(optim.NAdam, lr=1e-2),
    "radam": functools.partial(optim.RAdam, lr=1e-2),
    "adam, 8 bits": functools.partial(Adam8bit, lr=1e-2),
}


def train(make, model: nn.Module, steps: int) -> list[float]:
    optimizer = make(model.parameters())
    losses = []
    for step in range(steps):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def main(steps: int = 6) -> dict[str, tuple[list[float], list[float]]]:
    """Return the losses of the parallel and the plain model for each optimizer."""
    found = {}
    torch.manual_seed(0)
    start = build_model().state_dict()
    cut = {"0.weight": "S0R", "0.bias": "S0", "3.weight": "RS0"}  # otherwise the plan replicates so small a model
    model = autopar.autoparallelize(build_model(), torch.empty(64, 32), mesh=(dist.get_world_size(),), constraints=cut)
    for name, make in OPTIMIZERS.items():
        model.load_state_dict(start)  # a parallel model loads whole tensors
        plain = build_model()
        plain.load_state_dict(start)
        found[name] = train(make, model, steps), train(make, plain, steps)
        if dist.get_rank() == 0:
            print(f"{name:<15} last loss {found[name][0][-1]:.5f}, on one device {found[name][1][-1]:.5f}")
    return found


if __name__ == "__main__":
    autopar.launch_from_torch()
    main()
    dist.destroy_process_group()
