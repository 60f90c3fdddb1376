"""Which samples of a data set a rank reads when every rank passes its own slice of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np

from autopar.errors import PlanError


class LocalSampler:
    """Every ``world_size``-th sample of the epoch's order; a torch DataLoader takes it as its ``sampler``.

    The k-th batches of all ranks together are the k-th part of that order, so one global batch holds the same samples
    for every number of ranks, and a run can go on with fewer.

    Args:
        dataset: anything with a length.
        rank, world_size: whose samples these are.
        shuffle: whether each epoch has an order of its own, from ``seed`` and the epoch.
        drop_last: whether samples that not every rank gets are left out; else the first ones come again.

    Raises:
        PlanError: the rank is none of the job's.
    """

    def __init__(
        self, dataset: Sized, rank: int, world_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True
    ) -> None:
        if not 0 <= rank < world_size:
            raise PlanError(
                "The plan has no such rank.", found=f"rank {rank} of {world_size}", hint="plan for the job's size."
            )
        self.dataset = dataset
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass."""
        self.epoch = epoch

    def __len__(self) -> int:
        size = len(self.dataset)
        return size // self.world_size if self.drop_last else -(-size // self.world_size)

    def __iter__(self) -> Iterator[int]:
        size = len(self.dataset)
        order = np.random.default_rng((self.seed, self.epoch)).permutation(size) if self.shuffle else np.arange(size)
        return (int(order[(i * self.world_size + self.rank) % size]) for i in range(len(self)))
