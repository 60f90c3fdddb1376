"""Cut a joint graph into the graphs of pipeline stages, each a joint graph like any other.

The forward is a list of nodes in the order in which it runs, so every position between two of them is a place to cut.
``seams`` chooses those between modules where few bytes cross, and says for every node between which of them it lies;
``cut`` makes a graph of each group of consecutive blocks. What decides where a node goes:

- *Free* nodes depend on inputs, buffers, constants and the seed alone, such as masks and rotary tables. Every stage
  that reads one has a copy of its own, and nothing of them is sent.
- A forward node lies where it runs.
- A backward node reads values of its own or an earlier forward block, and gradients of its own or a later block.
  Between these bounds it lies where forward nodes of its module and line do, and a sum of gradients where the earliest
  of them is.
- What a stage reads of one that is not its neighbour passes through all stages between them, so that messages are
  between neighbours alone.
- A parameter that several stages read has a copy in each, and each makes its own part of the gradient.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autopar.errors import PlanError
from autopar.ir import Arg, Graph, Input, InputKind, Node, Output, Part, Value
from autopar.planner.graphs.accumulation import is_gradient
from autopar.planner.graphs.dataflow import batch_size

COPIED: tuple[InputKind, ...] = ("input", "buffer", "constant", "seed")
"""Kinds of inputs that every stage is given."""

ADD = "aten.add.Tensor"

Path = tuple[str, ...]


@dataclass(frozen=True)
class Seams:
    """Where a graph may be cut.

    Args:
        blocks: names of what lies between neighbouring seams, in the order in which the forward runs: paths of modules,
            or "" for a range of nodes in which no module begins and ends.
        block_of: the block of every op that is not free, forward and backward.
        bytes: of the activations that cross each seam, whole; one entry fewer than blocks.
    """

    blocks: tuple[str, ...]
    block_of: Mapping[str, int]
    bytes: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """One stage.

    What the model returns is an output of the stage that makes it; what no stage computes, such as an input that is
    returned as it is, of the last.

    Args:
        graph: its activations from other stages are inputs of kind "received", and those for other stages outputs of
            kind "sent". The gradient of a sent one comes as a tangent with its name, and that of a received one leaves
            as the gradient ``input:NAME``.
        receives: names of the activations from the stage before, equal to what that one sends.
        sends: names of those to the next stage.
        returns: names of the received activations whose gradients go back. A gradient that belongs to none of them has
            a name of its own.
        takes: names of the sent activations whose gradients come back, equal to what the next stage returns.
    """

    graph: Graph
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    returns: tuple[str, ...]
    takes: tuple[str, ...]


def seams(graph: Graph) -> Seams:
    """Find where ``graph`` may be cut."""
    free = free_nodes(graph)
    forward = _Forward(graph, free)
    starts = [0, *forward.seams()]
    of_position = [i for i, (a, b) in enumerate(itertools.pairwise([*starts, len(forward.nodes)])) for _ in range(a, b)]
    blocks = {node.name: at for node, at in zip(forward.nodes, of_position, strict=True)}
    block_of = blocks | _backward_blocks(graph, free, blocks, len(starts))
    names = tuple(forward.name(a, b) for a, b in itertools.pairwise([*starts, len(forward.nodes)]))
    return Seams(names, block_of, _crossing_bytes(graph, block_of, len(starts)))


def split_at(graph: Graph, seams: Seams, names: Sequence[str]) -> tuple[int, ...]:
    """Return the first block of each stage.

    Args:
        names: modules in the order in which they run, each the first of a stage. That of the first stage may be left
            out.

    Raises:
        PlanError: no seam lies where a module begins, or the modules are in another order.
    """
    begun = _modules_that_begin(graph, seams)
    starts = [0]
    for i, name in enumerate(names):
        places = [at for at in begun.get(name, ()) if at > starts[-1] or (i == 0 and at == 0)]
        if not places:
            raise _cannot_begin(name, graph, begun, names[:i])
        starts += [places[0]] * (places[0] > 0)
    return tuple(starts)


def cut(graph: Graph, seams: Seams, starts: Sequence[int]) -> tuple[Stage, ...]:
    """Cut ``graph`` into stages that begin with the blocks ``starts``, in increasing order from 0."""
    assert list(starts) == sorted(set(starts)) and starts[0] == 0 and starts[-1] < len(seams.blocks), starts
    stage_of_block = [sum(b >= s for s in starts) - 1 for b in range(len(seams.blocks))]
    stage = {name: stage_of_block[b] for name, b in seams.block_of.items()}
    apart = _with_sums_apart(graph, stage)
    crossing = _crossing(apart.graph, apart.stage, len(starts))
    owners = [_owners(graph, seams.block_of, apart.stage, s, crossing) for s in range(len(starts) + 1)]
    build = _Builder(apart.graph, apart.stage, crossing, owners, _Names(graph), batch_size(graph))
    return tuple(build.stage(s) for s in range(len(starts)))


def free_nodes(graph: Graph) -> frozenset[str]:
    """Return the nodes that depend on inputs, buffers, constants and the seed alone, these placeholders included."""
    free: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            if graph.input_of[node.name].kind in COPIED:
                free.add(node.name)
        elif all(v.node in free for v in node.inputs):
            free.add(node.name)
    return frozenset(free)


# -- where to cut ------------------------------------------------------------------------------------------------------


@dataclass
class _Forward:
    """The ops of the forward that are not free, in order; a position is the one before the op of that index."""

    graph: Graph
    free: frozenset[str]
    nodes: list[Node] = field(init=False)
    paths: list[Path] = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = [n for n in self.graph.nodes if n.phase == "forward" and _is_placed(n, self.free)]
        self.paths = [_path(n) for n in self.nodes]

    def seams(self) -> list[int]:
        """Return the positions of the seams: between modules, or in a model without modules between any two nodes."""
        found = {t for t in self._between_modules(0, len(self.nodes), 0) if t not in self._forbidden}
        return sorted(found) or [t for t in range(1, len(self.nodes)) if self._is_least(t) and t not in self._forbidden]

    def _is_least(self, t: int) -> bool:
        inner = range(1, len(self.nodes))
        return all(self.bytes[t] <= self.bytes[u] for u in (t - 1, t + 1) if u in inner)

    def _between_modules(self, first: int, end: int, depth: int, most: float = math.inf) -> Iterator[int]:
        """Yield the seams inside ``[first, end)``, the nodes of one module, whose path has ``depth`` parts.

        Repeated modules have seams around them and none inside. At others at most as many bytes may cross as at the
        beginning or end of the module that they are in, and at most ``most``.
        """
        children = [list(g) for _, g in itertools.groupby(range(first, end), lambda i: self.paths[i][: depth + 1])]
        if first > 0 and end < len(self.nodes):
            most = min(most, max(self.bytes[first], self.bytes[end]))
        for before, child in itertools.pairwise(children):
            if self._block_at[before[-1]] != self._block_at[child[0]] or self.bytes[child[0]] <= most:
                yield child[0]
        for child in children:
            path = self.paths[child[0]][: depth + 1]
            if len(path) > depth and path not in self._list_members:
                yield from self._between_modules(child[0], child[-1] + 1, depth + 1, most)

    @cached_property
    def _block_at(self) -> list[Path]:
        """The repeated module of each node; empty outside of these."""
        return [next((p[:d] for d in range(1, len(p) + 1) if p[:d] in self._list_members), ()) for p in self.paths]

    @cached_property
    def _list_members(self) -> set[Path]:
        """The outermost members of lists of modules most of which run the same ops as another one, on the same shapes.

        A list (``ModuleList``, ``Sequential``) computes nothing itself.
        """
        found: set[Path] = set()
        computing = set(self.paths)
        for depth in range(1, max(map(len, self.paths), default=0) + 1):
            members: dict[Path, list[tuple[Path, object]]] = {}
            for path, places in itertools.groupby(range(len(self.nodes)), lambda i: self.paths[i][:depth]):  # noqa: B023
                inside = any(path[:d] in found for d in range(1, depth))
                if len(path) == depth and path[:-1] not in computing and not inside:
                    work = tuple(self._work(self.nodes[i]) for i in places)
                    members.setdefault(path[:-1], []).append((path, work))
            for calls in members.values():
                modules: dict[object, set[Path]] = {}
                for path, done in calls:
                    modules.setdefault(done, set()).add(path)
                if sum(len(modules[done]) > 1 for _, done in calls) * 2 > len(calls):
                    found.update(path for path, _ in calls)
        return found

    def _work(self, node: Node) -> object:
        return node.op, node.outputs, tuple(self.graph.meta(v) for v in node.inputs)

    @cached_property
    def bytes(self) -> list[int]:
        """Bytes that the forward reads at or after each position of what it made before."""
        at = {n.name: i for i, n in enumerate(self.nodes)}
        change = [0] * (len(self.nodes) + 1)
        last: dict[Value, int] = {}
        for i, node in enumerate(self.nodes):
            last.update((v, i) for v in node.inputs if v.node in at)
        for value, end in last.items():
            change[at[value.node] + 1] += (size := self.graph.meta(value).bytes)
            change[end + 1] -= size
        return list(itertools.accumulate(change))

    @cached_property
    def _forbidden(self) -> set[int]:
        """Positions between the ops that read a buffer and the one that makes its new value, which need one stage."""
        at = {n.name: i for i, n in enumerate(self.nodes)}
        found: set[int] = set()
        made = {o.name: o.value.node for o in self.graph.outputs if o.kind == "mutation" and o.value.node in at}
        for node in (i.node for i in self.graph.inputs if i.name in made and i.kind == "buffer"):
            places = [at[n] for n in _readers_through(self.graph, self.free, node) if n in at]
            places.append(at[made[self.graph.input_of[node].name]])
            found.update(range(min(places) + 1, max(places) + 1))
        return found

    def name(self, first: int, end: int) -> str:
        """Return the largest module that begins at ``first`` and ends by ``end``; of a list its member."""
        largest, name = 0, ""
        for depth in range(_common(self.paths, first), len(self.paths[first])):
            path = self.paths[first][: depth + 1]
            inside = itertools.takewhile(lambda p: p[: depth + 1] == path, self.paths[first:])  # noqa: B023  used at once
            length = sum(1 for _ in inside)
            member = length == largest and path[-1].isdigit() and ".".join(path[:-1]) == name
            if first + length <= end and (length > largest or member):
                largest, name = length, ".".join(path)
        return name


def _is_placed(node: Node, free: Collection[str]) -> bool:
    return node.op != "placeholder" and node.name not in free


def _path(node: Node) -> Path:
    return tuple(node.module.split(".")) if node.module else ()


def _common(paths: Sequence[Path], at: int) -> int:
    """Return how many parts the path at ``at`` shares with the one before it."""
    before = paths[at - 1] if at else ()
    return sum(1 for _ in itertools.takewhile(lambda ab: ab[0] == ab[1], zip(before, paths[at], strict=False)))


def _readers_through(graph: Graph, free: Collection[str], source: str) -> Iterator[str]:
    """Yield the nodes that read ``source`` or a free node that depends on it."""
    ahead, seen = [source], {source}
    while ahead:
        node = graph.by_name[ahead.pop()]
        for i in range(len(node.outputs)):
            for reader, _ in graph.consumers.get(Value(node.name, i), ()):
                if reader.name not in free:
                    yield reader.name
                elif reader.name not in seen:
                    seen.add(reader.name)
                    ahead.append(reader.name)


def _modules_that_begin(graph: Graph, seams: Seams) -> dict[str, list[int]]:
    """Return the blocks with which each module begins, in order."""
    forward = [n for n in graph.nodes if n.phase == "forward" and n.name in seams.block_of]
    paths = [_path(n) for n in forward]
    begun: dict[str, list[int]] = {}
    for i, node in enumerate(forward):
        block = seams.block_of[node.name]
        if i == 0 or block != seams.block_of[forward[i - 1].name]:
            for depth in range(_common(paths, i), len(paths[i])):
                begun.setdefault(".".join(paths[i][: depth + 1]), []).append(block)
    return begun


def _cannot_begin(name: str, graph: Graph, begun: Mapping[str, Sequence[int]], before: Sequence[str]) -> PlanError:
    if name in begun:
        return PlanError(
            "The first modules of the stages are not in the order in which they run.",
            found=f"{name!r} after {before[-1]!r}",
            hint="name each module once, in the order of the forward.",
        )
    runs = any(f"{n.module}.".startswith(f"{name}.") for n in graph.nodes)
    near = difflib.get_close_matches(name, begun, n=3, cutoff=0.4) or list(begun)[:3]
    return PlanError(
        f"No stage can begin with {name!r}: " + ("no seam lies there." if runs else "no such module runs."),
        found=repr(name),
        hint=f"near it are {', '.join(map(repr, near))}.",
    )


# -- which block a backward node belongs to ----------------------------------------------------------------------------


def _backward_blocks(graph: Graph, free: frozenset[str], blocks: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the block of each backward node.

    The least possible block is that of the last forward value that the node, or what depends on it, reads; the largest
    is the earliest among those of its gradients.
    """
    backward = [n for n in graph.nodes if n.phase == "backward" and _is_placed(n, free)]
    least = _least_blocks(graph, backward, blocks)
    nearby = _Nearby(graph, blocks)
    returned = {o.name: blocks.get(o.value.node, count - 1) for o in graph.outputs if o.kind == "output"}
    found = {i.node: returned.get(i.name, count - 1) for i in graph.inputs if i.kind == "tangent"}
    reached = count - 1
    for node in backward:
        low, near = least[node.name], nearby.of(node)
        high = max(low, min((found[v.node] for v in node.inputs if v.node in found), default=count - 1))
        within = [b for b in near if low <= b <= high]
        read = max((blocks[v.node] for v in node.inputs if v.node in blocks), default=-1)
        if not within:
            found[node.name] = low if near and max(near) < low else high
        elif read >= 0:
            found[node.name] = min(within)
        else:
            found[node.name] = max((b for b in within if b <= reached), default=min(within))
        if read >= 0 or len(near) == 1:  # the backward runs in the reverse order of the forward
            reached = found[node.name]
    return {n.name: found[n.name] for n in backward}


def _least_blocks(graph: Graph, backward: Sequence[Node], blocks: Mapping[str, int]) -> dict[str, int]:
    """Return the last block whose values each node needs or what depends on it; -1 if there is none."""
    sums = {name for whole in _sums(graph).values() for name in whole.adds}
    least: dict[str, int] = {}
    for node in reversed(backward):
        readers = (r.name for i in range(len(node.outputs)) for r, _ in graph.consumers.get(Value(node.name, i), ()))
        later = [least[r] for r in readers if r in least and r not in sums]
        least[node.name] = max([*later, *(blocks.get(v.node, -1) for v in node.inputs)], default=-1)
    return least


@dataclass
class _Nearby:
    """The forward blocks to which a backward node may belong."""

    graph: Graph
    blocks: Mapping[str, int]

    def __post_init__(self) -> None:
        self.by_line: dict[tuple[str, str], set[int]] = {}
        self.by_module: dict[str, set[int]] = {}
        self.readers: dict[str, set[int]] = {}
        for node in self.graph.nodes:
            if node.name in self.blocks:
                self.by_line.setdefault((node.module, node.source), set()).add(self.blocks[node.name])
                self.by_module.setdefault(node.module, set()).add(self.blocks[node.name])
                for v in node.inputs:
                    self.readers.setdefault(v.node, set()).add(self.blocks[node.name])
        self.gradients: dict[str, set[int]] = {}
        owners = {i.name: i.node for i in reversed(self.graph.inputs) if i.kind == "parameter"}
        for name, whole in _sums(self.graph).items():
            for part in whole.parts:
                self.gradients.setdefault(part.node, self.readers.get(owners[name], set()))

    def of(self, node: Node) -> set[int]:
        """Return the blocks that read the parameter whose gradient this is, or that have forward nodes of its line or
        its module."""
        readers, beside = self.gradients.get(node.name, set()), self._beside(node)
        return (readers & beside) or readers or beside

    def _beside(self, node: Node) -> set[int]:
        if not node.module and not node.source:
            return set()
        found = self.by_line.get((node.module, node.source))
        return found or (self.by_module.get(node.module, set()) if node.module else set())


# -- sums of a parameter's gradients -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sum:
    """A sum of a gradient: the values that are added, in order, and the nodes that add them."""

    parts: tuple[Value, ...]
    adds: tuple[str, ...]


def _sums(graph: Graph) -> dict[str, _Sum]:
    """Return the sum that each parameter's gradient is, by the parameter's name."""
    returned = Counter(o.value for o in graph.outputs)
    return {o.name: _sum_of(graph, o, returned) for o in graph.outputs if is_gradient(o)}


def _sum_of(graph: Graph, output: Output, returned: Mapping[Value, int]) -> _Sum:
    parts: list[Value] = []
    adds: list[str] = []
    ahead = [output.value]
    while ahead:
        value = ahead.pop()
        node = graph.by_name[value.node]
        uses = len(graph.consumers.get(value, ())) + returned.get(value, 0)
        if uses == 1 and _adds_alike(graph, node):
            adds.append(node.name)
            ahead += reversed(node.inputs)
        else:
            parts.append(value)
    return _Sum(tuple(parts), tuple(adds))


def _adds_alike(graph: Graph, node: Node) -> bool:
    """Whether a node adds two values of the result's shape and dtype."""
    plain = node.op == ADD and not node.kwargs and len(node.inputs) == len(node.args) == 2
    return plain and all(graph.meta(v) == node.outputs[0] for v in node.inputs)


@dataclass(frozen=True)
class _Apart:
    """A graph in which each stage adds up its own part of every gradient, and the stage of each node."""

    graph: Graph
    stage: Mapping[str, int]


def _with_sums_apart(graph: Graph, stage: Mapping[str, int]) -> _Apart:
    of, removed, sums = dict(stage), set[str](), _sums(graph)
    added: list[tuple[float, Node]] = []
    outputs: list[Output] = []
    for output in graph.outputs:
        whole = sums[output.name] if is_gradient(output) else _Sum((output.value,), ())
        stages = {of[v.node]: None for v in whole.parts if v.node in of}
        if len(stages) < 2:
            outputs.append(output)
            continue
        removed.update(whole.adds)
        names = iter(whole.adds)
        for s in sorted(stages):
            total, *others = sorted((v for v in whole.parts if of[v.node] == s), key=lambda v: graph.order[v.node])
            for value in others:
                name = next(names)
                template = graph.by_name[name]
                added.append((graph.order[value.node] + 0.5, replace(template, args=(total, value))))
                total, of[name] = Value(name), s
            outputs.append(replace(output, value=total))
    if not removed:
        return _Apart(graph, stage)
    placed = {n.name for _, n in added}
    of = {name: s for name, s in of.items() if name not in removed or name in placed}
    kept = [(float(i), n) for i, n in enumerate(graph.nodes) if n.name not in removed]
    nodes = tuple(n for _, n in sorted([*kept, *added], key=lambda at: at[0]))
    return _Apart(replace(graph, nodes=nodes, outputs=tuple(outputs)), of)


# -- what crosses ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Crossing:
    """What crosses between neighbouring stages: entry ``s`` is between ``s - 1`` and ``s``; nothing at both ends."""

    down: tuple[tuple[Value, ...], ...]
    up: tuple[tuple[Value, ...], ...]


def _crossing(graph: Graph, stage: Mapping[str, int], count: int) -> _Crossing:
    down: list[dict[Value, None]] = [{} for _ in range(count + 1)]
    up: list[dict[Value, None]] = [{} for _ in range(count + 1)]
    for node in graph.nodes:
        for i in range(len(node.outputs)) if node.name in stage else ():
            value, made = Value(node.name, i), stage[node.name]
            reached = {stage[r.name] for r, _ in graph.consumers.get(value, ())}
            ahead, behind = max(reached, default=made), min(reached, default=made)
            assert ahead <= made if node.phase == "backward" else behind >= made, f"{value} is read on the wrong side"
            for s in range(made + 1, ahead + 1):
                down[s][value] = None
            for s in range(behind + 1, made + 1):
                up[s][value] = None
    return _Crossing(tuple(map(tuple, down)), tuple(map(tuple, up)))


def _crossing_bytes(graph: Graph, block_of: Mapping[str, int], count: int) -> tuple[int, ...]:
    """Return the bytes of activations that cross each seam; a sum of gradients is taken apart, so it counts nowhere."""
    total = [0] * (count + 1)
    for node in graph.nodes:
        if node.phase == "forward" and node.name in block_of:
            for i, meta in enumerate(node.outputs):
                readers = graph.consumers.get(Value(node.name, i), ())
                last = max((block_of[r.name] for r, _ in readers), default=0)
                for s in range(block_of[node.name] + 1, last + 1):
                    total[s] += meta.bytes if meta else 0
    return tuple(total[1:count])


def _owners(
    graph: Graph, block_of: Mapping[str, int], stage: Mapping[str, int], s: int, crossing: _Crossing
) -> dict[Value, Value]:
    """Return the activation to which each gradient that crosses between two stages belongs.

    The graph does not say which. An activation's gradient has its shape and dtype, and is read where the activation is
    made; of several the last to be made has the first gradient. A gradient for which none is left owns itself.
    """
    left = list(reversed(crossing.down[s]))
    owners: dict[Value, Value] = {}
    for gradient in crossing.up[s]:
        readers = (r.name for r, _ in graph.consumers.get(gradient, ()))
        read = max((block_of[r] for r in readers if stage.get(r, s) < s), default=0)
        alike = [v for v in left if graph.meta(v) == graph.meta(gradient)]
        owners[gradient] = min(alike, key=lambda v: abs(block_of[v.node] - read), default=gradient)
        left = [v for v in left if v != owners[gradient]]
    return owners


@dataclass(frozen=True)
class _Names:
    """The names under which stages exchange values, which are those of no input or output of the model."""

    graph: Graph

    def __call__(self, value: Value) -> str:
        name = str(value)
        while name in self._taken:
            name += "_"
        return name

    @cached_property
    def _taken(self) -> frozenset[str]:
        return frozenset([*(i.name for i in self.graph.inputs), *(o.name for o in self.graph.outputs)])


# -- the graphs of stages ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Builder:
    """Builds the graph of each stage.

    Args:
        owners: for each entry of ``crossing.up``, the activations to which the gradients belong.
        names: those of what is exchanged.
        batch: size of the batch.
    """

    graph: Graph
    of: Mapping[str, int]
    crossing: _Crossing
    owners: Sequence[Mapping[Value, Value]]
    names: _Names
    batch: int

    def stage(self, s: int) -> Stage:
        received, sent = self.crossing.down[s], self.crossing.down[s + 1]
        returned, taken = self.crossing.up[s], self.crossing.up[s + 1]
        returning = tuple(self.names(v) for v in self.owners[s].values())
        taking = tuple(self.names(v) for v in self.owners[s + 1].values())
        receiving, sending = tuple(map(self.names, received)), tuple(map(self.names, sent))
        here = {v: Value(str(v)) for v in (*received, *taken)}
        outputs = [o for o in self.graph.outputs if self._home(o) == s]
        own = {name for name, at in self.of.items() if at == s} | {i.node for i in self._unread if self._owner(i) == s}
        wanted = self._wanted(own, outputs)
        # A buffer that is changed without regard to the rest of the model changes in every stage that reads it.
        copies = [o for o in self._free_mutations if o not in outputs and self._buffer[o.name] in wanted]
        outputs = [o for o in self.graph.outputs if o in outputs or o in copies]
        wanted = self._wanted(own, outputs)

        placed = [n for n in self.graph.nodes if n.name in wanted]
        inputs = [self.graph.input_of[n.name] for n in placed if n.op == "placeholder"]
        inputs += [Input(str(v), "received", name) for v, name in zip(received, receiving, strict=True)]
        inputs += [Input(str(v), "tangent", name) for v, name in zip(taken, taking, strict=True)]
        outputs = [replace(o, value=here.get(o.value, o.value)) for o in outputs]
        outputs += [Output(here.get(v, v), "sent", name) for v, name in zip(sent, sending, strict=True)]
        outputs += [
            Output(here.get(v, v), "gradient", f"input:{name}") for v, name in zip(returned, returning, strict=True)
        ]
        nodes = [n for n in placed if n.op == "placeholder"]
        nodes += [Node(str(v), "placeholder", outputs=(self.graph.meta(v),)) for v in received]
        nodes += [Node(str(v), "placeholder", outputs=(self.graph.meta(v),), phase="backward") for v in taken]
        nodes += [_reading(n, here) for n in placed if n.op != "placeholder"]
        made = replace(
            self.graph,
            nodes=tuple(nodes),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            name=f"{self.graph.name}, stage {s}",
            part=Part(self.batch, frozenset((*receiving, *sending, *returning, *taking))),
        )
        return Stage(made, receiving, sending, returning, taking)

    def _wanted(self, own: Collection[str], outputs: Iterable[Output]) -> set[str]:
        """Return the nodes of a stage: its own, and what they and its outputs read that has no stage."""
        wanted = {*own, *(o.value.node for o in outputs), *(n for o in outputs if (n := self._owner_of(o)))}
        ahead = list(wanted)
        while ahead:
            for value in self.graph.by_name[ahead.pop()].inputs:
                if value.node not in wanted and value.node not in self.of:
                    wanted.add(value.node)
                    ahead.append(value.node)
        return wanted

    def _home(self, output: Output) -> int:
        """Return the stage that makes a result of the model."""
        if output.value.node in self.of:
            return self.of[output.value.node]
        owner = self._owner_of(output) or output.value.node
        if output.kind == "output" and owner not in self._parameter.values():
            return self._last
        return min(self._readers[owner], default=self._around(output.value.node))

    def _owner_of(self, output: Output) -> str | None:
        """Return the placeholder of the parameter or buffer to which a result belongs."""
        if is_gradient(output):
            return self._parameter[output.name]
        return self._buffer[output.name] if output.kind == "mutation" else None

    def _around(self, name: str) -> int:
        """Return the stage of the ops next to a node that has none: of its module, or else that run after it."""
        node, at = self.graph.by_name[name], self.graph.order[name]
        forward = [n for n in self.graph.nodes if n.phase == "forward" and n.name in self.of]
        beside = [self.of[n.name] for n in forward if n.module == node.module]
        return min(beside or [self.of[n.name] for n in forward if self.graph.order[n.name] > at], default=self._last)

    @cached_property
    def _last(self) -> int:
        return len(self.crossing.up) - 2

    @cached_property
    def _readers(self) -> Mapping[str, set[int]]:
        """The stages that read each placeholder, also through free nodes."""
        free = free_nodes(self.graph)
        return {
            i.node: {self.of[n] for n in _readers_through(self.graph, free, i.node) if n in self.of}
            for i in self.graph.inputs
        }

    @cached_property
    def _parameter(self) -> Mapping[str, str]:
        return {i.name: i.node for i in reversed(self.graph.inputs) if i.kind == "parameter"}

    @cached_property
    def _buffer(self) -> Mapping[str, str]:
        return {i.name: i.node for i in reversed(self.graph.inputs) if i.kind == "buffer"}

    @cached_property
    def _free_mutations(self) -> list[Output]:
        return [o for o in self.graph.outputs if o.kind == "mutation" and o.value.node not in self.of]

    @cached_property
    def _unread(self) -> list[Input]:
        """Inputs that nothing reads, which must be in some stage all the same."""
        results = {n for o in self.graph.outputs for n in (o.value.node, self._owner_of(o))}
        return [i for i in self.graph.inputs if Value(i.node) not in self.graph.consumers and i.node not in results]

    def _owner(self, unread: Input) -> int:
        made = {o.name: self._home(o) for o in self.graph.outputs if o.kind == "output"}
        return made.get(unread.name, self._last) if unread.kind == "tangent" else 0


def _reading(node: Node, here: Mapping[Value, Value]) -> Node:
    """Return ``node`` with the values that come from other stages under the names they have here."""
    if not any(here.get(v, v) != v for v in node.inputs):
        return node
    kwargs = tuple((k, _renamed(a, here)) for k, a in node.kwargs)
    return replace(node, args=tuple(_renamed(a, here) for a in node.args), kwargs=kwargs)


def _renamed(arg: Arg, here: Mapping[Value, Value]) -> Arg:
    if isinstance(arg, Value):
        return here.get(arg, arg)
    return tuple(_renamed(a, here) for a in arg) if isinstance(arg, tuple) else arg


__all__ = ["Seams", "Stage", "cut", "free_nodes", "seams", "split_at"]
