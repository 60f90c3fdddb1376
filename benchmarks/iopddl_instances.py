"""Generate instances of the contest's kind and size, for when the contest's largest ones are not at hand.

    python -m benchmarks.iopddl_instances --nodes 40000 --room 1.05 OUT.json.gz

An instance has ``nodes`` ops in equal layers. Each op has a backward op that reads it; chains of aliases must agree,
thousands of ops read the same constants, and unequal strategies cost a redistribution. The more a strategy shards, the
less it uses. The limit is ``room`` times what a known choice needs, so a choice exists, but is hard to find when
``room`` is near 1. One seed determines everything.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

FORBIDDEN = 10**18
ALIAS_SHARE = 0.35
"""Share of the edges that forbid all strategies that do not agree."""

HUB_EVERY = 5000
LAYER = 120
"""Nodes in a layer; the same node of every layer has the same costs."""


def generate(nodes: int, *, seed: int = 0, room: float = 1.1, most_options: int = 40) -> dict[str, Any]:
    """Return an instance in the contest's format."""
    random = np.random.default_rng(seed)
    forward = nodes // 2
    kinds = [_kind(random, most_options) for _ in range(LAYER)]
    of = [kinds[min(i, 2 * forward - 1 - i) % LAYER] if i < 2 * forward else kinds[0] for i in range(nodes)]
    edges = _edges(random, nodes, forward)
    matrices: dict[tuple[int, int, bool], list[int]] = {}
    planted = _planted(random, nodes, edges)
    costs = []
    for u, v, alias in edges:
        key = id(of[u]), id(of[v]), alias
        if key not in matrices:
            matrices[key] = _matrix(random, of[u], of[v], alias)
        costs.append(matrices[key])
    intervals = [_interval(random, i, nodes, forward) for i in range(nodes)]
    usages = [(kind["bytes"] // kind["shards"]).tolist() for kind in of]
    limit = room * _peak(intervals, [u[p] for u, p in zip(usages, planted, strict=True)])
    return {
        "problem": {
            "name": f"made up of {nodes} nodes, seed {seed}",
            "nodes": {"intervals": intervals, "costs": [kind["cost"].tolist() for kind in of], "usages": usages},
            "edges": {"nodes": [[u, v] for u, v, _ in edges], "costs": costs},
            "usage_limit": int(limit),
        }
    }


def _kind(random: np.random.Generator, most: int) -> dict[str, Any]:
    """Draw the strategies of a node: how many shards, along what (``where``), the cost, and the bytes of the whole."""
    count = int(min(most, 2 + random.geometric(0.12)))
    shards = 2 ** random.integers(0, 6, count)
    size = int(2 ** random.uniform(10, 24))
    cost = (size / 64 / shards * random.uniform(0.5, 1.5, count)).astype(np.int64)
    cost[random.random(count) < 0.02] = FORBIDDEN
    where = random.integers(0, 4, count)
    cost[:2], shards[:2], where[:2] = size // 64, (32, 4), (0, 1)
    return {"shards": shards, "where": where, "cost": cost, "bytes": size}


def _edges(random: np.random.Generator, nodes: int, forward: int) -> list[tuple[int, int, bool]]:
    """Return edges (u, v, alias): to the next op, sometimes to a later one, from each backward op to its forward op,
    and to constants that many ops read."""
    edges = []
    for v in range(1, nodes):
        edges.append((v - 1, v, bool(random.random() < ALIAS_SHARE)))
        if random.random() < 0.25:
            edges.append((max(v - 1 - int(random.geometric(0.05)), 0), v, False))
        if v >= forward and 2 * forward - 1 - v >= 0 and random.random() < 0.6:
            edges.append((2 * forward - 1 - v, v, False))
        if v % 3 == 0 and v > HUB_EVERY:
            edges.append((v // HUB_EVERY * HUB_EVERY - 1, v, False))
    return [(u, v, alias) for u, v, alias in edges if u != v]


def _planted(random: np.random.Generator, nodes: int, edges: Sequence[tuple[int, int, bool]]) -> list[int]:
    """Return a choice that nothing forbids: strategy 0 or 1, which all nodes have in common, in stretches."""
    tied = {v for u, v, alias in edges if alias}
    chosen = [0] * nodes
    for v in range(1, nodes):
        switches = v not in tied and random.random() < 0.05
        chosen[v] = 1 - chosen[v - 1] if switches else chosen[v - 1]
    return chosen


def _matrix(random: np.random.Generator, u: dict[str, Any], v: dict[str, Any], alias: bool) -> list[int]:
    agree = (u["where"][:, None] == v["where"]) & (u["shards"][:, None] == v["shards"])
    moved = u["bytes"] / 128 / np.minimum(u["shards"][:, None], v["shards"]) * random.uniform(0.8, 1.2)
    values = np.where(agree, 0, np.full(agree.shape, FORBIDDEN) if alias else moved.astype(np.int64))
    if alias:
        # A strategy that agrees with nothing keeps one partner; otherwise it would be forbidden from the start.
        values[:, 0] = np.minimum(values[:, 0], moved[:, 0].astype(np.int64) * 4)
    return [int(value) for value in values.ravel()]


def _interval(random: np.random.Generator, node: int, nodes: int, forward: int) -> list[int]:
    look = random.random()
    if look < 0.15:
        return [node, node]  # an alias of another's memory
    if look < 0.2:
        return [0, nodes]  # a parameter
    if node < forward and look < 0.5:
        return [node, 2 * forward - node]  # kept for the backward
    return [node, min(node + 1 + int(random.geometric(0.3)), nodes)]


def _peak(intervals: Sequence[Sequence[int]], amounts: Sequence[int]) -> float:
    change = np.zeros(max(end for _, end in intervals) + 1)
    for (start, end), amount in zip(intervals, amounts, strict=True):
        change[start] += amount
        change[end] -= amount
    return float(np.cumsum(change).max())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="OUT.json.gz")
    parser.add_argument("--nodes", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--room", type=float, default=1.1, help="limit, as a multiple of a known choice's peak")
    parser.add_argument("--options", type=int, default=40, help="most strategies of a node")
    options = parser.parse_args(arguments)
    instance = generate(options.nodes, seed=options.seed, room=options.room, most_options=options.options)
    text = json.dumps(instance).encode()
    options.file.write_bytes(gzip.compress(text, 1) if options.file.suffix == ".gz" else text)
    problem = instance["problem"]
    entries = sum(map(len, problem["edges"]["costs"]))
    print(f"{options.nodes:,} nodes, {len(problem['edges']['nodes']):,} edges, {entries:,} edge costs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
