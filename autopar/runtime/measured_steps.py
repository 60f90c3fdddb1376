"""Measured times of real steps, to compare with the plan's predictions."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from autopar.plans import Plan
from autopar.plans.layers import REST, folded
from autopar.plans.table import seconds, size
from autopar.runtime.measured_memory import MemoryProbe
from autopar.spmd.sections import timed

REMEMBERED = 256
"""Number of last steps whose times are kept."""

IN_DETAIL = 10
"""Number of last steps for which each module's times are kept."""

SHOWN = 12
"""Number of modules printed: those that take longest."""


def stamp(device: torch.device) -> Any:
    """Return a time stamp on the device: the moment when everything launched so far is done."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def between(first: Any, last: Any) -> float:
    """Return the seconds from one stamp to another."""
    if isinstance(first, float):
        return float(last - first)
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


@dataclass
class Marks:
    """The times of one step: its forward, its backward if it had one, and on the CPU the starts of modules' ops."""

    device: torch.device
    forward: tuple[Any, Any] | None = None
    backward: tuple[Any, Any] | None = None
    sections: list[tuple[str, float]] = field(default_factory=list)

    @contextlib.contextmanager
    def in_sections(self) -> Iterator[None]:
        """Record sections in the body on a CPU; a GPU runs behind the host, whose times would mean nothing."""
        if self.device.type == "cpu":
            with timed(self.sections):
                yield
        else:
            yield

    def by_module(self) -> Counter[str]:
        """Return seconds by module; modules whose names differ only in a number are added up."""
        found: Counter[str] = Counter()
        for (module, began), (_, ended) in zip(self.sections, self.sections[1:], strict=False):
            if module:
                found[folded(module)] += ended - began  # type: ignore[assignment]
        return found


@dataclass
class StepClock:
    """The times of the last steps of a model on this rank."""

    steps: deque[Marks] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    total: int = 0
    memory: MemoryProbe = field(default_factory=MemoryProbe)

    def done(self, marks: Marks) -> None:
        """Record a step whose backward has run, unless its memory was counted, which slows it down."""
        self.total += 1
        if self.memory.is_counting:
            return
        self.steps.append(marks)
        if len(self.steps) > IN_DETAIL:
            self.steps[-1 - IN_DETAIL].sections.clear()


@dataclass(frozen=True)
class PredictionCheck:
    """Medians of this rank's last ``wanted`` steps beside the plan's figures; later reads cover newer steps."""

    plan: Plan
    clock: StepClock
    wanted: int
    device: torch.device

    @property
    def steps(self) -> int:
        """Number of steps in the medians."""
        return min(self.wanted, len(self.clock.steps))

    @property
    def measured(self) -> dict[str, float]:
        """Median seconds of forward, backward and both, and peak bytes.

        On a CPU the peak is that of one step including its optimizer, the first after the comparison was requested.
        """
        last = list(self.clock.steps)[-self.wanted :]
        found = {}
        if last:
            forward = [between(*m.forward) for m in last if m.forward]
            backward = [between(*m.backward) for m in last if m.backward]
            both = [f + b for f, b in zip(forward, backward, strict=True)]
            found = {"forward": median(forward), "backward": median(backward), "step": median(both)}
        if self.device.type == "cuda":
            found["peak memory"] = float(torch.cuda.max_memory_allocated(self.device))
        elif self.clock.memory.measured is not None:
            found["peak memory"] = float(self.clock.memory.measured)
        return found

    @property
    def predicted(self) -> dict[str, float]:
        """The plan's figures for the same quantities."""
        ops = self.plan.program.ops
        intervals = self.plan.facts.intervals if self.plan.facts else ()
        forward = max((end for at, _, _, end in intervals if at >= 0 and ops[at].phase == "forward"), default=0.0)
        step = self.plan.step_time
        return {"forward": forward, "backward": step - forward, "step": step, "peak memory": self.plan.peak_memory}

    @property
    def measured_modules(self) -> dict[str, float]:
        """Median seconds in which a module's ops ran or waited, summed over modules that differ only in a number.

        Empty on a GPU, where a profiler shows the same ranges, and for compiled programs.
        """
        steps = [m.by_module() for m in list(self.clock.steps)[-min(self.wanted, IN_DETAIL) :] if m.sections]
        return {name: median(s[name] for s in steps) for name in dict.fromkeys(n for s in steps for n in s)}

    @property
    def predicted_modules(self) -> dict[str, float]:
        """The plan's seconds by module, on the computation stream, where each op includes the wait before it."""
        found: dict[str, float] = defaultdict(float)
        last = 0.0
        facts = self.plan.facts
        for at, stream, _, end in sorted(facts.intervals, key=lambda i: i[2]) if facts else ():
            if stream == "compute" and at >= 0:
                node = facts.nodes.get(self.plan.program.ops[at].node) if facts else None
                found[folded(node.module) if node and node.module else REST] += end - last
                last = end
        return dict(found)

    def __str__(self) -> str:
        if not self.steps:
            return "No step has run yet: call the model and the loss's backward, then read this again."
        predicted, lines = self.predicted, [f"{'':<12}{'predicted':>12}{'measured':>12}{'ratio':>9}"]
        for name, value in self.measured.items():
            lines.append(_line(name, predicted[name], value, size if name == "peak memory" else seconds))
        head = f"{self.plan.model} on mesh {self.plan.mesh}, planned for {self.plan.cluster}, run on {self.device.type}"
        return "\n".join([head, f"median of {self.steps} steps of this rank", *lines, *self._modules()])

    def _modules(self) -> list[str]:
        predicted, measured = self.predicted_modules, self.measured_modules
        longest = sorted(measured, key=lambda name: -measured[name])[:SHOWN]
        if not longest:
            return []
        width = max(map(len, longest)) + 2
        lines = [_line(name, predicted.get(name, 0.0), measured[name], seconds, width) for name in longest]
        return ["modules, including their waits", *lines]


def _line(name: str, predicted: float, measured: float, text: Any, width: int = 12) -> str:
    ratio = f"{measured / predicted:.2f} x" if predicted else ""
    return f"{name:<{width}}{text(predicted):>12}{text(measured):>12}{ratio:>9}"
