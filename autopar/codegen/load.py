"""An emitted program as functions that run."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from typing import Any


def load(source: str, name: str = "autopar_program") -> Mapping[str, Any]:
    """Run an emitted module and return its names. Debuggers and tracebacks show its lines."""
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": name}
    exec(compile(source, filename, "exec"), namespace)  # noqa: S102  it is our own program
    return namespace
