"""Capture: from an nn.Module to the joint forward and backward graph."""

from autopar.tracer.tracer import Capture, ColoTracer

__all__ = ["Capture", "ColoTracer"]
