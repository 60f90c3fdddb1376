"""Fits of measured times, and what one process alone can measure."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models import ComputeCosts
from autopar.errors import AutoparError
from autopar.mesh import Cluster, Mesh
from autopar.profiling import Effort, fit_line, join, profile_cluster
from autopar.profiling.group import run_under_torchrun
from autopar.profiling.kernels import KERNELS, rotation, runs, separated
from autopar.profiling.timing import Allowance, Stopwatch

SIZES = [64.0 * 4**k for k in range(11)]


@given(st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8))
def test_a_line_is_found_again(alpha, beta):
    line = fit_line(SIZES, [alpha + beta * x for x in SIZES])
    assert line.alpha_s == pytest.approx(alpha, rel=1e-6)
    assert line.beta_s_per_byte == pytest.approx(beta, rel=1e-6)
    assert line.error == pytest.approx(0, abs=1e-9)


@given(st.integers(0, len(SIZES) - 1), st.floats(1.5, 100))
def test_one_spoiled_time_does_not_move_it(at, factor):
    seconds = [1e-4 + 1e-9 * x for x in SIZES]
    seconds[at] *= factor
    line = fit_line(SIZES, seconds)
    assert line.alpha_s == pytest.approx(1e-4, rel=1e-6)
    assert line.beta_s_per_byte == pytest.approx(1e-9, rel=1e-6)


@given(st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=11))
def test_whatever_was_measured_the_line_is_positive(seconds):
    line = fit_line(SIZES[: len(seconds)], seconds)
    assert line.alpha_s > 0
    assert line.beta_s_per_byte > 0
    assert line.error >= 0


def test_the_error_is_that_of_the_line():
    x = np.array(SIZES)
    line = fit_line(SIZES, 1e-4 + 1e-9 * x * np.array([1.0, 1.2] * 5 + [1.0]))
    fitted = line.alpha_s + line.beta_s_per_byte * x
    assert 0 <= line.error <= 0.2
    assert (fitted > 0).all()


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.kind)
def test_every_kernel_runs_and_counts_its_amount(kernel):
    call, small = kernel.make(min(kernel.sizes), torch.float32, torch.device("cpu"))
    call()
    assert 0 < small < kernel.make(kernel.sizes[1], torch.float32, torch.device("cpu"))[1]


def test_a_stopwatch_calls_a_function_in_batches_and_at_least_so_often():
    calls = []
    timing = Stopwatch(torch.device("cpu"), budget_s=0.0, least=5).time(lambda: calls.append(0))
    assert 0 < timing.seconds < 1
    assert timing.spread >= 0
    assert len(calls) > 5


@pytest.fixture
def alone():
    join("gloo")
    yield
    dist.destroy_process_group()


def test_one_process_measures_its_kernels_and_keeps_the_figures_of_the_nearest_links(alone):
    told = []
    cluster = profile_cluster(
        Mesh((1,)), name="mine", effort=Effort(2**10, 2**9, 0.0), progress=lambda *step: told.append(step)
    )
    assert cluster.name == "mine"
    assert cluster.measured.collectives == ()
    assert {k.kind for k in cluster.measured.kernels} == {k.kind for k in KERNELS}
    assert cluster.intra_node == Cluster.load("cpu-2").intra_node
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert ComputeCosts(cluster).seconds(0, 1e6, "float32", "memory", "aten.gelu") > 0
    assert [done for _, done, _ in told] == list(range(1, told[-1][2] + 1))


def test_a_process_that_a_launcher_started_launches_no_others(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(AutoparError, match="cannot launch processes"):
        run_under_torchrun(2, ["profile"])


def test_a_call_among_others_is_timed_without_them():
    now, order = [0.0], []

    def others() -> None:
        now[0] += 100.0
        order.append("others")

    def function() -> None:
        now[0] += 2.0
        order.append("function")

    watch = Stopwatch(torch.device("cpu"), budget_s=0.0, least=4, clock=lambda: now[0])
    assert watch.time_among(others, function).seconds == 2.0
    assert order[-8:] == ["others", "function"] * 4


def test_operands_are_taken_in_turn_and_some_results_are_kept():
    run = next(r for r in runs(torch.device("cpu"), 2**12) if r.kernel.kind == "memory")
    call, amount = rotation(run, torch.device("cpu"))
    before = list(call.calls)
    call()
    assert amount > 0
    assert len(before) > 1
    assert list(call.calls) == [before[-1], *before[:-1]]
    assert len(call.kept) == 1


def test_fat_and_thin_shapes_are_relieved_of_each_others_part():
    cpu = torch.device("cpu")
    planned = [r for r in runs(cpu, 2**20) if r.kernel.kind.startswith("matmul") and r.dtype == torch.float32]
    arithmetic, traffic = 1e-11, 1e-10  # s/FLOP and s/B
    found = {}
    for r in planned:
        amount = r.kernel.make(r.size, r.dtype, cpu)[1]
        other = r.kernel.other_amount(r.size, 4)
        flops, nbytes = (amount, other) if r.kernel.unit == "flops" else (other, amount)
        seconds = 1e-6 + flops * arithmetic + nbytes * traffic
        found.setdefault((r.kernel.kind, "float32", r.kernel.unit), []).append((amount, seconds, 0.0))
    made = separated(found, planned)
    flops, seconds, _ = made["matmul", "float32", "flops"][-1]
    assert seconds == pytest.approx(flops * arithmetic, rel=0.05)
    nbytes, seconds, _ = made["matmul:traffic", "float32", "bytes"][-1]
    assert seconds == pytest.approx(nbytes * traffic, rel=0.25)


def test_when_the_allowance_is_spent_everything_is_timed_once():
    calls = []
    watch = Stopwatch(torch.device("cpu"), budget_s=0.0, least=50, most=50, allowance=Allowance(math.inf))
    watch.time_among(lambda: None, lambda: calls.append(0))
    assert len(calls) >= 50
    assert watch.allowance.passed_s > 0
    hurried = replace(watch, allowance=Allowance(0.0))
    hurried.time_among(lambda: None, calls.clear)
    hurried.time_among(lambda: None, lambda: calls.append(0))
    assert 1 <= len(calls) <= 3


def test_the_lowest_quantile_is_the_batch_that_nothing_disturbed():
    durations = iter([1e-3, 1e-3, 5e-3, 1e-3, 9e-3])
    now = [0.0]

    def function() -> None:
        now[0] += next(durations)

    watch = Stopwatch(torch.device("cpu"), budget_s=0.0, least=4, clock=lambda: now[0], quantile=0.0)
    assert watch.time(function).seconds == pytest.approx(1e-3)
