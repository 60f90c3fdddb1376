"""Linear annealing of a temperature."""

from __future__ import annotations


class AnnealingScheduler:
    """``start`` during the warm-up, then on a straight line to ``end``, which it is from ``annealing_step`` on.

    Args:
        start: the first value.
        end: the last value.
        warmup_steps: steps before it begins to change.
        annealing_step: the step at which it arrives.
    """

    def __init__(self, start: float, end: float, warmup_steps: int = 100, annealing_step: int = 2000) -> None:
        self.start = start
        self.end = end
        self.warmup_steps = warmup_steps
        self.annealing_step = annealing_step
        self.step = 0

    def get_temperature(self) -> float:
        """The value at the present step."""
        if self.step >= self.annealing_step:
            return self.end
        if self.step <= self.warmup_steps:
            return self.start
        done = (self.step - self.warmup_steps) / (self.annealing_step - self.warmup_steps)
        return self.start + (self.end - self.start) * done

    def step_forward(self) -> None:
        """Go on by one step."""
        self.step += 1
