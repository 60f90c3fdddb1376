"""Problems under a limit whose optimum is known, of any size: how far from it is what a search finds?

    python -m benchmarks.planted [--nodes N...] [--options N] [--hubs N] [--seeds N] [--time-limit S]

A choice is planted, and prices of the limit at each time that it fills. Costs are those of random ones less what makes
every node and every edge cheapest where the planted choice takes it, usages paid for. So the planted choice is cheapest
under the prices, and as it fills the limit wherever something is paid, no choice within the limit costs less (weak
duality): its cost is the optimum, and what is random hides it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import numpy as np

from autopar.solver import Edge, Problem, Usage, evaluate, solve

ROUNDS = 40
"""Times at which the limit is looked at, at most: each is one row of the problem."""

FILLED = 0.3
"""Share of these at which the planted choice fills the limit, and something is paid."""

NOISE = 0.1
"""Least cost of an option above that of the planted one, in multiples of what it may cost."""


def planted(nodes: int, *, options: int = 8, hubs: int = 0, seed: int = 0) -> tuple[Problem, float]:
    """A problem and its optimum.

    Args:
        hubs: nodes that a third of all others are beside; the rest are a tree with as many edges across again.
    """
    random = np.random.default_rng(seed)
    sizes = random.integers(2, options + 1, nodes)
    chosen = random.integers(0, sizes)
    times = min(ROUNDS, nodes)
    prices = np.where(random.random(times) < FILLED, random.exponential(1.0, times), 0.0)
    lives = [_life(random, node, nodes, times) for node in range(nodes)]
    amounts = [random.integers(0, 100, size).astype(float) for size in sizes]
    used = np.zeros(times)
    for (start, end), amount, option in zip(lives, amounts, chosen, strict=True):
        used[start:end] += amount[option]
    # One node more uses at each time what the planted choice leaves of the limit, where that has a price.
    limit = float(np.ceil(1.02 * used.max()))
    usages = [Usage(v, amount, *life) for v, (amount, life) in enumerate(zip(amounts, lives, strict=True))]
    usages += [Usage(nodes, np.array([limit - used[t]]), t, t + 1) for t in np.flatnonzero(prices).tolist()]
    scale = float(prices.sum()) * 10 or 10.0
    costs = []
    for amount, (start, end), option in zip(amounts, lives, chosen, strict=True):
        dearer = scale * (NOISE + random.exponential(0.3, len(amount))) * (np.arange(len(amount)) != option)
        costs.append(dearer - float(prices[start:end].sum()) * amount)
    edges = []
    for u, v in _pairs(random, nodes, hubs):
        matrix = scale * random.exponential(0.5, (sizes[u], sizes[v]))
        matrix[chosen[u], chosen[v]] = 0.0
        left, right = scale * random.normal(0.0, 0.5, sizes[u]), scale * random.normal(0.0, 0.5, sizes[v])
        costs[u] = costs[u] - left
        costs[v] = costs[v] - right
        matrix = matrix + left[:, None] + right
        costs[u] = costs[u] + float(matrix.min())
        edges.append(Edge(u, v, matrix - matrix.min()))
    costs = [cost - cost.min() for cost in costs]
    problem = Problem((*costs, np.zeros(1)), tuple(edges), tuple(usages), limit)
    return problem, evaluate(problem, [*chosen.tolist(), 0])[0]


def _life(random: np.random.Generator, node: int, nodes: int, times: int) -> tuple[int, int]:
    start = node * times // nodes
    return start, min(start + 1 + int(random.geometric(0.3)), times)


def _pairs(random: np.random.Generator, nodes: int, hubs: int) -> list[tuple[int, int]]:
    found = set()
    for v in range(1, nodes):
        found.add((max(v - int(random.geometric(0.2)), 0), v))
        if random.random() < 0.5:
            found.add((max(v - int(random.geometric(0.05)), 0), v))
    for hub in range(hubs):
        found |= {(hub, v) for v in range(hubs, nodes) if random.random() < 0.33}
    return sorted((u, v) for u, v in found if u < v)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 10_000])
    parser.add_argument("--options", type=int, default=12)
    parser.add_argument("--hubs", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--time-limit", type=float, default=30.0)
    options = parser.parse_args(arguments)
    print(f"{'nodes':>8}{'seed':>6}{'cost / optimum':>16}{'bound / optimum':>17}{'seconds':>9}")
    for nodes in options.nodes:
        for seed in range(options.seeds):
            problem, optimum = planted(nodes, options=options.options, hubs=options.hubs, seed=seed)
            began = time.process_time()
            found = solve(problem, time_limit=options.time_limit, gap=0.0)
            ratios = f"{found.objective / optimum:>16.5f}{found.lower_bound / optimum:>17.5f}"
            print(f"{nodes:>8}{seed:>6}{ratios}{time.process_time() - began:>9.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
