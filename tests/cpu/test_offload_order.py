"""Which of equal layers offload."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers

import autopar
from autopar.holding import KEEP, OFFLOAD
from autopar.planner.options import Options
from autopar.planner.pricing.objective import Objective
from autopar.planner.pricing.transfers import exposed_seconds
from autopar.planner.search import rounds, state
from autopar.planner.search.fitting import scheduled
from autopar.planner.search.offload_order import offloading_first

LAYERS = 8


@pytest.fixture(scope="module")
def searched() -> tuple[Objective, tuple[int, ...]]:
    """The objective of a search within a budget, and a choice that was scheduled."""
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=50,
    )
    model, ids = transformers.LlamaForCausalLM(config), torch.zeros(16, 64, dtype=torch.long)
    inputs, given = {"input_ids": ids, "labels": ids}, []

    def recording(objective, choice):
        given.append((objective, tuple(choice)))
        return offloading_first(objective, choice)

    free = autopar.plan(model, inputs, mesh=(2,), cluster="dgx-h100")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "offloading_first", recording)
        patch.setattr(rounds, "offloading_first", recording)
        autopar.plan(model, inputs, mesh=(2,), cluster="dgx-h100", memory_budget=int(0.7 * free.peak_memory))
    return next(g for g in given if any(v.kind == "hold" for v in g[0].decisions.variables))


def layers(objective: Objective) -> np.ndarray:
    """The variables of each layer, in the order of the forward."""
    copies = max((run.copies for run in objective.runs), key=np.size)
    place = {node.name: at for at, node in enumerate(objective.decisions.graph.nodes)}
    variables = objective.decisions.variables
    made = [min(place[variables[i].value.node] for i in c if variables[i].kind == "hold") for c in copies]
    return copies[np.argsort(made)]


def offloading(objective: Objective, choice: tuple[int, ...], which: slice) -> tuple[int, ...]:
    """Keep everything but what these layers can offload."""
    found, variables = list(choice), objective.decisions.variables
    inside = set(layers(objective)[which].ravel().tolist())
    for i, v in enumerate(variables):
        if v.kind == "hold" and v.actions[choice[i]] in (KEEP, OFFLOAD):
            spec, wanted = v.options[choice[i]].inputs[0], OFFLOAD if i in inside else KEEP
            there = (k for k, a in enumerate(v.actions) if a == wanted and v.options[k].inputs[0] == spec)
            found[i] = next(there, choice[i])
    return tuple(found)


def offloaded(objective: Objective, choice: tuple[int, ...]) -> list[int]:
    """The numbers of the values that each layer offloads."""
    variables = objective.decisions.variables
    return [
        sum(variables[i].kind == "hold" and variables[i].actions[choice[i]] == OFFLOAD for i in layer)
        for layer in layers(objective)
    ]


def test_the_first_layers_offload_at_the_same_cost_and_hold_no_more(searched) -> None:
    objective, choice = searched
    last = offloading(objective, choice, slice(-3, None))
    first = offloading_first(objective, last)
    of_last, of_first = offloaded(objective, last), offloaded(objective, first)
    assert of_last[-1] > 0
    assert of_first == sorted(of_last, reverse=True)
    assert objective.seconds(first) == pytest.approx(objective.seconds(last), rel=1e-6)
    one, other = (scheduled(objective.decisions, c, objective.prices, Options(), math.inf) for c in (last, first))
    assert other[1].peak_bytes <= one[1].peak_bytes
    assert exposed_seconds(other[0]) < exposed_seconds(one[0])
    assert offloading_first(objective, first) == first


def test_nothing_changes_where_nothing_is_offloaded(searched) -> None:
    objective, choice = searched
    kept = offloading(objective, choice, slice(0))
    assert offloading_first(objective, kept) == kept
