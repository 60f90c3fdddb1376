"""An error on one rank in the middle of a step stops all ranks.

The rank that fails says so in the job's store, and closes its connections, so that ranks that wait for it raise an
error; these close theirs in turn, and look in the store for the cause.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from autopar import _torch
from autopar.errors import RankError
from autopar.runtime.agreement import this_rank, world_size
from autopar.runtime.pipeline.state import PipelineState

KEY = "failed"
LOOKS, LOOK_S = 20, 0.1
"""How often, and after how many seconds each, a rank looks for the cause of a broken connection."""
BROKEN = ("onnection", "gloo", "NCCL", "Socket", "Broken pipe", "Timed out", "process group")
"""Parts of torch's messages when another rank is gone."""


@contextlib.contextmanager
def stopping_all_ranks(state: PipelineState, let_go: Callable[[], None]) -> Iterator[Callable[[Any], None]]:
    """Run a part of a step; if it fails, every rank raises.

    Args:
        let_go: releases all work on messages.

    Yields:
        A function to call with each action as it begins.
    """
    now: list[Any] = [None]
    if state.failed:
        raise RankError(
            "This pipeline has stopped because of an error on a rank.",
            found=state.failed,
            hint="start the job again, from its last checkpoint.",
        )
    try:
        yield lambda action: now.__setitem__(0, action)
    except Exception as error:
        raise _stopped(state, let_go, error, now[0]) from error


def _stopped(state: PipelineState, let_go: Callable[[], None], error: Exception, action: Any) -> BaseException:
    where = f"stage {action.stage}, action {action}" if action is not None else "before the first action"
    here = f"rank {this_rank()}, {where}: {type(error).__name__}: {error!s:.400}"
    broken = isinstance(error, RuntimeError) and any(part in str(error) for part in BROKEN)
    cause = _cause(here, wait=broken) if world_size() > 1 else here
    state.failed = cause
    let_go()
    if world_size() > 1:
        state.disconnect()
    if cause == here and not broken:
        note = f"This is {where} of the pipeline, on rank {this_rank()}; all ranks stop."
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10
            error.args = ("\n".join([*map(str, error.args), note]),)
        return error
    return RankError(
        "A rank of the pipeline failed, so all ranks stop.",
        found=cause if cause != here else f"{here}; no rank said why",
        hint="fix the error on that rank.",
    )


def _cause(here: str, *, wait: bool) -> str:
    """Return the first error of any rank, this one's if no other rank has reported one."""
    with contextlib.suppress(Exception):  # the store may be gone with its rank
        store = _torch.store("autopar_pipeline")
        for _ in range(LOOKS if wait else 1):
            if store.check([KEY]):
                return str(store.get(KEY).decode())
            time.sleep(LOOK_S if wait else 0)
        if not wait:
            store.set(KEY, here)
    return here
