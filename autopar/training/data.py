"""Data loading: loaders that cycle or resume, and the sampler of a rank's samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.plans import LocalSampler, Plan


class CycledDataLoader:
    """Yields batches without end: the loader restarts whenever it ends.

    A sampler with ``set_epoch``, such as a distributed one, is told each new epoch, so that the order changes.

    Attributes:
        epoch: how often the loader has restarted.
    """

    def __init__(self, dataloader: Iterable[Any]) -> None:
        self.dataloader = dataloader
        self.epoch = 0
        self._batches: Iterator[Any] | None = None

    def next(self) -> Any:
        """Return the next batch.

        Raises:
            AutoparError: the loader is empty.
        """
        if self._batches is None:
            self._batches = iter(self.dataloader)
        try:
            return next(self._batches)
        except StopIteration:
            self.epoch += 1
            _set_epoch(self.dataloader, self.epoch)
            self._batches = iter(self.dataloader)
        try:
            return next(self._batches)
        except StopIteration:
            raise AutoparError(
                "The data loader has no batches.", found=repr(self.dataloader), hint="pass a loader that has data."
            ) from None


class ResumableDataLoader:
    """A loader that records its position, and can continue from there in another process.

    One ``for`` loop over it is one epoch; after ``load_state_dict`` the first loop is the rest of the interrupted
    epoch. The order of an epoch is determined by the random state at its beginning, which is saved, and by the
    sampler's ``set_epoch``, which is called. On resuming, batches that were already consumed are read again and
    dropped.

    Args:
        dataloader: torch's, or any iterable that fixes its order when an iterator is created.
    """

    def __init__(self, dataloader: Iterable[Any]) -> None:
        self.dataloader = dataloader
        self.epoch = 0
        self.batch = 0
        self._began: torch.Tensor | None = None
        self._resumes = False

    def __len__(self) -> int:
        return len(self.dataloader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    def __iter__(self) -> Iterator[Any]:
        batches = self._resume_epoch() if self._resumes else self._start_epoch()
        for batch in batches:
            self.batch += 1
            yield batch
        self.epoch, self.batch, self._began = self.epoch + 1, 0, None

    def _start_epoch(self) -> Iterator[Any]:
        self.batch = 0
        _set_epoch(self.dataloader, self.epoch)
        self._began = self._generator_state()
        return iter(self.dataloader)

    def _resume_epoch(self) -> Iterator[Any]:
        """Replay the beginning of the epoch with its random state, and leave torch's current state as it is."""
        self._resumes = False
        present = self._generator_state()
        _set_epoch(self.dataloader, self.epoch)
        if self._began is not None:
            self._set_generator_state(self._began)
        batches = iter(self.dataloader)
        for _ in range(self.batch):
            next(batches, None)
        if self._generator() is torch.default_generator:  # the loader's own generator must stay where it has got to
            self._set_generator_state(present)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Return epoch, batches read and the generator's state at its beginning; valid for any number of ranks."""
        return {"epoch": self.epoch, "batch": self.batch, "began": self._began}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.batch = int(state_dict["epoch"]), int(state_dict["batch"])
        self._began = state_dict["began"]
        self._resumes = self.batch > 0 or self._began is not None

    def _generator(self) -> torch.Generator:
        own = getattr(self.dataloader, "generator", None)
        return own if isinstance(own, torch.Generator) else torch.default_generator

    def _generator_state(self) -> torch.Tensor:
        return self._generator().get_state()

    def _set_generator_state(self, state: torch.Tensor) -> None:
        self._generator().set_state(state)


def sampler(plan: Plan, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True) -> LocalSampler:
    """Return the sampler of this rank for a model that was planned with ``batch="local"``.

    Calls ``plan.sampler``, whose arguments and errors it shares, for this rank of the process group.
    """
    rank = dist.get_rank() if dist.is_initialized() else None
    return plan.sampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank)


def _set_epoch(dataloader: Any, epoch: int) -> None:
    for each in (getattr(dataloader, "sampler", None), getattr(dataloader, "batch_sampler", None)):
        set_epoch = getattr(each, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
