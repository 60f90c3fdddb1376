"""Run the kernels of this tier on triton's interpreter, which must be chosen before triton is imported."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")

LONG = (
    "kernels_in_plans",
    "memory",
    "models",
    "capture_repeated",
    "baselines",
    "transients",
    "capture_models",
    "experts",
    "kernels",
    "linear_nll",
    "rules_exact",
    "cut_dims",
    "memory_laws",
    "fewer_layers",
    "bad_input",
    "half_precision",
)
"""The test files that take longest. They run first, after the tests that start ranks, so that no core is left
alone with a long file at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}.py": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: -1 if "multiprocess" in item.path.parts else place.get(item.path.name, len(LONG)))
