"""Repeated blocks of a network of nodes, found by its structure: the layers of a model, whatever their names.

A *shift* maps nodes to their likes one layer further on; it is grown from seed pairs along edges of one kind. Its
orbits are the columns of a table whose rows are the layers. Where a row begins is free: minimum cuts place the rows so
that few edges leave them. Rows whose nodes and edges are all alike form a run.

Several shifts are tried: two equal norms of one layer lead to one by half a layer, which moves as many nodes as the
right one and has no equal rows. What is outside the runs of the best, such as another tower, is looked at again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heappop, heappush
from itertools import count, pairwise, zip_longest
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from autopar.repetition.minimum_cut import least_crossing

MOST_ROWS = 8
"""Of a block: of six layers of Gemma 3 five attend to a window and one to everything."""

MOST_SHIFTS = 5
COVERAGE = 0.75
"""A shift whose runs repeat this share of the nodes is taken without trying others."""

LITTLE = 0.25
"""Share of the nodes in runs below which other shifts are tried. StableLM's norms alone are .13 of them, BART's encoder
is .3."""

RADIUS = 2
"""Edges around two nodes that are compared. With 1, 2, 3 and 6 the same runs are found in Marian, Pegasus, FLAN-T5 XL
and Gemma 3 12B; those of Marian, 12 layers deep, take .14 s with 1 and .05 with 2."""

LEAST_SHARE = 0.05
"""Of all nodes, in runs that are worth another look at what is left."""


@dataclass(frozen=True, eq=False)
class Run:
    """Equal blocks in a row: ``copies[j, c]`` is the node of column c in block j.

    Every edge of a block joins two of its nodes, or a node to one of the next or previous block, or a column to one
    node outside that all blocks share. That holds for the first and the last block too, whose neighbours are no part
    of the run, unless the network's ``ends`` count.

    Args:
        layers: equal parts of a block but for what they read outside: one, or more where layers of several kinds take
            turns. Their columns follow each other.
    """

    copies: npt.NDArray[np.int64]
    layers: int = 1

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The nodes of each layer."""
        return self.copies.reshape(len(self.copies) * self.layers, -1)


Entry: TypeAlias = tuple[int, int, int]
"""An edge as one of its ends sees it: its kind, which end that is (0 or 1), and the node at the other."""


@dataclass(frozen=True, eq=False)
class Network:
    """What is compared.

    Args:
        labels: of each node; those of equal nodes are equal.
        around: the edges of each node, in order.
        sizes: of each node. The smaller its ends, the cheaper an edge is to cut.
        least: layers of a run.
        ends: whether the first and the last layer of a stack count too, whose neighbours are unlike those of others.
    """

    labels: Sequence[int]
    around: Sequence[Sequence[Entry]]
    sizes: Sequence[int]
    least: int
    ends: bool = False

    @classmethod
    def of(
        cls,
        labels: Sequence[int],
        edges: Iterable[tuple[int, int, int]],
        sizes: Sequence[int],
        *,
        least: int,
        ends: bool = False,
    ) -> Network:
        """Return the network of ``edges``: of each the kind, and the nodes at its ends."""
        around: list[list[Entry]] = [[] for _ in labels]
        for kind, u, v in edges:
            around[u].append((kind, 0, v))
            around[v].append((kind, 1, u))
        for entries in around:
            entries.sort()
        return cls(labels, around, sizes, least, ends)

    @cached_property
    def regions(self) -> Sequence[Sequence[int]]:
        """Numbers for what is to be seen of each node within 0, 1, ... edges (colour refinement: Weisfeiler and Leman
        1968); within 0 are its label and the kinds of its edges."""
        known: dict[object, int] = {}
        looks = (
            (label, tuple([(kind, side) for kind, side, _ in entries]))
            for label, entries in zip(self.labels, self.around, strict=True)
        )
        regions = [[known.setdefault(look, len(known)) for look in looks]]
        for _ in range(RADIUS):
            inner, known = regions[-1], {}
            seen = (
                (look, tuple(sorted([(kind, side, inner[other]) for kind, side, other in entries])))
                for look, entries in zip(inner, self.around, strict=True)
            )
            regions.append([known.setdefault(region, len(known)) for region in seen])
        return regions

    @property
    def looks(self) -> Sequence[int]:
        """For each node a number for its label and the kinds of its edges."""
        return self.regions[0]

    def agreement(self, node: int, image: int) -> int:
        """How many edges far the surroundings of two nodes are alike."""
        return next((r for r, region in enumerate(self.regions) if region[node] != region[image]), len(self.regions))


class Repetition(NamedTuple):
    """``looks``: how many nodes were looked at, each as often as it was."""

    runs: tuple[Run, ...]
    looks: int


def repetition(network: Network) -> Repetition:
    """Find what repeats in a network."""
    runs: list[Run] = []
    looks = nodes = len(network.labels)
    left = set(range(nodes))
    while len(left) >= LEAST_SHARE * nodes:
        found, tried = _longest_runs(network, left)
        looks += tried * len(left)
        if _repeated(found) < LEAST_SHARE * nodes:
            break
        runs += found
        left -= {node for run in found for node in run.copies.ravel().tolist()}
    return Repetition(tuple(runs), looks)


def grown(network: Network, shift: Mapping[int, int]) -> Repetition:
    """Find what repeats in a network of which so much is known."""
    nodes = range(len(network.labels))
    return Repetition(tuple(_runs_of(network, _grow(network, shift.items(), nodes, known=True))), 2 * len(nodes))


def _longest_runs(network: Network, left: Collection[int]) -> tuple[list[Run], int]:
    """Return the runs among the nodes that are ``left``, of the shift whose runs hold most of them, and how many shifts
    were tried.

    Classes of several kinds come last where they lead to little: they are layers of several kinds, which take turns, or
    equal parts of one layer, such as the two weights of a gated feed-forward, and then some spoil the shift of all.
    """
    classes = _classes(network, left)
    best, tried = _best_of(network, left, classes)
    if _repeated(best) < LITTLE * len(left):
        found, more = _best_of(network, left, sorted(classes, key=partial(_is_mixed, network)))
        best, tried = max(best, found, key=_repeated), tried + more
    return best, tried


def _best_of(network: Network, left: Collection[int], classes: Iterable[tuple[int, ...]]) -> tuple[list[Run], int]:
    best: list[Run] = []
    tried: list[dict[int, int]] = []
    for members in classes:
        if any(shift.get(members[0]) == members[1] for shift in tried):
            continue
        tried.append(_grow(network, zip(members, members[1:], strict=False), left))
        best = max(best, _runs_of(network, tried[-1]), key=_repeated)
        if len(tried) == MOST_SHIFTS or _repeated(best) >= COVERAGE * len(left):
            break
    return best, len(tried)


def _runs_of(network: Network, shift: dict[int, int]) -> list[Run]:
    return [
        run for component in _components(network, _orbits(shift, network.least)) for run in _runs(network, component)
    ]


def shift_of(runs: Iterable[Run]) -> dict[int, int]:
    """The nodes of all layers but the last of each run, and their likes one layer further on."""
    layers = (pair for run in runs for pair in pairwise(run.rows.tolist()))
    return {node: like for layer, following in layers for node, like in zip(layer, following, strict=True)}


def _repeated(runs: Sequence[Run]) -> int:
    """Nodes of all layers but the first of each run: with it, blocks of twice the size would count as much."""
    return sum(int(run.copies.size - run.copies.shape[1] // run.layers) for run in runs)


def _classes(network: Network, left: Collection[int]) -> list[tuple[int, ...]]:
    """Classes of nodes that look alike, and of those that do so with all around them, in turns: one of each size, the
    commonest sizes first, then another of each."""
    turns = zip_longest(*(_by_size(region, left, network.least) for region in (network.looks, network.regions[-1])))
    return list(dict.fromkeys(members for turn in turns for members in turn if members is not None))


def _is_mixed(network: Network, members: Iterable[int]) -> bool:
    """Whether at most half of a class have the same around them."""
    kinds = Counter(network.regions[-1][node] for node in members)
    return 2 * max(kinds.values()) <= kinds.total()


def _by_size(looks: Sequence[int], left: Collection[int], least: int) -> list[tuple[int, ...]]:
    classes: dict[int, list[int]] = {}
    for node in sorted(left):
        classes.setdefault(looks[node], []).append(node)
    sizes: dict[int, list[tuple[int, ...]]] = {}
    for members in classes.values():
        if len(members) >= least:
            sizes.setdefault(len(members), []).append(tuple(members))
    groups = sorted(sizes.values(), key=lambda group: (-len(group), group))
    return [members for turn in zip_longest(*groups) for members in turn if members is not None]


def _grow(
    network: Network, seeds: Iterable[tuple[int, int]], left: Collection[int], *, known: bool = False
) -> dict[int, int]:
    """Extend seed pairs to all pairs that equal edges lead to; the first to claim a node keeps it.

    Pairs whose surroundings are alike furthest come first: a stack of layers looks at its ends like what comes before
    or after it, as the last layer of an encoder like the first of the decoder. Of these, what is certain comes before
    seeds: where nodes of the forward and of the backward look alike, some seeds lead from one to the other. What all
    blocks read has many edges of one kind, which tell least.

    Args:
        known: whether the seeds are known to be right, and come before all that they lead to.
    """
    shift: dict[int, int] = {}
    taken: set[int] = set()
    waiting: list[tuple[int, int, int, int, int]] = []
    order = count()

    def wait(node: int, image: int, doubt: int) -> None:
        heappush(waiting, (-network.agreement(node, image), doubt, next(order), node, image))

    for node, image in seeds:
        if known:
            heappush(waiting, (-len(network.regions) - 1, 0, next(order), node, image))
        else:
            wait(node, image, 1)
    labels, around, looks = network.labels, network.around, network.looks
    while waiting:
        *_, node, image = heappop(waiting)
        if node in shift or image in taken or labels[node] != labels[image]:
            continue
        if node not in left or image not in left:
            continue
        shift[node] = image
        taken.add(image)
        for p, q, only in _pairs(around[node], around[image], looks[node] == looks[image]):
            if p != q and p not in shift and q not in taken:
                wait(p, q, 0 if only else 2)
    return shift


def _pairs(here: Sequence[Entry], there: Sequence[Entry], alike: bool) -> Iterator[tuple[int, int, bool]]:
    """Neighbours over edges of one kind, where both nodes have as many of the kind, and whether they have one."""
    if alike:
        for i, (kind, side, other) in enumerate(here):
            same = [here[j][:2] == (kind, side) for j in (i - 1, i + 1) if 0 <= j < len(here)]
            yield other, there[i][2], not any(same)
        return
    groups: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for which, entries in enumerate((here, there)):
        for kind, side, other in entries:
            groups.setdefault((kind, side), ([], []))[which].append(other)
    for a, b in groups.values():
        if len(a) == len(b):
            yield from ((p, q, len(a) == 1) for p, q in zip(a, b, strict=True))


def _orbits(shift: dict[int, int], least: int) -> list[list[int]]:
    """Maximal chains of the shift that are long enough."""
    images = set(shift.values())
    orbits = []
    for node in sorted(shift):
        if node not in images:
            chain = [node]
            while chain[-1] in shift:
                chain.append(shift[chain[-1]])
            if len(chain) >= least:
                orbits.append(chain)
    return orbits


@dataclass
class _Component:
    """Connected orbits, with the row at which each begins."""

    orbits: list[list[int]]
    begins: list[int]


def _components(network: Network, orbits: list[list[int]]) -> list[_Component]:
    """Orbits that edges connect, aligned so that few edges join different rows.

    An edge that all rows have to one node, such as the output of an encoder, connects nothing.
    """
    place = {node: (o, t) for o, chain in enumerate(orbits) for t, node in enumerate(chain)}
    links: list[list[tuple[int, int, int]]] = [[] for _ in orbits]
    around = network.around
    for o, chain in enumerate(orbits):
        t = len(chain) // 2
        of_all = {entry for node in (*chain[t - 1 : t], *chain[t + 1 : t + 2]) for entry in around[node]}
        for entry in around[chain[t]]:
            other = entry[2]
            found = place.get(other)
            if found is not None and found[0] != o and entry not in of_all:
                weight = min(network.sizes[other], network.sizes[chain[t]])
                links[o].append((found[0], found[1] - t, weight))
                links[found[0]].append((o, t - found[1], weight))
    seen: set[int] = set()
    components = []
    for first in range(len(orbits)):
        if first not in seen:
            begins = _connected(links, first)
            seen.update(begins)
            members = sorted(begins)
            local = {o: i for i, o in enumerate(members)}
            joined = [(local[o], local[p], d, w) for o in members for p, d, w in links[o] if o < p]
            placed = least_crossing([begins[o] for o in members], joined)
            components.append(_Component([orbits[o] for o in members], placed))
    return components


def _connected(links: list[list[tuple[int, int, int]]], first: int) -> dict[int, int]:
    begins = {first: 0}
    waiting = deque([first])
    while waiting:
        o = waiting.popleft()
        for p, distance, _ in links[o]:
            if p not in begins:
                begins[p] = begins[o] - distance
                waiting.append(p)
    return begins


def _runs(network: Network, component: _Component) -> list[Run]:
    """Stretches of rows in which every node and every edge is equal, in each window of rows.

    Orbits need not span the same rows: where an encoder's blocks are in a decoder's, some go through both and others
    through one. A window lies between two rows at which orbits begin or end, and has those that span it.
    """
    ends = [begin + len(chain) for begin, chain in zip(component.begins, component.orbits, strict=True)]
    borders = sorted({*component.begins, *ends})
    runs: list[Run] = []
    for first, last in pairwise(borders):
        spanning = [o for o, (b, e) in enumerate(zip(component.begins, ends, strict=True)) if b <= first and e >= last]
        if last - first >= network.least:
            part = _Component([component.orbits[o] for o in spanning], [component.begins[o] for o in spanning])
            runs += _runs_in_window(network, part, first, last)
    return runs


def _runs_in_window(network: Network, window: _Component, first: int, last: int) -> list[Run]:
    place = {
        node: (c, begin + t)
        for c, (begin, chain) in enumerate(zip(window.begins, window.orbits, strict=True))
        for t, node in enumerate(chain)
    }
    rows = range(first, last)
    looks = [_row(network, window, place, row, rows) for row in rows]
    runs = []
    for start, end, period in _stretches(looks, network.least):
        copies = np.array(
            [[chain[row - b] for b, chain in zip(window.begins, window.orbits, strict=True)] for row in rows[start:end]]
        )
        runs.append(Run(copies.reshape((end - start) // period, -1), period))
    return runs


def _row(
    network: Network, component: _Component, place: dict[int, tuple[int, int]], row: int, rows: range
) -> tuple[object, ...] | None:
    """All that two equal rows have in common; None when an edge leads further than the next row, but for one out of
    ``rows``: what all blocks read may look like a node of theirs."""
    look: list[object] = []
    for c, (begin, chain) in enumerate(zip(component.begins, component.orbits, strict=True)):
        node = chain[row - begin]
        look.append(network.labels[node])
        entries = []
        for kind, side, other in network.around[node]:
            column, there = place.get(other, (-1, other))
            distance = there - row if column >= 0 else other
            if column >= 0 and abs(distance) > 1:
                if there in rows:
                    return None
                column, distance = -1, other
            if network.ends and (column < 0 or distance):
                column = distance = -1
            entries.append((kind, side, column, distance))
        entries.sort()
        look.append((c, tuple(entries)))
    return tuple(look)


def _stretches(looks: Sequence[object | None], least: int) -> list[tuple[int, int, int]]:
    """Stretches of rows that repeat, each with its period: where layers of two kinds take turns, it is two rows."""
    found: list[tuple[int, int, int]] = []
    free = [look is not None for look in looks]
    for period in range(1, MOST_ROWS + 1):
        start = 0
        for end in range(1, len(looks) + 1):
            inside = end < len(looks) and free[start] and free[end]
            if inside and (end - start < period or looks[end] == looks[end - period]):
                continue
            copies = (end - start) // period
            if free[start] and copies >= least:
                stop = start + copies * period
                found.append((start, stop, period))
                free[start:stop] = [False] * (stop - start)
            start = end
    return sorted(found)
