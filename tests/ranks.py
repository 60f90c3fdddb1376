"""Run a function on several gloo processes; a test never hangs, and shows the error that came first."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing

T = TypeVar("T")


@dataclass(frozen=True)
class Report:
    """What one rank sends back: its pickled result, or its error and when it happened."""

    rank: int
    result: bytes = b""
    error: bytes = b""
    trace: str = ""
    time_s: float = 0.0


def forking() -> ForkServerContext:
    """Return a context whose processes are forked from one that has imported what ranks need, and has run none of it:
    the imports take longer than most tests."""
    context: ForkServerContext = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autopar", "transformers", "tests.multiprocess.training_models"])
    return context


def run_ranks(
    world_size: int, function: Callable[..., T], *args: Any, timeout: float = 120.0, backend: str = "gloo"
) -> list[T]:
    """Call ``function(*args)`` on ``world_size`` new processes and return what each returned, by rank.

    Each process has one thread, the same seeds and an initialized default process group. ``function`` must be
    defined at the top level of a module; arguments and results must be picklable, and are passed by value.

    Raises:
        TimeoutError: if a rank is not done after ``timeout`` seconds; shows the stacks of such ranks.
        Exception: the error that a rank raised first, with that rank's traceback as its cause.
    """
    context = forking()
    call = pickle.dumps((function, args))
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = []
        ends: dict[Connection, int] = {}
        try:
            for rank in range(world_size):
                here, there = context.Pipe(duplex=False)
                target = (call, rank, world_size, backend, folder, there)
                process = context.Process(target=_rank_main, args=target, daemon=True)
                process.start()
                there.close()
                processes.append(process)
                ends[here] = rank
            return _gather(processes, ends, Path(folder), timeout)
        finally:
            for process in processes:
                process.join(0 if ends else 5)  # ranks whose peers failed may wait forever
                process.kill()
                process.join()


def _gather(processes: list[BaseProcess], ends: dict[Connection, int], folder: Path, timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline_s = time.monotonic() + timeout
    while ends:
        awake = wait(list(ends), max(0.0, deadline_s - time.monotonic()))
        ready = [end for end in awake if isinstance(end, Connection)]
        if not ready:
            raise TimeoutError(_where_they_stand(processes, sorted(ends.values()), folder, timeout))
        reports = [_receive(end, ends[end], processes) for end in ready]
        failures = [r for r in reports if r.trace]
        if failures:
            _reraise(min(failures, key=lambda r: r.time_s))
        results.update((r.rank, pickle.loads(r.result)) for r in reports)
        for end in ready:
            del ends[end]
    return [results[rank] for rank in range(len(processes))]


def _receive(end: Connection, rank: int, processes: list[BaseProcess]) -> Report:
    try:
        report: Report = end.recv()
    except EOFError:
        processes[rank].join(5)
        died = f"rank {rank} died without a word, exit code {processes[rank].exitcode}"
        return Report(rank, trace=died)  # time 0: the other ranks' errors follow from this one
    return report


def _reraise(report: Report) -> None:
    cause = RankTraceback(f"\nrank {report.rank}:\n{report.trace}")
    if report.error:
        raise pickle.loads(report.error) from cause
    raise RuntimeError(f"rank {report.rank} failed:\n{report.trace}")


class RankTraceback(Exception):  # noqa: N818  it is the place of an error, not an error
    """Shows the traceback of another process as the cause of the error raised here."""

    def __str__(self) -> str:
        return str(self.args[0])


def _where_they_stand(processes: list[BaseProcess], missing: list[int], folder: Path, timeout: float) -> str:
    """Return the stacks of the missing ranks as text (see ``faulthandler.register`` below)."""
    lines = [f"after {timeout:g} s these ranks were not done: {missing}"]
    for rank in missing:
        pid = processes[rank].pid
        if pid and (folder / f"stack{rank}").exists():
            os.kill(pid, signal.SIGUSR1)
    time.sleep(1)
    for rank in missing:
        path = folder / f"stack{rank}"
        lines.append(f"rank {rank}:\n{path.read_text() if path.exists() else '  still starting'}")
    return "\n".join(lines)


def _rank_main(call: bytes, rank: int, world_size: int, backend: str, folder: str, there: Connection) -> None:
    stack = Path(folder, f"stack{rank}").open("w")  # noqa: SIM115  open as long as the process lives
    faulthandler.register(signal.SIGUSR1, stack)
    faulthandler.enable()  # a rank that dies shows where
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
        function, args = pickle.loads(call)
        report = Report(rank, result=pickle.dumps(function(*args)))
    except BaseException as error:  # noqa: BLE001  whatever it is, the parent raises it
        report = Report(rank, error=_pickled(error), trace=traceback.format_exc(), time_s=time.monotonic())
    there.send(report)
    if not report.trace and dist.is_initialized():
        dist.barrier()  # a rank that exits early would cut off the others' last messages
        dist.destroy_process_group()


def _pickled(error: BaseException) -> bytes:
    """Return the pickled error, or nothing if the parent could not unpickle it."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # noqa: BLE001  pickling runs code of the error's class
        return b""
    return data
