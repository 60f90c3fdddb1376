"""Checkpoints of a run: written in the background, there whole or not at all, and loaded under any plan and world size.

Tensors go through ``torch.distributed.checkpoint``, each rank writing its shards; what is not a tensor goes beside
them. A checkpoint is written to a directory of another name, which is renamed once everything in it has reached the
disk: a directory named ``step-...`` is complete.
"""

from __future__ import annotations

import datetime as dt
import io
import os
import re
import shutil
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from autopar import _torch
from autopar.errors import AutoparError, RankError
from autopar.plans import Plan
from autopar.runtime.agreement import decided_by_first, this_rank, together, world_size
from autopar.runtime.gathering import EVERY_RANK
from autopar.runtime.waiting import roll_call
from autopar.training import state
from autopar.training.files import read_plain
from autopar.training.launch import TIMEOUT_S
from autopar.training.optimizers import scaler_of

NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
"""A step, and how often it was saved again after a restart."""


@dataclass(frozen=True)
class Resumed:
    """What was loaded.

    Args:
        step: that ``save`` was given.
        extra: likewise.
    """

    step: int
    extra: Any


class Checkpointer:
    """Saves a run to ``folder`` and goes on from what is there. Every rank makes one, and calls the same methods.

        checkpointer = Checkpointer("run1")
        resumed = checkpointer.load(model, optimizer, lr_scheduler, data)
        for step in range(resumed.step if resumed else 0, steps):
            ...
            if (step + 1) % 100 == 0:
                checkpointer.save(step + 1, model, optimizer, lr_scheduler, data)
        checkpointer.wait()

    Args:
        folder: on a disk that all ranks share.
        keep: how many of the newest checkpoints stay.
        timeout_s: how long ranks that have written wait for one that has not, before that is an error.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 2, timeout_s: float = TIMEOUT_S) -> None:
        self.folder = Path(folder)
        self.keep = max(keep, 1)
        self._timeout = dt.timedelta(seconds=timeout_s)
        self._group: Any = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        data: Any = None,
        extra: Any = None,
        *,
        wait: bool = False,
    ) -> None:
        """Copy the state of the run to the host, and write it while training goes on.

        Waits for the checkpoint before, if that is still being written.

        Args:
            step: names the checkpoint; steps done.
            data: has ``state_dict()``, as a ``ResumableDataLoader`` has; its position in the data.
            extra: anything that ``torch.load(weights_only=True)`` reads, the same on all ranks.
            wait: return only when it is written.

        Raises:
            AutoparError: the checkpoint before could not be written, or gradients are half accumulated.
        """
        roll_call("Checkpointer.save", EVERY_RANK)
        self.wait()
        self._join()
        if getattr(optimizer, "accumulate_step", 0):
            raise AutoparError(
                "Gradients are half accumulated, and checkpoints hold none.",
                found=f"{optimizer.accumulate_step} of {optimizer.accumulate_size} batches",
                hint="save after a step of the optimizer.",
            )
        tensors, common = state.of_training(model, optimizer)
        common |= {"step": step, "extra": extra, "world_size": world_size()}
        common["lr_scheduler"] = None if lr_scheduler is None else lr_scheduler.state_dict()
        scaler = scaler_of(optimizer)
        common["scaler"] = None if scaler is None else scaler.state_dict()
        own = {"random": state.of_generators(), "data": None if data is None else data.state_dict()}
        blobs = {f"rank-{this_rank()}.pt": _bytes(own)}
        if this_rank() == 0:
            blobs["common.pt"] = _bytes(common)
            plan = getattr(model, "plan", None)
            if isinstance(plan, Plan):
                blobs["plan.json"] = plan.to_json().encode()
        staged = {name: _staged(tensor) for name, tensor in tensors.items()}
        # A daemon, so that a rank that fails while others wait for it can end.
        self._thread = threading.Thread(target=self._write, args=(step, staged, blobs), daemon=True)
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when what was saved is on the disk.

        Raises:
            AutoparError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            hint = (
                "see that every rank reaches the folder, and that there is room; the checkpoints before it are whole."
            )
            raise RankError("A checkpoint could not be written.", found=str(error), hint=hint) from error

    def _join(self) -> None:
        """A group of its own, since collectives of the background must not mix with those of training."""
        if self._group is None and world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    def steps(self) -> list[int]:
        """The steps of all complete checkpoints."""
        return sorted({step for step, _, _ in self._complete()})

    def _complete(self) -> list[tuple[int, int, Path]]:
        """Step, repetition and directory of every complete checkpoint, the newest last."""
        if not self.folder.is_dir():
            return []
        found = ((NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted((int(m[1]), int(m[2] or 0), path) for m, path in found if m)

    def plan(self, step: int | None = None) -> Plan | None:
        """The plan of the newest checkpoint (or of ``step``), if it is one for this number of ranks.

        Give it to ``autoparallelize``, so that a resumed run is the same bit for bit; None plans again.
        """
        text = decided_by_first(lambda: self._plan_text(step))
        plan = None if text is None else Plan.from_json(text)
        return plan if plan is not None and plan.mesh.size == world_size() else None

    def _plan_text(self, step: int | None) -> str | None:
        steps = self.steps() if step is None else [step]
        path = self._path(steps[-1]) / "plan.json" if steps else None
        return Plan.load(path).to_json() if path is not None and path.is_file() else None

    def load(
        self,
        model: nn.Module,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        data: Any = None,
        *,
        step: int | None = None,
    ) -> Resumed | None:
        """Load the newest checkpoint (or that of ``step``), cut as this run's plan cuts.

        Random generators come last, so that a run under the same plan repeats itself bit for bit. Ranks that were
        not there when it was saved take those of rank 0.

        Returns:
            None where there is no checkpoint.

        Raises:
            AutoparError: it belongs to another model or optimizer; on every rank.
        """
        roll_call("Checkpointer.load", EVERY_RANK)
        self.wait()
        self._join()
        steps = decided_by_first(self.steps)
        if step is not None and step not in steps:
            raise AutoparError(
                "There is no such checkpoint.",
                found=f"step {step}, in {self.folder} {steps}",
                hint="give one of these.",
            )
        if not steps:
            return None
        path = self._path(steps[-1] if step is None else step)
        common = together(lambda: _read(path / "common.pt"))
        self._load_tensors(path, model, optimizer, common)
        if lr_scheduler is not None and common["lr_scheduler"] is not None:
            lr_scheduler.load_state_dict(common["lr_scheduler"])
        scaler = scaler_of(optimizer)
        if scaler is not None and common["scaler"]:
            scaler.load_state_dict(common["scaler"])
        own = together(lambda: _read(path / f"rank-{this_rank() if this_rank() < common['world_size'] else 0}.pt"))
        if data is not None and own["data"] is not None:
            data.load_state_dict(own["data"])
        state.set_generators(own["random"])
        return Resumed(common["step"], common["extra"])

    def _load_tensors(self, path: Path, model: nn.Module, optimizer: Any, common: Mapping[str, Any]) -> None:
        reader = _torch.shard_reader(path)
        there = together(reader.read_metadata).state_dict_metadata
        targets, finish = together(lambda: state.to_load(model, optimizer, there, common), key=lambda t: list(t[0]))
        _torch.load_shards(targets, reader, self._group)
        finish()

    def _path(self, step: int) -> Path:
        return max((again, path) for each, again, path in self._complete() if each == step)[1]

    def _write(self, step: int, tensors: dict[str, Tensor], blobs: Mapping[str, bytes]) -> None:
        try:
            beside = self.folder / f".step-{step:08d}.incomplete"
            self._all(lambda: _emptied(beside) if this_rank() == 0 else None)
            self._all(lambda: _written(beside, blobs))
            writer = FileSystemWriter(beside, sync_files=True)
            _torch.save_shards(tensors, writer, self._group)
            self._all(lambda: self._commit(beside, step) if this_rank() == 0 else None)
        except BaseException as error:  # noqa: BLE001  raised by wait, in the thread that trains
            self._error = error

    def _all(self, function: Any) -> None:
        """Run on every rank; where it fails on one, all fail, and none waits for it."""
        error: Exception | None = None
        try:
            function()
        except Exception as caught:  # noqa: BLE001  every rank hears of it below
            error = caught
        said = [None if error is None else f"rank {this_rank()}: {type(error).__name__}: {error}"]
        if self._group is not None:
            all_said: list[Any] = [None] * world_size()
            dist.all_gather_object(all_said, said[0], group=self._group)
            said = all_said
        failed = next((text for text in said if text is not None), None)
        if failed is not None:
            raise RuntimeError(failed) from error

    def _commit(self, beside: Path, step: int) -> None:
        """Give the complete checkpoint its name, and remove those that are too old."""
        _synced(beside)
        again = [n for each, n, _ in self._complete() if each == step]
        beside.rename(self.folder / (f"step-{step:08d}.{max(again) + 1}" if again else f"step-{step:08d}"))
        _synced(self.folder)
        kept = self.steps()[-self.keep :]
        for each, _, path in self._complete():
            if each not in kept or path != self._path(each):
                path.rename(self.folder / f".{path.name}.removed")  # first, since removing takes more than a moment
        for path in self.folder.glob(".step-*"):  # those of a run that was killed too
            shutil.rmtree(path)


def _staged(tensor: Tensor) -> Tensor:
    """A copy on the host, which training does not change."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    copied = local.detach().to("cpu", copy=True)
    return _torch.dtensor_like(copied, tensor) if isinstance(tensor, DTensor) else copied


def _bytes(data: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(data, buffer)
    return buffer.getvalue()


def _read(path: Path) -> Any:
    if not path.is_file():
        raise AutoparError("The checkpoint lacks a file.", found=str(path), hint="use a disk that all ranks share.")
    return read_plain(path)


def _emptied(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _written(folder: Path, blobs: Mapping[str, bytes]) -> None:
    for name, data in blobs.items():
        with open(folder / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _synced(folder: Path) -> None:
    """Names of a directory reach the disk by syncing it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
