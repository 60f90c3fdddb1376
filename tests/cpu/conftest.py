"""Kernels of this tier run on triton's interpreter, which has to be chosen before triton is imported."""

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
"""Files that take longest. They go first, behind the tests that start ranks: a core that is left alone with one at the
end waits for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"test_{name}.py": i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: -1 if "multiprocess" in item.path.parts else place.get(item.path.name, len(LONG)))
