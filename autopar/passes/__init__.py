"""From the planned program to the graphs that run."""

from autopar.passes.inference import forward_only
from autopar.passes.lower import lower

__all__ = ["forward_only", "lower"]
