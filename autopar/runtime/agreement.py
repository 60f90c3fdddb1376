"""What all ranks must agree on before a collective is safe: that each of them got this far, and with the same graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from autopar.errors import AutoparError, RankError

T = TypeVar("T")


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def together(
    function: Callable[[], T], key: Callable[[T], object] | None = None, what: str = "graph",
    hint: str = "build the same model, with the same inputs' shapes, on every rank.",
) -> T:  # fmt: skip
    """Run ``function`` on every rank; if it raises anywhere, every rank raises.

    Args:
        key: what of the result must be equal on all ranks.
        what: names that in the error, and ``hint`` says what to do about it.

    Raises:
        RankError: another rank failed, or results differ.
    """
    if world_size() == 1:
        return function()
    result: T | None = None
    error: BaseException | None = None
    try:
        result = function()
    except Exception as caught:  # noqa: BLE001  whatever it is, the other ranks must hear of it
        error = caught
    digest = key(result) if key and result is not None else None
    said = _share(("error", type(error).__name__, str(error)) if error else ("ok", digest, ""))
    if error is not None:
        raise error
    failed = [(rank, name, text) for rank, (kind, name, text) in enumerate(said) if kind == "error"]
    if failed:
        rank, name, text = failed[0]
        what_failed = f"Rank {rank} failed, so all ranks stop."
        raise RankError(what_failed, found=f"{name}: {text}", hint="mend the error of that rank.")
    other = next((rank for rank, (_, k, _) in enumerate(said) if k != said[0][1]), None)
    if other is not None:
        raise RankError(
            f"The {what} of rank {other} differs from that of rank 0.",
            found=_difference(said[0][1], said[other][1], other),
            hint=hint,
        )
    assert result is not None or key is None
    return result  # type: ignore[return-value]


def decided_by_first(function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0 and give its result to all; if it raises there, every rank raises the same error."""
    if world_size() == 1:
        return function()
    box: list[Any] = [None]
    if this_rank() == 0:
        try:
            box = [("ok", function())]
        except AutoparError as error:
            box = [("error", error)]
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            box = [("error", RankError("Planning failed on rank 0.", found=found, hint="see the error of rank 0."))]
            dist.broadcast_object_list(box, src=0)
            raise
    dist.broadcast_object_list(box, src=0)
    kind, value = box[0]
    if kind == "error":
        raise value
    result: T = value
    return result


def _difference(first: object, other: object, rank: int) -> str:
    if not (isinstance(first, dict) and isinstance(other, dict)):
        return f"{first} on rank 0, {other} on rank {rank}"
    differing = [name for name in first if first[name] != other.get(name)]
    return ", ".join(f"{name}: {first[name]} on rank 0, {other.get(name)} on rank {rank}" for name in differing)


def differing(keys: Sequence[object]) -> list[bool]:
    """Which of ``keys`` are not the same on all ranks."""
    if world_size() == 1:
        return [False] * len(keys)
    return [len(set(each)) > 1 for each in zip(*_share(list(keys)), strict=True)]


def _share(item: Any) -> list[Any]:
    said: list[Any] = [None] * world_size()
    dist.all_gather_object(said, item)
    return said
