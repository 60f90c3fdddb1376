"""The options of a plan: listed once, the same for every function that plans."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.cli import plan as command
from autopar.errors import AutoparError
from autopar.plan_options import PlanOptions

FUNCTIONS = (autopar.plan, autopar.autoparallelize, autopar.compare)
PROMISED = {
    "mesh": None,
    "cluster": None,
    "memory_budget": None,
    "optimizer": "adamw",
    "mixed_precision": None,
    "batch": "global",
    "outputs": "auto",
    "constraints": None,
    "backend": "eager",
    "time_limit": 60.0,
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_signature_lists_every_option_with_its_default(function: Any) -> None:
    found = inspect.signature(function).parameters
    assert list(found)[:4] == ["model", "meta_inputs", "mesh", "cluster"]
    assert {name: found[name].default for name in PROMISED} == PROMISED
    assert set(PlanOptions.__annotations__) <= set(found)
    assert all(p.default is not p.empty for p in list(found.values())[2:])


def test_autoparallelize_takes_a_plan() -> None:
    assert inspect.signature(autopar.autoparallelize).parameters["plan"].default is None


def test_every_option_is_documented() -> None:
    assert PlanOptions.__doc__ is not None
    assert [name for name in PlanOptions.__annotations__ if f"    {name}: " not in PlanOptions.__doc__] == []


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_misspelt_option_names_the_one_that_was_meant(function: Any) -> None:
    with pytest.raises(AutoparError, match="memory_budgett") as raised:
        function(nn.Linear(4, 4), torch.empty(2, 4), mesh=(1,), cluster="cpu-2:1", memory_budgett=10**9)
    assert "did you mean memory_budget?" in str(raised.value)


def test_the_command_line_gives_the_same_options() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = command.options_of(parser.parse_args(["gpt2"]))
    assert set(options) <= set(PlanOptions.__annotations__)
