"""Measured times in cluster files: what they survive, what they replace, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models import CollectiveCosts, ComputeCosts
from autopar.errors import MeshError
from autopar.mesh import Cluster, CollectiveTimes, Curve, KernelTimes, Measured, Mesh, rising

positive = st.floats(1e-9, 1e9)
measurements = st.lists(st.tuples(st.integers(1, 10**9), positive), min_size=1, max_size=8, unique_by=lambda p: p[0])
curves = measurements.map(lambda pairs: rising(*zip(*sorted(pairs), strict=True)))

ALL_REDUCE = CollectiveTimes("all_reduce", 2, 1, Curve((8.0, 8e6), (1e-4, 1e-2)), 1e-4, 1.2e-9, 0.05)
MATMUL = KernelTimes("matmul", "float32", "flops", Curve((1e6, 1e9), (1e-5, 1e-2)), 0.02)
MEMORY = KernelTimes("memory", "float32", "bytes", Curve((4e3, 4e6), (1e-6, 1e-3)), 0.02)
GELU = KernelTimes("aten.gelu", "float32", "bytes", Curve((4e3, 4e6), (1e-5, 1e-2)), 0.02)
CONVOLUTION = KernelTimes("aten.convolution", "float32", "flops", Curve((1e6, 1e9), (3e-5, 3e-2)), 0.02)
MEASURED = Measured((ALL_REDUCE,), (MATMUL, MEMORY, GELU, CONVOLUTION), call_s=2e-6, overlap=0.25)


def measured_cluster():
    return replace(Cluster.load("cpu-2"), measured=MEASURED)


@given(curves)
def test_a_curve_goes_through_its_points(curve):
    assert curve.at(np.array(curve.amounts)) == pytest.approx(np.array(curve.seconds), rel=1e-9)


@given(curves, st.floats(0, 1e12), st.floats(0, 1e12))
def test_a_curve_never_falls_and_is_positive_but_at_nothing(curve, x, y):
    low, high = sorted((x, y))
    assert curve.at(low) <= curve.at(high) * (1 + 1e-12)
    assert curve.at(high) > 0 or high == 0


def test_between_points_logarithms_are_interpolated_and_beyond_them_latency_and_bandwidth_rule():
    curve = Curve((1e2, 1e4), (1e-6, 1e-4))
    assert curve.at([1e3, 1.0, 1e5, 0.0]) == pytest.approx([1e-5, 1e-6, 1e-3, 0.0])


def test_noise_that_makes_more_work_faster_is_pooled():
    assert rising([1, 2, 3, 4], [1.0, 4.0, 1.0, 9.0]).seconds == pytest.approx((1.0, 2.0, 2.0, 9.0))


@given(measurements)
def test_pooling_keeps_what_already_rises_and_the_mean_of_logarithms(pairs):
    amounts, seconds = zip(*sorted(pairs), strict=True)
    pooled = rising(amounts, seconds).seconds
    assert sum(map(math.log, pooled)) == pytest.approx(sum(map(math.log, seconds)), abs=1e-6)
    assert rising(amounts, pooled).seconds == pytest.approx(pooled)


@pytest.mark.parametrize(
    ("amounts", "seconds"),
    [
        ((), ()),
        ((1.0,), (1.0, 2.0)),
        ((2.0, 1.0), (1.0, 2.0)),
        ((1.0, 1.0), (1.0, 2.0)),
        ((1.0, 2.0), (2.0, 1.0)),
        ((0.0, 1.0), (1.0, 2.0)),
        ((1.0,), (math.inf,)),
    ],
)
def test_points_that_are_no_curve_are_refused(amounts, seconds):
    with pytest.raises(MeshError, match="valid lines are: bytes"):
        Curve(amounts, seconds)


def test_a_cluster_with_measurements_survives_its_toml_form():
    cluster = measured_cluster()
    assert Cluster.from_toml(cluster.to_toml()) == cluster
    assert "[measured" not in Cluster.load("cpu-2").to_toml()


@pytest.mark.parametrize(
    ("right", "wrong", "key", "hint"),
    [
        ("overlap = 0.25", "overlap = -1", "measured.overlap", "overlap = 0.5"),
        ("overlap = 0.25", "overlaps = 0.25", "measured.overlaps", "overlap = 0.5"),
        ('kind = "all_reduce"', 'kind = "all_reduced"', "measured.collectives[0].kind", "kind = "),
        ("ranks_per_node = 2", "ranks_per_node = 0.5", "measured.collectives[0].ranks_per_node", "ranks_per_node = 2"),
        ("bytes = [8.0, 8000000.0]", "bytes = [8]", "measured.collectives[0].seconds", "seconds = [2e-5, 6e-5]"),
        ("bytes = [8.0, 8000000.0]", "bytes = 8", "measured.collectives[0].bytes", "bytes = [8, 65536]"),
        ("bytes = [8.0, 8000000.0]", "bytes = [80, 8]", "measured.collectives[0].bytes", "bytes = [8, 65536]"),
        ("seconds = [1e-5, 0.01]", "seconds = [1e-5, -1]", "measured.kernels[0].seconds", "seconds = [2e-5, 6e-5]"),
        ("seconds = [1e-5, 0.01]", "seconds = [1.0, 0.5]", "measured.kernels[0].seconds", "seconds = [2e-5, 6e-5]"),
        ("flops = [1000000.0, 1e9]", "", "measured.kernels[0].flops", "flops = [1e6, 1e9]"),
        ('dtype = "float32"', "dtype = 32", "measured.kernels[0].dtype", 'dtype = "float32"'),
        ("[[measured.kernels]]", "[measured.kernels]", "measured.kernels", "[[measured.kernels]]"),
    ],
)
def test_a_broken_measurement_names_the_key_and_shows_a_right_line(right, wrong, key, hint):
    text = replace(measured_cluster(), measured=replace(MEASURED, kernels=(MATMUL,))).to_toml()
    assert right in text
    with pytest.raises(MeshError) as caught:
        Cluster.from_toml(text.replace(right, wrong, 1), "my.toml")
    assert key in str(caught.value)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "wrong",
    [{"overlap": 1.5}, {"call_s": -1.0}, {"call_s": math.nan}],
)
def test_figures_made_in_code_are_checked(wrong):
    with pytest.raises(MeshError, match="overlap must lie between 0 and 1"):
        Measured(**wrong)
    with pytest.raises(MeshError, match="at least two ranks"):
        replace(ALL_REDUCE, ranks_per_node=1)
    with pytest.raises(MeshError, match="flops or bytes as unit"):
        replace(MATMUL, unit="rows")


def test_a_measured_collective_goes_before_the_formula_in_groups_like_those_measured():
    cluster = measured_cluster()
    plain, costs = (CollectiveCosts(Mesh((2,)), c) for c in (Cluster.load("cpu-2"), cluster))
    assert costs.seconds("all_reduce", 8e6, 0) == pytest.approx(1e-2)
    assert costs.lines("all_reduce", 0) == ((1e-4, 1.2e-9),)
    assert costs.algorithm("all_reduce", 8e6, 0) == "measured"
    assert costs.seconds("all_reduce", 0, 0) == pytest.approx(1e-4)
    assert costs.seconds("all_gather", 8e6, 0) == plain.seconds("all_gather", 8e6, 0)
    four, four_plain = (CollectiveCosts(Mesh((4,)), c) for c in (cluster, Cluster.load("cpu-2")))
    assert four.seconds("all_reduce", 8e6, 0) == four_plain.seconds("all_reduce", 8e6, 0)


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_more_bytes_never_take_less_where_measured(x, y):
    costs = CollectiveCosts(Mesh((2,)), measured_cluster())
    low, high = sorted((x, y))
    assert 0 < costs.seconds("all_reduce", low, 0) <= costs.seconds("all_reduce", high, 0) * (1 + 1e-12)
    assert costs.seconds_array("all_reduce", np.array([x, y]), 0).tolist() == [
        costs.seconds("all_reduce", x, 0),
        costs.seconds("all_reduce", y, 0),
    ]


def test_measured_kernels_go_before_the_roofline():
    costs = ComputeCosts(measured_cluster())
    assert costs.seconds(1e9, 0, "float32") == pytest.approx(1e-2)
    assert costs.seconds(1e6, 4e6, "float32") == pytest.approx(1e-3), "thin matrices are bound by their traffic"
    assert costs.seconds(0, 4e6, "int64", "memory") == pytest.approx(1e-3)
    assert costs.seconds(0, 4e6, "float32", "memory", "aten.gelu") == pytest.approx(1e-2)
    assert costs.seconds(1e9, 4e12, "float32", "matmul", "aten.convolution") == pytest.approx(3e-2)
    assert costs.seconds(1e9, 0, "float32", "attention") == pytest.approx(1e-2), "for want of its own curve"
    assert costs.seconds(0, 1e9, "float32", "view") == 2e-6
    formula = ComputeCosts(Cluster.load("cpu-2"))
    assert costs.seconds(1e12, 0, "float64") == formula.seconds(1e12, 0, "float64")


@given(st.floats(0, 1e13), st.floats(0, 1e12), st.floats(0, 1e12), st.sampled_from(["matmul", "memory", "attention"]))
def test_measured_kernels_are_monotone_and_take_a_launch_at_least(flops, traffic, more, kind):
    costs = ComputeCosts(measured_cluster())
    least = costs.seconds(flops, traffic, "float32", kind)
    assert costs.cluster.device.launch_latency_s <= least
    assert least <= costs.seconds(flops + more, traffic, "float32", kind) * (1 + 1e-12)
    assert least <= costs.seconds(flops, traffic + more, "float32", kind) * (1 + 1e-12)


def test_more_processes_than_devices_share_what_was_measured():
    eight = measured_cluster().sized(8)
    assert ComputeCosts(eight).seconds(1e9, 0, "float32") == pytest.approx(4e-2)
    assert eight.measured.collectives == MEASURED.collectives


FAT = KernelTimes("matmul", "float32", "flops", Curve((1e3, 1e9), (1e-5, 1e-2)), 0.0)
THIN = KernelTimes("matmul:traffic", "float32", "bytes", Curve((1e3, 1e6), (2e-5, 1e-3)), 0.0)


def of_two_parts() -> ComputeCosts:
    return ComputeCosts(replace(measured_cluster(), measured=replace(MEASURED, kernels=(FAT, THIN))))


def test_what_fat_and_thin_shapes_show_is_added_with_the_latency_once():
    costs = of_two_parts()
    assert costs.seconds(1e9, 1e6, "float32") == pytest.approx(1e-2 + 1e-3 - 2e-5)
    assert costs.seconds(1e9, 0, "float32") == pytest.approx(1e-2)
    assert costs.seconds(1e3, 1e3, "float32") == pytest.approx(1e-5)


def test_the_traffic_of_a_dtype_that_was_not_measured_is_that_of_as_many_bytes():
    costs = ComputeCosts(
        replace(measured_cluster(), measured=replace(MEASURED, kernels=(replace(FAT, dtype="bfloat16"), THIN)))
    )
    assert costs.seconds(1e9, 1e6, "bfloat16") == pytest.approx(1e-2 + 1e-3 - 2e-5)


@given(st.floats(0, 1e13), st.floats(0, 1e12), st.floats(0, 1e12))
def test_the_sum_of_two_parts_is_monotone_in_both(flops, traffic, more):
    costs = of_two_parts()
    least = costs.seconds(flops, traffic, "float32")
    assert least <= costs.seconds(flops + more, traffic, "float32") * (1 + 1e-12)
    assert least <= costs.seconds(flops, traffic + more, "float32") * (1 + 1e-12)
