"""Copies a captured block into the joint graph for each block skipped at export, forward and backward.

The result equals the graph of a capture of every block, including the names of its nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from autopar._torch import with_signature_of
from autopar.tracer.joint import Joint
from autopar.tracer.pattern import MIDDLE, Pattern, Phase, numbered, require
from autopar.tracer.repeated import Run
from autopar.tracer.skipping import HEAD


def stamp(joint: Joint, runs: Sequence[Run]) -> None:
    """Put the skipped blocks of ``runs`` into ``joint``.

    Raises:
        IrregularError: it is not certain what they look like.
    """
    for run in runs:
        joint.graph_module.graph = _Writer(Pattern(joint, run)).write()


@dataclass
class _Writer:
    """Writes the whole graph: renumbers existing nodes, and puts the copies in between.

    Args:
        made: the new node of each old one.
        copies: the new nodes of each copied one, by its block's place in the run.
    """

    pattern: Pattern
    graph: fx.Graph = field(default_factory=fx.Graph)
    made: dict[fx.Node, fx.Node] = field(default_factory=dict)
    copies: dict[tuple[fx.Node, int], fx.Node] = field(default_factory=dict)

    @property
    def _count(self) -> int:
        return self.pattern.missing

    def write(self) -> fx.Graph:
        """Write the new graph.

        Raises:
            IrregularError: its names are not those that torch would give.
        """
        forward, backward = (self.pattern.sections[phase, MIDDLE] for phase in ("forward", "backward"))
        added: dict[Phase, int] = {"forward": 0, "backward": 0}
        for node in self.pattern.graph.nodes:
            if node is backward[0]:
                for block in range(MIDDLE + self._count, MIDDLE, -1):
                    self._copy("backward", block)
                added["backward"] = self._count
            if node.op == "output":
                self._finish(node)
            else:
                self.made[node] = self._create(node, self._place(node), self._new_name(node, added))
            if node is forward[-1]:
                for block in range(MIDDLE + 1, MIDDLE + 1 + self._count):
                    self._copy("forward", block)
                added["forward"] = self._count
        return with_signature_of(self.graph, self.pattern.graph)

    def _copy(self, phase: Phase, block: int) -> None:
        """Copy the middle block as the one at place ``block`` of the run."""
        added: dict[Phase, int] = {"forward": block - MIDDLE, "backward": 0}
        if phase == "backward":
            added = {"forward": self._count, "backward": self._count - (block - MIDDLE)}
        for node in self.pattern.sections[phase, MIDDLE]:
            made = self._create(node, block, self._new_name(node, added))
            for key in ("nn_module_stack", "fwd_nn_module_stack"):
                if key in made.meta:
                    made.meta[key] = self._stack(made.meta[key], block)
            self.copies[node, block] = made

    def _place(self, node: fx.Node) -> int | None:
        """Return the place in the run of the block that a captured node belongs to."""
        place = self.pattern.places.get(node)
        if place is None:
            return None
        return place.block if place.block < HEAD else place.block + self._count

    def _new_name(self, node: fx.Node, added: dict[Phase, int]) -> str:
        """Return the node's name after the given numbers of additional blocks."""
        if node.op == "placeholder":
            return node.name
        kind, number = numbered(node.name)
        number += sum(count * self.pattern.steps.get((phase, kind), 0) for phase, count in added.items())
        return f"{kind}_{number}" if number or node.name.endswith("_0") else kind

    def _create(self, node: fx.Node, block: int | None, name: str) -> fx.Node:
        """Create ``node`` in the block at place ``block`` of the run, or outside of all blocks."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: self._operand(n, node, block))
        if kwargs.get("site"):
            kwargs = {**kwargs, "site": self._site(node, int(str(kwargs["site"])), block)}
        made = self.graph.create_node(node.op, node.target, args, kwargs, name)
        require(made.name == name)
        made.meta = dict(node.meta)
        return made

    def _operand(self, node: fx.Node, reader: fx.Node, block: int | None) -> fx.Node:
        """Return what the copy of ``reader`` in that block reads in place of ``node``."""
        pattern = self.pattern
        if block is None:
            return self.made[node]
        if node in pattern.owners:
            return self.made[self._parameters[block, pattern.owners[node][1]]]
        place = pattern.places.get(node)
        if place is None:
            return self.made[node]
        wanted = block + place.block - pattern.places[reader].block
        if MIDDLE < wanted <= MIDDLE + self._count:
            return self.copies[pattern.sections[place.phase, MIDDLE][place.at], wanted]
        captured = wanted if wanted <= MIDDLE else wanted - self._count
        return self.made[pattern.sections[place.phase, captured][place.at]]

    @cached_property
    def _parameters(self) -> dict[tuple[int, str], fx.Node]:
        return {owner: node for node, owner in self.pattern.owners.items()}

    def _site(self, node: fx.Node, site: int, block: int | None) -> int:
        """Return a random op's number; random ops are counted in the forward."""
        place = self.pattern.places.get(node)
        if place is not None and place.block == MIDDLE and block is not None:
            return site + (block - MIDDLE) * self.pattern.sites
        return site + self._count * self.pattern.sites if site > self._last_site else site

    @cached_property
    def _last_site(self) -> int:
        """The last random op's number up to the end of the middle block."""
        sites = [0]
        for node in self.pattern.graph.nodes:
            sites.append(node.kwargs.get("site") or 0)
            if node is self.pattern.sections["forward", MIDDLE][-1]:
                break
        return max(sites)

    def _stack(self, stack: dict[str, Any], block: int) -> dict[str, Any]:
        old, new = self.pattern.run.paths[MIDDLE], self.pattern.run.paths[block]

        def moved(path: str) -> str:
            return f"{path}.".replace(f".{old}.", f".{new}.", 1)[:-1]

        return {moved(key): (moved(value[0]), *value[1:]) for key, value in stack.items()}

    def _finish(self, output: fx.Node) -> None:
        """Write the output, with the gradients of the skipped blocks' parameters in their places."""
        pattern = self.pattern
        results = [self.made[a] if isinstance(a, fx.Node) else a for a in output.args[0]]  # type: ignore[union-attr]
        slots = {owner: at for owner, (at, _) in pattern.gradients.items()}
        for (index, name), (_, gradient) in pattern.gradients.items():
            if index == MIDDLE and gradient is not None:
                for block in range(MIDDLE + 1, MIDDLE + 1 + self._count):
                    results[slots[block, name]] = self.copies[gradient, block]
        self.graph.output(results).meta = dict(output.meta)
