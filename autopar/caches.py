"""What is kept on disk between runs: of each kind one file, that may be missing or unreadable at any time."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """``$AUTOPAR_CACHE_DIR``, else ``autopar`` in the user's folder of caches."""
    given = os.environ.get("AUTOPAR_CACHE_DIR")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "autopar"


def store(path: Path, data: Any) -> None:
    """``data`` as JSON in place of what the file held; a folder that cannot be written is no error."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump(data, file, indent=1, sort_keys=True)
        Path(name).replace(path)
