"""Data loading: loaders that begin again or resume, and which samples a rank reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.plans import LocalSampler, Plan


class CycledDataLoader:
    """Batches without end: at its end the loader begins again.

    A sampler with ``set_epoch``, as distributed ones have, is told each new epoch, so that the order changes.

    Attributes:
        epoch: how often the loader has begun again.
    """

    def __init__(self, dataloader: Iterable[Any]) -> None:
        self.dataloader = dataloader
        self.epoch = 0
        self._batches: Iterator[Any] | None = None

    def next(self) -> Any:
        """The next batch.

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
                "The data loader has no batches.", found=repr(self.dataloader), hint="give one with data."
            ) from None


class ResumableDataLoader:
    """A loader that knows where it is, and goes on from there in another process.

    One ``for`` over it is one epoch; after ``load_state_dict`` the first is the rest of the epoch that was under way.
    The order of an epoch is that of its random numbers at the beginning, which are part of the state, and of the
    sampler's ``set_epoch``, which is called. Batches that were read before are read again and dropped.

    Args:
        dataloader: torch's, or any iterable whose order is decided when an iterator is made.
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
        batches = self._continued() if self._resumes else self._begun()
        for batch in batches:
            self.batch += 1
            yield batch
        self.epoch, self.batch, self._began = self.epoch + 1, 0, None

    def _begun(self) -> Iterator[Any]:
        self.batch = 0
        _set_epoch(self.dataloader, self.epoch)
        self._began = self._generator_state()
        return iter(self.dataloader)

    def _continued(self) -> Iterator[Any]:
        """Repeat the beginning of the epoch with its random numbers, and leave torch's present ones as they are."""
        self._resumes = False
        present = self._generator_state()
        _set_epoch(self.dataloader, self.epoch)
        if self._began is not None:
            self._set_generator_state(self._began)
        batches = iter(self.dataloader)
        for _ in range(self.batch):
            next(batches, None)
        if self._generator() is torch.default_generator:  # one of the loader's own has come as far as it was
            self._set_generator_state(present)
        return batches

    def state_dict(self) -> dict[str, Any]:
        """Epoch, batches read of it, and the generator's state when it began; the same for any number of ranks."""
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
    """The samples that this rank reads for a model that was planned with ``batch="local"``.

    As ``plan.sampler``, whose arguments and errors it has, for this rank of the process group.
    """
    rank = dist.get_rank() if dist.is_initialized() else None
    return plan.sampler(dataset, shuffle=shuffle, seed=seed, drop_last=drop_last, rank=rank)


def _set_epoch(dataloader: Any, epoch: int) -> None:
    for each in (getattr(dataloader, "sampler", None), getattr(dataloader, "batch_sampler", None)):
        tell = getattr(each, "set_epoch", None)
        if tell is not None:
            tell(epoch)
