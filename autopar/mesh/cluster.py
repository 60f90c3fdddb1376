"""The hardware that a mesh runs on: devices, nodes and links. In the TOML files every figure has a source."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, cast, get_args

from autopar.errors import MeshError
from autopar.mesh.measured import Measured, measured_lines, read_measured
from autopar.mesh.tables import Table, example, parse_toml, read_text, toml_key, toml_value

Sources = tuple[tuple[str, str], ...]
Library = Literal["nccl", "gloo"]
LIBRARIES: tuple[Library, ...] = get_args(Library)

FALLBACK_DTYPE = {
    "float8_e4m3fn": "float16",
    "float8_e5m2": "float16",
    "float16": "float32",
    "bfloat16": "float32",
    "complex32": "float16",
    "complex128": "float64",
}
"""The dtype whose peak applies if the file has none for a dtype; for all others it is float32."""


@dataclass(frozen=True)
class Device:
    """The device of one rank.

    Args:
        name: the vendor's name.
        memory_bytes: its total memory.
        memory_bytes_per_s: peak memory bandwidth.
        launch_latency_s: time of the smallest kernel.
        collective_launch_latency_s: the same for a collective, on top of its links' latencies.
        peak_flops_per_s: dense peak by dtype, sorted by dtype.
        matmul_efficiency: share of the peak that the largest contractions reach.
        matmul_ramp_s: duration of a contraction that reaches half of that share; see `cost_models.compute`.
        memory_efficiency: share of the peak memory bandwidth that the largest transfers reach.
        memory_ramp_s: duration of a transfer that reaches half of that share.
        sources: (figure, where it comes from).
    """

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    launch_latency_s: float
    collective_launch_latency_s: float
    peak_flops_per_s: tuple[tuple[str, float], ...]
    matmul_efficiency: float = 0.7
    matmul_ramp_s: float = 2e-6
    memory_efficiency: float = 0.85
    memory_ramp_s: float = 1e-6
    sources: Sources = ()

    def __post_init__(self) -> None:
        _check_positive(self, "device")
        peaks = dict(self.peak_flops_per_s)
        if "float32" not in peaks or not all(0 < peak < math.inf for peak in peaks.values()):
            raise MeshError(
                "A device needs a positive peak in FLOP/s for float32 and for every other dtype listed.",
                found=repr(peaks),
                hint=f"a valid line is: {example('peak_flops_per_s')}",
            )

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """The torch device type: "cpu", or "cuda", which torch uses for accelerators of AMD too."""
        return "cpu" if "cpu" in self.name.lower() else "cuda"

    @property
    def kernels(self) -> Literal["cpu", "cuda", "cuda without flash"]:
        """Whose kernels run: flash attention needs a GPU with units for bfloat16 (compute capability 8 or more)."""
        with_units = self.peak("bfloat16") > self.peak("float32")
        return "cpu" if self.kind == "cpu" else "cuda" if with_units else "cuda without flash"

    def peak(self, dtype: str) -> float:
        """Return the dense peak in FLOP/s for contractions of ``dtype``."""
        peaks = dict(self.peak_flops_per_s)
        while dtype not in peaks and dtype != "float32":
            dtype = FALLBACK_DTYPE.get(dtype, "float32")
        return peaks[dtype]


@dataclass(frozen=True)
class Link:
    """One kind of connection. Bandwidths are per direction.

    Args:
        kind: description for people.
        latency_s: latency of one message between neighbours.
        bandwidth_bytes_per_s: bandwidth of one device; between nodes, of one network card.
        efficiency: share of the bandwidth that large messages reach.
        peer_bandwidth_bytes_per_s: bandwidth of one pair if devices are connected pairwise, without a switch. A group
            of n then reaches n - 1 times as much, up to ``bandwidth_bytes_per_s``. None behind a switch.
        nics: network cards of a node; 0 for links inside a node.
        reduction_bytes_per_s: bytes of a tensor per second that the switch sums over the devices of a node (NVLink
            SHARP); None if it does not.
        reduction_latency_s: latency of one such sum, beyond the launch of a collective.
        sources: (figure, where it comes from).
    """

    kind: str
    latency_s: float
    bandwidth_bytes_per_s: float
    efficiency: float = 0.8
    peer_bandwidth_bytes_per_s: float | None = None
    nics: int = 0
    reduction_bytes_per_s: float | None = None
    reduction_latency_s: float | None = None
    sources: Sources = ()

    def __post_init__(self) -> None:
        _check_positive(self, self.kind)
        if (self.reduction_bytes_per_s is None) != (self.reduction_latency_s is None):
            raise MeshError(
                "A switch that reduces needs both reduction_bytes_per_s and reduction_latency_s.",
                found=f"{self.reduction_bytes_per_s} B/s and {self.reduction_latency_s} s",
                hint=f"a valid line is: {example('reduction_latency_s')}",
            )

    def copy_seconds(self, nbytes: float) -> float:
        """Return the seconds to copy ``nbytes`` in one direction."""
        return self.latency_s + nbytes / (self.bandwidth_bytes_per_s * self.efficiency)

    def group_bytes_per_s(self, n: int) -> float:
        """Return the bandwidth of each of ``n`` devices in one node when all of them exchange data with each other."""
        peer = self.peer_bandwidth_bytes_per_s
        peak = self.bandwidth_bytes_per_s if peer is None else min(self.bandwidth_bytes_per_s, peer * max(n - 1, 1))
        return peak * self.efficiency


@dataclass(frozen=True)
class Cluster:
    """Nodes of equal devices. Rank r is device r % devices_per_node of node r // devices_per_node.

    Args:
        name: built-in name, or the name in the user's file.
        devices_per_node: number of devices of a node.
        device: figures of one device.
        intra_node: the link between devices of a node.
        inter_node: the link between nodes, with the number of network cards that a node's devices share.
        host: the link between a device and host memory, for offloading.
        nodes: number of nodes.
        fixed: whether the number of devices was given; otherwise it follows the mesh.
        oversubscribe: whether the devices are processes on one machine, which can run any number of them.
        description: one line for people.
        sources: (figure, where it comes from).
        library: the library that runs collectives: "nccl" (or RCCL, which has the same algorithms) or "gloo".
        measured: times from `autopar profile`, which take precedence over the figures.
    """

    name: str
    devices_per_node: int
    device: Device
    intra_node: Link
    inter_node: Link
    host: Link
    nodes: int = 1
    fixed: bool = False
    oversubscribe: bool = False
    description: str = ""
    sources: Sources = ()
    library: Library = "nccl"
    measured: Measured = field(default_factory=Measured)

    def __post_init__(self) -> None:
        _check_positive(self, self.name, {"fixed", "oversubscribe"})
        if self.inter_node.nics < 1:
            raise MeshError(
                "inter_node.nics must be at least 1.", found=str(self.inter_node.nics), hint="a valid line is: nics = 8"
            )

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    def sized(self, world_size: int) -> Cluster:
        """Return this cluster with exactly ``world_size`` devices: whole nodes, or a part of one.

        Raises:
            MeshError: if the cluster was given another size, or a node would be only partly filled.
        """
        if world_size < 1 or (self.fixed and world_size != self.size):
            raise MeshError(
                f"The cluster {self.name} has {self.size} devices, the mesh {world_size} ranks.",
                found=f"{world_size} ranks on {self}",
                hint=f'use cluster="{self.name}:{max(world_size, 1)}", or a mesh of {self.size} ranks.',
            )
        if self.fixed:
            return self
        if self.oversubscribe:
            return self._shared_by(world_size)
        per_node = min(world_size, self.devices_per_node)
        if world_size % per_node:
            lower = world_size // per_node * per_node
            raise MeshError(
                f"{world_size} devices of {self.name} do not fill whole nodes of {per_node}.",
                found=f"{self.name}:{world_size}",
                hint=f'use "{self.name}:{lower}", "{self.name}:{lower + per_node}", or fewer than {per_node}.',
            )
        return replace(self, nodes=world_size // per_node, devices_per_node=per_node, fixed=True)

    def part(self, ranks: int, per_node: int) -> Cluster:
        """Return ``ranks`` devices of this cluster, ``per_node`` on each node, which have their share of the network
        cards."""
        cards = self.inter_node.nics * per_node / self.devices_per_node
        inter = replace(
            self.inter_node,
            nics=max(int(cards), 1),
            bandwidth_bytes_per_s=self.inter_node.bandwidth_bytes_per_s * cards / max(int(cards), 1),
        )
        return replace(self, nodes=ranks // per_node, devices_per_node=per_node, fixed=True, inter_node=inter)

    def _shared_by(self, processes: int) -> Cluster:
        share = min(1.0, self.devices_per_node / processes)
        device, intra = self.device, self.intra_node
        device = replace(
            device,
            memory_bytes=int(device.memory_bytes * share),
            memory_bytes_per_s=device.memory_bytes_per_s * share,
            peak_flops_per_s=tuple((dtype, peak * share) for dtype, peak in device.peak_flops_per_s),
        )
        intra = replace(intra, bandwidth_bytes_per_s=intra.bandwidth_bytes_per_s * share)
        measured = self.measured.slowed(1 / share)
        return replace(
            self, devices_per_node=processes, device=device, intra_node=intra, nodes=1, fixed=True, measured=measured
        )

    @classmethod
    def load(cls, name: str | Path | Cluster) -> Cluster:
        """Return the cluster with this built-in name or TOML file.

        It has ``:count`` devices, or as many as the mesh needs: ``"dgx-h100"``, ``"dgx-h100:32"`` (4 nodes),
        ``"dgx-h100:4"`` (half a node), ``"my-cluster.toml"``.

        Raises:
            MeshError: if there is no such name or file, the count fills a node only partly, or the file has an error.
        """
        if isinstance(name, Cluster):
            return name
        text = str(name)
        base, colon, count = text.rpartition(":")
        if colon and not _is_file(text):
            if not re.fullmatch(r"0*[1-9][0-9]{0,9}", count):
                raise MeshError(
                    "The number of devices after ':' must be a positive whole number.",
                    found=f"{text:.200}",
                    hint=f'write "{base[:80] or "dgx-h100"}:32".',
                )
            return replace(cls.load(base), fixed=False).sized(int(count))
        if text in builtin_clusters():
            return _load_builtin(text)
        if text.endswith(".toml") or "/" in text or _is_file(text):
            return cls.from_toml(read_text(Path(text)), text)
        raise _unknown(text)

    @classmethod
    def from_toml(cls, text: str, origin: str = "the text given") -> Cluster:
        """Read a cluster from the text of a TOML file. ``Cluster.load("dgx-h100").to_toml()`` shows the format.

        Raises:
            MeshError: if a key is wrong; names the key and a valid line for it.
        """
        top = Table(parse_toml(text, origin), "", origin)
        figures = ("devices_per_node",)
        links = ("intra_node", "inter_node", "host")
        top.only(["name", "description", "nodes", "oversubscribe", "library", "device", "measured", *figures, *links])
        return cls(
            name=top.text("name"),
            description=top.text("description", ""),
            devices_per_node=top.count("devices_per_node"),
            nodes=top.count("nodes", 1),
            fixed="nodes" in top.values,
            oversubscribe=top.flag("oversubscribe"),
            device=_read_device(top.table("device")),
            intra_node=_read_link(top.table("intra_node")),
            inter_node=_read_link(top.table("inter_node"), nics=True),
            host=_read_link(top.table("host")),
            sources=top.sources(figures),
            library=cast(Library, top.choice("library", LIBRARIES)) if "library" in top.values else "nccl",
            measured=read_measured(top.table("measured")) if "measured" in top.values else Measured(),
        )

    def to_toml(self) -> str:
        """Return this cluster as the text of a TOML file, which `load` reads back as an equal cluster."""
        top = {"name": self.name, "description": self.description, "devices_per_node": self.devices_per_node}
        lines = _entries(top, ())
        lines += [f"nodes = {self.nodes}"] if self.fixed else []
        lines += ["oversubscribe = true"] if self.oversubscribe else []
        lines += [f'library = "{self.library}"'] if self.library != "nccl" else []
        lines += _source_table("source", self.sources)
        for section in ("device", "intra_node", "inter_node", "host"):
            lines += _section(section, getattr(self, section))
        lines += measured_lines(self.measured)
        return "\n".join(lines) + "\n"

    def save(self, path: str | Path) -> None:
        """Write `to_toml` to ``path``."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    def __str__(self) -> str:
        return f"{self.name}:{self.size}" if self.fixed else self.name


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # not a possible file name
        return False


@cache
def builtin_clusters() -> tuple[str, ...]:
    """Return the sorted names of the clusters that come with autopar."""
    names = (entry.name for entry in (files("autopar.mesh") / "hardware").iterdir())
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


def cluster_of_device(device_name: str) -> Cluster | None:
    """Return the built-in cluster with the device that a driver calls ``device_name``, or None.

    ``"NVIDIA H100 80GB HBM3"`` gives ``dgx-h100``, ``"Tesla V100-SXM2-16GB"`` gives ``p3.16xlarge``. Only the model
    is compared, so cards of other form factors match too.
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    for name in builtin_clusters():
        models = re.findall(r"[a-z]+[0-9]{2,}[a-z]*", _load_builtin(name).device.name.lower())
        if models and models[0] in words:
            return _load_builtin(name)
    return None


@cache
def _load_builtin(name: str) -> Cluster:
    text = (files("autopar.mesh") / "hardware" / f"{name}.toml").read_text(encoding="utf-8")
    return Cluster.from_toml(text, f"autopar/mesh/hardware/{name}.toml")


def _unknown(name: str) -> MeshError:
    near = difflib.get_close_matches(name[:80].lower(), builtin_clusters(), n=1, cutoff=0.4)
    did_you_mean = f'did you mean "{near[0]}"? ' if near else ""
    return MeshError(
        "No cluster has this name.",
        found=f"{name:.200}",
        hint=f"{did_you_mean}Built-in clusters: {', '.join(builtin_clusters())}; or give a file of `autopar profile`.",
    )


def _check_positive(record: Any, name: str, skip: set[str] | None = None) -> None:
    """Check that no figure is zero: with a latency of zero the solver would scatter tiny collectives."""
    for figure in fields(record):
        value = getattr(record, figure.name)
        if figure.name in (skip or ()) or isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        if not 0 < value < math.inf and not (figure.name == "nics" and value == 0):
            raise MeshError(
                f"{figure.name} of {name} must be positive.",
                found=repr(value),
                hint=f"a valid line is: {example(figure.name)}",
            )


REQUIRED_FIGURES = (
    "memory_bytes_per_s",
    "launch_latency_s",
    "collective_launch_latency_s",
    "latency_s",
    "bandwidth_bytes_per_s",
)
"""Figures without a default, which every file must give."""


def _figures(table: Table, names: list[str]) -> dict[str, Any]:
    return {name: table.number(name) for name in names if name in table.values or name in REQUIRED_FIGURES}


def _read_device(table: Table) -> Device:
    known = [field.name for field in fields(Device) if field.name != "sources"]
    table.only(known)
    peaks = table.table("peak_flops_per_s")
    peaks.number("float32")
    special = {"name", "memory_bytes", "peak_flops_per_s"}
    return Device(
        name=table.text("name"),
        memory_bytes=table.count("memory_bytes"),
        peak_flops_per_s=tuple((dtype, peaks.number(dtype)) for dtype in sorted(peaks.values)),
        sources=table.sources([name for name in known if name != "name"]),
        **_figures(table, [name for name in known if name not in special]),
    )


def _read_link(table: Table, *, nics: bool = False) -> Link:
    figures = ["latency_s", "bandwidth_bytes_per_s", "efficiency", "peer_bandwidth_bytes_per_s"]
    figures += [] if nics else ["reduction_bytes_per_s", "reduction_latency_s"]
    table.only(["kind", "nics", *figures] if nics else ["kind", *figures])
    return Link(
        kind=table.text("kind"),
        nics=table.count("nics") if nics else 0,
        sources=table.sources([*figures, "nics"] if nics else figures),
        **_figures(table, figures),
    )


def _entries(values: dict[str, Any], skip: tuple[str, ...]) -> list[str]:
    given = ((key, value) for key, value in values.items() if key not in skip and value is not None)
    return [f"{toml_key(key)} = {toml_value(value)}" for key, value in given]


def _source_table(path: str, sources: Sources) -> list[str]:
    return ["", f"[{path}]", *(f"{toml_key(key)} = {toml_value(text)}" for key, text in sources)] if sources else []


def _section(path: str, record: Device | Link) -> list[str]:
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    if not values.get("nics", 1):
        del values["nics"]
    lines = ["", f"[{path}]", *_entries(values, ("sources", "peak_flops_per_s"))]
    if isinstance(record, Device):
        lines += ["", f"[{path}.peak_flops_per_s]", *_entries(dict(record.peak_flops_per_s), ())]
    return lines + _source_table(f"{path}.source", record.sources)
