"""What share of an op's FLOPs its kernel executes."""

from __future__ import annotations

import pytest

from autopar.ir import Node, TensorMeta, Value
from autopar.planner.footprint.op_work import executed_share


def attention(length: int, *, causal: bool) -> Node:
    out = TensorMeta((2, 4, length, 64), "float32")
    kwargs = (("is_causal", causal),)
    return Node("attention", "autopar.attention.default", (Value("q"), Value("k"), Value("v")), kwargs, (out,))


@pytest.mark.parametrize("length", [1, 128, 4096])
def test_without_a_causal_mask_everything_is_executed(length):
    assert executed_share(attention(length, causal=False)) == 1


@pytest.mark.parametrize(("length", "share"), [(1, 1.0), (512, 1.0), (1024, 0.75), (2048, 0.625), (1 << 20, 0.5)])
def test_a_causal_mask_spares_whole_blocks_half_of_long_rows_and_nothing_of_short_ones(length, share):
    assert executed_share(attention(length, causal=True)) == pytest.approx(share, abs=1e-3)


def test_other_ops_execute_what_they_have():
    out = TensorMeta((4, 4), "float32")
    assert executed_share(Node("mm", "aten.mm.default", (Value("a"), Value("b")), (), (out,))) == 1
