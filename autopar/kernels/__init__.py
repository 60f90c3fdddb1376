"""Triton kernels that a compiler of single ops would not generate, each with an eager equivalent.

The modules with kernels import only torch and triton, and can be read, copied and run by themselves. This package
registers them by name, decides where they run, and returns their source.
"""

from __future__ import annotations

from autopar.kernels import alone
from autopar.kernels.dispatch import enabled, forced, run
from autopar.kernels.registry import KERNELS, Kernel, source

__all__ = ["KERNELS", "Kernel", "alone", "enabled", "forced", "run", "source"]
