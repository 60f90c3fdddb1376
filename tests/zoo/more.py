"""Generative models, detection, structured losses and reinforcement learning."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import BATCH, Entry, Inputs

WIDTH, CODES, PLACES = 4, 5, 6


def perceptron(inputs: int, outputs: int, hidden: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class Flow(nn.Module):
    """A normalizing flow: affine couplings (Dinh et al. 2017) and a learned linear map with its determinant."""

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(perceptron(WIDTH // 2, WIDTH) for _ in range(3))
        self.mix = nn.Parameter(torch.eye(WIDTH) + 0.1 * torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        volume = torch.linalg.slogdet(self.mix).logabsdet
        for coupling in self.couplings:
            left, right = (x @ self.mix).chunk(2, -1)
            scale, shift = coupling(left).chunk(2, -1)
            x = torch.cat([left, right * scale.tanh().exp() + shift], -1)
            volume = volume + scale.tanh().sum(-1)
        normal = torch.distributions.Normal(torch.zeros_like(x), 1.0)
        return -(normal.log_prob(x).sum(-1) + volume).mean()


class Codebook(nn.Module):
    """Vector quantization with straight-through gradients (van den Oord et al. 2017) and code counts."""

    usage: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes = nn.Linear(WIDTH, WIDTH), nn.Embedding(CODES, WIDTH)
        self.decode = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("usage", torch.zeros(CODES))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        nearest = torch.cdist(z, self.codes.weight).argmin(-1)
        self.usage.mul_(0.9).add_(F.one_hot(nearest, CODES).to(x.dtype).sum(0), alpha=0.1)
        code = self.codes(nearest)
        loss = F.mse_loss(code, z.detach()) + F.mse_loss(z, code.detach()) / 4
        return F.mse_loss(self.decode(z + (code - z).detach()), x) + loss


class Differential(nn.Module):
    """A neural ordinary differential equation (Chen et al. 2018), solved by Runge-Kutta steps."""

    def __init__(self) -> None:
        super().__init__()
        self.field = perceptron(WIDTH + 1, WIDTH)

    def slope(self, x: Tensor, at: float) -> Tensor:
        return self.field(torch.cat([x, torch.full_like(x[:, :1], at)], -1))

    def forward(self, x: Tensor, step: float = 0.25) -> Tensor:
        for i in range(3):
            t = i * step
            a = self.slope(x, t)
            b = self.slope(x + step / 2 * a, t + step / 2)
            c = self.slope(x + step / 2 * b, t + step / 2)
            d = self.slope(x + step * c, t + step)
            x = x + step / 6 * (a + 2 * b + 2 * c + d)
        return x.square().mean()


class Diffusion(nn.Module):
    """A step of denoising diffusion (Ho et al. 2020): a U-Net with time embeddings and spatial attention."""

    kept: Tensor

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.first, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.GroupNorm(4, width)
        self.second, self.down = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.qkv, self.out = nn.Conv2d(2 * width, 6 * width, 1), nn.Conv2d(2 * width, 2 * width, 1)
        self.up, self.last = nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(2 * width, 1, 3, padding=1)
        self.register_buffer("kept", torch.linspace(0.9, 0.1, 10))

    def forward(self, image: Tensor, time: Tensor, noise: Tensor) -> Tensor:
        share = self.kept[time].view(-1, 1, 1, 1)
        skipped = self.first(share.sqrt() * image + (1 - share).sqrt() * noise)
        angle = time[:, None] * torch.exp(-torch.arange(self.norm.num_channels // 2, dtype=image.dtype))
        when = self.time(torch.cat([angle.sin(), angle.cos()], -1))
        h = self.down(self.second(F.silu(self.norm(skipped))) + when[..., None, None])
        b, c, rows, columns = h.shape
        q, k, v = self.qkv(h).view(b, 3, 4, c // 4, rows * columns).permute(1, 0, 2, 4, 3)
        h = h + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-1, -2).reshape(h.shape))
        h = self.up(F.interpolate(h, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.last(torch.cat([h, skipped], 1)), noise)


class Detector(nn.Module):
    """A detector that matches boxes to anchors and mines the hardest negatives of each image (Liu et al. 2016)."""

    anchors: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 6, 3, padding=1)
        self.boxes = nn.Conv2d(8, 8, 3, padding=1)
        self.register_buffer("anchors", torch.rand(32, 4))

    def forward(self, image: Tensor, boxes: Tensor, labels: Tensor) -> Tensor:
        h = self.body(image).relu()
        scores = self.classes(h).permute(0, 2, 3, 1).reshape(len(h), -1, 3)
        found = self.boxes(h).permute(0, 2, 3, 1).reshape(len(h), -1, 4)
        first = torch.max(self.anchors[None, :, None, :2], boxes[:, None, :, :2])
        last = torch.min(self.anchors[None, :, None, 2:] + 1, boxes[:, None, :, 2:] + 1)
        overlap, match = (last - first).clamp(min=0).prod(-1).max(2)
        positive = overlap > overlap.median(1, keepdim=True).values
        wanted = labels.gather(1, match).where(positive, 0)
        loss = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), reduction="none").view(len(h), -1)
        order = loss.masked_fill(positive, -1).argsort(1, descending=True).argsort(1)
        counted = positive | (order < 3 * positive.sum(1, keepdim=True))
        apart = F.smooth_l1_loss(found, boxes.gather(1, match[..., None].expand(-1, -1, 4)), reduction="none").sum(-1)
        return ((loss * counted).sum() + (apart * positive).sum()) / positive.sum().clamp(min=1)


class Tagger(nn.Module):
    """A conditional random field, which sums over all paths of tags by recursion (Lafferty et al. 2001)."""

    def __init__(self, tags: int = 3) -> None:
        super().__init__()
        self.emit, self.move = nn.Linear(WIDTH, tags), nn.Parameter(torch.randn(tags, tags))

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        scores = self.emit(x)
        paths = scores[:, 0]
        for t in range(1, scores.shape[1]):
            paths = torch.logsumexp(paths[:, :, None] + self.move + scores[:, t, None], 1)
        chosen = scores.gather(2, tags[..., None]).sum((1, 2)) + self.move[tags[:, :-1], tags[:, 1:]].sum(1)
        return (paths.logsumexp(1) - chosen).mean()


class Policy(nn.Module):
    """A step of proximal policy optimization (Schulman et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = perceptron(WIDTH, 3), perceptron(WIDTH, 1)

    def forward(self, seen: Tensor, action: Tensor, before: Tensor, advantage: Tensor, gain: Tensor) -> Tensor:
        chosen = torch.distributions.Categorical(logits=self.policy(seen))
        ratio = (chosen.log_prob(action) - before).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return F.huber_loss(self.value(seen).squeeze(-1), gain) / 2 - clipped - 0.01 * chosen.entropy().mean()


class Masked(nn.Module):
    """A masked autoencoder (He et al. 2022), which encodes half of the patches and replaces the rest by a token."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.token = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.decode = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        order = noise.argsort(1)
        seen = self.encode(x.gather(1, order[:, : PLACES // 2, None].expand(-1, -1, WIDTH)))
        full = torch.cat([seen, self.token.expand(len(x), PLACES - PLACES // 2, -1)], 1)
        full = full.gather(1, order.argsort(1)[..., None].expand(-1, -1, WIDTH))
        hidden = torch.ones_like(noise).scatter(1, order[:, : PLACES // 2], 0.0)
        return ((self.decode(full) - x).square().mean(-1) * hidden).sum() / hidden.sum()


def rows() -> Inputs:
    return {"x": torch.randn(BATCH, WIDTH)}


def noised() -> Inputs:
    return {
        "image": torch.randn(BATCH, 1, 8, 8),
        "time": torch.randint(0, 10, (BATCH,)),
        "noise": torch.randn(BATCH, 1, 8, 8),
    }


def boxes() -> Inputs:
    return {
        "image": torch.randn(BATCH, 3, 8, 8),
        "boxes": torch.rand(BATCH, 3, 4),
        "labels": torch.randint(1, 3, (BATCH, 3)),
    }


def tags() -> Inputs:
    return {"x": torch.randn(BATCH, PLACES, WIDTH), "tags": torch.randint(0, 3, (BATCH, PLACES))}


def steps() -> Inputs:
    return {
        "seen": torch.randn(BATCH, WIDTH),
        "action": torch.randint(0, 3, (BATCH,)),
        "before": -torch.rand(BATCH) - 1,
        "advantage": torch.randn(BATCH),
        "gain": torch.randn(BATCH),
    }


def patches() -> Inputs:
    return {"x": torch.randn(BATCH, PLACES, WIDTH), "noise": torch.rand(BATCH, PLACES)}


MORE = [
    Entry("flow", "other", Flow, rows),
    Entry("codebook", "other", Codebook, rows),
    Entry("differential", "other", Differential, rows),
    Entry("diffusion", "other", Diffusion, noised, quick=True),
    Entry("detector", "other", Detector, boxes),
    Entry("tagger", "other", Tagger, tags),
    Entry("policy", "other", Policy, steps),
    Entry("masked", "other", Masked, patches),
]
