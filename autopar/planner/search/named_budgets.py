"""The choices behind the smallest budgets that errors have named, kept on disk.

A search that is cut short by its clock comes less far where the machine is slower, or busier, than it was when a budget
was named. It then ends with the choice that is kept here, so that the budget works. What else is in a plan, and every
plan that is found without it, stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from autopar.caches import cache_folder, store
from autopar.planner.search.rounds import Result, Rounds

MOST = 32
"""Choices that are kept, the latest."""


def or_kept(rounds: Rounds, smallest: Result) -> Result:
    """The kept choice, where it fits the budget and ``smallest`` does not, or where it holds less."""
    choice = kept(_key(rounds))
    if smallest.memory.peak_bytes <= rounds.budget or not _is_choice(rounds, choice):
        return smallest
    return min(smallest, _again(rounds, choice, rounds.budget), key=lambda r: r.memory.peak_bytes)


def named(rounds: Rounds, smallest: Result) -> int:
    """Bytes that an error may name for ``smallest``, whose choice is kept."""
    choice, peak = smallest.solution.choice, smallest.memory.peak_bytes
    keep(_key(rounds), choice)
    return max(peak, _again(rounds, choice, peak).memory.peak_bytes)


def kept(key: str) -> tuple[int, ...]:
    """The choice; empty where there is none."""
    return _read().get(key, ())


def keep(key: str, choice: Sequence[int]) -> None:
    others = [(name, c) for name, c in _read().items() if name != key]
    latest = [*others[-(MOST - 1) :], (key, choice)]
    store(_path(), [[name, " ".join(map(str, c))] for name, c in latest])


def _again(rounds: Rounds, choice: Sequence[int], budget: float) -> Result:
    """Its program, whose transfers give way to ``budget`` bytes, or else as far as they can."""
    found = rounds.of_choice(choice, budget)
    if found.memory.peak_bytes <= budget:
        return found
    return min(found, rounds.of_choice(choice), key=lambda r: r.memory.peak_bytes)


def _is_choice(rounds: Rounds, choice: Sequence[int]) -> bool:
    options = [len(v.options) for v in rounds.decisions.variables]
    there = len(choice) == len(options) and all(0 <= c < n for c, n in zip(choice, options, strict=True))
    return there and math.isfinite(rounds.objective.seconds(choice))


def _key(rounds: Rounds) -> str:
    """Of all that says which choices there are, and, by the link to the host, whether what they offload hides."""
    asked = replace(rounds.options, memory_budget_bytes=None, time_limit_s=1.0, gap=0.0, solver="auto", compare=False)
    key = rounds.graph.digest, rounds.decisions.mesh, rounds.prices.cluster.host, asked
    return hashlib.sha256(repr(key).encode()).hexdigest()[:16]


def _path() -> Path:
    return cache_folder() / "named-budgets.json"


def _read() -> dict[str, tuple[int, ...]]:
    """The latest last."""
    try:
        return {name: tuple(map(int, choice.split())) for name, choice in json.loads(_path().read_text())}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
