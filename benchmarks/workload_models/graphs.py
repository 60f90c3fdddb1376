"""Networks on one large graph, whose nodes are all trained on in every step."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GraphSAGE(nn.Module):
    """Means over neighbours (Hamilton et al. 2017), as the Open Graph Benchmark's full-batch baselines use them."""

    def __init__(self, features: int, classes: int, width: int = 256, layers: int = 3) -> None:
        super().__init__()
        sizes = [features, *[width] * (layers - 1), classes]
        self.own = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        self.neighbours = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in pairwise(sizes))

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        source, target = edges
        ones = torch.ones_like(target, dtype=x.dtype)
        degree = torch.zeros_like(x[:, 0]).index_add(0, target, ones).clamp(min=1)[:, None]
        for layer, (own, neighbours) in enumerate(zip(self.own, self.neighbours, strict=True)):
            mean = torch.zeros_like(x).index_add(0, target, x[source]) / degree
            x = own(x) + neighbours(mean)
            if layer + 1 < len(self.own):
                x = F.dropout(x.relu(), 0.5, self.training)
        return F.cross_entropy(x, labels)
