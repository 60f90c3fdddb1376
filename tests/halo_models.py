"""Models with sliding windows: convolution, pooling and interpolation."""

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


class Resizing(nn.Module):
    """Downsample by a stride, and upsample by transposed convolutions and by each kind of interpolation."""

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(1, width)
        self.up = nn.ConvTranspose2d(width, width, 4, stride=2, padding=1)
        self.last = nn.ConvTranspose2d(width, 1, 3, stride=2, padding=1, output_padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        small = self.norm(self.down(x)).sin()
        up = self.up(small)
        up = up + nn.functional.interpolate(small, scale_factor=2, mode="bilinear", align_corners=True)
        up = up * nn.functional.interpolate(small, scale_factor=2, mode="bicubic").cos()
        up = up + nn.functional.interpolate(small, size=up.shape[-2:], mode="nearest")
        return self.last(up).square().mean()


class Volume(nn.Module):
    """Convolutions, pooling and interpolation of a volume and of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.Conv3d(3, 2, 3, padding=1)
        self.up = nn.ConvTranspose3d(2, 2, 2, stride=2)
        self.sequence = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1).expand(*x.shape, 4)
        x = nn.functional.max_pool3d(self.volume(x), 3, 2, 1)
        x = nn.functional.avg_pool3d(self.up(x), 2)
        x = nn.functional.interpolate(x, scale_factor=2, mode="trilinear")
        return nn.functional.interpolate(self.sequence(x.sum((3, 4))), scale_factor=1.5, mode="linear").square().mean()


def image(rows: int = 32, batch: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(batch, 3, rows, 12, generator=generator, dtype=torch.float64)
