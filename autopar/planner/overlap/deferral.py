"""Deferral of work that nothing waits for, such as gradients of weights, behind the collectives of the backward.

A backward is a chain from the loss to the inputs. Under tensor parallelism collectives are links of this chain, and the
next op waits for each. Gradients of weights, their sums and their reductions hang beside the chain. Autograd computes
them before the collective. Here each is deferred until the next collective of the chain is launched, which so goes out
earlier and hides behind them. Operands live until then; the exact memory of the result counts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.ir import Graph
from autopar.program import Op, Program

PRODUCTS = frozenset(
    {
        "autopar.contract",
        "aten.convolution_backward",
        "autopar.attention_backward",
        "autopar.experts_mm",
        "autopar.routed_mm",
    }
)
"""Ops by which the chain is recognised. A reduced gradient that is only cast or added to another is at the chain's
end."""


def deferred(program: Program, graph: Graph) -> tuple[Op, ...]:
    """Return the ops of ``program``, with what hangs beside the backward's chain behind the collectives of the
    chain."""
    begin = program.turn
    ops = program.ops[begin:]
    links = _links(ops, graph)
    if not links:
        return program.ops
    return (*program.ops[:begin], *_defer(ops, links, _chain_ops(ops, links)))


def may_defer(program: Program, graph: Graph) -> bool:
    """Whether anything can be deferred: the backward's chain has collectives."""
    return bool(_links(program.ops[program.turn :], graph))


def _links(ops: Sequence[Op], graph: Graph) -> set[str]:
    """Return the collectives of the chain: what they send is computed in the backward, and what they bring is
    multiplied there."""
    computed: set[str] = set()
    for op in ops:
        if op.kind in ("compute", "decomposed") or any(name in computed for name in op.reads):
            computed.update(t.name for t in op.writes)
    used: set[str] = set()
    found = set()
    for op in reversed(ops):
        multiplies = op.kind == "decomposed" or (op.kind == "compute" and graph.by_name[op.node].packet in PRODUCTS)
        reaches = multiplies or any(t.name in used for t in op.writes)
        if op.is_collective and reaches and any(name in computed for name in op.reads):
            found.add(op.name)
        if reaches:
            used.update(op.reads)
    return found


def _chain_ops(ops: Sequence[Op], links: set[str]) -> set[str]:
    """Return the ops that lead to a collective of the chain."""
    needed: set[str] = set()
    found = set()
    for op in reversed(ops):
        if op.name in links or any(t.name in needed for t in op.writes):
            found.add(op.name)
            needed.update(op.reads)
    return found


def _defer(ops: Sequence[Op], links: set[str], chain: set[str]) -> Iterator[Op]:
    last = max(i for i, op in enumerate(ops) if op.name in links)
    waiting: list[Op] = []
    made: set[str] = set()
    read: set[str] = set()

    def release() -> Iterator[Op]:
        yield from waiting
        waiting.clear()
        made.clear()
        read.clear()

    for i, op in enumerate(ops):
        if i < last and op.name not in chain and not _is_pinned(op) and not _overwrites(op):
            waiting.append(op)
            made.update(t.name for t in op.writes)
            read.update(op.reads)
            continue
        if any(name in made for name in op.reads) or (_overwrites(op) and op.reads[op.operand] in read):
            yield from release()
        yield op
        if op.name in links:
            yield from release()
    yield from release()


def _is_pinned(op: Op) -> bool:
    """Whether an op keeps its place. Transfers have places of their own."""
    return op.kind == "input" or op.is_transfer or (op.kind == "wait" and len(op.reads) > 1)


def _overwrites(op: Op) -> bool:
    return op.in_place and op.kind == "compute"
