"""Read the tables of a cluster file. Every value is checked, and errors name the key and show a valid line."""

from __future__ import annotations

import difflib
import importlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from autopar.errors import MeshError

EXAMPLES: Mapping[str, str] = {
    "name": 'name = "my-cluster"',
    "description": 'description = "eight GPUs behind one switch"',
    "kind": 'kind = "NVLink 4"',
    "source": 'source = "the vendor\'s datasheet"',
    "nodes": "nodes = 4",
    "library": 'library = "nccl"',
    "nics": "nics = 8",
    "devices_per_node": "devices_per_node = 8",
    "oversubscribe": "oversubscribe = false",
    "device": '[device]\nname = "H100"',
    "intra_node": '[intra_node]\nkind = "NVLink 4"',
    "inter_node": '[inter_node]\nkind = "InfiniBand NDR"',
    "host": '[host]\nkind = "PCIe 5 x16"',
    "peak_flops_per_s": "[device.peak_flops_per_s]\nfloat32 = 67e12",
    "memory_bytes": "memory_bytes = 80e9",
    "memory_bytes_per_s": "memory_bytes_per_s = 3.35e12",
    "bandwidth_bytes_per_s": "bandwidth_bytes_per_s = 450e9",
    "peer_bandwidth_bytes_per_s": "peer_bandwidth_bytes_per_s = 64e9",
    "reduction_bytes_per_s": "reduction_bytes_per_s = 275e9",
    "efficiency": "efficiency = 0.8",
    "matmul_efficiency": "matmul_efficiency = 0.7",
    "memory_efficiency": "memory_efficiency = 0.85",
    "measured": "[measured]\noverlap = 0.5",
    "overlap": "overlap = 0.5",
    "collectives": '[[measured.collectives]]\nkind = "all_reduce"',
    "kernels": '[[measured.kernels]]\nkind = "matmul"',
    "dtype": 'dtype = "float32"',
    "ranks_per_node": "ranks_per_node = 2",
    "beta_s_per_byte": "beta_s_per_byte = 1e-9",
    "error": "error = 0.05",
    "bytes": "bytes = [8, 65536]",
    "flops": "flops = [1e6, 1e9]",
    "seconds": "seconds = [2e-5, 6e-5]",
}
"""A valid line for each key. Keys that are not listed are in seconds or FLOP/s; see `example`."""


def example(key: str) -> str:
    return EXAMPLES.get(key, f"{key} = 2e-6" if key.endswith("_s") else f"{key} = 67e12")


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """Parse the text of a TOML file.

    Raises:
        MeshError: if the text is not TOML.
    """
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    try:
        tables: dict[str, Any] = toml.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # overlong integers, deeply nested tables
        raise MeshError(
            "The cluster file is not valid TOML.",
            found=f"{error!s:.200} in {origin}",
            hint="a valid line is: devices_per_node = 8",
        ) from None
    return tables


class Table:
    """One table of a cluster file, read key by key.

    Args:
        values: the parsed TOML.
        path: dotted name of the table, "" at the top of the file.
        origin: name of the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], path: str, origin: str) -> None:
        self.values, self.path, self.origin = values, path, origin

    def error(self, what: str, key: str, found: str) -> MeshError:
        dotted = f"{self.path}.{key}" if self.path else key
        return MeshError(f"{dotted} {what}", found=f"{found} in {self.origin}", hint=f"a valid line is: {example(key)}")

    def only(self, known: Iterable[str]) -> None:
        """Raise on unknown keys, since a misspelt one would otherwise be ignored silently."""
        known = [*known, "source"]
        for key in self.values:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                dotted = f"{self.path}.{key}" if self.path else key
                raise MeshError(
                    f"{dotted} is not a key of a cluster file.",
                    found=f"{dotted} in {self.origin}",
                    hint=f"a valid line is: {example(near[0])}" if near else f"the keys here are {', '.join(known)}.",
                )

    def text(self, key: str, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str) or (default is None and not value):
            raise self.error("must be a string.", key, _shown(value))
        return value

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise self.error("must be true or false.", key, _shown(value))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive, finite number in SI units."""
        value = self.values.get(key, default)
        if not _is_figure(value) or not value > 0:
            raise self.error("must be a positive number in SI units.", key, _shown(value))
        return float(value)

    def at_least_zero(self, key: str, default: float | None = None) -> float:
        """Return a finite number that may be 0."""
        value = self.values.get(key, default)
        if not _is_figure(value) or not value >= 0:
            raise self.error("must be a number of at least 0.", key, _shown(value))
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """Return one or more positive, finite numbers in SI units."""
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(_is_figure(x) and x > 0 for x in value):
            raise self.error("must be a list of positive numbers.", key, _shown(value))
        return tuple(map(float, value))

    def choice(self, key: str, known: Iterable[str]) -> str:
        value = self.text(key)
        if value not in (known := tuple(known)):
            raise self.error(f"must be one of {', '.join(known)}.", key, _shown(value))
        return value

    def tables(self, key: str) -> tuple[Table, ...]:
        """Return the tables of an array ``[[path.key]]``, or () if it is absent."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(v, dict) for v in value):
            raise self.error("must be an array of tables.", key, _shown(value))
        return tuple(Table(v, f"{self.path}.{key}[{i}]", self.origin) for i, v in enumerate(value))

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if value != int(value):
            raise self.error("must be a whole number.", key, _shown(value))
        return int(value)

    def table(self, key: str) -> Table:
        value = self.values.get(key)
        path = f"{self.path}.{key}" if self.path else key
        if not isinstance(value, dict):
            raise self.error("must be a table.", key, _shown(value))
        return Table(value, path, self.origin)

    def sources(self, keys: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """Return (figure, source) pairs. ``source`` is a string for the whole table, or a table with one per figure."""
        given = self.values.get("source", {})
        if isinstance(given, str):
            return tuple((key, given) for key in keys if key in self.values)
        if not isinstance(given, dict):
            raise self.error("must be a string or a table of strings.", "source", repr(given))
        Table(given, f"{self.path}.source".lstrip("."), self.origin).only(keys)
        for key, text in given.items():
            if not isinstance(text, str):
                raise self.error("must be a string or a table of strings.", "source", f"{key} = {text!r}")
        return tuple((key, given[key]) for key in keys if key in given)


LARGEST = 1e300
"""Exclusive limit on numbers. No hardware figure comes near it, and sums of a few such values stay finite."""


def _is_figure(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value!r:.200}"


def toml_key(key: str) -> str:
    """Format a TOML key, quoted if it has to be."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_value(value: str | bool | float) -> str:
    """Format a TOML value, with large numbers as ``450e9``. TOML shares JSON's strings and booleans."""
    if isinstance(value, (str, bool)):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if value < 1e9:
        return re.sub("e-0", "e-", repr(value))
    unit = 12 if value >= 1e12 else 9
    short = f"{value / 10**unit:.10g}e{unit}"
    return short if float(short) == value else repr(float(value))


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise MeshError(
            "The cluster file cannot be read.",
            found=f"{path!s:.200}: {error!s:.200}",
            hint='use a built-in cluster such as "dgx-h100".',
        ) from None
