"""Ranks that stay alive between tests, since starting a process with torch takes seconds."""

from __future__ import annotations

import faulthandler
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing

from tests.ranks import Report, _gather, _pickled, forking

T = TypeVar("T")


class RankPool:
    """``world_size`` gloo processes. A failure ends them, and the next call starts new ones."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[BaseProcess] = []
        self._ends: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory()
        self._starts = 0

    def run(self, function: Callable[..., T], *args: Any, timeout: float = 120.0) -> list[T]:
        """Call ``function(*args)`` on every rank and return the results by rank, as ``run_ranks`` does."""
        if not self._processes:
            self._start()
        call = pickle.dumps((function, args))
        for end in self._ends:
            end.send(call)
        try:
            return _gather(self._processes, {e: r for r, e in enumerate(self._ends)}, Path(self._folder.name), timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._ends = [], []

    def _start(self) -> None:
        context = forking()
        self._starts += 1
        store = str(Path(self._folder.name, f"store{self._starts}"))
        for rank in range(self.world_size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, store, there), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._ends.append(here)


def _serve(rank: int, world_size: int, store: str, there: Connection) -> None:
    faulthandler.enable()  # a rank that dies shows where
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    while True:
        try:
            call = there.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            function, args = pickle.loads(call)
            report = Report(rank, result=pickle.dumps(function(*args)))
        except BaseException as error:  # noqa: BLE001  whatever it is, the parent raises it
            report = Report(rank, error=_pickled(error), trace=traceback.format_exc(), time_s=time.monotonic())
        there.send(report)
