"""What a plan shows: its table, differences, and its text form read back."""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import autopar
from autopar import Plan
from autopar.errors import AutoparError, PlanError
from autopar.planner.schedule.timeline import simulate_streams
from autopar.plans.layers import layers, rows
from autopar.plans.table import table


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(32, 50)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


IDS = torch.zeros(8, 16, dtype=torch.long)
CUT = {"blocks.*.up.weight": "S1R", "blocks.*.down.weight": "RS1", "head.weight": "S0R"}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return autopar.plan(Net(), IDS, mesh={"dp": 2, "tp": 2}, cluster="dgx-h100", constraints=CUT)


@pytest.fixture(scope="module")
def whole() -> Plan:
    return autopar.plan(Net(), IDS, mesh={"dp": 2, "tp": 2}, cluster="dgx-h100", search="baseline:ZeRO-3")


def test_the_table_fits_and_folds_layers(plan):
    text = str(plan)
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text
    up = next(line for line in text.splitlines() if "blocks.*.up" in line)
    assert re.search(r"blocks\.\*\.up +x 3 +S1R", up)
    assert "MFU" in text
    assert "tokens/s" in text


def test_the_table_has_colours_on_a_terminal_and_is_the_same_text(plan, monkeypatch):
    coloured = table(plan, colour=True)
    assert "\x1b[1m" in coloured
    assert re.sub(r"\x1b\[\d*m", "", coloured) == table(plan)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert str(plan) == coloured
    monkeypatch.setenv("NO_COLOR", "1")
    assert str(plan) == table(plan)


def test_layers_hold_all_seconds_bytes_and_collectives_of_the_plan(plan, whole):
    for p in (plan, whole):
        for found in (layers(p).values(), rows(p)):
            kinds = sum((layer.collectives for layer in found), start=type(next(iter(found)).collectives)())
            assert kinds.total() == len(p.collectives)
            assert sum(layer.weight_bytes for layer in found) == sum(p.parameters.values())
            seconds = sum(op.seconds for op in p.program.ops if op.kind != "input")
            assert sum(layer.seconds for layer in found) == pytest.approx(seconds)
    assert {r.count for r in rows(plan) if r.name.startswith("blocks")} == {3}


def test_facts_say_what_the_figures_came_from(plan):
    facts = plan.facts
    assert facts.tokens == 8 * 16
    assert facts.samples == 8
    matmuls = 3 * 2 * 2 * 128 * 32 * 64 + 2 * 128 * 32 * 50  # forward; the backward has twice as many
    assert facts.flops == pytest.approx(3 * matmuls, rel=0.01)
    assert plan.mfu == pytest.approx(facts.flops / (plan.step_time * 4 * facts.peak_flops_per_s))
    assert plan.throughput == pytest.approx(128 / plan.step_time)
    assert simulate_streams(plan.program, facts.overlap).seconds == pytest.approx(plan.step_time)


def test_the_history_of_memory_reaches_the_peak_and_never_more(plan, whole):
    for p in (plan, whole):
        at = sorted({i for points in p.facts.history.values() for i, _ in points})
        held = [
            sum(next((b for i, b in reversed(points) if i <= now), 0) for points in p.facts.history.values())
            for now in at
        ]
        assert max(held) == p.peak_memory


def test_a_plan_equals_itself_read_back(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.digest == plan.digest
    assert str(again) == str(plan)
    assert again.to_json() == plan.to_json()
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_a_plan_of_the_first_format_loads_and_prints(plan):
    data = json.loads(plan.to_json())
    del data["facts"]
    old = Plan.from_json(json.dumps(data | {"version": 1}))
    assert old.facts is None
    assert old.digest == plan.digest
    assert "blocks.*.up.weight" in str(old)
    assert "MFU" not in str(old)


def test_a_plan_of_a_later_format_says_why_it_does_not_load(plan):
    data = json.loads(plan.to_json()) | {"version": 99}
    with pytest.raises(PlanError, match="format version 99"):
        Plan.from_json(json.dumps(data))


def test_a_changed_program_is_found_out(plan):
    data = json.loads(plan.to_json())
    data["program"]["ops"][5]["reads"] = ["nothing"]
    with pytest.raises(PlanError, match="digest"):
        Plan.from_json(json.dumps(data))


def test_differences_are_folded(plan, whole):
    text = plan.diff(whole)
    assert "blocks.*.up.weight: S1R -> " in text
    assert "(x 3)" in text
    assert "peak memory" in text
    assert plan.diff(plan) == "The plans run the same program."


def test_explain_begins_with_the_plans_own_figures(plan):
    text = plan.explain("blocks.0.up.weight")
    head = text.split("\n\n")[0]
    assert "[64, 32] as [64, 16] on a rank" not in head  # S1R cuts dim 0
    assert "[64, 32] as [32, 32] on a rank" in head
    assert "4.00 KiB on a device" in head
    assert "blocks.0.up: " in head


def test_a_loaded_plan_says_what_it_knows(plan):
    with pytest.raises(PlanError, match=r"\[64, 32\] as \[32, 32\]"):
        Plan.from_json(plan.to_json()).explain("blocks.0.up.weight")


def test_figures(plan, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    near = replace(plan, options={**plan.options, "memory_budget_bytes": 2 * plan.peak_memory})
    memory, timeline = near.memory_figure(), plan.timeline_figure()
    assert [t.get_text() for t in memory.axes[0].get_legend().get_texts()][-1] == "budget"
    assert plan.memory_figure().axes[0].get_ylim()[1] * 2**30 < 4 * plan.peak_memory  # not a stripe below 80 GB
    assert next(t.get_text() for t in timeline.axes[0].get_yticklabels()) == "compute"
    memory.savefig(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").stat().st_size > 5000


def test_real_steps_are_compared_with_the_prediction():
    model = autopar.autoparallelize(Net(), IDS, mesh=(1,), cluster="cpu-2")
    with pytest.raises(AutoparError, match="positive integer"):
        model.compare_with_prediction(0)
    check = model.compare_with_prediction(2)
    assert "No step has run yet" in str(check)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(IDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert check.steps == 2
    found = check.measured
    assert found["step"] == pytest.approx(found["forward"] + found["backward"], rel=0.5)
    assert 0 < found["forward"] < 60
    assert check.predicted["step"] == model.plan.step_time
    assert "ratio" in str(check)
    modules = check.measured_modules
    assert {"blocks.*.up", "blocks.*.down"} <= modules.keys() <= check.predicted_modules.keys()
    for step in model._autopar.clock.steps:  # its modules' seconds are within its own
        took = sum(end - begun for begun, end in (step.forward, step.backward))
        assert 0 < sum(step.by_module().values()) <= took
    assert sum(check.predicted_modules.values()) == pytest.approx(model.plan.step_time, rel=0.05)
    assert "blocks.*.up" in str(check)
    with torch.no_grad():
        model(IDS)
    assert model._autopar.clock.total == 4  # a validation is no step


def test_the_memory_of_a_real_step_is_that_of_the_plan():
    model = autopar.autoparallelize(Net(), IDS, mesh=(1,), cluster="cpu-2")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for step in range(3):
        if step == 1:  # the state is there from the second step on
            check = model.compare_with_prediction()
        model(IDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert check.measured["peak memory"] == pytest.approx(model.plan.peak_memory, rel=0.02)
    assert "peak memory" in str(check)
    assert not model._autopar.clock.memory.is_counting


class Queue(nn.Module):
    """Compares samples with a queue that the call changes, as contrastive learning does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("queue", torch.randn(1000, 8))

    def forward(self, x):
        loss = (self.layer(x) @ self.queue.clone().t()).logsumexp(1).mean()
        with torch.no_grad():
            self.queue.mul_(0.9)
        return loss


def test_the_memory_of_a_step_has_the_copies_of_buffers_that_the_backward_reads():
    x = torch.randn(4, 8)
    model = autopar.autoparallelize(Queue(), x, mesh=(1,), cluster="cpu-2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step == 1:
            check = model.compare_with_prediction()
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert check.measured["peak memory"] == pytest.approx(model.plan.peak_memory, rel=0.02)


def test_files_that_cannot_be_written_or_read_are_named_errors(plan, tmp_path):
    for write in (plan.save, plan.report):
        with pytest.raises(PlanError, match="cannot be written"):
            write(tmp_path / "nosuch" / "file")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "list.json").write_text("[1, 2]")
    messages = {"bytes": "cannot be read", "list.json": "not an autopar plan", "nosuch": "cannot be read"}
    for name, said in messages.items():
        with pytest.raises(PlanError, match=said):
            Plan.load(tmp_path / name)


def test_what_is_no_plan_and_no_place_for_a_file_are_told(plan, tmp_path):
    with pytest.raises(PlanError, match="compared with another"):
        plan.diff("plan.json")
    with pytest.raises(PlanError, match="cannot be written"):
        plan.emit(tmp_path / "none" / "step.py")
