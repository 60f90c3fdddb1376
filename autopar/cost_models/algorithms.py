r"""The algorithms of collectives, each as a line: alpha seconds plus beta seconds per byte.

A message of S bytes takes a + S / b (Hockney, 1994). Below, a group has n = k m ranks, k on each of m nodes; a and b
are latency and bandwidth inside a node, A and B between nodes. b and B are those of one rank in one direction, so the
ranks of a node together reach k B.

    ring                all-gather, reduce-scatter   (n - m) a + (m - 1) A  +  S (n - 1) / n / min(b, k B)
                        all-reduce                   twice that: a reduce-scatter and an all-gather
    tree                all-reduce, m > 1            2 ((k - 1) a + ceil(log2 m) A)
                                                         + S max(2 (k - 1) / (k b), min(2, m - 1) / (k B)) / 0.92
    hierarchical        all-reduce, k, m > 1         2 ((k - 1) a + (m - 1) A)
                                                         + 2 S ((k - 1) / (k b) + (m - 1) / (m k B))
    in the switch       all-reduce, m = 1            c + S / r
    by levels           all-to-all                   (k - 1) a + (m - 1) A  +  S ((k - 1) / (k b) + (m - 1) / (m B))
    pairwise            all-to-all                   (k - 1) a + (n - k) A  +  S ((k - 1) / (n b) + (n - k) / (n B))
    direct              permute                      max(a, A)  +  S / min(p, B), p the bandwidth of one pair
    pipeline            broadcast                    (n - m) a + (m - 1) A  +  S / min(b, k B)
    binomial tree       broadcast                    ceil(log2 k) (a + S / b) + ceil(log2 m) (A + S / B)

Sources: rings, R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005, and P. Patarasuk and X. Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations",
2009. Trees, P. Sanders, J. Speck and J. L. Träff, "Two-tree Algorithms for Full Bandwidth Broadcast, Reduction and
Scan", 2009: a rank is an inner node of one tree and a leaf of the other, so no rank sends more than two halves up and
two down. NCCL has built them over nodes since 2.4, with a chain through each node, and assumes that they reach 0.92 of
the bandwidth (its src/graph/tuning.cc, which also counts the latencies of rings and trees as above). Hierarchical:
reduce-scatter inside nodes, all-reduce between them, all-gather inside nodes; M. Cho, U. Finkler, D. Kung and
H. Hunter, "BlueConnect: Decomposing All-Reduce for Deep Learning on Heterogeneous Network Hierarchy", 2019. In the
switch: NVLink SHARP, whose latency c and rate r are figures of the link. By levels: since 2.12 NCCL passes a message
to the rank of its own node that is next to the receiver's network card, which sends what it has collected (PXN).

A library has some of these and uses the fastest for a size, as NCCL's tuning model does. NCCL also runs rings and trees
with a low-latency protocol (LL), which sends a flag with every four bytes instead of waiting. By its tuning model a is
then 0.6 / 1.9 and A 2.7 / 4.0 of the values with LL128, and the bandwidth is a half for rings and 1 / 3.8 for trees.

    NCCL, RCCL    rings; for all-reduce also the tree, hierarchical and in the switch; all-to-all by levels; pipeline
    gloo          rings (its all-reduce by default); all-to-all pairwise; broadcast by a binomial tree; and a
                  reduce-scatter that torch builds from an all-reduce
                  (ProcessGroupGloo::reduce_scatter_tensor_coalesced)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.mesh import AxisLink, Library

TREE_EFFICIENCY = 0.92
"""Share of the bandwidth that trees reach."""

LOW_LATENCY_INSIDE, LOW_LATENCY_BETWEEN = 0.6 / 1.9, 2.7 / 4.0
"""Latencies inside and between nodes with the LL protocol, relative to LL128."""

LOW_LATENCY_RING, LOW_LATENCY_TREE = 0.5, 1 / 3.8
"""Share of the bandwidth that rings and trees reach with the LL protocol."""


class Algorithm(NamedTuple):
    """An algorithm of a collective, which takes ``alpha_s + beta_s_per_byte * nbytes`` seconds."""

    name: str
    alpha_s: float
    beta_s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.alpha_s + self.beta_s_per_byte * nbytes

    def times(self, factor: float) -> Algorithm:
        return self._replace(alpha_s=factor * self.alpha_s, beta_s_per_byte=factor * self.beta_s_per_byte)


def algorithms(kind: str, link: AxisLink, library: Library) -> tuple[Algorithm, ...]:
    """Return the algorithms of ``library`` for collectives of ``kind`` over ``link``, a group of two or more ranks.

    ``nbytes`` counts as in `CollectiveCosts`. Launches are not included.
    """
    if kind == "permute":
        alpha_s = max(link.intra_latency_s, link.inter_latency_s)
        return (Algorithm("direct", alpha_s, 1 / min(link.peer_bytes_per_s, link.inter_bytes_per_s)),)
    if kind == "all_to_all":
        return (_by_levels(link) if library == "nccl" else _pairwise(link),)
    if kind == "broadcast":
        return (_pipeline(link) if library == "nccl" else _binomial_tree(link),)
    if library == "gloo":
        return (_ring(link, 1 if kind == "all_gather" else 2),)
    rings = _by_both_protocols(link, 2 if kind == "all_reduce" else 1)
    return (*rings, *_reductions(link)) if kind == "all_reduce" else rings


def fastest(choices: Sequence[Algorithm]) -> tuple[Algorithm, ...]:
    """Return the algorithms that are the fastest for some size, ordered from small to large sizes."""
    envelope: list[Algorithm] = []
    for line in sorted(choices, key=lambda c: (-c.beta_s_per_byte, c.alpha_s)):
        while envelope and line.alpha_s <= envelope[-1].alpha_s:
            envelope.pop()
        while len(envelope) > 1 and _crossover(envelope[-2], line) <= _crossover(envelope[-2], envelope[-1]):
            envelope.pop()
        if not envelope or line.beta_s_per_byte < envelope[-1].beta_s_per_byte:
            envelope.append(line)
    return tuple(envelope)


def _crossover(first: Algorithm, second: Algorithm) -> float:
    """Return the size in bytes above which ``second``, which has more latency, is faster."""
    return (second.alpha_s - first.alpha_s) / (first.beta_s_per_byte - second.beta_s_per_byte)


def _by_both_protocols(link: AxisLink, passes: int) -> tuple[Algorithm, ...]:
    quick = _ring(_low_latency(link, LOW_LATENCY_RING), passes)
    return _ring(link, passes), quick._replace(name="ring, low latency")


def _reductions(link: AxisLink) -> tuple[Algorithm, ...]:
    """Return the algorithms of an all-reduce besides rings."""
    k, m = link.ranks_per_node, link.nodes
    found = []
    if m > 1:
        quick = _tree(_low_latency(link, LOW_LATENCY_TREE / TREE_EFFICIENCY))
        found += [_tree(link), quick._replace(name="tree, low latency")]
    if m > 1 and k > 1:
        found.append(_hierarchical(link))
    if m == 1 and link.reduction_bytes_per_s is not None:
        found.append(Algorithm("in the switch", link.reduction_latency_s, 1 / link.reduction_bytes_per_s))
    return tuple(found)


def _low_latency(link: AxisLink, bandwidth: float) -> AxisLink:
    """Return ``link`` under NCCL's LL protocol, which reaches this share of the bandwidth."""
    return replace(
        link,
        intra_latency_s=link.intra_latency_s * LOW_LATENCY_INSIDE,
        inter_latency_s=link.inter_latency_s * LOW_LATENCY_BETWEEN,
        intra_bytes_per_s=link.intra_bytes_per_s * bandwidth,
        inter_bytes_per_s=link.inter_bytes_per_s * bandwidth,
    )


def _ring(link: AxisLink, passes: int) -> Algorithm:
    n, m = link.size, link.nodes
    alpha_s = (n - m) * link.intra_latency_s + (m - 1) * link.inter_latency_s
    return Algorithm("ring", passes * alpha_s, passes * (n - 1) / n * _s_per_byte(link))


def _s_per_byte(link: AxisLink) -> float:
    """Return the seconds per byte of a ring: the slower of a rank inside its node and a node's network cards."""
    return max(1 / link.intra_bytes_per_s, 1 / (link.ranks_per_node * link.inter_bytes_per_s))


def _tree(link: AxisLink) -> Algorithm:
    k, m = link.ranks_per_node, link.nodes
    levels = (m - 1).bit_length()
    inside = 2 * (k - 1) / k / link.intra_bytes_per_s
    between = min(2, m - 1) / (k * link.inter_bytes_per_s)
    alpha_s = 2 * ((k - 1) * link.intra_latency_s + levels * link.inter_latency_s)
    return Algorithm("tree", alpha_s, max(inside, between) / TREE_EFFICIENCY)


def _hierarchical(link: AxisLink) -> Algorithm:
    k, m = link.ranks_per_node, link.nodes
    alpha_s = (k - 1) * link.intra_latency_s + (m - 1) * link.inter_latency_s
    inside, between = (k - 1) / k / link.intra_bytes_per_s, (m - 1) / m / (k * link.inter_bytes_per_s)
    return Algorithm("hierarchical", 2 * alpha_s, 2 * (inside + between))


def _by_levels(link: AxisLink) -> Algorithm:
    k, m = link.ranks_per_node, link.nodes
    alpha_s = (k - 1) * link.intra_latency_s + (m - 1) * link.inter_latency_s
    return Algorithm("by levels", alpha_s, (k - 1) / k / link.intra_bytes_per_s + (m - 1) / m / link.inter_bytes_per_s)


def _pairwise(link: AxisLink) -> Algorithm:
    k, n = link.ranks_per_node, link.size
    alpha_s = (k - 1) * link.intra_latency_s + (n - k) * link.inter_latency_s
    return Algorithm("pairwise", alpha_s, (k - 1) / n / link.intra_bytes_per_s + (n - k) / n / link.inter_bytes_per_s)


def _pipeline(link: AxisLink) -> Algorithm:
    alpha_s = (link.size - link.nodes) * link.intra_latency_s + (link.nodes - 1) * link.inter_latency_s
    return Algorithm("pipeline", alpha_s, _s_per_byte(link))


def _binomial_tree(link: AxisLink) -> Algorithm:
    inside, between = (link.ranks_per_node - 1).bit_length(), (link.nodes - 1).bit_length()
    alpha_s = inside * link.intra_latency_s + between * link.inter_latency_s
    return Algorithm("binomial tree", alpha_s, inside / link.intra_bytes_per_s + between / link.inter_bytes_per_s)
