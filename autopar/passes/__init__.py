"""From the planned program to the graphs that run."""

from autopar.passes.lower import Lowered, lower

__all__ = ["Lowered", "lower"]
