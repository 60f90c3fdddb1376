"""When a rank fails, the job ends at once and says why; when one hangs, it ends in time and says where."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from autopar.errors import AutoparError, RankError
from autopar.training.communication import DistCoordinator

Main = TypeVar("Main", bound=Callable[..., object])
LATE_S = 3.0
_OF_COLLECTIVES = re.compile(r"gloo|nccl|closed by peer|reset by peer|barrier|collective", re.IGNORECASE)


def guarded(main: Main) -> Main:
    """A decorator for a script's main function: an error ends this process now, whatever else it is waiting for.

    Its traceback goes to the standard error and to torchrun, which ends the other ranks, names the rank that failed
    first, and starts all again where it may (``--max-restarts``). When the function is done, so is the process group.
    """
    recorded = record(_late_where_it_follows(main))

    @functools.wraps(main)
    def run(*args: object, **kwargs: object) -> object:
        try:
            done = recorded(*args, **kwargs)
        except Exception:  # noqa: BLE001  whatever it is, the job ends
            sys.stderr.write(f"rank {DistCoordinator().rank} failed:\n{traceback.format_exc()}\n")
            sys.stderr.flush()
            sys.stdout.flush()
            # Leaving in the ordinary way would wait for threads and process groups, which wait for other ranks.
            os._exit(1)
        if dist.is_initialized():
            # Threads of a group that is still there when the interpreter ends may abort the process.
            dist.destroy_process_group()
        return done

    return run  # type: ignore[return-value]


def _late_where_it_follows(main: Callable[..., object]) -> Callable[..., object]:
    """``main`` whose errors wait a little where they may follow from another rank's.

    torchrun takes the error with the earliest second for the cause. A rank that was told of another's end, as all are
    within a moment, is ended meanwhile.
    """

    @functools.wraps(main)
    def run(*args: object, **kwargs: object) -> object:
        try:
            return main(*args, **kwargs)
        except Exception as error:
            if follows(error):
                time.sleep(LATE_S)
            raise

    return run


def follows(error: BaseException | None) -> bool:
    """Whether an error is that of a collective, or another rank's, and so not where the trouble began."""
    while error is not None:
        told = isinstance(error, (RankError, dist.DistError)) or _OF_COLLECTIVES.search(str(error))
        if told:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def watchdog(timeout_s: float) -> Iterator[Callable[[], None]]:
    """End this process when a step takes longer than ``timeout_s``; first it writes where each thread stands.

        with watchdog(300.0) as beat:
            for batch in dataloader:
                ...
                beat()

    It needs no lock of Python's, so it works while a collective or a kernel blocks. Its exit ends the job, as a
    rank's death does, also where only a rank outside of any collective hangs.
    """
    if timeout_s <= 0:
        raise AutoparError("A timeout is positive.", found=f"{timeout_s} s", hint="give seconds of the longest step.")

    def beat() -> None:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)

    beat()
    try:
        yield beat
    finally:
        faulthandler.cancel_dump_traceback_later()
