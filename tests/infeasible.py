"""What the error of a budget that nothing fits names."""

from __future__ import annotations

from autopar.errors import InfeasibleError


def smallest_budget(error: BaseException) -> int:
    """Return the bytes of the smallest budget that works, as the error names it."""
    assert isinstance(error, InfeasibleError)
    return int(error.hint.partition("memory_budget=")[2].partition(";")[0])
