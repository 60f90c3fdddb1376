"""FLOPs by the rules against torch's own count, over forward and backward of whole models."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from autopar.strategies import flops
from autopar.tracer import ColoTracer
from tests.models import ZOO

COUNTED = {"autopar.contract", "aten.convolution", "aten.convolution_backward"}
"""What torch counts as mm, bmm and convolution. It does not count attention on CPUs, nor grouped products there."""


def counted_by_rules(name):
    model, inputs = ZOO[name].made(torch.float32)
    graph = ColoTracer().capture(model, inputs).graph
    found: Counter[str] = Counter()
    for node in graph.nodes:
        found[node.packet] += flops(node, tuple(graph.meta(v) for v in node.inputs))
    return found


FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
"""Fused where the kernel takes the call: it takes no position bias that is trained."""


def counted_by_torch(name, *, backward=True, kernels=FUSED):
    model, inputs = ZOO[name].made(torch.float32)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(kernels):
        out = model(**inputs)
        if backward:
            loss = out[0] if isinstance(out, tuple) else getattr(out, "loss", out)
            loss.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ZOO)
def test_products_and_convolutions_have_the_flops_that_torch_counts(name):
    found = counted_by_rules(name)
    assert sum(n for op, n in found.items() if op in COUNTED) == counted_by_torch(name)
    others = {op for op, n in found.items() if n and op not in COUNTED}
    assert all("attention" in op or "experts" in op for op in others)


@pytest.mark.parametrize("name", ["gpt2", "vit", "bert"])
def test_attention_has_the_flops_of_its_products_and_a_backward_two_and_a_half_times_as_many(name):
    """As single products torch counts attention on CPUs too; a causal mask leaves nothing out."""
    found = counted_by_rules(name)
    fused = counted_by_torch(name, backward=False)
    in_products = counted_by_torch(name, backward=False, kernels=[SDPBackend.MATH])
    assert found["autopar.attention"] == in_products - fused > 0
    assert found["autopar.attention_backward"] == 2.5 * found["autopar.attention"]
