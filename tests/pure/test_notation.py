"""The language of rules: what can be said, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import RuleError
from autopar.ir import TensorMeta
from autopar.strategies import Bound, bind, parse


def fitted(text: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...] | None]) -> Bound:
    metas = tuple(TensorMeta(s, "float32") for s in inputs)
    return bind(parse(text), metas, tuple(None if s is None else TensorMeta(s, "float32") for s in outputs))


def test_each_dim_has_a_factor_and_each_factor_a_size() -> None:
    mm = fitted("m k, k n -> m n", [(4, 8), (8, 6)], [(4, 6)])
    assert mm.sizes == {"m": 4, "k": 8, "n": 6}
    assert mm.cuttable == ("m", "k", "n")
    assert mm.inputs == ((("m",), ("k",)), (("k",), ("n",)))


def test_a_factor_in_brackets_is_never_cut_wherever_it_stands() -> None:
    assert fitted("... [d], d -> ... d", [(4, 8), (8,)], [(4, 8)]).cuttable == (".0",)
    assert fitted("[...] d -> [...] d", [(4, 8)], [(4, 8)]).cuttable == ("d",)


def test_an_ellipsis_is_aligned_from_the_right() -> None:
    add = fitted("..., ... -> ...", [(2, 3, 4), (3, 4)], [(2, 3, 4)])
    assert add.sizes == {".2": 2, ".1": 3, ".0": 4}
    assert add.inputs[1] == ((".1",), (".0",))


def test_a_dim_of_one_element_broadcasts_and_is_not_cut() -> None:
    add = fitted("..., ... -> ...", [(3, 1), (1, 4)], [(3, 4)])
    assert add.inputs == (((".1",), ()), ((), (".0",)))


def test_a_group_tells_the_size_of_the_factor_that_no_dim_shows() -> None:
    assert fitted("b (g q) -> b g", [(2, 12)], [(2, 4)]).sizes == {"b": 2, "g": 4, "q": 3}
    assert fitted("(g=3 q) -> (g q)", [(12,)], [(12,)]).sizes == {"g": 3, "q": 4}


def test_scalars_and_absent_results() -> None:
    assert fitted("k, k -> -", [(4,), (4,)], [()]).outputs == ((),)
    assert fitted("k -> k, -", [(4,)], [(4,), None]).outputs == ((("k",),), None)
    assert parse(" -> a b").inputs == ()


def test_a_result_can_be_independent_of_a_factor() -> None:
    assert parse("o, i -> o / i").outputs[0].independent == {"i"}
    assert parse("i -> - / i").outputs[0].independent == {"i"}


@pytest.mark.parametrize(
    "text",
    [
        "m k, k n",
        "m -> n -> k",
        "m k) -> m",
        "(m k -> m",
        "[m -> m",
        "m+k -> m",
        "m m -> m",
        "... ... -> ...",
        "(m=2 k) (m=3 n) -> m",
        "P0 -> P0",
        "2 -> 1",
    ],
)
def test_what_cannot_be_read_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(RuleError) as error:
        parse(text)
    assert repr(text) in error.value.found
    assert error.value.hint


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("m k, k n -> m n", [(4, 8), (7, 6)], [(4, 6)]),
        ("m k -> m k", [(4, 8), (4, 8)], [(4, 8)]),
        ("m k -> m", [(4, 8)], [(4,), (4,)]),
        ("m k -> m", [(4, 8, 2)], [(4,)]),
        ("m 1 -> m", [(4, 8)], [(4,)]),
        ("(a b) -> a", [(5,)], [(2,)]),
    ],
)
def test_what_does_not_fit_the_shapes_is_refused(
    text: str, inputs: list[tuple[int, ...]], outputs: list[tuple[int, ...] | None]
) -> None:
    with pytest.raises(RuleError) as error:
        fitted(text, inputs, outputs)
    assert text in error.value.found


@given(st.lists(st.integers(2, 9), min_size=1, max_size=5))
def test_a_permutation_keeps_the_size_of_each_factor(shape: list[int]) -> None:
    names = [f"d{i}" for i in range(len(shape))]
    turned = fitted(f"{' '.join(names)} -> {' '.join(reversed(names))}", [tuple(shape)], [tuple(reversed(shape))])
    assert tuple(turned.sizes.values()) == tuple(shape)
    assert turned.outputs[0] == tuple(reversed(turned.inputs[0]))
