"""Kernels of this tier run on triton's interpreter, which has to be chosen before triton is imported."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
