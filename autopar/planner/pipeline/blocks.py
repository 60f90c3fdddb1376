"""What each block of a graph costs, as one program of the whole graph tells it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field

from autopar.ir import Graph
from autopar.mesh import Mesh
from autopar.planner.footprint.state import state_bytes
from autopar.planner.graphs.accumulation import accumulated_sums, accumulation_program
from autopar.planner.options import Options
from autopar.planner.schedule.timeline import Event, simulate_streams
from autopar.program import Op, Program


@dataclass
class BlockCosts:
    """Seconds and bytes of a block for one micro-batch, on one device; see ``Parts``.

    Args:
        static: bytes of its parameters with their optimizer state, gradients and sums, and of what all micro-batches of
            a call share.
        once: seconds of what runs once for all micro-batches, on the busiest stream.
        delivery: the same of what the last micro-batch does besides, to give the sums to the parameters.
    """

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    held: int = 0
    static: int = 0
    once: float = 0.0
    delivery: float = 0.0

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: BlockCosts) -> BlockCosts:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return BlockCosts(*(mine + others for mine, others in pairs))


@dataclass
class _Walk:
    """Adds up the ops of a program by the block that they belong to; what belongs to none counts with the first."""

    program: Program
    graph: Graph
    block_of: Mapping[str, int]
    found: list[BlockCosts] = field(default_factory=list)

    def at(self, node: str) -> BlockCosts:
        return self.found[self.block_of.get(node, 0)]


def block_costs(
    program: Program, graph: Graph, mesh: Mesh, options: Options, overlap: float, block_of: Mapping[str, int]
) -> tuple[BlockCosts, ...]:
    """Return the costs of every block.

    What the program waits for before an op counts as time of that op's block.

    Args:
        overlap: as for ``simulate_streams``.
        block_of: the block of each node.
    """
    adding = accumulation_program(program, graph) if accumulated_sums(graph) else program
    walk = _Walk(program, graph, block_of, [BlockCosts() for _ in range(max(block_of.values(), default=0) + 1)])
    _add_seconds(walk, adding, overlap)
    every_time = {op.name for op in adding.ops}
    for node, seconds in _on_busiest_stream([op for op in program.ops if op.name in program.once]):
        walk.at(node).once += seconds
    for node, seconds in _on_busiest_stream([op for op in program.ops if op.name not in every_time]):
        walk.at(node).delivery += seconds
    _add_bytes(walk, mesh, options)
    return tuple(walk.found)


def _add_seconds(walk: _Walk, program: Program, overlap: float) -> None:
    node_of = {op.name: op for op in program.ops}
    once = frozenset(program.once)
    before_input = _nodes_before_another_block(walk.graph, walk.block_of)
    now = 0.0
    for interval in simulate_streams(program, overlap).intervals:
        op = node_of.get(interval.op)
        if interval.stream != "compute" or op is None:
            continue
        spent, now = interval.end_s - now, interval.end_s
        if op.name in once:
            continue
        costs = walk.at(op.node)
        if op.phase == "forward":
            costs.forward += spent
        elif op.node in before_input or walk.graph.by_name[op.node].phase == "forward":
            costs.backward_input += spent
        else:
            costs.backward_weight += spent


def _on_busiest_stream(ops: Collection[Op]) -> Iterator[tuple[str, float]]:
    """Yield nodes with the seconds of their ops on the stream that is busy for longest, while the others are beside
    it."""
    streams: dict[int, list[Op]] = {}
    for op in ops:
        streams.setdefault(Event.of(op).queue, []).append(op)
    for op in max(streams.values(), key=lambda found: sum(op.seconds for op in found), default=[]):
        for tensor in op.writes:  # of a bucket several nodes have a part
            node = tensor.name.partition("|")[0].partition(".")[0] if op.bucket else op.node
            yield node, op.seconds * tensor.bytes / max(sum(t.bytes for t in op.writes), 1)


def _nodes_before_another_block(graph: Graph, block_of: Mapping[str, int]) -> frozenset[str]:
    """Return the nodes of the backward from which a value of a block further to the front is computed."""
    reached: set[str] = set()
    for node in reversed(graph.nodes):
        if node.phase != "backward":
            continue
        own = block_of.get(node.name)
        for value in node.inputs:
            maker = block_of.get(value.node)
            crosses = own is not None and maker is not None and maker > own
            if graph.by_name[value.node].phase == "backward" and (crosses or node.name in reached):
                reached.add(value.node)
    return frozenset(reached)


def _add_bytes(walk: _Walk, mesh: Mesh, options: Options) -> None:
    program, graph = walk.program, walk.graph
    readers: dict[str, int] = {}
    for node in graph.nodes:
        for value in node.inputs:
            if value.node in graph.input_of and node.name in walk.block_of:
                readers.setdefault(value.node, walk.block_of[node.name])
    for op in program.ops:
        if op.kind != "input":
            continue
        meaning, tensor = graph.input_of[op.node], op.writes[0]
        if meaning.kind == "parameter":
            s = state_bytes(tensor.meta, tensor.spec, mesh, meaning.trainable, options)
            walk.found[readers.get(op.node, 0)].static += s.parameter + s.optimizer + s.gradient
        elif meaning.kind == "accumulator":
            walk.found[readers.get(op.node, 0)].static += tensor.bytes
    for name, maker in _kept(program):
        if name in program.held_once:
            walk.at(maker).static += program.tensors[name].bytes
        else:
            walk.at(maker).held += program.tensors[name].bytes


def _kept(program: Program) -> Sequence[tuple[str, str]]:
    """Return the tensors that the forward keeps for the backward in device memory, with the nodes that made them."""
    inputs = {op.writes[0].name for op in program.ops if op.kind == "input"}
    made = {t.name: op.node for op in program.ops if op.phase == "forward" for t in op.writes if not t.host}
    read = {program.root[name] for op in program.ops if op.phase == "backward" for name in op.reads if name in made}
    return [(name, made[name]) for name in sorted(read - inputs) if name in made]
