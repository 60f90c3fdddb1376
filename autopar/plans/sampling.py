"""Choose the samples that a rank reads when every rank passes its own slice of the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sized

import numpy as np

from autopar.errors import PlanError


class LocalSampler:
    """Yields every ``world_size``-th sample of the epoch's order. Pass it to a DataLoader as ``sampler``.

    The k-th batches of all ranks together are the k-th part of that order, so a global batch holds the same samples
    for any number of ranks, and a run can continue with fewer.

    Args:
        dataset: anything with a length.
        rank, world_size: the rank that reads the samples, and the number of ranks.
        shuffle: whether to shuffle each epoch anew, by ``seed`` and the epoch.
        drop_last: whether to drop the samples left over when the ranks share evenly; else the first samples repeat.

    Raises:
        PlanError: if the job has no such rank.
    """

    def __init__(
        self, dataset: Sized, rank: int, world_size: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True
    ) -> None:
        if not 0 <= rank < world_size:
            raise PlanError(
                "The plan has no such rank.",
                found=f"rank {rank} of {world_size}",
                hint="plan for the number of ranks of the job.",
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
