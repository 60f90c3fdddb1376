"""Linear annealing of a temperature."""

from __future__ import annotations


class AnnealingScheduler:
    """Holds ``start`` during the warm-up, then moves linearly to ``end``, which it reaches at ``annealing_step``.

    Args:
        start: the initial value.
        end: the final value.
        warmup_steps: steps before the value begins to change.
        annealing_step: the step from which the value is ``end``.
    """

    def __init__(self, start: float, end: float, warmup_steps: int = 100, annealing_step: int = 2000) -> None:
        self.start = start
        self.end = end
        self.warmup_steps = warmup_steps
        self.annealing_step = annealing_step
        self.step = 0

    def get_temperature(self) -> float:
        """Return the value at the current step."""
        if self.step >= self.annealing_step:
            return self.end
        if self.step <= self.warmup_steps:
            return self.start
        done = (self.step - self.warmup_steps) / (self.annealing_step - self.warmup_steps)
        return self.start + (self.end - self.start) * done

    def step_forward(self) -> None:
        """Advance by one step."""
        self.step += 1
