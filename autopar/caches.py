"""Caches kept on disk between runs: one file of each kind, which may be missing or unreadable at any time."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Return ``$AUTOPAR_CACHE_DIR``, or ``autopar`` in the user's cache folder."""
    given = os.environ.get("AUTOPAR_CACHE_DIR")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "autopar"


def store(path: Path, data: Any) -> None:
    """Write ``data`` as JSON over the file; a folder that cannot be written is not an error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(data, file, indent=1, sort_keys=True)
        Path(name).replace(path)
