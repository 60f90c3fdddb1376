"""Agreement of all ranks before a collective: that each of them got this far, and with the same graph or call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError, RankError
from autopar.runtime.waiting import wait_for

T = TypeVar("T")

FROZEN, DTYPES = "parameters without gradients", "dtypes of parameters"
"""Properties of a call of which a rank of a pipeline knows those of its own stages only."""


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def this_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def on_all_ranks(
    function: Callable[[], T],
    key: Callable[[T], object] | None = None,
    what: str = "graph",
    hint: str = "build the same model, with the same inputs' shapes, on every rank.",
) -> T:
    """Run ``function`` on every rank; if it raises anywhere, every rank raises.

    Args:
        key: the part of the result that must be equal on all ranks.
        what: names that part in the error; ``hint`` tells the user what to do about a difference.

    Raises:
        RankError: another rank failed, or the results differ.
    """
    if world_size() == 1:
        return function()
    result: T | None = None
    error: BaseException | None = None
    try:
        result = function()
    except Exception as caught:  # noqa: BLE001  the other ranks must learn of any error
        error = caught
    digest = key(result) if key and result is not None else None
    reports = _share(("error", type(error).__name__, str(error)) if error else ("ok", digest, ""))
    if error is not None:
        raise error
    failed = [(rank, name, text) for rank, (kind, name, text) in enumerate(reports) if kind == "error"]
    if failed:
        rank, name, text = failed[0]
        what_failed = f"Rank {rank} failed, so all ranks stop."
        raise RankError(what_failed, found=f"{name}: {text}", hint="fix the error on that rank.")
    other = next((rank for rank, (_, k, _) in enumerate(reports) if k != reports[0][1]), None)
    if other is not None:
        raise RankError(
            f"The {what} of rank {other} differs from that of rank 0.",
            found=_difference(reports[0][1], reports[other][1], other),
            hint=hint,
        )
    assert result is not None or key is None
    return result  # type: ignore[return-value]


class Agreement:
    """An exchange between the ranks about one call: it starts with the call, and ``settle`` waits for it.

    If one rank takes another path, the rest wait in a collective, so every rank settles before its first one, and
    before anything that the user can see. What is computed until then hides the exchange of two numbers between the
    hosts; more is exchanged only if something is wrong.

    Args:
        number: identifies the call, below 2**62, equal on all ranks; None if this rank cannot make the call.
        describe: returns the call's properties by name, for the error.
    """

    def __init__(
        self, number: int | None, describe: Callable[[], Mapping[str, str]], error: BaseException | None = None
    ) -> None:
        sent = _FAILED if number is None else number
        extremes = torch.tensor([sent, -sent])
        work = dist.all_reduce(extremes, dist.ReduceOp.MAX, group=_hosts(), async_op=True)
        self._under_way: tuple[Any, Tensor, Callable[[], Mapping[str, str]]] | None = work, extremes, describe
        self._error = error

    def settle(self) -> None:
        """Wait for the other ranks' numbers; further calls do nothing.

        Raises:
            RankError: another rank failed, or makes a different call.
        """
        if self._under_way is None:
            return
        work, extremes, describe = self._under_way
        self._under_way = None  # releases the inputs
        wait_for(work, "calls the model", _ON_EVERY_RANK)
        most, least = extremes.tolist()
        error = self._error
        if most == -least and error is None:
            return
        reports: list[dict[str, str]] = [{}] * world_size()
        failed = {"": f"{type(error).__name__}: {error}"} if error is not None else {}
        dist.all_gather_object(reports, failed or dict(describe()), group=_hosts())
        if error is not None:
            raise error
        raise _disagreement(reports)


def same_call(
    function: Callable[[], T], key: Callable[[T], int], describe: Callable[[T], Mapping[str, str]]
) -> tuple[T, Callable[[], None]]:
    """Run ``function`` on every rank at the start of each step, and start the exchange with the other ranks.

    Args:
        key: returns a number below 2**62 that must be equal on all ranks.
        describe: returns the result's properties by name, for the error.

    Returns:
        The result, and ``Agreement.settle``, which must be called before the step's first collective and at its end.

    Raises:
        Exception: what ``function`` raises, once the other ranks know.
    """
    if world_size() == 1:
        return function(), _settled
    try:
        result = function()
        number = key(result)
    except Exception as error:
        Agreement(None, dict, error).settle()
        raise
    return result, Agreement(number, lambda: describe(result)).settle


def _settled() -> None:
    """Do nothing: there is no other rank."""


def _disagreement(reports: Sequence[dict[str, str]]) -> RankError:
    """Return the error for the ranks' descriptions; a description with an empty name says why a rank cannot call."""
    broken = next((rank for rank, each in enumerate(reports) if "" in each), None)
    if broken is not None:
        return RankError(
            f"Rank {broken} cannot make this call, so all ranks stop.",
            found=reports[broken][""],
            hint="fix the error on that rank.",
        )
    other = next((rank for rank, each in enumerate(reports) if each != reports[0]), None)
    if other is None:
        return RankError(
            "The ranks do not know the same of the model.",
            found="another number of parameters, or another requires_grad or dtype of one of them",
            hint="change parameters on all ranks, and those of a pipeline before it is made.",
        )
    if all(reports[0].get(k) == v or k in (FROZEN, DTYPES) for k, v in reports[other].items()):
        return RankError(
            f"Rank {other} has other parameters than rank 0 knows of.",
            found=_difference(reports[0], reports[other], other),
            hint="freeze parameters, or convert them, on every rank; those of a pipeline before the model is made "
            "parallel, since a rank does not see the parameters of other stages.",
        )
    return RankError(
        f"Rank {other} calls the model with other inputs, or in another mode, than rank 0.",
        found=_difference(reports[0], reports[other], other),
        hint="give every rank batches of the same size: drop or pad a smaller last batch (drop_last=True).",
    )


_FAILED = 2**62
_ON_EVERY_RANK = "call the model on every rank, outside of `if rank == 0`: each rank holds a part of it."
_hosts_of: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def _hosts() -> dist.ProcessGroup:
    """Return a process group for numbers in host memory, which no device delays. All ranks must call it at once."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _hosts_of:
        on_hosts = any(name in dist.get_backend() for name in ("gloo", "mpi", "fake"))
        _hosts_of[world] = world if on_hosts else dist.new_group(backend="gloo")
    return _hosts_of[world]


def decided_on_rank_0(function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0 and return its result on all ranks; if it raises, every rank raises the same error."""
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
    """Return which of ``keys`` are not equal on all ranks."""
    if world_size() == 1:
        return [False] * len(keys)
    return [len(set(each)) > 1 for each in zip(*_share(list(keys)), strict=True)]


def warn_of_other_values(tensors: Mapping[str, Tensor]) -> None:
    """Warn if ranks have different ``tensors``; floats may differ by what another order of additions explains."""
    if world_size() == 1:
        return
    reports = _share({name: _sampled(t) for name, t in tensors.items()})
    for rank, other in enumerate(reports):
        name = next((n for n, values in other.items() if not _close(values, reports[0][n])), None)
        if name is not None:
            warnings.warn(
                f"The model was planned for a batch that is the same on every rank, but {name} has other values on "
                f'rank {rank} than on rank 0, so the result belongs to no batch. Plan with batch="local" if each rank '
                "reads its own samples, as with a DistributedSampler, the Trainer or prepared loaders of Accelerate; "
                "otherwise seed all ranks alike.",
                stacklevel=6,
            )
            return


SAMPLED = 64


def _sampled(tensor: Tensor) -> list[float]:
    """Return up to ``SAMPLED`` elements of a tensor."""
    flat = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // SAMPLED)][:SAMPLED]
    found: list[float] = (flat.abs() if flat.is_complex() else flat).double().nan_to_num().tolist()
    return found


def _close(values: Sequence[float], others: Sequence[float]) -> bool:
    most = max(map(abs, others), default=0.0)
    return all(abs(a - b) <= 0.01 * most for a, b in zip(values, others, strict=True))


def _share(item: Any) -> list[Any]:
    reports: list[Any] = [None] * world_size()
    dist.all_gather_object(reports, item)
    return reports
