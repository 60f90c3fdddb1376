"""Lower the planned program to the graphs that run."""

from autopar.passes.compose import compose
from autopar.passes.inference import forward_only
from autopar.passes.lower import lower
from autopar.passes.split import split_backward

__all__ = ["compose", "forward_only", "lower", "split_backward"]
