"""From the planned program to the graphs that run."""

from autopar.passes.lower import lower

__all__ = ["lower"]
