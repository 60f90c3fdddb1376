"""Recurrent networks, U-Nets, GANs, graph networks, recommenders and physics-informed networks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import BATCH, SEQUENCE, VOCABULARY, Entry, Inputs, labels_of, token_ids


class Recurrent(nn.Module):
    """A language model with a recurrent layer."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layer = kind(width, width, num_layers=1, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.layer(self.embed(ids))[0])
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten())


class Cells(nn.Module):
    """The same with recurrent cells in the user's own loop."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.lstm, self.gru = nn.LSTMCell(width, width), nn.GRUCell(width, width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        h = c = g = x.new_zeros(len(x), x.shape[-1])
        seen = []
        for step in x.unbind(1):
            h, c = self.lstm(step, (h, c))
            g = self.gru(h, g)
            seen.append(g)
        return F.cross_entropy(self.head(torch.stack(seen, 1)).transpose(1, 2), labels)


class UNet(nn.Module):
    """A U-Net (Ronneberger et al. 2015) with two levels, skip connections and transposed convolutions."""

    def __init__(self, width: int = 8, classes: int = 3) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(3, width), self.block(width, 2 * width)])
        self.middle = self.block(2 * width, 4 * width)
        self.up = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.Upsample(scale_factor=2, mode="bilinear")]
        )
        self.merge = nn.ModuleList([self.block(4 * width, 2 * width), self.block(3 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def block(i: int, o: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(i, o, 3, padding=1),
            nn.GroupNorm(4, o),
            nn.SiLU(),
            nn.Conv2d(o, o, 3, padding=1),
            nn.InstanceNorm2d(o, affine=True),
            nn.SiLU(),
        )

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        x, skipped = pixel_values, []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([up(x), skipped.pop()], 1))
        return F.cross_entropy(self.head(x), labels)


class AdversarialStep(nn.Module):
    """One step of a GAN (Goodfellow et al. 2014) in one backward: each network's loss sees the other detached."""

    def __init__(self, noise: int = 6, width: int = 24) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(noise, width, 4),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1),
            nn.Tanh(),
        )
        self.discriminator = nn.Sequential(nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(width, 1, 4))

    def forward(self, real: Tensor, noise: Tensor) -> Tensor:
        made = self.generator(noise[:, :, None, None])
        frozen = {n: p.detach() for n, p in self.discriminator.named_parameters()}
        fooled = torch.func.functional_call(self.discriminator, frozen, made).flatten()
        seen, told = self.discriminator(real).flatten(), self.discriminator(made.detach()).flatten()
        one, zero = torch.ones_like(seen), torch.zeros_like(seen)
        bce = F.binary_cross_entropy_with_logits
        return bce(fooled, one) + bce(seen, one) + bce(told, zero)


class GraphNetwork(nn.Module):
    """Two graph convolutions on edge lists (Kipf and Welling 2017) and attention over neighbours."""

    def __init__(self, features: int = 12, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, width), nn.Linear(width, width)
        self.score, self.head = nn.Linear(2 * width, 1), nn.Linear(width, classes)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        source, target = edges
        degree = torch.zeros(len(x), dtype=x.dtype).index_add(0, target, torch.ones_like(target, dtype=x.dtype))
        scale = (degree.clamp(min=1)).rsqrt()
        h = self.first(x)
        h = torch.zeros_like(h).index_add(0, target, h[source] * (scale[source] * scale[target])[:, None]).relu()
        h = self.second(h)
        weight = F.leaky_relu(self.score(torch.cat([h[source], h[target]], -1))).squeeze(-1).exp()
        total = torch.zeros_like(degree).scatter_add(0, target, weight)
        summed = torch.zeros_like(h).scatter_add(0, target[:, None].expand(-1, h.shape[1]), h[source] * weight[:, None])
        return F.cross_entropy(self.head(summed / total.clamp(min=1e-6)[:, None]), labels)


class Recommender(nn.Module):
    """DLRM (Naumov et al. 2019): embedding bags from large tables, pairwise products and two MLPs."""

    def __init__(self, rows: tuple[int, ...] = (200, 96, 48), width: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, width, mode="sum") for n in rows)
        self.user = nn.Embedding(500, width)
        self.bottom = nn.Sequential(nn.Linear(13, 24), nn.ReLU(), nn.Linear(24, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(width + 10, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, dense: Tensor, user: Tensor, categories: Tensor, clicked: Tensor) -> Tensor:
        x = self.bottom(dense)
        every = [x, self.user(user), *(t(c) for t, c in zip(self.tables, categories.unbind(1), strict=True))]
        stacked = torch.stack(every, 1)
        pairs = torch.bmm(stacked, stacked.transpose(1, 2))
        i, j = torch.tril_indices(len(every), len(every), -1)
        scores = self.top(torch.cat([x, pairs[:, i, j]], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(scores, clicked)


class Physics(nn.Module):
    """A physics-informed network (Raissi et al. 2019): the residual of u'' = f has its second derivatives."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        hidden = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.net = nn.Sequential(hidden, nn.Linear(width, 1))

    def forward(self, x: Tensor, force: Tensor) -> Tensor:
        def u(at: Tensor) -> Tensor:
            return self.net(at[None]).squeeze()

        second = torch.vmap(torch.func.jacfwd(torch.func.jacfwd(u)))(x).flatten()
        return ((second - force) ** 2).mean() + (self.net(torch.zeros_like(x[:1])) ** 2).mean()


class PhysicsByGrad(Physics):
    """The same with ``torch.autograd.grad``, as most people write it."""

    def forward(self, x: Tensor, force: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = self.net(x)
        first = torch.autograd.grad(u.sum(), x, create_graph=True)[0]
        second = torch.autograd.grad(first.sum(), x, create_graph=True)[0]
        return ((second.flatten() - force) ** 2).mean() + (self.net(torch.zeros_like(x[:1])) ** 2).mean()


def sentences() -> Inputs:
    ids = token_ids()
    return {"ids": ids, "labels": labels_of(ids)}


def masks() -> Inputs:
    return {"pixel_values": torch.randn(BATCH, 3, 8, 8), "labels": torch.randint(0, 3, (BATCH, 8, 8))}


def samples() -> Inputs:
    return {"real": torch.randn(BATCH, 3, 8, 8), "noise": torch.randn(BATCH, 6)}


def graph(nodes: int = 16, edges: int = 40) -> Inputs:
    return {
        "x": torch.randn(nodes, 12),
        "edges": torch.randint(0, nodes, (2, edges)),
        "labels": torch.randint(0, 5, (nodes,)),
    }


def clicks() -> Inputs:
    return {
        "dense": torch.randn(BATCH, 13),
        "user": torch.randint(0, 500, (BATCH,)),
        "categories": torch.randint(0, 48, (BATCH, 3, SEQUENCE)),
        "clicked": torch.randint(0, 2, (BATCH,)).double(),
    }


def points() -> Inputs:
    return {"x": torch.rand(16, 1), "force": torch.randn(16)}


OTHERS = [
    Entry("lstm", "other", lambda: Recurrent(nn.LSTM), sentences),
    Entry("gru", "other", lambda: Recurrent(nn.GRU), sentences),
    Entry("cells", "other", Cells, sentences),
    Entry("unet", "other", UNet, masks, quick=True),
    Entry("gan", "other", AdversarialStep, samples),
    Entry("graph_network", "other", GraphNetwork, graph, quick=True),
    Entry("recommender", "other", Recommender, clicks, quick=True),
    Entry("physics", "other", Physics, points, quick=True),
    Entry("physics_by_grad", "other", PhysicsByGrad, points),
]
