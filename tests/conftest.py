"""Give every test fixed seeds and one thread, and property tests the same examples each time."""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine runs tests/gpu with the packages that it has
    pass
else:
    # No deadlines, so that a busy machine fails no property test; derandomized, so that failures repeat.
    settings.register_profile("autopar", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("autopar")


MUCH = 3_000_000
"""Number of objects, net, since the last collection, from which the next one runs."""


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
    """Keep the tests, and the processes that they start, away from the user's cache."""
    os.environ["AUTOPAR_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def _garbage() -> Iterator[None]:
    """Collect garbage only after tests that leave much of it, since a collection takes as long as a test."""
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
    """Destroy process groups after each module: even a group of one changes what torch does in the next module."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


SLOW = frozenset((Path(__file__).parent / "slow_cases.txt").read_text().split("\n")[:-1])
"""The tests that only `make test-all` runs, beside those that are marked: they take long, and others are like them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests with the tier whose folder they are in, and those of ``SLOW`` as slow.

    Raises:
        UsageError: a line of ``SLOW`` names no test of a file that is collected whole, or a file that does not exist.
    """
    for item in items:
        for tier in ("multiprocess", "gpu"):
            if tier in item.path.parts:
                item.add_marker(tier)
        if item.nodeid in SLOW:
            item.add_marker("slow")
    if any("::" in argument for argument in config.args):
        return
    found = {item.nodeid for item in items}
    files = {name.split("::")[0] for name in found}
    gone = {name for name in SLOW if not (config.rootpath / name.split("::")[0]).exists()}
    unknown = sorted(gone.union(name for name in SLOW - found if name.split("::")[0] in files))
    if unknown:
        raise pytest.UsageError(f"tests/slow_cases.txt names tests that do not exist: {', '.join(unknown)}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule by file, but run all tests that start ranks on one worker: they use every core and share processes."""
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
    """Return why tests that need a GPU cannot run here, or an empty string if they can."""
    import torch

    if not torch.backends.cuda.is_built():
        return f"this torch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return ""
