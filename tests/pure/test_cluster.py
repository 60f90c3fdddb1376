from __future__ import annotations

import math
import sys
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import MeshError
from autopar.mesh import Cluster, Device, Link, builtin_clusters, cluster_of_device, tables

SECTIONS = ("device", "intra_node", "inter_node", "host")
every_cluster = pytest.mark.parametrize("name", builtin_clusters())


def test_the_built_in_clusters_are_these():
    assert builtin_clusters() == (
        "cpu-2",
        "dgx-a100",
        "dgx-b200",
        "dgx-h100",
        "dgx-h200",
        "gb200-nvl72",
        "l40s-pcie",
        "mi300x",
        "p3.16xlarge",
    )


@every_cluster
def test_every_figure_of_a_built_in_cluster_names_its_source(name):
    cluster = Cluster.load(name)
    assert dict(cluster.sources)["devices_per_node"]
    for section in SECTIONS:
        record = getattr(cluster, section)
        sources = dict(record.sources)
        for field in fields(record):
            value = getattr(record, field.name)
            is_figure = (isinstance(value, (int, float)) and value) or field.name == "peak_flops_per_s"
            assert not is_figure or len(sources[field.name]) > 5, f"{name}: {section}.{field.name}"


@every_cluster
def test_a_cluster_survives_its_toml_form(name, tmp_path):
    for cluster in (Cluster.load(name), Cluster.load(name).sized(2), Cluster.load(f"{name}:144")):
        cluster.save(tmp_path / "cluster.toml")
        assert Cluster.load(tmp_path / "cluster.toml") == cluster
        assert Cluster.load(str(tmp_path / "cluster.toml")) == cluster


@every_cluster
def test_figures_are_of_the_order_that_hardware_has(name):
    cluster = Cluster.load(name)
    device = cluster.device
    assert 1e9 < device.memory_bytes_per_s < 1e13
    assert device.peak("bfloat16") >= device.peak("float32") or name == "cpu-2"
    for link in (cluster.intra_node, cluster.inter_node, cluster.host):
        assert 1e-7 < link.latency_s < 1e-4
        assert 1e9 <= link.bandwidth_bytes_per_s < 1e12
        assert 0.5 <= link.efficiency <= 1
    assert cluster.intra_node.bandwidth_bytes_per_s < device.memory_bytes_per_s


def test_vendor_units_are_decimal_dense_and_of_one_direction():
    h100 = Cluster.load("dgx-h100")
    assert h100.device.memory_bytes == 80 * 10**9
    assert h100.device.memory_bytes_per_s == 3.35e12
    assert h100.device.peak("bfloat16") == 989.4e12
    assert h100.intra_node.bandwidth_bytes_per_s == 450e9
    assert (h100.inter_node.nics, h100.inter_node.bandwidth_bytes_per_s) == (8, 50e9)


def test_a_dtype_without_a_peak_takes_that_of_the_type_that_computes_it():
    a100, v100 = Cluster.load("dgx-a100").device, Cluster.load("p3.16xlarge").device
    assert a100.peak("float8_e4m3fn") == a100.peak("float16") == 312e12
    assert a100.peak("int64") == a100.peak("bool") == a100.peak("complex64") == a100.peak("float32") == 19.5e12
    assert a100.peak("complex128") == a100.peak("float64")
    assert v100.peak("bfloat16") == v100.peak("float32")


@pytest.mark.parametrize(
    ("name", "nodes", "per_node"),
    [("dgx-h100:32", 4, 8), ("dgx-h100:8", 1, 8), ("dgx-h100:4", 1, 4), ("dgx-h100:1", 1, 1), ("mi300x:72", 9, 8)],
)
def test_a_count_after_the_name_gives_nodes(name, nodes, per_node):
    cluster = Cluster.load(name)
    assert (cluster.nodes, cluster.devices_per_node, cluster.size) == (nodes, per_node, nodes * per_node)
    assert cluster.fixed
    assert str(cluster) == name
    assert Cluster.load(cluster) is cluster


def test_without_a_count_a_cluster_is_as_large_as_needed():
    cluster = Cluster.load("dgx-h100")
    assert not cluster.fixed
    assert str(cluster) == "dgx-h100"
    assert cluster.sized(4096) == Cluster.load("dgx-h100:4096")
    assert cluster.sized(16).sized(16) == cluster.sized(16)


@given(st.integers(1, 7) | st.integers(1, 40).map(lambda nodes: 8 * nodes))
def test_a_cluster_takes_a_part_of_a_node_or_whole_nodes(world_size):
    assert Cluster.load("dgx-h100").sized(world_size).size == world_size


@given(st.integers(9, 300).filter(lambda world_size: world_size % 8))
def test_nodes_filled_in_part_are_an_error_that_says_which_counts_would_do(world_size):
    lower = world_size // 8 * 8
    with pytest.raises(MeshError, match="do not fill whole nodes of 8") as caught:
        Cluster.load("dgx-h100").sized(world_size)
    assert f'"dgx-h100:{lower}", "dgx-h100:{lower + 8}"' in caught.value.hint


@given(st.integers(1, 64))
def test_processes_on_one_machine_share_it(processes):
    two, many = Cluster.load("cpu-2"), Cluster.load("cpu-2").sized(processes)
    assert (many.nodes, many.size) == (1, processes)
    total = many.device.memory_bytes_per_s * processes
    assert math.isclose(total, two.device.memory_bytes_per_s * min(processes, 2))
    assert many.device.peak("float32") <= two.device.peak("float32")


def test_a_count_that_differs_from_the_mesh_is_an_error():
    with pytest.raises(MeshError, match="has 32 devices, the mesh 8 ranks") as caught:
        Cluster.load("dgx-h100:32").sized(8)
    assert caught.value.hint == 'use cluster="dgx-h100:8", or a mesh of 32 ranks.'


def test_an_unknown_name_shows_the_nearest_and_all():
    with pytest.raises(MeshError) as caught:
        Cluster.load("dgx-h1000")
    assert 'did you mean "dgx-h100"?' in caught.value.hint
    assert all(name in caught.value.hint for name in builtin_clusters())
    with pytest.raises(MeshError, match="No cluster has this name") as caught:
        Cluster.load("DGX-H100")
    assert 'did you mean "dgx-h100"?' in caught.value.hint
    with pytest.raises(MeshError) as caught:
        Cluster.load("a toaster")
    assert "did you mean" not in caught.value.hint


@pytest.mark.parametrize("name", ["dgx-h100:", "dgx-h100:x", "dgx-h100:0", "dgx-h100:-8", "dgx-h100:1.5"])
def test_a_count_that_is_none_is_an_error(name):
    with pytest.raises(MeshError, match="positive whole number"):
        Cluster.load(name)


def test_a_file_that_is_missing_is_an_error(tmp_path):
    with pytest.raises(MeshError, match="cannot be read"):
        Cluster.load(str(tmp_path / "no.toml"))
    with pytest.raises(MeshError, match="cannot be read"):
        Cluster.load(tmp_path)


@pytest.mark.parametrize(
    ("wrong", "right", "key", "hint"),
    [
        ("memory_bytes = -1", "memory_bytes = 80e9", "device.memory_bytes", "memory_bytes = 80e9"),
        ('latency_s = "fast"', "latency_s = 1.9e-6", "intra_node.latency_s", "latency_s = 2e-6"),
        ("latency_s = 0", "latency_s = 1.9e-6", "intra_node.latency_s", "latency_s = 2e-6"),
        ("bandwidth_bytes_per_s = inf", "bandwidth_bytes_per_s = 450e9", "intra_node.bandwidth", "= 450e9"),
        ("", "bandwidth_bytes_per_s = 50e9", "inter_node.bandwidth_bytes_per_s", "bandwidth_bytes_per_s = 450e9"),
        ("nics = 7.5", "nics = 8", "inter_node.nics", "nics = 8"),
        ("devices_per_node = true", "devices_per_node = 8", "devices_per_node", "devices_per_node = 8"),
        ("memory_byte = 80e9", "memory_bytes = 80e9", "device.memory_byte", "memory_bytes = 80e9"),
        ("launch_s = 1e-6", "launch_latency_s = 4e-6", "device.launch_s", "launch_latency_s = 2e-6"),
        ("zzz = 1", "nics = 8", "inter_node.zzz", "the keys here are kind, nics"),
        ("", "float32 = 66.9e12", "device.peak_flops_per_s.float32", "float32 = 67e12"),
        ("bfloat16 = 0", "bfloat16 = 989.4e12", "device.peak_flops_per_s.bfloat16", "bfloat16 = 67e12"),
        ("[guest]", "[host]", "guest", "host"),
        ('name = ""', 'name = "dgx-h100"', "name", 'name = "my-cluster"'),
        ("nodes = 0\n[source]", "[source]", "nodes", "nodes = 4"),
        ("oversubscribe = 1\n[source]", "[source]", "oversubscribe", "oversubscribe = false"),
        ("host = 3\n[source]", "[source]", "host", "[host]"),
        ("[intra_node.source]\nnics = 'x'\n", "[intra_node.source]\n", "intra_node.source.nics", "keys here"),
    ],
)
def test_a_broken_file_names_the_key_and_shows_a_right_line(wrong, right, key, hint):
    text = Cluster.load("dgx-h100").to_toml()
    assert right in text
    if key in {"guest", "host"}:
        text = text[: text.index("[host]")] + "[host]\n"
    if wrong.startswith("host"):
        text = text.replace("[host]\n", "")
    with pytest.raises(MeshError) as caught:
        Cluster.from_toml(text.replace(right, wrong, 1), "my.toml")
    message = str(caught.value)
    assert key in message
    assert hint in caught.value.hint
    assert "my.toml" in message


def test_text_that_is_no_toml_is_an_error():
    with pytest.raises(MeshError, match="not valid TOML"):
        Cluster.from_toml("devices_per_node 8")


def test_one_source_may_cover_a_table():
    text = """
        name = "lab"
        devices_per_node = 2
        nodes = 3
        source = "counted"
        [device]
        name = "X"
        memory_bytes = 16e9
        memory_bytes_per_s = 1e12
        launch_latency_s = 5e-6
        collective_launch_latency_s = 9e-6
        peak_flops_per_s = { float32 = 10e12 }
        source = "autopar profile"
        [intra_node]
        kind = "PCIe"
        latency_s = 5e-6
        bandwidth_bytes_per_s = 20e9
        [inter_node]
        kind = "Ethernet"
        latency_s = 5e-5
        bandwidth_bytes_per_s = 1e9
        nics = 1
        [host]
        kind = "PCIe"
        latency_s = 1e-5
        bandwidth_bytes_per_s = 20e9
    """
    cluster = Cluster.from_toml(text)
    assert (cluster.size, cluster.fixed) == (6, True)
    assert set(dict(cluster.device.sources).values()) == {"autopar profile"}
    assert dict(cluster.sources) == {"devices_per_node": "counted"}
    assert cluster.intra_node.sources == ()
    assert Cluster.from_toml(cluster.to_toml()) == cluster


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
def test_figures_made_in_code_are_checked_too(value):
    h100 = Cluster.load("dgx-h100")
    with pytest.raises(MeshError, match="latency_s of NVLink 4 through NVSwitch must be positive"):
        replace(h100.intra_node, latency_s=value)
    with pytest.raises(MeshError, match="memory_bytes_per_s"):
        replace(h100.device, memory_bytes_per_s=value)
    with pytest.raises(MeshError, match="nics"):
        replace(h100, inter_node=h100.intra_node)


def test_a_device_needs_a_float32_peak():
    with pytest.raises(MeshError, match="float32"):
        Device("X", 1, 1.0, 1.0, 1.0, peak_flops_per_s=(("bfloat16", 1.0),))


def test_pairwise_links_give_small_groups_less():
    link = Link("pairs", 1e-6, 448e9, efficiency=1.0, peer_bandwidth_bytes_per_s=64e9)
    assert [link.group_bytes_per_s(n) for n in (2, 4, 8, 16)] == [64e9, 192e9, 448e9, 448e9]
    switch = Link("switch", 1e-6, 448e9, efficiency=0.5)
    assert {switch.group_bytes_per_s(n) for n in (1, 2, 8)} == {224e9}


@pytest.mark.parametrize(
    ("device", "cluster"),
    [
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA H100 80GB HBM3", "dgx-h100"),
        ("NVIDIA H200", "dgx-h200"),
        ("NVIDIA B200", "dgx-b200"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L40S", "l40s-pcie"),
        ("Tesla V100-SXM2-16GB", "p3.16xlarge"),
    ],
)
def test_a_device_is_found_by_the_name_that_its_driver_gives(device, cluster):
    assert cluster_of_device(device) == Cluster.load(cluster)


@pytest.mark.parametrize("device", ["NVIDIA GeForce RTX 4090", "NVIDIA L40", "cpu", ""])
def test_a_device_that_no_file_describes_is_not_found(device):
    assert cluster_of_device(device) is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there tomli is what every other test uses")
def test_python_3_10_reads_files_with_tomli(monkeypatch):
    import tomllib

    fake = SimpleNamespace(loads=lambda _: {"via": "tomli"}, TOMLDecodeError=OSError)
    monkeypatch.setattr(tables, "sys", SimpleNamespace(version_info=(3, 10)))
    monkeypatch.setitem(sys.modules, "tomli", fake)
    assert tables.parse_toml("", "x") == {"via": "tomli"}
    monkeypatch.setattr(tables, "sys", sys)
    assert tables.parse_toml("via = 'tomllib'", "x") == tomllib.loads("via = 'tomllib'")
