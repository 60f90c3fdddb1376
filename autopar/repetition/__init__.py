"""What repeats in a network of nodes, such as the ops of a model or the decisions about them."""

from autopar.repetition.runs import Network, Repetition, Run, grown, repetition, shift_of

__all__ = ["Network", "Repetition", "Run", "grown", "repetition", "shift_of"]
