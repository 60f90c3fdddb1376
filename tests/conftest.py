"""What every test may rely on: fixed seeds, one thread, and laws that are tried with the same examples each time."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine runs tests/gpu with whatever its own Python has
    pass
else:
    # Without deadlines, since a busy machine must not fail a law; derandomized, so that a failure repeats.
    settings.register_profile("autopar", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("autopar")


MUCH = 3_000_000
"""Objects, net, since the last collection."""


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch = sys.modules.get("torch")  # the pure tier never imports it
    if torch is not None:
        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _no_cache_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Neither read nor written, in processes that tests start neither."""
    os.environ["AUTOPAR_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _garbage() -> Iterator[None]:
    """Collected when a test has left much of it, and never in between: to look for it takes as long as a test."""
    gc.disable()
    yield
    if gc.get_count()[0] > MUCH:
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _no_process_group_left_over() -> Iterator[None]:
    """A group of one that a module's tests joined would change what plain torch does in the next module's."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their tier's folder."""
    for item in items:
        for tier in ("multiprocess", "gpu"):
            if tier in item.path.parts:
                item.add_marker(tier)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """File by file, but all tests that start ranks to one worker: each runs on every core, on processes they share."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if "tests/multiprocess/" in nodeid else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        reason = why_no_gpu()
        if reason:
            pytest.skip(reason)


def why_no_gpu() -> str:
    """Why tests that need a GPU cannot run here; empty where they can."""
    import torch

    if not torch.backends.cuda.is_built():
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return ""
