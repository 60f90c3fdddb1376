"""What the figures of a plan were computed from: for tables, reports and explanations, never for running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from autopar.plans.typed import entries


class NodeFacts(NamedTuple):
    """One captured op, or an input. ``flops`` are those of the whole op on whole tensors."""

    module: str
    op: str
    flops: float


@dataclass(frozen=True)
class AxisFacts:
    """What a mesh axis communicates over: the level of its links, and what a rank reaches there in one direction."""

    name: str
    ranks_per_node: int
    nodes: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    algorithms: Mapping[str, str]


@dataclass(frozen=True)
class Facts:
    """The captured ops and the devices, as far as a reader needs them.

    Args:
        nodes: by name; a placeholder's module is the one that owns the parameter.
        names: what users call the values that have a name: parameters, buffers, inputs, outputs, and gradients.
        shapes: global shape and dtype of each parameter and buffer.
        intervals: ``(position of the op, or -1, stream, start_s, end_s)`` of the simulated step.
        history: for each kind of memory, ``(position, bytes)`` from which op of the program on how much is held.
        dtype: in which most FLOPs are done; ``peak_flops_per_s`` is a device's in it.
        overlap: share of a collective's time that computation beside it is spared.
        samples, tokens: of a step's whole batch; 0 tokens where the inputs are no sequences of them.
        device, description: of the cluster.
        memory_bytes: of one device.
    """

    nodes: Mapping[str, NodeFacts]
    names: Mapping[str, str]
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    intervals: tuple[tuple[int, str, float, float], ...]
    history: Mapping[str, tuple[tuple[int, int], ...]]
    dtype: str
    peak_flops_per_s: float
    overlap: float
    samples: int
    tokens: int
    device: str
    description: str
    memory_bytes: int
    devices_per_node: int
    axes: tuple[AxisFacts, ...]

    @property
    def flops(self) -> float:
        """Of one step on the whole batch, forward and backward, without what is recomputed."""
        return sum(n.flops for n in self.nodes.values())


def facts_to(facts: Facts) -> dict[str, Any]:
    """As JSON data: ops by module, since most names repeat."""
    data = {f: getattr(facts, f) for f in _PLAIN}
    data["axes"] = [asdict(a) | {"algorithms": dict(a.algorithms)} for a in facts.axes]
    data["names"] = dict(facts.names)
    data["nodes"] = {name: list(n) for name, n in facts.nodes.items()}
    data["shapes"] = {name: [list(shape), dtype] for name, (shape, dtype) in facts.shapes.items()}
    data["intervals"] = [list(i) for i in facts.intervals]
    data["history"] = {kind: [list(p) for p in points] for kind, points in facts.history.items()}
    return data


def facts_from(data: Mapping[str, Any]) -> Facts:
    """The facts that `facts_to` wrote."""
    return Facts(
        nodes={name: NodeFacts(*entries(n)) for name, n in data["nodes"].items()},
        names=data.get("names", {}),
        shapes={name: (tuple(entries(shape)), dtype) for name, (shape, dtype) in data["shapes"].items()},
        intervals=tuple((at, stream, start, end) for at, stream, start, end in entries(data["intervals"])),
        history={kind: tuple((at, size) for at, size in entries(points)) for kind, points in data["history"].items()},
        axes=tuple(AxisFacts(**a) for a in entries(data["axes"])),
        **{f: data[f] for f in _PLAIN},
    )


_PLAIN = (
    "dtype",
    "peak_flops_per_s",
    "overlap",
    "samples",
    "tokens",
    "device",
    "description",
    "memory_bytes",
    "devices_per_node",
)
