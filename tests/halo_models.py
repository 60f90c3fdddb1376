"""A network of windows that slide: convolutions and pooling of several strides, batch norm between them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = "RRS0R"


class Sliding(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 5, stride=2, padding=2)
        self.norm = nn.BatchNorm2d(width)
        self.body = nn.Conv2d(width, width, 3, padding=1, groups=2)
        self.head = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.norm(self.stem(x)).relu(), 3, 2, 1)
        return self.head(nn.functional.avg_pool2d(self.body(x).relu(), 2)).square().mean()


def image(rows: int = 32, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(batch, 3, rows, 12, generator=generator, dtype=torch.float64)
