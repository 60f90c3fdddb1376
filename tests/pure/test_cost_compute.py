from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models import ComputeCosts
from autopar.errors import AutoparError
from autopar.mesh import Cluster, builtin_clusters

amounts = st.floats(0, 1e18)
costs = st.sampled_from(builtin_clusters()).map(lambda name: ComputeCosts(Cluster.load(name)))
dtypes = st.sampled_from(["float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "bool"])
kernels = st.sampled_from(["matmul", "memory"])


@given(costs, amounts, amounts, dtypes, kernels)
def test_a_kernel_takes_at_least_its_launch(cost, flops, traffic, dtype, kind):
    assert cost.seconds(flops, traffic, dtype, kind) >= cost.cluster.device.launch_latency_s > 0


@given(costs, amounts, amounts, amounts, dtypes, kernels)
def test_more_work_or_traffic_never_takes_less(cost, flops, traffic, more, dtype, kind):
    least = cost.seconds(flops, traffic, dtype, kind)
    assert least <= cost.seconds(flops + more, traffic, dtype, kind)
    assert least <= cost.seconds(flops, traffic + more, dtype, kind)


@given(costs, amounts, amounts, amounts, amounts, dtypes, kernels)
def test_one_kernel_never_takes_longer_than_its_halves(cost, flops, traffic, more_flops, more_traffic, dtype, kind):
    halves = cost.seconds(flops, traffic, dtype, kind) + cost.seconds(more_flops, more_traffic, dtype, kind)
    assert cost.seconds(flops + more_flops, traffic + more_traffic, dtype, kind) <= halves * (1 + 1e-12)


@given(costs, amounts, amounts, dtypes, kernels)
def test_no_kernel_beats_the_roofline(cost, flops, traffic, dtype, kind):
    device = cost.cluster.device
    peak = device.peak(dtype if kind == "matmul" else "float32")
    assert cost.seconds(flops, traffic, dtype, kind) >= max(flops / peak, traffic / device.memory_bytes_per_s)


@given(costs, st.lists(st.tuples(amounts, amounts), max_size=6), dtypes, kernels)
def test_arrays_agree_with_single_kernels(cost, pairs, dtype, kind):
    flops, traffic = np.array(pairs).reshape(-1, 2).T
    expected = [cost.seconds(f, t, dtype, kind) for f, t in pairs]
    assert cost.seconds_array(flops, traffic, dtype, kind).tolist() == expected


def test_arrays_broadcast():
    cost = ComputeCosts(Cluster.load("dgx-h100"))
    assert cost.seconds_array(np.ones((3, 1)), np.ones(4), "float32").shape == (3, 4)
    assert cost.seconds_array(1e9, np.arange(5), "float32", "memory").shape == (5,)
    assert cost.seconds_array(np.zeros((2, 3)), 0, "float32", "view").tolist() == [[0.0] * 3] * 2


def test_large_kernels_reach_the_efficiency_of_the_device_and_small_ones_half():
    base = Cluster.load("dgx-h100")
    device = replace(base.device, launch_latency_s=1e-15)
    cost = ComputeCosts(replace(base, device=device))
    limit = device.peak("bfloat16") * device.matmul_efficiency
    assert 1e18 / cost.seconds(1e18, 0, "bfloat16") == pytest.approx(limit, rel=1e-6)
    half = limit * device.matmul_ramp_s
    assert half / cost.seconds(half, 0, "bfloat16") == pytest.approx(limit / 2, rel=1e-6)
    limit = device.memory_bytes_per_s * device.memory_efficiency
    half = limit * device.memory_ramp_s
    assert half / cost.seconds(0, half, "bfloat16", "memory") == pytest.approx(limit / 2, rel=1e-6)


def test_a_view_is_free_and_a_contraction_of_fewer_bits_is_faster():
    cost = ComputeCosts(Cluster.load("dgx-h100"))
    assert cost.seconds(1e9, 1e9, "float32", "view") == 0
    assert cost.seconds(1e13, 0, "bfloat16") < cost.seconds(1e13, 0, "tf32") < cost.seconds(1e13, 0, "float32")
    assert cost.seconds(1e13, 0, "bfloat16", "memory") == cost.seconds(1e13, 0, "float32", "memory")


def test_the_copy_line_is_the_cost_of_a_copy():
    cost = ComputeCosts(Cluster.load("mi300x"))
    alpha, beta = cost.copy_line()
    assert cost.seconds(0, 1e9, "float32", "memory") == pytest.approx(alpha + beta * 1e9)


def test_offloading_takes_the_host_link():
    cluster = Cluster.load("dgx-h100")
    assert cluster.host.copy_seconds(0) == cluster.host.latency_s
    assert cluster.host.copy_seconds(64e9) == pytest.approx(1 / cluster.host.efficiency, rel=1e-4)


def test_a_kind_that_does_not_exist_is_an_error():
    with pytest.raises(AutoparError, match="no such kind of kernel"):
        ComputeCosts(Cluster.load("cpu-2")).seconds(1, 1, "float32", "magic")
