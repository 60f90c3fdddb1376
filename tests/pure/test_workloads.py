"""The table of published set-ups: readable, and possible on the clusters that it names. Building them needs torch."""

from __future__ import annotations

import fnmatch
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from autopar.cost_models.memory import optimizer_state_bytes
from autopar.errors import InfeasibleError, MeshError
from autopar.mesh import Cluster, builtin_clusters
from benchmarks.workload_models.setups import TABLE, read
from benchmarks.workloads import cases, described, least_budget, summary

WORKLOADS = read()
ROOT = Path(__file__).parents[2]


@pytest.fixture(params=WORKLOADS.values(), ids=WORKLOADS)
def workload(request):
    return request.param


def test_at_least_forty_set_ups_are_told_apart_by_name(tmp_path):
    assert len(WORKLOADS) >= 40
    twice = tmp_path / "twice.toml"
    twice.write_text(2 * TABLE.read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(MeshError, match="not valid TOML"):
        read(twice)


def test_a_set_up_says_where_it_was_published_and_has_one_model(workload):
    assert workload.source
    assert sum(map(bool, (workload.preset, workload.transformers, workload.model))) == 1


def test_a_mesh_fits_its_cluster(workload):
    assert workload.cluster in builtin_clusters()
    size = math.prod(workload.mesh)
    assert Cluster.load(workload.cluster).sized(size).size == size
    assert 1 <= len(workload.mesh) <= 3


def test_every_cluster_has_meshes_of_one_two_and_three_axes():
    asked = {(w.cluster, len(w.mesh)) for w in WORKLOADS.values()}
    assert asked == {(cluster, axes) for cluster in builtin_clusters() for axes in (1, 2, 3)}


def test_inputs_have_shapes_and_share_a_batch(workload):
    shapes = {name: shape for name, (_, shape) in workload.shapes.items()}
    assert shapes and all(n >= 1 for shape in shapes.values() for n in shape)
    if "edges" not in shapes:
        assert len({shape[0] for shape in shapes.values()}) == 1


def test_the_batch_is_cut_evenly_by_the_axis_that_is_within_no_node(workload):
    """Where a batch is too small for that, what is cut is the sequence."""
    shapes = workload.shapes
    batch = next(iter(shapes.values()))[1][0]
    assert "edges" in shapes or batch < workload.mesh[0] or batch % workload.mesh[0] == 0


def test_budgets_are_shares_sizes_or_words(workload):
    assert not [b for b, n in Counter(workload.budgets).items() if n > 1]
    for budget in workload.budgets:
        if isinstance(budget, str):
            assert budget in ("device", "least") or re.fullmatch(r"\d+(\.\d+)?[KMGT]i?B", budget)
        else:
            assert 0 < budget <= 1


def test_an_optimizer_is_known(workload):
    assert optimizer_state_bytes(workload.optimizer, 1, "float32") >= 0


def test_lengths_and_batches_span_what_people_train_with():
    tokens = [tuple(map(int, w.tokens.split("x"))) for w in WORKLOADS.values() if w.tokens]
    batches = [next(iter(w.shapes.values()))[1][0] for w in WORKLOADS.values()]
    assert min(length for _, length in tokens) <= 512
    assert max(length for _, length in tokens) >= 262_144
    assert min(batches) == 1
    assert max(batches) >= 4096


def test_the_table_is_read_without_torch():
    program = "import sys, benchmarks.workload_models.setups as s; s.read(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_pattern_chooses_set_ups_or_single_budgets():
    every = [case.name for case in cases(WORKLOADS, [])]
    assert len(every) == len(set(every)) == sum(len(w.budgets) for w in WORKLOADS.values())
    assert [case.name for case in cases(WORKLOADS, ["gpt2-small@0.8"])] == ["gpt2-small@0.8"]
    chosen = {case.workload.name for case in cases(WORKLOADS, ["gpt2-small", "resnet*"])}
    assert chosen == {n for n in WORKLOADS if n == "gpt2-small" or fnmatch.fnmatchcase(n, "resnet*")}


def made(trace: tuple[object, ...] = (), baseline_s: float = 2.0, *, fits: bool = True) -> SimpleNamespace:
    facts = SimpleNamespace(nodes={"x": None, "y": None}, shapes={"w": ((3, 4), "float32")})
    baseline = SimpleNamespace(name="ZeRO-3", step_time=baseline_s, peak_memory=5, fits=fits)
    return SimpleNamespace(
        facts=facts,
        parameters={"w": 48},
        timings={"capture": 0.5},
        trace=trace,
        objective=1.0,
        lower_bound=0.9,
        gap=0.1,
        step_time=1.5,
        baselines=(baseline,),
        peak_memory=7,
        budget=8,
        digest="0",
    )


def step(seconds: float, cost: float) -> SimpleNamespace:
    return SimpleNamespace(phase="joint", work=1, seconds=seconds, cost=cost, bound=0.9)


def test_seconds_to_the_first_plan_and_to_one_percent_come_from_the_trace():
    record = described(made((step(1.0, math.inf), step(2.0, 1.2), step(3.0, 1.009), step(4.0, 1.0))))
    assert (record["first_s"], record["near_s"]) == (2.0, 3.0)
    assert (described(made())["first_s"], described(made())["near_s"]) == (None, None)


def test_the_summary_tells_gaps_failures_and_plans_that_a_baseline_beats():
    beaten = {"case": "beaten"} | described(made(baseline_s=1.4))
    unbeaten = {"case": "unbeaten"} | described(made(baseline_s=1.4, fits=False))
    failed = {"case": "failed", "error": "InfeasibleError: No plan fits the memory budget."}
    assert summary([beaten, unbeaten, failed]).splitlines() == [
        "3 cases, 1 without a plan",
        "gap: median 10.00%, worst 10.00% of unbeaten",
        "1 slower than the best baseline: beaten",
        "failed: InfeasibleError: No plan fits the memory budget.",
    ]


def test_the_least_budget_is_the_one_that_the_error_names():
    def plan(budget):
        raise InfeasibleError(
            "No plan fits.", hint="the smallest budget that works so far is 1 KiB: memory_budget=1024"
        )

    assert least_budget(plan) == (1024, True)
