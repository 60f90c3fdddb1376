"""Block sizes that are measured once on a device and cached on disk.

The key of the file contains everything that a measurement depends on: the versions of this package and of triton, the
device, and the text of the kernel. A file that is unreadable or has another key counts as empty. Of several processes
that share it one measures while the others wait, so that all use the same block sizes: sums in another order round
differently, and replicas would diverge.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from autopar.caches import cache_folder, store
from autopar.kernels.registry import Config, Kernel, source

FORMAT = 1


class Tuning:
    """The best configuration of each kernel by size and dtype, on one device."""

    def __init__(self, device: str, folder: Path | None = None) -> None:
        self.device = device
        self.path = (folder or cache_folder()) / f"kernels-{re.sub(r'[^a-z0-9]+', '-', device.lower())}.json"
        self._found: dict[str, Config] | None = None

    def best(
        self,
        kernel: Kernel,
        size: str,
        measure: Callable[[Config], float] | None,
        settle: Callable[[], object] = lambda: None,
    ) -> Config:
        """Return the configuration for ``size``: cached, or else measured and stored; the first if ``measure`` is None.

        Args:
            settle: waits for the device's earlier work. The process that measures must not wait for a collective that
                another process only launches after its own turn to measure.
        """
        known = self._load()
        key = f"{kernel.name} {size} {_text_digest(kernel.name)}"
        if known.get(key) in kernel.configs:
            return known[key]
        if measure is None:
            return kernel.configs[0]
        settle()
        with _locked(self.path):
            known |= read(self.path, self._version)
            if known.get(key) not in kernel.configs:
                seconds = [measure(config) for config in kernel.configs]
                known[key] = kernel.configs[seconds.index(min(seconds))]
                self._store(known)
        return known[key]

    def _load(self) -> dict[str, Config]:
        if self._found is None:
            self._found = read(self.path, self._version)
        return self._found

    @property
    def _version(self) -> str:
        return f"{FORMAT}; autopar {_version_of('autopar')}; triton {_version_of('triton')}; {self.device}"

    def _store(self, known: Mapping[str, Config]) -> None:
        """Store the configurations, and keep those of other processes. An unwritable folder is not an error."""
        merged = {**read(self.path, self._version), **known}
        store(self.path, {"version": self._version, "configs": merged})


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock among the processes that share the file. If files cannot be locked, proceed without."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(path.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed or the process ends
        yield


def read(path: Path, wanted: str) -> dict[str, Config]:
    """Return the contents of a file with version ``wanted``, or {} if it holds anything else."""
    try:
        data: Any = json.loads(path.read_text())
        if data["version"] != wanted:
            return {}
        return {str(k): {str(n): int(v) for n, v in config.items()} for k, config in data["configs"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


@cache
def _text_digest(name: str) -> str:
    return hashlib.sha256(source(name).encode()).hexdigest()[:12]


@cache
def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
