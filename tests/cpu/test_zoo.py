"""Every architecture of the zoo is captured, planned, and equal to one device; those that cannot be say why."""

from __future__ import annotations

from collections import Counter

import pytest

from autopar.errors import CaptureError
from autopar.tracer import ColoTracer
from tests.cpu.bad_input_checks import refused
from tests.zoo import ZOO
from tests.zoo.measure import LEAST, captured, check, coverage, measure
from tests.zoo.refused import REFUSED

QUICK = [n for n, e in ZOO.items() if e.quick]


@pytest.mark.parametrize("name", QUICK)
def test_a_sample_of_the_zoo_equals_one_device(name) -> None:
    of = captured(ZOO[name])
    found = coverage(of.capture.graph)
    assert not found.without_rule
    assert min(found.flops, found.bytes) >= LEAST
    check(ZOO[name], of, (2, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ZOO)
def test_a_model_equals_one_device_on_every_mesh_and_can_be_sharded(name) -> None:
    record = measure(ZOO[name])
    assert not record.failures
    assert record.is_well, record.coverage


@pytest.mark.parametrize("case", REFUSED, ids=[r.name for r in REFUSED])
def test_what_cannot_be_captured_says_why(case) -> None:
    model, inputs = case.entry.made()
    with refused(CaptureError, *case.words):
        ColoTracer().capture(model, inputs)


def test_the_zoo_is_as_large_as_it_says() -> None:
    families = Counter(e.family.split(",")[0] for e in ZOO.values())
    kinds = Counter(e.family for e in ZOO.values())
    assert sum(families[f] for f in ("text", "vision", "audio", "multimodal")) >= 35
    assert families["timm"] >= 20
    assert {"text, decoder", "text, encoder", "text, encoder and decoder", "text, experts", "text, state space"} <= set(
        kinds
    )
    assert {"timm, convolutional", "timm, transformer", "timm, mixed"} <= set(kinds)
    assert {"lstm", "gru", "unet", "gan", "graph_network", "recommender", "physics"} <= set(ZOO)
