"""Strides as the planner follows them against torch's own."""

from __future__ import annotations

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from autopar.ir import Graph, Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.planner.footprint.layouts import Layout, permuted, reshaped, results, views_of
from autopar.planner.footprint.local_op import local_op
from autopar.planner.footprint.transients import transients
from autopar.runtime.meter import MemoryMeter
from autopar.sharding import ShardingSpec, Strategy

lengths = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4)


@st.composite
def tensors(draw, shape=None):
    """A tensor that is a permuted part of a dense one, possibly expanded."""
    sizes = draw(lengths) if shape is None else shape
    order = draw(st.permutations(range(len(sizes))))
    wider = [n + draw(st.sampled_from([0, 0, 0, 1])) for n in sizes]
    made = torch.randn([wider[d] for d in order])
    back = made.permute([order.index(d) for d in range(len(sizes))])
    return back[tuple(slice(0, n) for n in sizes)]


def layout(x: torch.Tensor) -> Layout:
    return Layout(tuple(x.shape), tuple(x.stride()))


@given(tensors(), st.data())
def test_a_reshape_is_a_view_where_torch_makes_one(x, data) -> None:
    flat = x.numel()
    shape, rest = [], flat
    for _ in range(data.draw(st.integers(0, 3))):
        shape.append(data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0])))
        rest //= shape[-1]
    shape.append(rest)
    found = reshaped(layout(x), tuple(shape))
    try:
        view = x.view(shape)
    except RuntimeError:
        assert found is None
    else:
        assert found is not None
        assert all(n == 1 or a == b for n, a, b in zip(shape, found.strides, view.stride(), strict=True))


@given(tensors())
def test_contiguous_means_what_it_means_in_torch(x) -> None:
    assert layout(x).is_contiguous == x.is_contiguous()


@given(tensors(), st.data())
def test_a_pointwise_op_keeps_the_order_of_dims(x, data) -> None:
    y = data.draw(tensors(shape=list(x.shape)))
    meta = TensorMeta(tuple(x.shape), "float32")
    node = Node("add", "aten.add.Tensor", (Value("x"), Value("y")), outputs=(meta,))
    made = x + y
    (found,), aliased = results(node, [layout(x), layout(y)], [tuple(x.shape)])
    assert not aliased
    same = (n == 1 or a == b for n, a, b in zip(x.shape, found.strides, made.stride(), strict=True))
    assert all(same)


EQUATIONS = ["bsk,nk->bsn", "bsn,bsk->nk", "bsn,nk->bsk", "bik,bkj->bij", "abk,kc->cab", "ab,cd->abcd", "bsk,nk->nbs"]


@given(st.sampled_from(EQUATIONS), st.data())
def test_a_contraction_copies_what_is_predicted(equation, data) -> None:
    sizes = dict(zip("abcdijknsg", (2, 3, 4, 5, 6, 7, 8, 9, 10, 11), strict=True))
    terms, out = equation.split("->")
    assume(not any(c in terms.split(",")[0] and c not in terms.split(",")[1] + out for c in terms))
    operands = [data.draw(tensors(shape=[sizes[c] for c in term])) for term in terms.split(",")]
    metas = [TensorMeta(tuple(x.shape), "float32") for x in operands]
    made = TensorMeta(tuple(sizes[c] for c in out), "float32")
    node = Node("c", "autopar.contract.default", (Value("x"), Value("w"), equation), outputs=(made,))
    whole = Strategy(tuple(ShardingSpec.replicated(len(m.shape)) for m in metas), (ShardingSpec.replicated(len(out)),))
    predicted = transients(local_op(node, whole, metas, Mesh((1,)), "cpu", [layout(x) for x in operands]))
    meter = MemoryMeter()
    meter.hold(operands)
    before = meter.held
    with meter:
        torch.ops.autopar.contract(*operands, equation)
    assert meter.peak - before <= predicted + made.bytes
    assert permuted(layout(operands[0]), range(operands[0].ndim)) == layout(operands[0])


def test_a_reshape_of_what_lies_across_is_no_view_of_it() -> None:
    shapes = {"x": (2, 3, 8), "heads": (2, 3, 4, 2), "across": (2, 4, 3, 2), "flat": (2, 24)}
    made = {name: (TensorMeta(shape, "float32"),) for name, shape in shapes.items()}
    graph = Graph(
        (
            Node("x", "placeholder", (), outputs=made["x"]),
            Node("heads", "aten.view.default", (Value("x"), (2, 3, 4, 2)), outputs=made["heads"]),
            Node("across", "aten.transpose.int", (Value("heads"), 1, 2), outputs=made["across"]),
            Node("flat", "aten.view.default", (Value("across"), (2, 24)), outputs=made["flat"]),
        ),
        (),
        (),
    )
    assert views_of(graph, whole=True) == {"heads", "across"}
    assert views_of(graph, whole=False) == {"heads", "across", "flat"}
