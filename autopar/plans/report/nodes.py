"""Draw the mesh on the nodes of the cluster: which ranks share a node, and which form a group of each axis."""

from __future__ import annotations

from html import escape

from autopar.plans.record import PlanRecord
from autopar.plans.report.markup import number, tag

NODES, DEVICES = 8, 16
"""Most nodes, and most devices of a node, that are drawn; the rest is counted."""


def mesh_figure(plan: PlanRecord) -> str:
    """Draw each node as a box of its devices. A button for each axis highlights the group of rank 0 along it."""
    mesh = plan.mesh
    per_node = plan.facts.devices_per_node if plan.facts else mesh.size
    nodes = -(-mesh.size // per_node)
    boxes = [_node(plan, n, per_node) for n in range(min(nodes, NODES))]
    if nodes > NODES:
        boxes.append(tag("p", f"… and {nodes - NODES:,} more nodes", class_="more"))
    buttons = [
        tag(
            "button",
            escape(f"axis {name}: {size} ranks"),
            type="button",
            class_="axis",
            aria_pressed="false",
            data_ranks=" ".join(str(r) for r in mesh.group(0, axis) if r < NODES * per_node),
        )
        for axis, (name, size) in enumerate(zip(mesh.names, mesh.shape, strict=True))
    ]
    said = tag(
        "p", f"{mesh.size:,} devices on {nodes:,} node{'s' * (nodes > 1)}. Highlight the group of rank 0 along: "
    )
    return said + tag("div", *buttons, class_="axes") + tag("div", *boxes, class_="nodes") + _links(plan)


def _node(plan: PlanRecord, node: int, per_node: int) -> str:
    ranks = range(node * per_node, min((node + 1) * per_node, plan.mesh.size))
    devices = []
    for rank in ranks[:DEVICES]:
        place = ", ".join(f"{n}={c}" for n, c in zip(plan.mesh.names, plan.mesh.coordinate(rank), strict=True))
        devices.append(tag("span", str(rank), class_="device", data_rank=rank, title=f"rank {rank}: {place}"))
    if len(ranks) > DEVICES:
        devices.append(tag("span", f"+{len(ranks) - DEVICES}", class_="more"))
    return tag("div", tag("b", f"node {node}"), tag("div", *devices, class_="devices"), class_="node")


def _links(plan: PlanRecord) -> str:
    """List the bandwidth of a rank along each axis."""
    if plan.facts is None:
        return ""
    lines = []
    for axis in plan.facts.axes:
        inside = f"{axis.ranks_per_node} ranks per node at {axis.intra_bytes_per_s / 1e9:,.0f} GB/s"
        across = f"{axis.nodes} nodes at {axis.inter_bytes_per_s / 1e9:,.0f} GB/s per rank"
        parts = [inside] * (axis.ranks_per_node > 1) + [across] * (axis.nodes > 1)
        rates = (
            "what a rank sends in one direction while all groups of the axis communicate: link bandwidth x efficiency"
        )
        lines.append(tag("li", f"axis {escape(axis.name)}: ", number(", ".join(parts) or "one rank", rates)))
    return tag("ul", *lines)
