"""Parameters and buffers of other stages: their places in the modules are None, and what is known of them lies beside.

``parameters()`` and ``state_dict()`` are then this rank's, under the names that they have in the whole model. A capture
of another program needs the whole model, so it finds tensors on the meta device there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from autopar.attributes import Absent, Table, absent_from


def without(
    model: nn.Module,
    names: Collection[str],
    stages_of: Mapping[str, tuple[int, ...]],
    placements: Mapping[str, Any],
    dtype_of: Callable[[Tensor], torch.dtype],
) -> None:
    """Replace tensors of other stages by None, in every place that holds them.

    Args:
        names: of the tensors, as the model lists them.
        stages_of: the stages that have each.
        placements: how those stages' ranks hold each parameter.
        dtype_of: returns the dtype in which a tensor is stored.
    """
    every: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {id(every[name]): name for name in names if name in every}
    known: dict[str, Absent] = {}
    for module in model.modules():
        for kind in ("_parameters", "_buffers"):
            table = module.__dict__[kind]
            gone = {key: found[id(t)] for key, t in table.items() if t is not None and id(t) in found}
            if not gone:
                continue
            kept = table if isinstance(table, Table) else Table(table)
            for key, name in gone.items():
                if name not in known:
                    known[name] = Absent(_meta(every[name], dtype_of), name, stages_of[name], placements.get(name))
                kept.absent[key] = known[name]
                kept[key] = None
            module.__dict__[kind] = kept


def _meta(tensor: Tensor, dtype_of: Callable[[Tensor], torch.dtype]) -> Tensor:
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype_of(tensor), device="meta")
    return nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made


@contextlib.contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Put tensors on the meta device where those of other stages were, for a capture."""
    places: list[tuple[Table, str]] = []
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, each in absent_from(table).items():
                if table.get(key) is None:
                    table[key] = each.tensor  # type: ignore[assignment]
                    places.append((table, key))  # type: ignore[arg-type]
    try:
        yield
    finally:
        for held, key in places:
            held[key] = None


def absent_tensors(model: nn.Module) -> dict[str, Absent]:
    """Return what is known of the tensors of other stages, by name."""
    found: dict[str, Absent] = {}
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            found |= {each.name: each for key, each in absent_from(table).items() if table.get(key) is None}
    return found


def absent_at(model: nn.Module, path: str) -> Absent | None:
    """Return what is known of the tensor at a path if another stage has it."""
    owner, _, key = path.rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return None
    for table in (module._parameters, module._buffers):
        if table.get(key) is None and key in absent_from(table):
            return absent_from(table)[key]
    return None


def positions_of(stages: Sequence[int], rank_of: Sequence[int]) -> tuple[int, ...]:
    """Return the positions along the pipeline that hold any of ``stages``, in order."""
    return tuple(sorted({rank_of[s] for s in stages}))
