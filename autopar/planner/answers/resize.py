"""A plan's decisions for a batch of other sizes: the same program on other shapes, without a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.ir import Graph, Node, TensorMeta
from autopar.mesh import Mesh
from autopar.planner.footprint.op_work import local_bytes
from autopar.program import LocalTensor, Op, Program
from autopar.sharding import Halo, Loan, ShardingSpec
from autopar.strategies import halos, lent, strategies


def same_but_for_sizes(one: Graph, other: Graph) -> bool:
    """Whether two graphs are the same but for sizes."""
    ends = one.inputs == other.inputs and one.outputs == other.outputs
    return ends and [(n.name, n.op, n.inputs) for n in one.nodes] == [(n.name, n.op, n.inputs) for n in other.nodes]


def with_sizes_of(program: Program, graph: Graph, mesh: Mesh) -> Program | None:
    """Return ``program`` on the shapes of ``graph``, which equals the planned graph but for sizes.

    None if a cut would leave a rank without elements. Predicted seconds stay those that were planned.
    """
    metas: dict[str, TensorMeta] = {}
    specs: dict[str, ShardingSpec] = {}
    ops = []
    for op in program.ops:
        made = _result_metas(op, graph, metas)
        if made is None or not _is_possible(op, graph, made, metas, specs, mesh):
            return None
        writes = tuple(
            replace(t, meta=m, bytes=local_bytes(m, t.spec, mesh)) for t, m in zip(op.writes, made, strict=True)
        )
        metas |= {t.name: t.meta for t in writes}
        specs |= {t.name: t.spec for t in writes}
        ops.append(replace(op, writes=writes, halos=_halos(op, graph, mesh), loan=_loan(op, graph, mesh)))
    return replace(program, ops=tuple(ops))


def _result_metas(op: Op, graph: Graph, metas: dict[str, TensorMeta]) -> Sequence[TensorMeta] | None:
    """Return the global shapes of what the op writes; None if the graph has no such op."""
    node = graph.by_name.get(op.node)
    made = [m for m in node.outputs if m is not None] if node else []
    if op.kind in ("input", "compute"):
        return made if len(made) == len(op.writes) else None
    if op.kind == "decomposed":  # a product, and the operand that is gathered where others read it too
        return [*made, metas[op.reads[op.operand]]][: len(op.writes)] if made else None
    return [metas[name] for name in op.reads[: len(op.writes)]]


def _is_possible(
    op: Op,
    graph: Graph,
    made: Sequence[TensorMeta],
    metas: dict[str, TensorMeta],
    specs: dict[str, ShardingSpec],
    mesh: Mesh,
) -> bool:
    steps = op.bucket or ((op.step,) if op.step is not None else ())
    moved = zip(steps, op.reads, strict=False)
    if op.kind == "redistribute" and not all(t.fits(specs[name], metas[name].shape, mesh) for t, name in moved):
        return False
    if not all(map(_leaves_no_rank_empty, op.writes, made, [mesh] * len(made))):
        return False
    return op.strategy is None or op.strategy in _strategies(graph, graph.by_name[op.node], mesh)


def _halos(op: Op, graph: Graph, mesh: Mesh) -> tuple[Halo, ...]:
    if op.strategy is None or not op.halos:
        return ()
    node = graph.by_name[op.node]
    return halos(node, op.strategy, tuple(graph.meta(v) for v in node.inputs), mesh) or ()


def _loan(op: Op, graph: Graph, mesh: Mesh) -> Loan | None:
    if op.strategy is None or op.loan is None:
        return None
    node = graph.by_name[op.node]
    return lent(node, op.strategy, tuple(graph.meta(v) for v in node.inputs), mesh)


def _strategies(graph: Graph, node: Node, mesh: Mesh) -> Sequence[object]:
    return strategies(node, tuple(graph.meta(v) for v in node.inputs), mesh)


def _leaves_no_rank_empty(tensor: LocalTensor, meta: TensorMeta, mesh: Mesh) -> bool:
    """Whether every rank holds some of what is cut."""
    for n, axes in zip(meta.shape, tensor.spec.dims, strict=True):
        group_size = 1
        for a in axes:
            group_size *= mesh.shape[a]
        if group_size > 1 and n < group_size:
            return False
    return True
