"""Checkpoints of a run: written in the background, atomic, and loadable under any plan and world size.

Tensors go through ``torch.distributed.checkpoint``, where each rank writes its shards; everything else is stored beside
them. A checkpoint is written to a temporary directory, which is renamed once all of it has reached the disk: a
directory named ``step-...`` is complete.
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
from autopar.plans.pipeline import PipelinePlan, load_plan, plan_from_json
from autopar.runtime.agreement import decided_on_rank_0, on_all_ranks, this_rank, world_size
from autopar.runtime.gathering import EVERY_RANK
from autopar.runtime.waiting import roll_call
from autopar.training import state
from autopar.training.files import read_plain
from autopar.training.launch import TIMEOUT_S
from autopar.training.optimizers import scaler_of

NAME = re.compile(r"step-(\d+)(?:\.(\d+))?")
"""Name of a checkpoint's directory: the step, and how often that step was saved again after restarts."""


@dataclass(frozen=True)
class Resumed:
    """What ``Checkpointer.load`` returns.

    Args:
        step: the step that was passed to ``save``.
        extra: the extra data that was passed to ``save``.
    """

    step: int
    extra: Any


class Checkpointer:
    """Saves a run to ``folder`` and resumes it from there. Every rank creates one and calls the same methods.

        checkpointer = Checkpointer("run1")
        resumed = checkpointer.load(model, optimizer, lr_scheduler, data)
        for step in range(resumed.step if resumed else 0, steps):
            ...
            if (step + 1) % 100 == 0:
                checkpointer.save(step + 1, model, optimizer, lr_scheduler, data)
        checkpointer.wait()

    Args:
        folder: a directory on a disk that all ranks share.
        keep: how many of the newest checkpoints to keep.
        timeout_s: how long ranks that have written wait for the others before they raise an error.
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
        """Copy the state of the run to the host, and write it in the background while training goes on.

        If the previous checkpoint is still being written, wait for it first.

        Args:
            step: the number of steps done; names the checkpoint.
            data: an object with ``state_dict()`` that holds the position in the data, such as a
                ``ResumableDataLoader``.
            extra: anything that ``torch.load(weights_only=True)`` can read, the same on all ranks.
            wait: return only once the checkpoint is written.

        Raises:
            AutoparError: the previous checkpoint could not be written, or gradients are partly accumulated.
        """
        roll_call("Checkpointer.save", EVERY_RANK)
        self.wait()
        self._ensure_group()
        if getattr(optimizer, "accumulate_step", 0):
            raise AutoparError(
                "The checkpoint cannot be saved: gradients are partly accumulated, and checkpoints hold none.",
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
            if isinstance(plan, (Plan, PipelinePlan)):
                blobs["plan.json"] = plan.to_json().encode()
        staged = {name: _host_copy(tensor) for name, tensor in tensors.items()}
        # A daemon thread lets a rank that fails exit while others wait for it.
        self._thread = threading.Thread(target=self._write, args=(step, staged, blobs), daemon=True)
        self._thread.start()
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is on the disk.

        Raises:
            AutoparError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            hint = "check that every rank reaches the folder, and that there is room; earlier checkpoints are intact."
            raise RankError("A checkpoint could not be written.", found=str(error), hint=hint) from error

    def _ensure_group(self) -> None:
        """Create a separate process group, because background collectives must not mix with those of training."""
        if self._group is None and world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)

    def steps(self) -> list[int]:
        """Return the steps of all complete checkpoints."""
        return sorted({step for step, _, _ in self._complete()})

    def _complete(self) -> list[tuple[int, int, Path]]:
        """Return step, repetition and directory of every complete checkpoint, the newest last."""
        if not self.folder.is_dir():
            return []
        found = ((NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        return sorted((int(m[1]), int(m[2] or 0), path) for m, path in found if m)

    def plan(self, step: int | None = None) -> Plan | PipelinePlan | None:
        """Return the plan of the newest checkpoint (or of ``step``) if it fits this number of ranks, else None.

        Pass it to ``autoparallelize`` so that a resumed run repeats bit for bit; None plans again.
        """
        text = decided_on_rank_0(lambda: self._plan_text(step))
        plan = None if text is None else plan_from_json(text)
        return plan if plan is not None and plan.mesh.size == world_size() else None

    def _plan_text(self, step: int | None) -> str | None:
        steps = self.steps() if step is None else [step]
        path = self._path(steps[-1]) / "plan.json" if steps else None
        return load_plan(path).to_json() if path is not None and path.is_file() else None

    def load(
        self,
        model: nn.Module,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        data: Any = None,
        *,
        step: int | None = None,
    ) -> Resumed | None:
        """Load the newest checkpoint (or that of ``step``), resharded to this run's plan.

        Random generators are restored last, so that a run under the same plan repeats bit for bit. Ranks that did not
        exist when the checkpoint was saved take the generators of rank 0.

        Returns:
            None where there is no checkpoint.

        Raises:
            AutoparError: the checkpoint belongs to another model or optimizer; raised on every rank.
        """
        roll_call("Checkpointer.load", EVERY_RANK)
        self.wait()
        self._ensure_group()
        steps = decided_on_rank_0(self.steps)
        if step is not None and step not in steps:
            raise AutoparError(
                "There is no checkpoint for this step.",
                found=f"step {step}; {self.folder} has {steps}",
                hint="choose one of these steps.",
            )
        if not steps:
            return None
        path = self._path(steps[-1] if step is None else step)
        common = on_all_ranks(lambda: _read(path / "common.pt"))
        self._load_tensors(path, model, optimizer, common)
        if lr_scheduler is not None and common["lr_scheduler"] is not None:
            lr_scheduler.load_state_dict(common["lr_scheduler"])
        scaler = scaler_of(optimizer)
        if scaler is not None and common["scaler"]:
            scaler.load_state_dict(common["scaler"])
        own = on_all_ranks(lambda: _read(path / f"rank-{this_rank() if this_rank() < common['world_size'] else 0}.pt"))
        if data is not None and own["data"] is not None:
            data.load_state_dict(own["data"])
        state.set_generators(own["random"])
        return Resumed(common["step"], common["extra"])

    def _load_tensors(self, path: Path, model: nn.Module, optimizer: Any, common: Mapping[str, Any]) -> None:
        reader = _torch.shard_reader(path)
        saved = on_all_ranks(reader.read_metadata).state_dict_metadata
        every = state.of_every_stage(model, on_all_ranks(lambda: state.held(model, optimizer)))
        key = (lambda t: list(t[0])) if len(every) == 1 else None  # stages of a pipeline load their own
        targets, finish = on_all_ranks(
            lambda: state.to_load(model, optimizer, saved, common, state.together(every)), key=key
        )
        _torch.load_shards(targets, reader, self._group)
        finish()

    def _path(self, step: int) -> Path:
        return max((repetition, path) for each, repetition, path in self._complete() if each == step)[1]

    def _write(self, step: int, tensors: dict[str, Tensor], blobs: Mapping[str, bytes]) -> None:
        try:
            temporary = self.folder / f".step-{step:08d}.incomplete"
            self._on_all_ranks(lambda: _make_empty_folder(temporary) if this_rank() == 0 else None)
            self._on_all_ranks(lambda: _write_blobs(temporary, blobs))
            writer = FileSystemWriter(temporary, sync_files=True)
            _torch.save_shards(tensors, writer, self._group)
            self._on_all_ranks(lambda: self._commit(temporary, step) if this_rank() == 0 else None)
        except BaseException as error:  # noqa: BLE001  wait() raises it in the training thread
            self._error = error

    def _on_all_ranks(self, function: Any) -> None:
        """Run ``function`` on every rank; if it fails on one, all raise and none is left waiting."""
        error: Exception | None = None
        try:
            function()
        except Exception as caught:  # noqa: BLE001  every rank learns of it below
            error = caught
        errors = [None if error is None else f"rank {this_rank()}: {type(error).__name__}: {error}"]
        if self._group is not None:
            all_errors: list[Any] = [None] * world_size()
            dist.all_gather_object(all_errors, errors[0], group=self._group)
            errors = all_errors
        failed = next((text for text in errors if text is not None), None)
        if failed is not None:
            raise RuntimeError(failed) from error

    def _commit(self, temporary: Path, step: int) -> None:
        """Rename the complete checkpoint to its final name, and remove those that are too old."""
        _sync_folder(temporary)
        repetitions = [n for each, n, _ in self._complete() if each == step]
        temporary.rename(
            self.folder / (f"step-{step:08d}.{max(repetitions) + 1}" if repetitions else f"step-{step:08d}")
        )
        _sync_folder(self.folder)
        kept = self.steps()[-self.keep :]
        for each, _, path in self._complete():
            if each not in kept or path != self._path(each):
                path.rename(self.folder / f".{path.name}.removed")  # a rename is atomic, removing is not
        for path in self.folder.glob(".step-*"):  # including leftovers of a run that was killed
            shutil.rmtree(path)


def _host_copy(tensor: Tensor) -> Tensor:
    """Return a host copy that training does not change."""
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


def _make_empty_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)


def _write_blobs(folder: Path, blobs: Mapping[str, bytes]) -> None:
    for name, data in blobs.items():
        with open(folder / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Sync a directory, which makes renames in it durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
