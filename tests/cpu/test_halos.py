"""Dims of space that are cut: windows read rows of the neighbours, and everything equals one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import autopar
from autopar.mesh import Mesh
from autopar.sharding.halo import Slide, halo, own_rows
from tests.cpu.capture_checks import assert_grads, assert_same, captured_once, eager
from tests.halo_models import Sliding, image


def model() -> Sliding:
    torch.manual_seed(0)
    return Sliding().double()


def assert_equal(plan: autopar.Plan, x: torch.Tensor) -> None:
    made = model()
    result = autopar.simulate(made, x, plan=plan)
    output, grads, _ = eager(made, x)
    assert_same(result.outputs, output)
    assert_grads(result.grads, grads)
    assert result.peak_memory <= plan.peak_memory


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("mesh", "rows"), [((2,), 33), ((2, 2), 48)])
def test_random_plans_with_halos_equal_one_device(mesh: tuple[int, ...], rows: int, seed: int) -> None:
    x = image(rows, 2)
    plan = autopar.plan(model(), x, mesh=mesh, search=f"random:{seed}", time_limit=2)
    assert_equal(plan, x)


def test_a_large_image_is_cut_by_rows_and_its_halos_are_in_the_plan() -> None:
    with torch.device("meta"):
        wide, x = Sliding(64), torch.empty(1, 3, 2048, 2048)
    plan = autopar.plan(wide, x, mesh=(4,), cluster="dgx-h100:4", time_limit=10)
    assert str(plan.specs["body"]) == "RRS0R"
    assert any(op.halos for op in plan.program.ops if op.node.startswith("convolution"))
    sent = [c for c in plan.collectives if c.kind == "permute"]
    assert sent
    assert max(c.bytes for c in sent) < 0.01 * max(t.bytes for op in plan.program.ops for t in op.writes)
    again = autopar.Plan.from_json(plan.to_json())
    assert again.digest == plan.digest
    assert again.program == plan.program


def test_a_plan_with_halos_runs_as_planned_and_after_saving() -> None:
    x = image()
    for seed in range(20):
        plan = autopar.plan(model(), x, mesh=(4,), search=f"random:{seed}", time_limit=2)
        if any(h.before and h.after for op in plan.program.ops for h in op.halos):
            break
    else:
        pytest.fail("no random plan has halos on both sides")
    assert "spmd.shift" in plan.source
    assert_equal(autopar.Plan.from_json(plan.to_json()), x)


class Border(nn.Module):
    """Windows of which a part counts: at padding, and beyond the last row."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(functional.max_pool2d(self.stem(x), 3, 2, 1, ceil_mode=True)).relu()
        x = functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
        return functional.avg_pool2d(x, 2, 2, ceil_mode=True).square().mean()


@captured_once()
def test_windows_that_count_in_part() -> None:
    torch.manual_seed(0)
    made, x = Border().double(), image()
    for seed in range(40):
        plan = autopar.plan(made, x, mesh=(2,), search=f"random:{seed}", time_limit=2)
        if all(part in plan.source for part in ("max_pool_part(", "avg_pool_part(", "avg_pool_part_backward(")):
            break
    else:
        pytest.fail("no random plan cuts rows of all pooling")
    result = autopar.simulate(made, x, plan=plan)
    output, grads, _ = eager(made, x)
    assert_same(result.outputs, output)
    assert_grads(result.grads, grads)
    assert result.peak_memory <= plan.peak_memory


def test_windows_beyond_the_neighbours_are_no_strategy() -> None:
    slide, mesh = Slide(stride=1, padding=4, reach=8), Mesh((4,))
    needed = [slide.read_for(rows) for rows in own_rows(12, 4)]
    assert halo(0, 2, 0, 12, needed, mesh) is None
    needed = [slide.read_for(rows) for rows in own_rows(16, 4)]
    found = halo(0, 2, 0, 16, needed, mesh)
    assert found is not None
    assert (found.before, found.after, found.windows[0], found.rows) == (4, 4, (-4, 8), 12)
