"""Small models whose ops run along dims that can be cut."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Function(nn.Module):
    """Multiply by a weight before ``function``, so that its backward reaches a parameter and the input."""

    def __init__(self, function: Callable[[Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1.5, 2, torch.Size(shape).numel()).sin().reshape(shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight)


class Norms(nn.Module):
    """Layer, RMS, group and instance norms of an image of ``c`` channels."""

    def __init__(self, c: int = 6, width: int = 5) -> None:
        super().__init__()
        self.group = nn.GroupNorm(2, c)
        self.all = nn.GroupNorm(1, c)
        self.instance = nn.InstanceNorm2d(c, affine=True)
        self.layer = nn.LayerNorm([4, width])
        self.rms = nn.RMSNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.instance(self.all(self.group(x).sin()).cos())
        return (self.rms(self.layer(x) + x) * x).square().sum()


class Complex(nn.Module):
    """Complex products by a linear layer, an einsum and a matmul, with a Fourier transform and conjugates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4, dtype=torch.complex128)
        self.mixed = nn.Parameter(torch.complex(torch.randn(4, 4), torch.randn(4, 4)).to(torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(torch.complex(x, x.sin()))
        spectrum = torch.fft.fft(z, dim=1)
        kept = torch.zeros_like(spectrum)
        kept[:, :3] = torch.einsum("bsi,io->bso", spectrum[:, :3], self.mixed)
        back = torch.fft.ifft(kept, dim=1) + z.conj() @ self.mixed
        return weighed(torch.view_as_real(back.conj().resolve_conj())) + weighed(back.angle()) + back.abs().sum()


def weighed(x: Tensor) -> Tensor:
    """Return a loss in which every element has another weight."""
    return (x * torch.arange(1, x.numel() + 1, dtype=x.dtype).reshape(x.shape).cos()).sum()


PLACES = torch.tensor([[5, 0, 1], [3, 3, 2], [0, 4, 5]]).unsqueeze(-1).expand(3, 3, 7)


PAIR = torch.tensor([5, 0])


def put(x: Tensor) -> Tensor:
    """Overwrite some columns and add to some elements."""
    y = x.clone()
    y[:, :, [6, 2]] = x[:, :, :2].sin()
    return y.index_put((torch.tensor([0, 2]), torch.tensor([5, 1])), x[1, :2], accumulate=True)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: weighed(x.softmax(-1)) + weighed(x.log_softmax(1)),
    "logsumexp": lambda x: weighed(x.logsumexp(-1)) + x.logsumexp((0, 1)).square().sum(),
    "variance": lambda x: weighed(x.var(-1)) + weighed(x.std((1, 2))) + x.var().log(),
    "norm": lambda x: weighed(x.norm(dim=-1)) + weighed(torch.linalg.vector_norm(x, 3, dim=1)) + x.norm(),
    "product": lambda x: weighed(x.prod(-1)) + x.cos().prod(1).sum(),
    "extrema": lambda x: weighed(x.amax(-1)) + weighed(x.max(1).values) + x.min(-1).values.sum() * x.argmax(1).sum(),
    "topk": lambda x: weighed(x.topk(2, -1).values) + weighed(x.topk(3, 1, largest=False).values),
    "cumulative": lambda x: weighed(x.cumsum(-1)) + weighed(x.cumprod(1)) + weighed(x.logcumsumexp(-1)),
    "extremum scans": lambda x: weighed(x.cummax(-1).values) + weighed(x.cummin(1).values),
    "sorted": lambda x: weighed(x.sort(-1).values) + weighed(x.sort(1, descending=True).values),
    "any": lambda x: weighed(x * (x > 1).any(-1, keepdim=True) * (x > -9).all(1, keepdim=True)),
    "reads": lambda x: (
        weighed(x[:, :, [4, 0, 4, -1]]) + weighed(x.gather(1, PLACES)) + weighed(x.take_along_dim(PLACES, 1))
    ),
    "writes": lambda x: (
        weighed(x.scatter_add(1, PLACES, x[:, :3] * 2)) + weighed(x.index_add(2, torch.tensor([1, 1, 6]), x[:, :, :3]))
    ),
    "puts": lambda x: weighed(x.index_copy(2, PAIR, x[:, :, 1:3])) + weighed(put(x)),
    "gathered": lambda x: (
        weighed(torch.fft.rfft(x, dim=-1).abs()) + weighed(torch.fft.fft2(x).real) + x.median(1).values.sum()
    ),
    "einsum": lambda x: weighed(torch.einsum("bij,bkj,ck->bic", x, x.sin(), x[:, 0, :6])),
    "glu": lambda x: weighed(functional.glu(x, 1)),
}
