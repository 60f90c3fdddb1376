"""The page of the documentation with the results of every model of the zoo."""

from __future__ import annotations

from collections.abc import Sequence

from tests.zoo.measure import LEAST, MESHES, Record, named

TOP = """# What is covered

Written by `python -m tests.zoo --page`; do not edit.

Every model below is the library's own class, unmodified, with its loss and a small configuration. autopar captures it,
plans it on {meshes}, and simulates the plan. The outputs, every gradient and every buffer are
compared with one ordinary step on one device: in float64 to {tolerance}, and to 1e-4 for mixtures of experts, whose
grouped product exists only in float32. The cluster has slow devices and fast links, so that sharding pays even for
models of this size.

- *nodes* and *ops* count the nodes of the joint forward and backward graph, and the distinct ops among them.
- *FLOPs* and *bytes* are the share of floating-point operations, and the share of bytes that ops of the forward make,
  in ops that can be sharded. At least {least:.0%} of each is required.
- *seconds* are of one processor core, for the capture, {plans} plans and {plans} simulations.
- *equal on* lists the meshes on which everything is equal.
- *sharded* is what the plan on the last of those meshes cuts: an input, how many parameters, and the largest of them.

"""

HEADER = """| model | nodes | ops | without a rule | FLOPs | bytes | seconds | equal on | sharded |
|---|---:|---:|---|---:|---:|---:|---|---|
"""


def page(records: Sequence[Record], refused: Sequence[tuple[str, str]]) -> str:
    """Return the page as Markdown. ``refused`` lists models that raise an error, with the reason."""
    meshes = [named(m) for m in MESHES]
    text = TOP.format(
        meshes=f"{', '.join(meshes[:-1])} and {meshes[-1]}",
        tolerance="1e-9",
        least=LEAST,
        plans=len(meshes),
        largest=meshes[-1],
    )
    well = sum(r.is_well for r in records)
    parts = [f"{text}{well} of {len(records)} models are equal to one device on every mesh.\n"]
    families = dict.fromkeys(r.family for r in records)
    for family in families:
        rows = "".join(_row(r) for r in records if r.family == family)
        parts.append(f"## {family[0].upper()}{family[1:]}\n\n{HEADER}{rows}")
    listed = "\n".join(f"- **{name}**: {why}" for name, why in refused)
    parts.append(
        "## Refused\n\nA captured graph cannot represent what these models do. Each gives an error that names the line."
        f"\n\n{listed}\n"
    )
    return "\n".join(parts)


def _row(r: Record) -> str:
    equal = "all" if set(map(named, MESHES)) <= set(r.equal) else ", ".join(r.equal) or "none"
    if r.coverage is None:
        return f"| {r.name} | | | | | | {r.seconds:.0f} | {equal} | |\n"
    c = r.coverage
    missing = ", ".join(f"`{op}`" for op in c.without_rule) or "none"
    shares = f"{c.flops:.1%} | {c.bytes:.1%}"
    return f"| {r.name} | {c.nodes} | {c.ops} | {missing} | {shares} | {r.seconds:.0f} | {equal} | {r.sharded} |\n"
