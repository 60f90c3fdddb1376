"""Recommendation by large embedding tables (DLRM, Naumov et al. 2019), at the sizes of the Criteo click logs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def perceptron(sizes: Sequence[int], *, ends_in_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers if ends_in_relu else layers[:-1])


class PairProducts(nn.Module):
    """The products of all pairs of features, behind the dense one."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        pairs = list(combinations(range(features), 2))
        self.rows, self.columns = [i for i, _ in pairs], [j for _, j in pairs]
        self.outputs = width + len(self.rows)

    def forward(self, features: Tensor) -> Tensor:
        products = torch.bmm(features, features.transpose(1, 2))
        return torch.cat([features[:, 0], products[:, self.rows, self.columns]], 1)


class LowRankCross(nn.Module):
    """Layers that multiply the features with a product of themselves of low rank (DCN-V2, Wang et al. 2021)."""

    def __init__(self, features: int, width: int, layers: int = 3, rank: int = 512) -> None:
        super().__init__()
        self.outputs = features * width
        self.narrow = nn.ModuleList(nn.Linear(self.outputs, rank, bias=False) for _ in range(layers))
        self.widen = nn.ModuleList(nn.Linear(rank, self.outputs) for _ in range(layers))

    def forward(self, features: Tensor) -> Tensor:
        first = x = features.flatten(1)
        for narrow, widen in zip(self.narrow, self.widen, strict=True):
            x = first * widen(narrow(x)) + x
        return x


class DLRM(nn.Module):
    """Bags of categories and dense features, their interaction, and a perceptron that predicts a click.

    Args:
        rows: of each table.
        hot: categories of each feature in a sample, whose embeddings are summed; one each where it is empty.
        interaction: ``"dot"`` for products of pairs, ``"cross"`` for DCN-V2.
    """

    def __init__(
        self,
        rows: Sequence[int],
        width: int,
        bottom: Sequence[int],
        top: Sequence[int],
        hot: Sequence[int] = (),
        interaction: str = "dot",
        dense: int = 13,
    ) -> None:
        super().__init__()
        self.hot = list(hot) or [1] * len(rows)
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in rows)
        self.bottom = perceptron((dense, *bottom), ends_in_relu=True)
        self.interaction = {"dot": PairProducts, "cross": LowRankCross}[interaction](len(rows) + 1, width)
        self.top = perceptron((self.interaction.outputs, *top), ends_in_relu=False)

    def forward(self, dense: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        bags = [table(ids) for table, ids in zip(self.tables, categories.split(self.hot, 1), strict=True)]
        scores = self.top(self.interaction(torch.stack([self.bottom(dense), *bags], 1)))
        return F.binary_cross_entropy_with_logits(scores.squeeze(1), clicked)
