"""Input sizes that may differ between calls: which dims vary, by which symbol, and within which range."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.errors import InputError

Shapes = Mapping[str, tuple[int, ...]]
Sizes = Mapping[str, int]

UNBOUNDED = 2**31
"""From this size on an upper bound counts as none."""
_HINT = (
    'write {"input_ids": {0: torch.export.Dim("batch", min=2, max=64)}}: for each input, its dims that vary, each with '
    "a Dim that has a max, or (name, min, max)."
)


@dataclass(frozen=True)
class Symbol:
    """A size that varies from ``least`` to ``most`` inclusive; ``planned`` is that of the example."""

    name: str
    least: int
    most: int
    planned: int


@dataclass(frozen=True)
class Ranges:
    """The symbols, and for each input the symbol of each dim that varies."""

    symbols: tuple[Symbol, ...]
    places: Mapping[str, Mapping[int, str]]

    def sizes(self, shapes: Shapes) -> Sizes | None:
        """Return the size of each symbol in a call; None if one is out of its range or has two sizes."""
        found: dict[str, int] = {}
        for name, dims in self.places.items():
            for dim, symbol in dims.items():
                shape = shapes.get(name, ())
                if dim >= len(shape) or found.setdefault(symbol, shape[dim]) != shape[dim]:
                    return None
        return found if all(s.least <= found[s.name] <= s.most for s in self.symbols) else None

    def corners(self) -> Iterator[Sizes]:
        """Yield the planned sizes, and then every combination of them with one other size of each symbol."""
        ends = [(s.planned, s.most if s.most != s.planned else s.least) for s in self.symbols]
        for chosen in itertools.product(*ends):
            yield dict(zip((s.name for s in self.symbols), chosen, strict=True))

    def resized(self, shapes: Shapes, sizes: Sizes) -> dict[str, tuple[int, ...]]:
        """Return the shapes with every symbol at its size."""
        return {
            name: tuple(sizes[self.places[name][d]] if d in self.places.get(name, {}) else n for d, n in enumerate(s))
            for name, s in shapes.items()
        }

    def to_data(self) -> dict[str, Any]:
        return {
            "symbols": [[s.name, s.least, s.most, s.planned] for s in self.symbols],
            "places": {name: {str(d): s for d, s in dims.items()} for name, dims in self.places.items()},
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Ranges:
        places = {name: {int(d): s for d, s in dims.items()} for name, dims in data["places"].items()}
        return Ranges(tuple(Symbol(*s) for s in data["symbols"]), places)


def as_ranges(given: Any, shapes: Shapes) -> Ranges | None:
    """Read ``dynamic_shapes`` as torch.export takes it, for inputs of these shapes.

    Raises:
        InputError: it names an unknown input or dim, or a symbol has two sizes or excludes the example's.
    """
    if given is None:
        return None
    named = given if isinstance(given, Mapping) else dict(zip(shapes, given, strict=False))
    symbols: dict[str, Symbol] = {}
    places: dict[str, dict[int, str]] = {}
    for name, dims in named.items():
        if name not in shapes:
            raise InputError(
                "dynamic_shapes names an input that the model does not have.",
                found=f"{name!r}; inputs are {list(shapes)}",
                hint=_HINT,
            )
        for dim, one in _dims(dims):
            if not -len(shapes[name]) <= dim < len(shapes[name]):
                raise InputError(f"The input {name} has no dim {dim}.", found=f"shape {shapes[name]}", hint=_HINT)
            at = dim % len(shapes[name])
            symbol = _symbol(one, f"{name}_{at}", shapes[name][at])
            known = symbols.setdefault(symbol.name, symbol)
            if known != symbol:
                raise InputError(
                    f"The size {symbol.name} has two values or ranges.", found=f"{known} and {symbol}", hint=_HINT
                )
            places.setdefault(name, {})[at] = symbol.name
    return Ranges(tuple(symbols.values()), places) if symbols else None


def _dims(dims: Any) -> list[tuple[int, Any]]:
    if dims is None:
        return []
    pairs = dims.items() if isinstance(dims, Mapping) else enumerate(dims)
    return [(int(d), one) for d, one in pairs if one is not None and not _is_static(one)]


def _is_static(one: Any) -> bool:
    return isinstance(one, int) or "STATIC" in str(one)


def _bound(value: Any, default: int) -> int:
    """Read a bound. torch.export has an infinity of its own, which gives ``default``."""
    return int(value) if str(value).isdigit() else default


def _symbol(one: Any, default: str, planned: int) -> Symbol:
    """Read a Dim of torch.export, a name with bounds, or bounds alone."""
    name, least, most = default, 1, UNBOUNDED
    if isinstance(one, Sequence) and not isinstance(one, str):
        *names, least, most = one
        name = str(names[0]) if names else default
    elif isinstance(one, str):
        name = one
    else:
        name = str(getattr(one, "__name__", default))
        least, most = (getattr(one, bound, other) for bound, other in (("min", 1), ("max", UNBOUNDED)))
    made = Symbol(name, _bound(least, 1), _bound(most, UNBOUNDED), planned)
    if not made.least <= planned <= made.most or made.most >= UNBOUNDED or not name.isidentifier():
        most_text = "infinity" if made.most >= UNBOUNDED else str(made.most)
        raise InputError(
            f"The range of the size {name} does not contain the example's size.",
            found=f"from {made.least} to {most_text}, the example has {planned}",
            hint=_HINT,
        )
    return made
