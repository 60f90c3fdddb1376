"""The architectures of benchmarks/workloads.toml that no installed library builds, at a small size."""

from __future__ import annotations

import pytest
import torch

from benchmarks.workload_models.audio import Demucs
from benchmarks.workload_models.diffusion import DenoisingUNet, DiT
from benchmarks.workload_models.graphs import GraphSAGE
from benchmarks.workload_models.recommendation import DLRM

BATCH = 3


def steps():
    return torch.randint(0, 1000, (BATCH,))


def dit():
    latents = torch.randn(2, BATCH, 4, 8, 8)
    model = DiT(size=8, width=32, depth=2, heads=4, classes=5)
    return model, {"latents": latents[0], "noise": latents[1], "step": steps(), "label": torch.tensor([0, 5, 2])}


def unet(context_width=None):
    images = torch.randn(2, BATCH, 3, 8, 8)
    model = DenoisingUNet(8, 3, 32, (1, 2), attended=(4,), heads=2, context_width=context_width)
    return model, {"image": images[0], "noise": images[1], "step": steps()}


def conditional_unet():
    model, inputs = unet(context_width=6)
    return model, inputs | {"context": torch.randn(BATCH, 5, 6)}


def dlrm(interaction="dot", hot=()):
    model = DLRM((7, 5, 9), 4, (8, 4), (8, 1), hot, interaction)
    categories = torch.randint(0, 5, (BATCH, sum(hot) or 3))
    return model, {"dense": torch.randn(BATCH, 13), "categories": categories, "clicked": torch.tensor([0.0, 1.0, 1.0])}


def demucs():
    model = Demucs(channels=4, depth=2)
    return model, {"mix": torch.randn(BATCH, 2, 148), "separated": torch.randn(BATCH, 4, 2, 148)}


def graphsage():
    edges = torch.randint(0, 10, (2, 30))
    return GraphSAGE(6, 4, 8), {"x": torch.randn(10, 6), "edges": edges, "labels": torch.randint(0, 4, (10,))}


SMALL = {
    "dit": dit,
    "unet": unet,
    "conditional_unet": conditional_unet,
    "dlrm": dlrm,
    "dlrm_cross": lambda: dlrm("cross", (2, 1, 3)),
    "demucs": demucs,
    "graphsage": graphsage,
}


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_of_a_workload_s_model_gets_a_gradient(name):
    model, inputs = SMALL[name]()
    loss = model(**inputs)
    assert loss.ndim == 0 and loss.isfinite()
    loss.backward()
    assert not [n for n, p in model.named_parameters() if p.grad is None]


def test_products_of_pairs_are_those_of_all_distinct_features():
    model = dlrm()[0]
    features = torch.arange(12.0).view(1, 4, 3)
    products = model.interaction(features)[0, 3:]
    expected = [features[0, i] @ features[0, j] for i in range(4) for j in range(i + 1, 4)]
    assert products.tolist() == torch.stack(expected).tolist()
