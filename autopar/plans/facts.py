"""The data behind a plan's figures, for tables, reports and explanations. Running the plan does not need it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from autopar.plans.typed import entries


class NodeFacts(NamedTuple):
    """One captured op or input. ``flops`` counts the whole op on global tensors."""

    module: str
    op: str
    flops: float


@dataclass(frozen=True)
class AxisFacts:
    """The links of a mesh axis. Bandwidths are those of one rank in one direction."""

    name: str
    ranks_per_node: int
    nodes: int
    intra_bytes_per_s: float
    inter_bytes_per_s: float
    algorithms: Mapping[str, str]


@dataclass(frozen=True)
class Facts:
    """The captured ops and the devices, as far as tables and reports need them.

    Args:
        nodes: facts by node name; the module of a placeholder is the one that owns the parameter.
        names: user-visible names of parameters, buffers, inputs, outputs and gradients.
        shapes: global shape and dtype of each parameter and buffer.
        intervals: ``(position of the op, or -1, stream, start_s, end_s)`` of the simulated step.
        history: for each kind of memory, ``(position, bytes)``: from this op of the program on, so many bytes are held.
        dtype: the dtype of most FLOPs; ``peak_flops_per_s`` is a device's peak in it.
        overlap: share of a collective's time that concurrent computation hides, from 0 to 1.
        samples, tokens: of the global batch of a step; 0 tokens if the inputs are not token sequences.
        hidden_flops: the FLOPs of ``flops`` that causal masks hide.
        device, description: of the cluster.
        memory_bytes: memory of one device.
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
    hidden_flops: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of one step on the global batch, forward and backward, without recomputation.

        By convention, those that causal masks hide count too.
        """
        return sum(n.flops for n in self.nodes.values())

    @property
    def needed_flops(self) -> float:
        """``flops`` without those that causal masks hide."""
        return self.flops - self.hidden_flops


def facts_to(facts: Facts) -> dict[str, Any]:
    """Return the facts as JSON data."""
    data = {f: getattr(facts, f) for f in _PLAIN}
    data["hidden_flops"] = facts.hidden_flops
    data["axes"] = [asdict(a) | {"algorithms": dict(a.algorithms)} for a in facts.axes]
    data["names"] = dict(facts.names)
    data["nodes"] = {name: list(n) for name, n in facts.nodes.items()}
    data["shapes"] = {name: [list(shape), dtype] for name, (shape, dtype) in facts.shapes.items()}
    data["intervals"] = [list(i) for i in facts.intervals]
    data["history"] = {kind: [list(p) for p in points] for kind, points in facts.history.items()}
    return data


def facts_from(data: Mapping[str, Any]) -> Facts:
    """Read the facts that `facts_to` wrote."""
    return Facts(
        nodes={name: NodeFacts(*entries(n)) for name, n in data["nodes"].items()},
        names=data.get("names", {}),
        shapes={name: (tuple(entries(shape)), dtype) for name, (shape, dtype) in data["shapes"].items()},
        intervals=tuple((at, stream, start, end) for at, stream, start, end in entries(data["intervals"])),
        history={kind: tuple((at, size) for at, size in entries(points)) for kind, points in data["history"].items()},
        axes=tuple(AxisFacts(**a) for a in entries(data["axes"])),
        hidden_flops=data.get("hidden_flops", 0.0),
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
