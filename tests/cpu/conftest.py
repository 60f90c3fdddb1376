"""Run the kernels of this tier on triton's interpreter, which must be chosen before triton is imported."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")

LONG = (
    "runtime_one_process",
    "capture_models",
    "kernels",
    "pipeline_plans",
    "kernels_in_plans",
    "capture_repeated",
    "inductor",
    "routed_experts",
    "ops",
    "models",
    "memory",
    "search_phases",
    "linear_nll",
    "random_plans",
    "baselines",
    "remedies",
    "guards",
    "micro_batches",
    "host_state",
    "capture_replaced",
    "bad_input",
    "experts",
    "docs",
    "context_parallel",
)
"""The test files that take longest. They run first, after the tests that start ranks, so that no core is left
alone with a long file at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}.py": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: -1 if "multiprocess" in item.path.parts else place.get(item.path.name, len(LONG)))
