"""How long real steps take, beside what the plan predicts."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from autopar.plans import Plan
from autopar.plans.table import seconds, size

REMEMBERED = 256
"""So many of the last steps are remembered."""


def stamp(device: torch.device) -> Any:
    """A moment on the device: when what was launched until now is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def between(first: Any, last: Any) -> float:
    """Seconds from one stamp to another."""
    if isinstance(first, float):
        return float(last - first)
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


@dataclass
class Marks:
    """One step: its forward, and its backward where there has been one."""

    device: torch.device
    forward: tuple[Any, Any] | None = None
    backward: tuple[Any, Any] | None = None


@dataclass
class StepClock:
    """The last steps of a model on this rank."""

    steps: deque[Marks] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    total: int = 0

    def done(self, marks: Marks) -> None:
        """A step whose backward has run."""
        self.steps.append(marks)
        self.total += 1


@dataclass(frozen=True)
class PredictionCheck:
    """The medians of the last ``wanted`` steps of this rank beside the plan's figures; read again, of newer steps."""

    plan: Plan
    clock: StepClock
    wanted: int
    device: torch.device

    @property
    def steps(self) -> int:
        """How many steps the medians are of."""
        return min(self.wanted, len(self.clock.steps))

    @property
    def measured(self) -> dict[str, float]:
        """Median seconds of forward, backward and both; bytes of the peak where the device counts them."""
        last = list(self.clock.steps)[-self.wanted :]
        found = {}
        if last:
            forward = [between(*m.forward) for m in last if m.forward]
            backward = [between(*m.backward) for m in last if m.backward]
            both = [f + b for f, b in zip(forward, backward, strict=True)]
            found = {"forward": median(forward), "backward": median(backward), "step": median(both)}
            if self.device.type == "cuda":
                found["peak memory"] = float(torch.cuda.max_memory_allocated(self.device))
        return found

    @property
    def predicted(self) -> dict[str, float]:
        """The same of the plan."""
        ops = self.plan.program.ops
        intervals = self.plan.facts.intervals if self.plan.facts else ()
        forward = max((end for at, _, _, end in intervals if at >= 0 and ops[at].phase == "forward"), default=0.0)
        step = self.plan.step_time
        return {"forward": forward, "backward": step - forward, "step": step, "peak memory": self.plan.peak_memory}

    def __str__(self) -> str:
        if not self.steps:
            return "No step was made yet: call the model and the loss's backward, then read this again."
        predicted, lines = self.predicted, [f"{'':<12}{'predicted':>12}{'measured':>12}{'ratio':>9}"]
        for name, value in self.measured.items():
            text = size if name == "peak memory" else seconds
            ratio = f"{value / predicted[name]:.2f} x" if predicted[name] else ""
            lines.append(f"{name:<12}{text(predicted[name]):>12}{text(value):>12}{ratio:>9}")
        head = f"{self.plan.model} on mesh {self.plan.mesh}, planned for {self.plan.cluster}, run on {self.device.type}"
        return "\n".join([head, f"median of {self.steps} steps of this rank", *lines])
