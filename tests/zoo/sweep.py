"""Measure many models, in this process or in several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from tests.zoo import ZOO
from tests.zoo.measure import MESHES, Record, measure

Meshes = tuple[tuple[int, ...], ...]


def measured(names: Sequence[str], jobs: int, meshes: Meshes = MESHES) -> Iterator[Record]:
    """Yield the record of each model as soon as it is ready."""
    if jobs == 1:
        yield from (measure_one(n, meshes) for n in names)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for future in as_completed([pool.submit(measure_one, n, meshes) for n in names]):
            yield future.result()


def measure_one(name: str, meshes: Meshes) -> Record:
    torch.set_num_threads(1)
    return measure(ZOO[name], meshes)
