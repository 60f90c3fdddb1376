"""Progress of a command: one changing line on a terminal, one line per stage elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TextIO

from autopar.solver.clock import hurried, interruptible

WIDTH = 78
STAGES = {
    "capture": "capture: trace forward and backward, without allocating anything",
    "strategies": "strategies: list the ways to shard each op",
    "build": "price: compute seconds and bytes of each strategy",
    "baselines": "baselines: complete the known ways to train in parallel",
    "solve": "solve: choose the best strategies",
    "without a budget": "search: the best plan without a memory budget",
    "baselines within the budget": "search: the cheapest known way to train that fits the budget",
    "keep, recompute or offload": "search: list what can be recomputed or offloaded",
    "checkpoint rules": "search: simple rules for what to keep",
    "known shardings": "search: what to keep, recompute and offload with known shardings",
    "joint": "search: shardings and what to keep, recompute and offload together",
    "exact memory": "search: what to keep, recompute and offload with exact memory",
    "smallest peak": "search: the plan of the smallest peak",
    "lower": "lower: write the program of every rank",
}


class Progress:
    """Print each stage that it is called with. In ``solve: 219 ms, gap 3 %`` the stage is ``solve``."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = sys.stderr if out is None else out
        self.live = self.out.isatty()
        self.began = time.monotonic()
        self.stage = ""
        self.printed_at = -1.0

    def __call__(self, text: str) -> None:
        stage, detail, _ = text.partition(": ")
        now = time.monotonic()
        if stage == self.stage and not self.live and now - self.printed_at < 2.0:
            return
        if stage == self.stage and not detail:
            return
        self.stage, self.printed_at = stage, now
        said = STAGES.get(stage, stage) if not detail else text
        stopping = " (stopping)" if hurried() else ""
        line = f"{now - self.began:6.1f} s  {said}{stopping}"
        print(f"\r{line[:WIDTH]:<{WIDTH}}" if self.live else line, end="" if self.live else "\n", file=self.out)
        self.out.flush()

    def close(self) -> None:
        if self.live:
            print("\r" + " " * WIDTH + "\r", end="", file=self.out, flush=True)


@contextlib.contextmanager
def told() -> Iterator[Progress]:
    """Show progress, and let Ctrl-C end the search with the best plan so far."""
    progress = Progress()
    try:
        with interruptible():
            yield progress
            if hurried():
                progress.close()
                print("stopped: this is the best plan found so far", file=progress.out)
    finally:
        progress.close()
