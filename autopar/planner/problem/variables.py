"""Decision variables and the uses that connect them, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from autopar import settings
from autopar.holding import Action
from autopar.ir import Graph, Node, Output, Phase, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.planner.footprint.layouts import views_of
from autopar.planner.graphs.kernel_patterns import inner_values
from autopar.planner.memo import Memo
from autopar.repetition import shift_of
from autopar.sharding import ShardingSpec, Strategy


@dataclass(frozen=True)
class Variable:
    """One decision, whose options are strategies.

    Args:
        key: a node's name, or the name of a value's copy in a phase.
        kept: for a copy in the backward, which options keep what the forward gathered.
        actions: what each option of a hold or rerun variable does.
        host_state_bytes: for each option of a parameter, the bytes of its optimizer state that the host keeps.
    """

    key: str
    kind: str
    options: tuple[Strategy, ...]
    phase: Phase
    node: Node | None = None
    value: Value | None = None
    kept: tuple[bool, ...] = ()
    actions: tuple[Action, ...] = ()
    host_state_bytes: tuple[int, ...] = ()

    @property
    def about(self) -> str:
        """The name of the node that it decides about."""
        if self.value is not None:
            return self.value.node
        return self.node.name if self.node is not None else self.key.split("@")[0]


class Use(NamedTuple):
    """A read of variable ``source``'s result ``out`` by variable ``target`` as operand ``position``.

    If ``kept``, the pair has no price: the target's kept options require the same spec at the source. A ``target`` that
    stores the value, as a parameter does its gradient, reads it at its own spec, with position -1. If ``rerun``, the
    source is an op that is run again, whose result the target's recompute options take as it is.
    """

    source: int
    out: int
    target: int
    position: int
    meta: TensorMeta
    kept: bool = False
    rerun: bool = False


class InternedOptions:
    """One object for equal options. Prices made from them are then one object too, by which repeated blocks are
    found.

    Attributes:
        memo: what is made of interned options.
    """

    def __init__(self) -> None:
        self.memo = Memo()
        self._known: dict[tuple[Strategy, ...], tuple[Strategy, ...]] = {}
        self._at: dict[int, tuple[Strategy, ...]] = {}

    def of(self, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        if self._at.get(id(options)) is not options:
            options = self._known.setdefault(options, options)
            self._at[id(options)] = options
        return options

    def of_readers(self, readers: Sequence[tuple[tuple[Strategy, ...], int]], *, twice: bool) -> tuple[Strategy, ...]:
        """Return every spec in which interned options read an operand, as options; with ``twice`` each two times."""

        def found() -> tuple[Strategy, ...]:
            specs = dict.fromkeys(spec_read(o, position) for options, position in readers for o in options)
            each = tuple(Strategy((s,), (s,)) for s in specs if s is not None)
            return self.of(each * 2 if twice else each)

        at = (position for _, position in readers)
        return self.memo.of("read", tuple(options for options, _ in readers), found, twice, *at)


@dataclass
class Decisions:
    """All variables and uses of a graph on a mesh.

    Args:
        recomputes: whether ops of the forward may run again in the backward.
        min_stored_bytes: smaller values are not stored in another place or form.
        accumulation_steps: micro-batches in one step of the optimizer.
        seam_s: seconds for each byte that a rank sends to another stage.
        widened: gradients that are reduced only after their cast to a wider dtype.
        interned: the options of all variables; those of several graphs that are priced together may be in one.
    """

    graph: Graph
    mesh: Mesh
    variables: list[Variable] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)
    recomputes: bool = False
    min_stored_bytes: float = math.inf
    accumulation_steps: int = 1
    seam_s: float = 0.0
    widened: frozenset[Value] = frozenset()
    interned: InternedOptions = field(default_factory=InternedOptions)

    @cached_property
    def reduced_dtype(self) -> Mapping[str, str]:
        """The dtype in which each parameter's gradient is made."""
        return {o.name: self.graph.meta(o.value).dtype for o in self.graph.outputs if o.kind == "gradient"}

    @cached_property
    def summing(self) -> frozenset[str]:
        """The accumulators of gradients and the ops that add to them."""
        sums = [i.node for i in self.graph.inputs if i.kind == "accumulator"]
        adding = (reader.name for name in sums for reader, _ in self.graph.consumers.get(Value(name), ()))
        return frozenset((*sums, *adding))

    @cached_property
    def returned(self) -> frozenset[Value]:
        """Values that leave the program: the caller gets them, or another pipeline stage."""
        return frozenset(o.value for o in self.graph.outputs if is_handed_out(o))

    @cached_property
    def kept_by_caller(self) -> frozenset[Value]:
        """Values that the caller holds to the end of the step."""
        found = (o for o in self.graph.outputs if is_handed_out(o) and not self.graph.goes_to_stage(o))
        return frozenset(o.value for o in found)

    @cached_property
    def output_of(self) -> Mapping[str, Output]:
        """The result of each variable for one that leaves the program, by the variable's key."""
        return {output_key(o.name): o for o in self.graph.outputs if is_handed_out(o)}

    @cached_property
    def inside_kernels(self) -> frozenset[Value]:
        """Values that are never kept for the backward: the kernel that makes what is around them does not write
        them."""
        return inner_values(self.graph)

    @cached_property
    def views(self) -> frozenset[str]:
        """Nodes whose results share the memory of their operand."""
        return views_of(self.graph, whole=self.mesh.size == 1)

    @cached_property
    def readers(self) -> Mapping[int, Sequence[Use]]:
        """The uses of each variable's results, the first reader's first."""
        found: dict[int, list[Use]] = {}
        for use in sorted(self.uses, key=lambda use: (use.target, use.position)):
            found.setdefault(use.source, []).append(use)
        return found

    def last_reader(self, copy: int) -> Use | None:
        """Return the use by the last op that reads a copy; None if it is the only reader."""
        readers = self.readers.get(copy, ())
        if len({use.target for use in readers}) < 2:
            return None
        of_ops = [(t.node.name, u) for u in readers if (t := self.variables[u.target]).kind == "op" and t.node]
        return max(of_ops, key=lambda found: self.graph.order[found[0]], default=("", None))[1]

    @cached_property
    def shift(self) -> Mapping[int, int]:
        """The variables of equal layers that may be worth folding, and their likes one layer further on."""
        shift = shift_of(run for run in self.graph.repetition.runs if len(run.copies) >= settings.FOLDED_LEAST)
        likes = {self.graph.nodes[a].name: self.graph.nodes[b].name for a, b in shift.items()}
        keys = (likes.get(v.about, "") + v.key.removeprefix(v.about) for v in self.variables)
        return {at: self.index[key] for at, key in enumerate(keys) if key in self.index}

    def add(self, variable: Variable) -> int:
        options = self.interned.of(variable.options)
        if options is not variable.options:
            variable = replace(variable, options=options)
        at = self.index[variable.key] = len(self.variables)
        self.variables.append(variable)
        return at

    def reader_options(self, readers: Sequence[tuple[int, int]], *, twice: bool = False) -> tuple[Strategy, ...]:
        """Return every spec in which some reader (variable, operand) takes a value, as options of a copy.

        A copy in any other spec would serve nobody better. With ``twice`` each spec may be made or kept.
        """
        return self.interned.of_readers([(self.variables[target].options, p) for target, p in readers], twice=twice)


def copy_key(value: Value, phase: Phase) -> str:
    return f"{value}@{phase}"


def hold_key(value: Value) -> str:
    return f"{value}@held"


def rerun_key(node: str) -> str:
    return f"{node}@rerun"


def forced_key(value: Value) -> str:
    return f"{value}@module"


def is_handed_out(output: Output) -> bool:
    """Whether a result leaves the program, so that it has a variable of its own; other results are stored."""
    return output.kind in ("output", "sent") or output.name.startswith("input:")


def output_key(name: str) -> str:
    return f"output:{name}"


def spec_read(option: Strategy, position: int) -> ShardingSpec | None:
    """Return the spec in which an option reads operand ``position``; -1 is the spec in which a variable stores.

    None if it reads nothing.
    """
    if position < 0:
        return option.outputs[0]
    return option.inputs[position] if option.inputs else None


def spec_made(option: Strategy, out: int) -> ShardingSpec | None:
    """Return the spec of an option's result ``out``; None if it makes nothing."""
    return option.outputs[out] if option.outputs else None
