from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models.memory import (
    OPTIMIZERS,
    optimizer_mode,
    optimizer_scalar_bytes,
    optimizer_state_bytes,
    optimizer_step_bytes,
)
from autopar.errors import AutoparError


@pytest.mark.parametrize(
    ("optimizer", "float32", "bfloat16"),
    [
        ("adamw", 8, 4),
        ("Adam", 8, 4),
        ("nadam", 8, 4),
        ("RAdam", 8, 4),
        ("adamax", 8, 4),
        ("sgd", 0, 0),
        ("sgd momentum", 4, 2),
        ("sgd_momentum", 4, 2),
        ("adagrad", 4, 2),
        ("rmsprop", 4, 2),
        ("lion", 4, 2),
        ("muon", 4, 2),
        (8, 8, 8),
        (2.5, 2.5, 2.5),
        (0, 0, 0),
    ],
)
def test_state_follows_the_dtype_of_the_parameter(optimizer, float32, bfloat16):
    assert optimizer_state_bytes(optimizer, 1000, "float32") == 1000 * float32
    assert optimizer_state_bytes(optimizer, 1000, "bfloat16") == 1000 * bfloat16


def test_a_master_copy_is_counted_and_the_state_is_in_its_dtype():
    assert optimizer_state_bytes("adamw", 1000, "bfloat16", master_dtype="float32") == 1000 * (4 + 8)
    assert optimizer_state_bytes("sgd", 1000, "bfloat16", master_dtype="float32") == 4000
    assert optimizer_state_bytes("adamw", 1000, "float32", master_dtype="float32") == 8000
    assert optimizer_state_bytes(12, 1000, "bfloat16", master_dtype="float32") == 12000


@pytest.mark.parametrize("name", ["8-bit adam", "adam8bit", "AdamW8bit", "8bit_adamw", "Adam 8-bit"])
def test_eight_bit_states_carry_a_scale_for_each_block(name):
    assert optimizer_state_bytes(name, 256 * 100, "bfloat16") == 256 * 100 * 2 + 100 * 8


def test_adafactor_is_sublinear_for_a_matrix_and_an_upper_estimate_without_its_shape():
    assert optimizer_state_bytes("adafactor", 6000, "float32", shape=(60, 100)) == 160 * 4
    assert optimizer_state_bytes("adafactor", 6000, "float32", shape=(2, 30, 100)) == 260 * 4
    assert optimizer_state_bytes("adafactor", 6000, "float32") == 6001 * 4


@given(st.integers(1, 100), st.integers(1, 100))
def test_the_upper_estimate_for_adafactor_is_one(rows, columns):
    exact = optimizer_state_bytes("adafactor", rows * columns, "float32", shape=(rows, columns))
    assert exact <= optimizer_state_bytes("adafactor", rows * columns, "float32")


class AdamW:
    pass


class MyAdamW(AdamW):
    pass


class SGD:
    param_groups = ()
    defaults = {"momentum": 0.9}  # noqa: RUF012


def test_classes_instances_and_partials_are_known_by_their_names():
    assert optimizer_state_bytes(AdamW, 10, "float32") == 80
    assert optimizer_state_bytes(MyAdamW, 10, "float32") == 80
    assert optimizer_state_bytes(SGD, 10, "float32") == 0
    assert optimizer_state_bytes(SGD(), 10, "float32") == 40
    assert optimizer_state_bytes(partial(SGD, momentum=0.9), 10, "float32") == 40
    assert optimizer_state_bytes(partial(SGD, lr=0.9), 10, "float32") == 0


@pytest.mark.parametrize("optimizer", ["adamz", object, "", None, True])
def test_an_unknown_optimizer_lists_the_known(optimizer):
    with pytest.raises(AutoparError, match="not known") as caught:
        optimizer_state_bytes(optimizer, 10, "float32")
    assert all(name in caught.value.hint for name in OPTIMIZERS)
    with pytest.raises(AutoparError, match="not known"):
        optimizer_step_bytes(optimizer, [10], "float32")


@pytest.mark.parametrize("number", [-1, math.inf, math.nan])
def test_bytes_per_element_are_a_number_from_zero_on(number):
    with pytest.raises(AutoparError, match="negative or infinite"):
        optimizer_state_bytes(number, 10, "float32")


@given(st.sampled_from(sorted(OPTIMIZERS)), st.integers(0, 10**9), st.integers(0, 10**9))
def test_state_and_step_grow_with_the_parameter(name, numel, more):
    if numel >= 4096 or numel + more < 4096:  # below, eight-bit state is not narrow
        less, all_ = (optimizer_state_bytes(name, n, "float32") for n in (numel, numel + more))
        assert 0 <= less <= all_
    for mode in ("", " foreach", " for-loop"):
        step = optimizer_step_bytes(name + mode, [numel], "float32")
        assert 0 <= step <= optimizer_step_bytes(name + mode, [numel, more], "float32")
        assert abs(optimizer_step_bytes(name + mode, [numel], "bfloat16") * 2 - step) <= 2


def test_the_step_of_an_optimizer_given_in_bytes_takes_one_tensor():
    assert optimizer_step_bytes(8, [600, 400], "float32") == 4000


def test_a_fused_step_needs_nothing():
    assert optimizer_step_bytes(partial(AdamW, fused=True), [1000], "float32") == 0
    assert optimizer_step_bytes("adamw fused", [1000], "float32") == 0
    assert optimizer_step_bytes(partial(AdamW, fused=None), [1000], "float32") == 4000


def test_torch_steps_over_all_parameters_at_once_except_on_a_cpu():
    assert optimizer_step_bytes("adamw", [600, 400], "float32") == 4000
    assert optimizer_step_bytes("adamw", [600, 100], "float32", device="cpu") == (2 * 600) * 4
    assert optimizer_step_bytes("adamw", [400, 600], "float32", device="cpu") == (2 * 600 + 400) * 4
    assert optimizer_step_bytes("adamw foreach", [600, 400], "float32", device="cpu") == 4000
    assert [optimizer_mode("sgd", d) for d in ("cpu", "cuda")] == ["forloop", "foreach"]
    assert optimizer_mode(partial(AdamW, foreach=False)) == "forloop"


@pytest.mark.parametrize("text", ["SGD momentum", "sgd_momentum foreach", "momentum", "SGD with momentum for-loop"])
def test_options_may_follow_the_name(text):
    assert optimizer_state_bytes(text, 10, "float32") == 40
    assert optimizer_state_bytes("adam amsgrad fused", 10, "float32") == 120
    assert optimizer_step_bytes("adam weight decay", [10], "float32", device="cpu") == 120


def test_eight_bit_optimizers_keep_small_parameters_in_float32():
    assert optimizer_state_bytes("adam8bit", 4095, "float32") == 4095 * 8


def test_scalars_of_state_are_counted_for_each_parameter():
    assert [optimizer_scalar_bytes(o) for o in ("adamw", "nadam", "sgd", 8)] == [4, 8, 0, 0]
