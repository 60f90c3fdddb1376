"""Triton kernels that a compiler of single ops would not make, each beside an eager equivalent that runs elsewhere.

The modules with kernels import nothing but torch and triton and can be read, copied and run by themselves; this page
knows them by name, says where they run, and gives their source.
"""

from __future__ import annotations

from autopar.kernels import alone
from autopar.kernels.dispatch import enabled, forced, run
from autopar.kernels.registry import KERNELS, Kernel, source

__all__ = ["KERNELS", "Kernel", "alone", "enabled", "forced", "run", "source"]
