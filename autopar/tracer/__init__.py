"""Capture: turns an nn.Module into the joint forward and backward graph."""

from autopar.tracer.tracer import Capture, ColoTracer

__all__ = ["Capture", "ColoTracer"]
