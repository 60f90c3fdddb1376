"""Denoising networks that return their own loss: a transformer, and a U-Net with attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

TIMESTEPS, PERIOD = 1000, 10_000.0
"""Steps of the noise schedule, and the longest period of the embedding of a step."""


def noised(clean: Tensor, noise: Tensor, step: Tensor) -> Tensor:
    """The sample after ``step`` steps of the cosine noise schedule (Nichol and Dhariwal 2021)."""
    kept = torch.cos(step.to(clean.dtype) / TIMESTEPS * (math.pi / 2))[:, None, None, None]
    return kept * clean + (1 - kept * kept).sqrt() * noise


class StepEmbedding(nn.Module):
    """Sines and cosines of the step, through two linear layers."""

    def __init__(self, frequencies: int, width: int) -> None:
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(nn.Linear(frequencies, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, step: Tensor, dtype: torch.dtype) -> Tensor:
        half = self.frequencies // 2
        rates = torch.exp(torch.arange(half, device=step.device) * (-math.log(PERIOD) / half))
        angles = step[:, None].float() * rates
        return self.mlp(torch.cat([angles.cos(), angles.sin()], -1).to(dtype))


class Attention(nn.Module):
    """Multi-head attention of tokens to themselves, or to ``context``."""

    def __init__(self, width: int, heads: int, context_width: int | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=bias)
        self.k = nn.Linear(context_width or width, width, bias=bias)
        self.v = nn.Linear(context_width or width, width, bias=bias)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (self.q(x), self.k(context), self.v(context))
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class DiTBlock(nn.Module):
    """Attention and a perceptron, both scaled, shifted and gated by the condition (adaLN-Zero)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """DiT-XL/2 (Peebles and Xie 2023) on latents of ``size`` x ``size``; it predicts the noise and its variance."""

    def __init__(
        self,
        size: int = 32,
        patch: int = 2,
        channels: int = 4,
        width: int = 1152,
        depth: int = 28,
        heads: int = 16,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.patch, self.side = patch, size // patch
        self.embed = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, self.side**2, width))
        self.step, self.label = StepEmbedding(256, width), nn.Embedding(classes + 1, width)
        self.blocks = nn.ModuleList(DiTBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 2 * width))
        self.head = nn.Linear(width, patch * patch * 2 * channels)

    def forward(self, latents: Tensor, noise: Tensor, step: Tensor, label: Tensor) -> Tensor:
        x = self.embed(noised(latents, noise, step)).flatten(2).transpose(1, 2) + self.positions
        condition = self.step(step, x.dtype) + self.label(label)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
        x = self.head(self.norm(x) * (1 + scale) + shift)
        x = x.unflatten(1, (self.side, self.side)).unflatten(-1, (self.patch, self.patch, -1))
        made = x.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        predicted, variance = made.chunk(2, 1)
        return F.mse_loss(predicted, noise) + 0.001 * variance.square().mean()


class ResidualBlock(nn.Module):
    """Two convolutions with group norms, shifted by the embedded step."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(32, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shift = nn.Linear(embedding, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.shift(F.silu(embedded))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class GatedPerceptron(nn.Module):
    """A linear layer times the GELU of another, and a projection back (GEGLU, Shazeer 2020)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.up(x).chunk(2, -1)
        return self.down(value * F.gelu(gate))


class SpatialAttention(nn.Module):
    """Attention over the places of an image; with a context also to it, and a perceptron (Rombach et al. 2022)."""

    def __init__(self, width: int, heads: int, context_width: int | None) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, width)
        self.own = Attention(width, heads, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if context_width else 1))
        self.cross = Attention(width, heads, context_width, bias=False) if context_width else None
        self.mlp = GatedPerceptron(width) if context_width else None

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        h = self.enter(self.norm(x).flatten(2).transpose(1, 2))
        h = h + self.own(self.norms[0](h))
        if self.cross is not None and self.mlp is not None:
            h = h + self.cross(self.norms[1](h), context)
            h = h + self.mlp(self.norms[2](h))
        return x + self.leave(h).transpose(1, 2).unflatten(2, x.shape[2:])


class Stage(nn.Module):
    """A residual block, and attention where ``heads`` is given."""

    def __init__(self, inputs: int, outputs: int, embedding: int, heads: int | None, context: int | None) -> None:
        super().__init__()
        self.block = ResidualBlock(inputs, outputs, embedding)
        self.attention = SpatialAttention(outputs, heads, context) if heads else None

    def forward(self, x: Tensor, embedded: Tensor, context: Tensor | None) -> Tensor:
        x = self.block(x, embedded)
        return x if self.attention is None else self.attention(x, context)


class DenoisingUNet(nn.Module):
    """The U-Net of DDPM (Ho et al. 2020), and with ``context_width`` of Stable Diffusion (Rombach et al. 2022).

    Args:
        size, channels: of the image or latent.
        width, multipliers: channels of the first level, and how many times as many each level has.
        blocks: residual blocks of a level on the way down; one more on the way up.
        attended: sides of the images that attention runs on.
        context_width: features of the tokens that condition it; None without any.
    """

    def __init__(
        self,
        size: int,
        channels: int,
        width: int,
        multipliers: tuple[int, ...],
        attended: tuple[int, ...],
        heads: int = 1,
        blocks: int = 2,
        context_width: int | None = None,
    ) -> None:
        super().__init__()
        embedding, sides = 4 * width, [size >> level for level in range(len(multipliers))]

        def stage(inputs: int, outputs: int, side: int) -> Stage:
            return Stage(inputs, outputs, embedding, heads if side in attended else None, context_width)

        self.step, self.enter = StepEmbedding(width, embedding), nn.Conv2d(channels, width, 3, padding=1)
        kept, now = [width], width
        self.down, self.shrink = nn.ModuleList(), nn.ModuleList()
        for level, (side, times) in enumerate(zip(sides, multipliers, strict=True)):
            row = nn.ModuleList()
            for _ in range(blocks):
                row.append(stage(now, times * width, side))
                now = times * width
                kept.append(now)
            self.down.append(row)
            if level + 1 < len(sides):
                self.shrink.append(nn.Conv2d(now, now, 3, 2, 1))
                kept.append(now)
        self.middle = nn.ModuleList(
            [Stage(now, now, embedding, heads, context_width), Stage(now, now, embedding, None, None)]
        )
        self.up, self.grow = nn.ModuleList(), nn.ModuleList()
        for level, (side, times) in reversed(list(enumerate(zip(sides, multipliers, strict=True)))):
            row = nn.ModuleList()
            for _ in range(blocks + 1):
                row.append(stage(now + kept.pop(), times * width, side))
                now = times * width
            self.up.append(row)
            if level:
                self.grow.append(nn.Conv2d(now, now, 3, padding=1))
        self.norm, self.leave = nn.GroupNorm(32, now), nn.Conv2d(now, channels, 3, padding=1)

    def forward(self, image: Tensor, noise: Tensor, step: Tensor, context: Tensor | None = None) -> Tensor:
        x = self.enter(noised(image, noise, step))
        embedded, kept = self.step(step, x.dtype), [x]
        for level, row in enumerate(self.down):
            for stage in row:
                x = stage(x, embedded, context)
                kept.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
                kept.append(x)
        for stage in self.middle:
            x = stage(x, embedded, context)
        for level, row in enumerate(self.up):
            for stage in row:
                x = stage(torch.cat([x, kept.pop()], 1), embedded, context)
            if level < len(self.grow):
                x = self.grow[level](F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return F.mse_loss(self.leave(F.silu(self.norm(x))), noise)
