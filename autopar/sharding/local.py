"""Integers of an op's arguments that differ from rank to rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LocalLength:
    """Elements that a rank holds of a dim of ``n`` cut by mesh ``axes``."""

    n: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class LocalOffset:
    """Global index of the first element that a rank holds of a dim of ``n`` cut by mesh ``axes``."""

    n: int
    axes: tuple[int, ...]
