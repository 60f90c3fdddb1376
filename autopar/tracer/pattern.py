"""Finds the captured blocks of a run in a joint graph, and what changes from one to the next.

Of a run of L equal blocks the graph contains 0, 1, 2, L-2 and L-1. A node-by-node comparison verifies that 1, 2 and L-2
are equal up to a shift of parameters, neighbours, names and the numbers of random ops.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from autopar.tracer.convert import module_path
from autopar.tracer.joint import Joint
from autopar.tracer.repeated import IrregularError, Run
from autopar.tracer.skipping import HEAD, TAIL

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")
CAPTURED = HEAD + TAIL
MIDDLE = HEAD - 1
"""The block to be copied: both of its neighbours are captured, and the skipped blocks come after it."""

_NUMBERED = re.compile(r"(.+?)(?:_(\d+))?")


@dataclass(frozen=True)
class Place:
    """A node's place: in the forward or backward of a captured block, at a position."""

    phase: Phase
    block: int
    at: int


def require(holds: bool) -> None:
    if not holds:
        raise IrregularError


@dataclass
class Pattern:
    """The blocks of one run in a joint graph.

    Args:
        sections: nodes of each captured block, by phase and block.
        places: place of each node.
        steps: increment of a name's number from one block to the next, by phase and kind of name.
        sites: increment of the numbers of random ops.
    """

    joint: Joint
    run: Run
    sections: dict[tuple[Phase, int], list[fx.Node]] = field(default_factory=dict)
    places: dict[fx.Node, Place] = field(default_factory=dict)
    owners: dict[fx.Node, tuple[int, str]] = field(default_factory=dict)
    steps: dict[tuple[Phase, str], int] = field(default_factory=dict)
    gradients: dict[tuple[int, str], tuple[int, fx.Node | None]] = field(default_factory=dict)
    sites: int = 0

    @property
    def graph(self) -> fx.Graph:
        return self.joint.graph_module.graph

    @property
    def missing(self) -> int:
        """Number of skipped blocks."""
        return len(self.run.paths) - CAPTURED

    @property
    def captured(self) -> list[str]:
        """Paths of the captured blocks."""
        return [*self.run.paths[:HEAD], *self.run.paths[-TAIL:]]

    def __post_init__(self) -> None:
        self._find_sections()
        self._find_parameters()
        self._find_gradients()
        self._check_readers()
        for block in range(1, HEAD):
            for phase in PHASES:
                self._compare(phase, block)

    def _find_sections(self) -> None:
        """Find the nodes of each block, which must be contiguous; sums of gradients belong to what is before."""
        order: list[tuple[Phase, int]] = []
        current: tuple[Phase, int] | None = None
        captured = self.captured
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            is_backward = node.meta.get("partitioner_tag") == "is_backward"
            path = module_path(node.meta)
            if path or not is_backward:
                block = block_of(path, captured)
                current = None if block is None else ("backward" if is_backward else "forward", block)
            if current is None:
                continue
            if not order or order[-1] != current:
                order.append(current)
            section = self.sections.setdefault(current, [])
            require(not section or section[-1].next is node)
            self.places[node] = Place(*current, len(section))
            section.append(node)
        blocks = range(CAPTURED)
        require(order == [*(("forward", b) for b in blocks), *(("backward", b) for b in reversed(blocks))])
        for a, b in zip(order[: CAPTURED - 1], order[1:CAPTURED], strict=True):
            require(self.sections[a][-1].next is self.sections[b][0])
        for a, b in zip(order[CAPTURED:-1], order[CAPTURED + 1 :], strict=True):
            require(self.sections[a][-1].next is self.sections[b][0])

    def _find_parameters(self) -> None:
        """Find the placeholders of blocks, by the block's index in the run and the name in the block."""
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        for node, meaning in zip(placeholders, self.joint.inputs, strict=True):
            if meaning.kind in ("parameter", "buffer"):
                name = str(meaning.target)
                index = block_of(name, self.run.paths)
                if index is not None:
                    self.owners[node] = (index, name[len(self.run.paths[index]) :])

    def _find_gradients(self) -> None:
        """Find positions and nodes of parameters' gradients among the results; a block must not change buffers."""
        output = next(iter(reversed(self.graph.nodes)))
        for at, (value, meaning) in enumerate(zip(output.args[0], self.joint.outputs, strict=True)):
            index = block_of(str(meaning.target), self.run.paths) if meaning is not None else None
            if meaning is None or index is None or meaning.kind == "output":
                continue
            require(meaning.kind == "gradient")
            self.gradients[index, str(meaning.target)[len(self.run.paths[index]) :]] = (at, value)
        for (index, name), (_, gradient) in self.gradients.items():
            if index == MIDDLE:
                self._compare_gradients(name, gradient)

    def _compare_gradients(self, name: str, gradient: fx.Node | None) -> None:
        """Require that a gradient has the same position in every captured block that has captured neighbours."""
        place = None if gradient is None else self.places.get(gradient)
        require(gradient is None or (place is not None and place.block == MIDDLE))
        for block, index in ((MIDDLE - 1, MIDDLE - 1), (HEAD, len(self.run.paths) - TAIL)):
            other = self.gradients[index, name][1]
            require((other is None) == (gradient is None))
            if place is not None:
                require(other is self.sections[place.phase, block][place.at])

    def _check_readers(self) -> None:
        """Require that inner blocks exchange values with neighbours only, and all read the same from outside."""
        for node, place in self.places.items():
            for user in node.users:
                reader = self.places.get(user)
                if reader is not None:
                    require(abs(place.block - reader.block) <= 1)
                elif user.op != "output":
                    require(place.block in (0, CAPTURED - 1))
        output = next(iter(reversed(self.graph.nodes)))
        gradients = {at for at, _ in self.gradients.values()}
        for at, value in enumerate(output.args[0]):
            if value in self.places and at not in gradients:
                require(self.places[value].block in (0, CAPTURED - 1))
        names = [self.run.paths.index(p) for p in self.captured]
        for node, (index, _) in self.owners.items():
            for user in node.users:
                reader = self.places.get(user)
                require(reader is not None and names[reader.block] == index)

    def _compare(self, phase: Phase, block: int) -> None:
        """Require that a block equals the next one up to the shift."""
        nodes, next_nodes = self.sections[phase, block], self.sections[phase, block + 1]
        require(len(nodes) == len(next_nodes))
        for a, b in zip(nodes, next_nodes, strict=True):
            require(a.op == b.op and a.target == b.target and _metas(a) == _metas(b))
            require(set(a.kwargs) == set(b.kwargs))
            self._same(a.args, b.args)
            for key in a.kwargs:
                if key == "site":
                    self._same_sites(a.kwargs[key], b.kwargs[key])
                else:
                    self._same(a.kwargs[key], b.kwargs[key])
            (kind, first), (other, second) = numbered(a.name), numbered(b.name)
            step = second - first if phase == "forward" else first - second
            require(kind == other and self.steps.setdefault((phase, kind), step) == step)

    def _same_sites(self, a: Any, b: Any) -> None:
        if a == b == 0:
            return  # neither is random
        self.sites = self.sites or b - a
        require(b - a == self.sites > 0)

    def _same(self, a: Any, b: Any) -> None:
        """Require that an argument of a block matches that of the next one."""
        require(type(a) is type(b))
        if isinstance(a, (tuple, list)):
            require(len(a) == len(b))
            for x, y in zip(a, b, strict=True):
                self._same(x, y)
        elif isinstance(a, fx.Node):
            self._same_nodes(a, b)
        else:
            require(bool(a == b) or repr(a) == repr(b))

    def _same_nodes(self, a: fx.Node, b: fx.Node) -> None:
        if a in self.owners:
            require(b in self.owners and self.owners[a][1] == self.owners[b][1])
            return
        if a not in self.places:
            require(a is b)
            return
        require(b in self.places)
        place, next_place = self.places[a], self.places[b]
        require(place.phase == next_place.phase and next_place.block - place.block == 1)
        inner = place.block >= 1 and next_place.block <= HEAD  # the outer blocks may be arranged differently
        require(not inner or place.at == next_place.at)
        require(_metas(a) == _metas(b))


def block_of(path: str, blocks: Sequence[str]) -> int | None:
    """Return the index in ``blocks`` of the one that a module, parameter or buffer belongs to, or None."""
    return next((i for i, b in enumerate(blocks) if path == b or path.startswith(f"{b}.")), None)


def numbered(name: str) -> tuple[str, int]:
    """Return ``("add", 3)`` for ``add_3``; torch numbers the nodes of each kind from 0, and omits the 0."""
    found = _NUMBERED.fullmatch(name)
    assert found is not None
    return found[1], int(found[2] or 0)


def _metas(node: fx.Node) -> Any:
    value = node.meta.get("val")
    values = value if isinstance(value, (tuple, list)) else [value]
    return [(v.shape, v.dtype, v.stride()) if isinstance(v, torch.Tensor) else repr(v) for v in values]
