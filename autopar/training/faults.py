"""Failures of a job: it ends at once with the cause if a rank fails, and in bounded time if one hangs."""

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
DELAY_S = 3.0
"""Seconds by which an error that may follow from another rank's is delayed."""

_OF_COLLECTIVES = re.compile(r"gloo|nccl|closed by peer|reset by peer|barrier|collective", re.IGNORECASE)


def guarded(main: Main) -> Main:
    """Decorate a script's main function so that an error ends this process at once, whatever else it is waiting for.

    The traceback goes to standard error and to torchrun, which ends the other ranks, names the rank that failed first,
    and restarts the job if allowed (``--max-restarts``). When the function returns, the process group is destroyed.
    """
    recorded = record(_delay_secondary_errors(main))

    @functools.wraps(main)
    def run(*args: object, **kwargs: object) -> object:
        try:
            done = recorded(*args, **kwargs)
        except Exception:  # noqa: BLE001  any error must end the job
            sys.stderr.write(f"rank {DistCoordinator().rank} failed:\n{traceback.format_exc()}\n")
            sys.stderr.flush()
            sys.stdout.flush()
            # An ordinary exit would wait for threads and process groups, which wait for other ranks.
            os._exit(1)
        if dist.is_initialized():
            # The threads of a process group that outlives the interpreter may abort the process.
            dist.destroy_process_group()
        return done

    return run  # type: ignore[return-value]


def _delay_secondary_errors(main: Callable[..., object]) -> Callable[..., object]:
    """Wrap ``main`` so that errors which may follow from another rank's are delayed.

    torchrun blames the error with the earliest timestamp, in whole seconds. A rank that only reports another's failure
    is usually ended during the delay, since all ranks fail within a moment.
    """

    @functools.wraps(main)
    def run(*args: object, **kwargs: object) -> object:
        try:
            return main(*args, **kwargs)
        except Exception as error:
            if follows(error):
                time.sleep(DELAY_S)
            raise

    return run


def follows(error: BaseException | None) -> bool:
    """Whether an error comes from a collective or another rank, and so is not the cause."""
    while error is not None:
        secondary = isinstance(error, (RankError, dist.DistError)) or _OF_COLLECTIVES.search(str(error))
        if secondary:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def watchdog(timeout_s: float) -> Iterator[Callable[[], None]]:
    """End this process if a step takes longer than ``timeout_s``, after writing where each thread is.

        with watchdog(300.0) as beat:
            for batch in dataloader:
                ...
                beat()

    The timer does not need the GIL, so it works while a collective or a kernel blocks. The exit ends the job as any
    rank's death does, even if only this rank hangs, outside of any collective.
    """
    if timeout_s <= 0:
        raise AutoparError(
            "The timeout must be positive.", found=f"{timeout_s} s", hint="give the longest step's seconds."
        )

    def beat() -> None:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)

    beat()
    try:
        yield beat
    finally:
        faulthandler.cancel_dump_traceback_later()
