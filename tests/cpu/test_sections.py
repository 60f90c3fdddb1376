"""A profiler shows whose ops run, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import autopar
from autopar import spmd
from autopar.codegen.emit import _wrapped_assignment


@pytest.fixture(autouse=True)
def no_group_is_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).square().mean()


def ranges(recorded: profile) -> list[str]:
    return [e.name for e in recorded.events() if e.name in ("up", "down")]


def test_ranges_of_a_profiler_are_named_after_modules() -> None:
    model = autopar.autoparallelize(Two(), (torch.randn(4, 8),), mesh=(1,))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        loss = model(torch.randn(4, 8))
        loss.backward()
    found = ranges(recorded)
    assert found[:2] == ["up", "down"]
    assert {"up", "down"} <= set(found[2:])
    source = model.plan.source
    assert source.count('spmd.section("up")') >= 2
    assert source.count('spmd.section("")') >= 2


def test_the_last_section_ends_what_is_open_and_without_a_profiler_nothing_is() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        spmd.section("up")
        spmd.section("down")
        spmd.section("")
    assert ranges(recorded) == ["up", "down"]
    spmd.section("up")
    spmd.section("")


def test_a_long_name_alone_is_assigned_what_it_is_given() -> None:
    """In brackets and with a comma behind it, it would be unpacked."""
    name = "d_" + "encoder_layer3_intermediate_" * 4 + "weight"
    scope = {"x": 1}
    exec("def f():\n" + "\n".join(_wrapped_assignment(name, "x + " * 30 + "x")) + f"\n    return {name}", scope)
    assert scope["f"]() == 31
