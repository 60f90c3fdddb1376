"""Gradients that accumulate over several micro-batches, as part of the graph.

Every gradient of a parameter gets an *accumulator*, which is an input of the backward that holds the sum so far, and an
op that adds to it. The accumulator's spec is a decision like any other. In the parameter's own spec a gradient is
reduced in every micro-batch, and little is held. As a partial sum it is reduced in the last micro-batch only, which
costs the memory of what is not reduced yet. Between the two, it may be reduced over some mesh axes at once and over
others at the end.

All micro-batches but the last run the *accumulation program*: the same without what takes the sums to their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.ir import FLOATS, ITEMSIZE, Graph, Input, Node, Output, TensorMeta, Value
from autopar.planner.footprint.op_work import VIEWS
from autopar.program import Op, Program


def with_gradient_sums(graph: Graph, steps: int, reduce: str | None) -> Graph:
    """Return ``graph`` with the sums of its parameters' gradients made explicit.

    Args:
        steps: micro-batches; with more than one each gradient has an accumulator.
        reduce: the dtype in which gradients are summed over micro-batches and ranks; None for that in which each is
            computed over ranks, and the parameter's over micro-batches.
    """
    graph = _uncast(graph)
    if reduce is not None or steps > 1:
        graph = _cast(graph, reduce)
    return graph if steps == 1 else _accumulating(graph)


def _uncast(graph: Graph) -> Graph:
    """Return ``graph`` without the casts of gradients from the dtype of computation to their parameters'.

    The reader of a gradient casts it once it is reduced, so it is sent in half the bytes, and nothing waits for it.
    """
    results = [o.value for o in graph.outputs if not is_gradient(o)]
    made = {o.value: graph.by_name[o.value.node] for o in graph.outputs if is_gradient(o)}
    casts = {
        value: node.inputs[0]
        for value, node in made.items()
        if node.packet == "aten._to_copy"
        and set(dict(node.kwargs)) <= {"dtype"}
        and ITEMSIZE[graph.meta(node.inputs[0]).dtype] == HALF < ITEMSIZE[graph.meta(value).dtype]
        and not graph.consumers.get(value)
        and value not in results
    }
    gone = {value.node for value in casts}
    return replace(
        graph,
        nodes=tuple(n for n in graph.nodes if n.name not in gone),
        outputs=tuple(replace(o, value=casts.get(o.value, o.value)) for o in graph.outputs),
    )


HALF = 2
"""Bytes of the dtypes of mixed precision."""


def _cast(graph: Graph, dtype: str | None) -> Graph:
    """Cast every gradient of a parameter to ``dtype``, or to the parameter's. Its reader casts it back once it is
    reduced."""
    taken = {n.name for n in graph.nodes}
    after: dict[str, list[Node]] = {}
    outputs = []
    stored = {i.name: graph.meta(Value(i.node)).dtype for i in reversed(graph.inputs) if i.kind == "parameter"}
    for output in graph.outputs:
        made, meta = graph.by_name[output.value.node], graph.meta(output.value)
        to = dtype or stored.get(output.name, meta.dtype)
        if is_gradient(output) and meta.dtype != to and meta.dtype in FLOATS:
            cast = Node(
                _unused_name(f"{made.name}_{to}", taken),
                "aten._to_copy.default",
                (output.value,),
                (("dtype", f"torch.{to}"),),
                (TensorMeta(meta.shape, to),),
                "backward",
                made.module,
                made.source,
            )
            after.setdefault(made.name, []).append(cast)
            output = replace(output, value=Value(cast.name))
        outputs.append(output)
    nodes = tuple(n for node in graph.nodes for n in (node, *after.get(node.name, ())))
    return replace(graph, nodes=nodes, outputs=tuple(outputs))


def _accumulating(graph: Graph) -> Graph:
    """Return ``graph`` with an accumulator for each parameter's gradient."""
    taken = {n.name for n in graph.nodes}
    after: dict[str, list[Node]] = {}
    inputs, outputs = list(graph.inputs), []
    owner = {i.name: i.node for i in reversed(graph.inputs) if i.kind == "parameter"}
    for output in graph.outputs:
        if not is_gradient(output):
            outputs.append(output)
            continue
        gradient = graph.by_name[output.value.node]
        name = _unused_name(f"{owner[output.name]}_accumulated", taken)
        total = _unused_name(f"{owner[output.name]}_total", taken)
        meta = graph.meta(output.value)
        inputs.append(Input(name, "accumulator", output.name))
        after.setdefault(gradient.name, []).extend(
            [
                Node(name, "placeholder", outputs=(meta,), phase="backward"),
                Node(
                    total,
                    "aten.add.Tensor",
                    (Value(name), output.value),
                    outputs=(meta,),
                    phase="backward",
                    module=gradient.module,
                    source=gradient.source,
                ),
            ]
        )
        outputs.append(Output(Value(total), output.kind, output.name))
    nodes = tuple(n for node in graph.nodes for n in (node, *after.get(node.name, ())))
    return replace(graph, nodes=nodes, inputs=tuple(inputs), outputs=tuple(outputs))


def widened(graph: Graph, dtype: str | None) -> frozenset[Value]:
    """Return gradients that ranks may not sum before they are cast to ``dtype``, in which they are to be reduced."""
    if dtype is None:
        return frozenset()
    sums = (graph.by_name[o.value.node] for o in graph.outputs if is_gradient(o))
    casts = (made for n in sums for made in (n, *(graph.by_name[v.node] for v in n.inputs)))
    found: set[Value] = set()
    for cast in casts:
        if cast.packet == "aten._to_copy" and graph.meta(Value(cast.name)).dtype == dtype:
            found |= {v for v in cast.inputs if graph.meta(v).dtype != dtype}
    ahead = list(found)
    while ahead:
        made = graph.by_name[ahead.pop().node]
        if made.packet in VIEWS and made.phase == "backward":
            ahead += made.inputs[:1]
            found |= {*made.inputs[:1]}
    return frozenset(found)


def is_gradient(output: Output) -> bool:
    """Whether a result is the gradient of a parameter."""
    return output.kind == "gradient" and not output.name.startswith("input:")


def _unused_name(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def accumulated_sums(graph: Graph) -> dict[str, tuple[Value, Value]]:
    """Return for each accumulated parameter the accumulator and the new sum, in the order of the graph."""
    meanings = (graph.input_of[n.name] for n in graph.nodes if n.op == "placeholder")
    return {
        i.name: (Value(i.node), Value(graph.consumers[Value(i.node)][0][0].name))
        for i in meanings
        if i.kind == "accumulator"
    }


def accumulation_program(program: Program, graph: Graph) -> Program:
    """Return the program of all micro-batches but the last, which returns new sums instead of gradients."""
    kept = [(o, name) for o, name in program.results if not is_gradient(o)]
    added = [(Output(new, "accumulator", name), str(new)) for name, (_, new) in accumulated_sums(graph).items()]
    results = (*kept, *added)
    ops = tuple(_needed(program, {name for _, name in results}))
    return replace(program, ops=ops, results=results, state_transfer_s=0.0)


def _needed(program: Program, needed: set[str]) -> Iterator[Op]:
    """Yield the whole forward, since it must keep the same values, and the ops of the backward that lead to
    ``needed``."""
    found: list[Op] = []
    for op in reversed(program.ops):
        waits = op.kind == "wait" and op.reads[-1] in needed
        if op.phase == "forward" or op.kind == "input" or waits or any(t.name in needed for t in op.writes):
            found.append(op)
            needed.update(op.reads)
    return reversed(found)
