"""Program points: the times within a step at which the memory constraints count what is held."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from autopar.ir import Graph


class Stage(IntEnum):
    """What is done for a node, in order: other nodes are run again, its operands are redistributed, it runs, and its
    results are replaced by copies of them that all read."""

    RERUN = 0
    BEFORE = 1
    RUNNING = 2
    REPLACED = 3


class ProgramPoint(NamedTuple):
    """A time within a step. Points are compared by time.

    Args:
        node: index of the node that runs then or next; the graph's length is the end of the step.
        stage: what is done for it. What else follows a node at once is done before the next.
        which: the index of the node that is run again, or of the result that is replaced.
    """

    node: int
    stage: Stage = Stage.RUNNING
    which: int = 0

    @property
    def key(self) -> int:
        """A number that orders points as they are ordered."""
        return self.node << 34 | self.stage << 32 | self.which

    @property
    def running(self) -> bool:
        return self.stage == Stage.RUNNING

    @property
    def preparing(self) -> ProgramPoint:
        """The point just before, if a node runs at this one, at which its operands are redistributed; else this one."""
        return self._replace(stage=Stage.BEFORE) if self.running else self

    @property
    def next(self) -> ProgramPoint:
        """The first point after this one."""
        return ProgramPoint(self.node, Stage.REPLACED) if self.running else self._replace(which=self.which + 1)


def before(node: int) -> ProgramPoint:
    """Return the point just before a node, at which its operands are redistributed."""
    return ProgramPoint(node, Stage.BEFORE)


def before_operands(node: int) -> ProgramPoint:
    """Return the last point before the operands of a node are redistributed."""
    return ProgramPoint(node, Stage.RERUN, 2**32 - 1)


def after(node: int) -> ProgramPoint:
    """Return the point just after a node, which is the one before the next."""
    return before(node + 1)


def replaced(node: int, result: int) -> ProgramPoint:
    """Return the point at which a node's result is replaced by a copy."""
    return ProgramPoint(node, Stage.REPLACED, result)


def rerun(graph: Graph, node: str, reader: ProgramPoint) -> ProgramPoint:
    """Return the point at which a node is run again whose result is first read at ``reader``."""
    return ProgramPoint(reader.node, Stage.RERUN, graph.order[node])


def end(graph: Graph) -> ProgramPoint:
    """Return the end of the step."""
    return ProgramPoint(len(graph.nodes))
