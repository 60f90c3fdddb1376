"""From rules to strategies, and from strategies to what each rank runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import RuleError
from autopar.ir import Arg, Node, TensorMeta, Value
from autopar.mesh import Mesh
from autopar.sharding import ShardingSpec
from autopar.sharding.local import LocalLength, LocalOffset
from autopar.strategies import flops, localize, lowering, missing_rule, register_rule, registered, strategies
from autopar.strategies.registry import op_name, remove
from autopar.strategies.rules.views import reshaped


def tensor(*shape: int, dtype: str = "float32") -> TensorMeta:
    return TensorMeta(shape, dtype)


def call(
    op: str, *args: Arg | TensorMeta, out: tuple[TensorMeta | None, ...], **kwargs: Arg
) -> tuple[Node, list[TensorMeta]]:
    """A node and the metas of its operands; tensors among the arguments are given by their meta."""
    metas = [a for a in args if isinstance(a, TensorMeta)]
    values = iter([Value(f"x{i}") for i in range(len(metas))])
    plain = tuple(next(values) if isinstance(a, TensorMeta) else a for a in args)
    return Node("node", op, plain, tuple(kwargs.items()), out), metas


def texts(found: tuple[Node, list[TensorMeta]], *mesh: int) -> list[str]:
    return [str(s) for s in strategies(*found, Mesh(mesh))]


MM = call("aten.mm.default", tensor(4, 8), tensor(8, 6), out=(tensor(4, 6),))


def test_matrix_multiplication_on_one_axis() -> None:
    assert texts(MM, 2) == [
        "RR, RR -> RR",
        "S0R, RR -> S0R",
        "RS0, S0R -> RR P0",
        "RR, RS0 -> RS0",
        "RR P0, RR -> RR P0",
        "RR, RR P0 -> RR P0",
    ]


def test_each_axis_chooses_by_itself_and_the_order_is_fixed() -> None:
    both = texts(MM, 2, 2)
    assert "S01R, RR -> S01R" in both  # two axes on one dim, in increasing order
    assert "S0S1, S1R -> S0R P1" in both
    assert "S0R P1, RR -> S0R P1" in both
    assert not any("S10" in t for t in both)
    assert both == texts(MM, 2, 2)


def test_an_axis_of_one_rank_does_nothing() -> None:
    assert texts(MM, 1) == ["RR, RR -> RR"]
    assert {s.axes[0] for s in strategies(*MM, Mesh((1, 2)))} == {""}


def test_work_is_divided_by_factors_and_not_by_partial_sums() -> None:
    work = {s.axes: s.work for s in strategies(*MM, Mesh((2, 3)))}
    assert work["m", "n"] == pytest.approx(1 / 6)
    assert work["m", "P0"] == pytest.approx(1 / 2)
    assert work["", ""] == 1


def test_a_plain_factor_is_cut_unevenly_as_long_as_no_rank_is_empty() -> None:
    def cuts(n: int, *mesh: int) -> bool:
        return any(s.work < 1 / max(mesh) + 1e-9 and all(s.axes) for s in strategies(*relu(n), Mesh(mesh)))

    def relu(n: int) -> tuple[Node, list[TensorMeta]]:
        return call("aten.relu.default", tensor(n), out=(tensor(n),))

    assert cuts(5, 2) and cuts(5, 3) and cuts(7, 2, 2)
    assert not cuts(4, 3)  # 2, 2, 0
    assert not cuts(5, 2, 3)  # 3, 2 -> the second has too few for three


@given(st.integers(1, 40), st.lists(st.integers(2, 4), min_size=1, max_size=3))
def test_no_rank_is_ever_left_without_elements(n: int, mesh: list[int]) -> None:
    node = call("aten.neg.default", tensor(n), out=(tensor(n),))
    where = Mesh(tuple(mesh))
    for strategy in strategies(*node, where):
        for rank in range(where.size):
            assert strategy.outputs[0] is not None
            assert strategy.outputs[0].local_shape((n,), where, where.coordinate(rank))[0] > 0


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(0, 1000))
def test_strategies_differ_and_fit_their_tensors(shape: list[int], seed: int) -> None:
    merged = (tensor(*shape), tensor(*_merged(shape, seed % len(shape))))
    node, metas = call("aten.view.default", merged[0], merged[1].shape, out=(merged[1],))
    found = strategies(node, metas, Mesh((2, 2)))
    assert len({(s.inputs, s.outputs) for s in found}) == len(found)
    assert all(s.inputs[0].ndim == len(shape) for s in found)
    assert found[0].inputs[0].is_replicated


def _merged(shape: list[int], at: int) -> list[int]:
    """Two neighbouring dims made one."""
    return shape if at + 1 >= len(shape) else [*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]]


def test_an_absent_result_has_no_spec() -> None:
    x, statistic, weight = tensor(4, 8), tensor(4, 1), tensor(8)
    rest = ((8,), statistic, statistic, weight, None, (True, True, False))
    found = call("aten.native_layer_norm_backward.default", x, x, *rest, out=(x, weight, None))
    cut = strategies(*found, Mesh((2,)))[1]
    assert [None if o is None else str(o) for o in cut.outputs] == ["S0R", "R P0", None]


def test_views_share_factors() -> None:
    assert reshaped((4, 6), (24,)) == "v0_0 v0_1 -> (v0_0 v0_1)"
    assert reshaped((2, 1, 3), (2, 3, 1)) == "v0_0 1 v1_0 -> v0_0 v1_0 1"
    assert reshaped((4, 6), (6, 4)) == "(v0_c=2 [v0_i0=2]) [v0_i1=6] -> (v0_c=2 [v0_o0=3]) [v0_o1=4]"
    split = call("aten.view.default", tensor(2, 5, 12), (2, 5, 4, 3), out=(tensor(2, 5, 4, 3),))
    assert "RRS0 -> RRS0R" in texts(split, 2)


def test_behind_a_factor_that_is_cut_to_one_element_the_next_may_be_cut() -> None:
    merge = call("aten.view.default", tensor(2, 6), (12,), out=(tensor(12),))
    assert "S0S1 -> S01" in texts(merge, 2, 2)
    assert "S1S0 -> S10" not in texts(merge, 2, 2)
    assert "RS0 -> S0" not in texts(merge, 2)


def test_a_number_that_is_added_is_no_part_of_a_sum() -> None:
    with_number = call("aten.add.Tensor", tensor(4), 2.0, out=(tensor(4),))
    assert texts(with_number, 2) == ["R -> R", "S0 -> S0"]
    both = call("aten.add.Tensor", tensor(4), tensor(4), out=(tensor(4),))
    assert "R P0, R P0 -> R P0" in texts(both, 2)


def test_truth_values_are_never_partial() -> None:
    copied = call("aten.clone.default", tensor(4, dtype="bool"), out=(tensor(4, dtype="bool"),))
    assert texts(copied, 2) == ["R -> R", "S0 -> S0"]


def test_a_cast_that_truncates_is_not_linear() -> None:
    def cast(before: str, after: str) -> list[str]:
        node = call("aten._to_copy.default", tensor(4, dtype=before), out=(tensor(4, dtype=after),), dtype=after)
        return [t for t in texts(node, 2) if "P" in t]

    assert cast("float32", "bfloat16") == cast("int64", "float32") == cast("int64", "int32") == ["R P0 -> R P0"]
    assert cast("float32", "int64") == cast("int64", "bool") == cast("bool", "float32") == []


def test_program_inputs_may_come_at_any_spec() -> None:
    assert texts(call("placeholder", out=(tensor(4, 6),)), 2) == [" -> RR", " -> S0R", " -> RS0"]


def test_an_op_without_a_rule_is_replicated_and_the_line_that_adds_one_is_shown() -> None:
    node, metas = call("mylib.flash.default", tensor(4, 8), out=(tensor(4),))
    assert [str(s) for s in strategies(node, metas, Mesh((2, 2)))] == ["RR -> R"]
    assert missing_rule(node, metas) == 'autopar.register_rule("mylib.flash", "[d0] [d1] -> [d2]")'


def test_flops_count_a_multiply_add_as_two() -> None:
    assert flops(*MM) == 2 * 4 * 8 * 6
    assert flops(*call("aten.relu.default", tensor(4), out=(tensor(4),))) == 0
    conv = call(
        "aten.convolution.default",
        tensor(2, 3, 8, 8),
        tensor(5, 3, 3, 3),
        None,
        (1, 1),
        (1, 1),
        (1, 1),
        False,
        (0, 0),
        1,
        out=(tensor(2, 5, 8, 8),),
    )
    assert flops(*conv) == 2 * (2 * 8 * 8) * 5 * (3 * 3 * 3)
    options: dict[str, Arg] = {"is_causal": True, "offset": (0, 0, 0, 0)}
    q, out = tensor(2, 4, 8, 16), (tensor(2, 4, 8, 16), tensor(2, 4, 8))
    attention = call("autopar.attention.default", q, q, q, None, None, out=out, **options)
    assert flops(*attention) == 2 * 2 * (2 * 4 * 8 * 8 * 16)


def test_shape_arguments_become_local() -> None:
    node, metas = call("aten.expand.default", tensor(4, 1), (4, 6), out=(tensor(4, 6),))
    by_axes = {s.axes: s for s in strategies(node, metas, Mesh((2,)))}
    op, args, _ = localize(node, by_axes[(".0",)], metas, Mesh((2,)))
    assert (op, args) == ("aten.expand.default", (Value("x0"), (4, 3)))


def test_where_ranks_differ_a_local_length_stands() -> None:
    node, metas = call("aten.view.default", tensor(5, 2, 3), (5, 6), out=(tensor(5, 6),))
    cut = next(s for s in strategies(node, metas, Mesh((2,))) if str(s.outputs[0]) == "S0R")
    op, args, kwargs = localize(node, cut, metas, Mesh((2,)))
    assert op == "aten.reshape.default"  # local strides may forbid a view
    assert args == (Value("x0"), (LocalLength(5, (0,)), 6))
    assert kwargs == ()


def test_a_cut_vocabulary_knows_its_first_row() -> None:
    node, metas = call(
        "autopar.lookup.default", tensor(10, 4), tensor(3, dtype="int64"), out=(tensor(3, 4),), offset=0, padding_idx=-1
    )
    rows = next(s for s in strategies(node, metas, Mesh((2,))) if str(s.inputs[0]) == "S0R")
    assert str(rows) == "S0R, R -> RR P0"
    assert dict(localize(node, rows, metas, Mesh((2,)))[2])["offset"] == LocalOffset(10, (0,))


def test_ranks_divide_the_rows_that_a_micro_batch_reads_of_the_whole_batch() -> None:
    first = LocalOffset(6, (), 6)
    node = Node("n", "aten.narrow_copy.default", (Value("x0"), 0, first, 6), (), (tensor(6, 4),))
    metas = (tensor(24, 4),)
    whole, rows = (
        next(s for s in strategies(node, metas, Mesh((2,))) if str(s.outputs[0]) == o) for o in ("RR", "S0R")
    )
    assert str(rows) == "RR -> S0R"
    assert localize(node, whole, metas, Mesh((2,)))[1][2:] == (first, 6)
    assert localize(node, rows, metas, Mesh((2,)))[1][2:] == (LocalOffset(6, (0,), 6), 3)


def test_a_rank_draws_the_random_numbers_of_its_micro_batch() -> None:
    first = LocalOffset(4, (), 4)
    node, metas = call(
        "autopar.dropout.default",
        tensor(4, 6),
        tensor(dtype="int64"),
        out=(tensor(4, 6),),
        global_shape=(16, 6),
        offset=(first, 0),
    )
    whole, *_ = strategies(node, metas, Mesh((2,)))
    cut = next(s for s in strategies(node, metas, Mesh((2,))) if str(s.outputs[0]) == "S0R")
    assert dict(localize(node, whole, metas, Mesh((2,)))[2])["offset"] == (first, 0)
    assert dict(localize(node, cut, metas, Mesh((2,)))[2])["offset"] == (LocalOffset(4, (0,), 4), 0)
    assert dict(localize(node, cut, metas, Mesh((2,)))[2])["global_shape"] == (16, 6)


@pytest.fixture
def custom() -> Iterator[str]:
    yield "mylib.flash"
    remove("mylib.flash")


def test_a_user_adds_a_rule_once(custom: str) -> None:
    node, metas = call("mylib.flash.default", tensor(4, 8), out=(tensor(4),))
    assert len(strategies(node, metas, Mesh((2,)))) == 1
    register_rule(custom, "m k -> m")
    assert texts((node, metas), 2) == ["RR -> R", "S0R -> S0", "RS0 -> R P0"]
    with pytest.raises(RuleError, match="already"):
        register_rule(custom, "m [k] -> m")
    register_rule(custom, "m [k] -> m", override=True)
    assert texts((node, metas), 2) == ["RR -> R", "S0R -> S0"]
    register_rule("mylib.flash.default", "[m] k -> m")  # the overload wins over the op
    assert texts((node, metas), 2) == ["RR -> R", "RS0 -> R P0"]
    remove("mylib.flash.default")


def test_a_lowering_is_registered_once(custom: str) -> None:
    register_rule(custom, "m -> m")
    node, metas = call("mylib.flash.default", tensor(4), out=(tensor(4),))

    @lowering(custom)
    def faster(node: Node, strategy: object, metas: object, mesh: Mesh) -> tuple[str, tuple[Arg, ...], tuple[()]]:
        return "mylib.faster.default", node.args, ()

    assert localize(node, strategies(node, metas, Mesh((2,)))[0], metas, Mesh((2,)))[0] == "mylib.faster.default"
    with pytest.raises(RuleError, match="already"):
        lowering(custom)(faster)


def test_ops_are_named_as_torch_prints_them() -> None:
    assert op_name("aten.mm") == "aten.mm"
    assert op_name("mylib::flash") == "mylib.flash"
    assert op_name("<CustomOpDef(mylib::flash)>") == "mylib.flash"
    with pytest.raises(RuleError, match="does not name an op"):
        op_name(42)


def test_only_sums_are_linear() -> None:
    with pytest.raises(RuleError, match="reduction"):
        register_rule("mylib.largest", "m k -> m", reduction="max", linear=((0,),))


def test_a_maximum_is_partial_as_a_maximum() -> None:
    amax = call("aten.amax.default", tensor(4, 6), (1,), out=(tensor(4),))
    assert "RS0 -> R Pmax0" in texts(amax, 2)


def test_the_table_is_large_and_every_text_in_it_can_be_read() -> None:
    assert len(registered()) > 350


def test_rules_need_no_torch() -> None:
    code = "import autopar.strategies, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_replicating_is_always_first() -> None:
    first = strategies(*MM, Mesh((2, 2)))[0]
    assert all(s == ShardingSpec.replicated(2) for s in (*first.inputs, *first.outputs))
