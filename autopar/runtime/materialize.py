"""Parameters and buffers as DTensors: each rank keeps its shard, and holds at most one whole parameter at a time."""

from __future__ import annotations

import contextlib
import functools
import inspect
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.runtime.agreement import differing, this_rank
from autopar.runtime.handing_over import hand_over
from autopar.runtime.optimizers import mark
from autopar.sharding import ShardingSpec
from autopar.spmd.placements import to_placements
from autopar.structure import is_dense


@dataclass(frozen=True)
class Owner:
    """One place of a model that holds a parameter or buffer: the table of a module, and the name there."""

    table: dict[str, Any]
    attribute: str
    path: str

    @property
    def fqn(self) -> str:
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


@dataclass(frozen=True)
class Replacement:
    """A tensor of the parallel model, what it stands for, and every place that it goes to."""

    owners: tuple[Owner, ...]
    tensor: Tensor
    old: Tensor


_successors: Any = WeakTensorKeyDictionary()
"""What stands for a parameter since a model that has it was made parallel: another model may have it too."""


def placed(parameter: Tensor) -> DTensor | None:
    """The DTensor that a parameter is already, or that stands for it in another parallel model."""
    found = parameter if isinstance(parameter, DTensor) else _successors.get(parameter)
    return found if isinstance(found, DTensor) else None


def owners(model: nn.Module) -> list[tuple[Tensor, tuple[Owner, ...]]]:
    """Every parameter and buffer that a program can take, with all places that hold it."""
    found: dict[int, tuple[Tensor, list[Owner]]] = {}
    for path, module in model.named_modules(remove_duplicate=True):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and is_dense(tensor):
                    found.setdefault(id(tensor), (tensor, []))[1].append(Owner(table, name, path))
    return [(tensor, tuple(places)) for tensor, places in found.values()]


def prepare(
    model: nn.Module,
    specs: Mapping[str, ShardingSpec],
    mesh: Mesh,
    device_mesh: DeviceMesh,
    coordinate: tuple[int, ...],
    device: torch.device,
    seed: int,
    dtype_of: Callable[[Tensor], torch.dtype] = lambda t: t.dtype,
    *,
    initialize: bool = True,
    only: Collection[str] | None = None,
) -> list[Replacement]:
    """Make this rank's shard of every parameter as a DTensor at its spec, and of every buffer a copy on ``device``.

    Tensors on the meta device are initialised as their modules do it, one at a time, from a seed of their own: the
    values are the same on every mesh. Where ranks have different values, those of rank 0 count, so it alone may have
    loaded a checkpoint. Parameters that another parallel model has are its own. ``model`` stays as it is.

    Args:
        dtype_of: in which each is stored.
        initialize: without it a parameter on the meta device gets memory for this rank's shard alone, to be loaded.
        only: the paths of those that are meant; None is all.

    Raises:
        AutoparError: a tensor is on the meta device and nothing initialises it.
    """
    every = [(t, places) for t, places in owners(model) if only is None or any(o.fqn in only for o in places)]
    shared = [(old, places, there) for old, places in every if (there := placed(old)) is not None]
    found = [(old, places) for old, places in every if placed(old) is None]
    differs = differing([_digest(old) for old, _ in found])
    made = [Replacement(places, there, old) for old, places, there in shared]
    with _stand_ins(every):
        for (old, places), differ in zip(found, differs, strict=True):
            if old.is_meta and not (differ and this_rank()):
                left_empty = isinstance(old, nn.Parameter) and not initialize and not differ
                whole = old.detach() if left_empty else _initialised(model, old, places[0], seed)
            else:
                whole = old.detach()
            if differ:
                whole = _from_first(whole, device)
            whole = whole.to(dtype_of(old))
            if isinstance(old, nn.Parameter):
                spec = next((specs[o.fqn] for o in places if o.fqn in specs), ShardingSpec.replicated(whole.ndim))
                new: Tensor = _parameter(whole, spec, mesh, device_mesh, coordinate, device, old.requires_grad)
            else:
                new = whole.to(device)
                new._autopar_placed = True  # type: ignore[attr-defined]
            del whole
            made.append(Replacement(places, new, old))
    return made


def is_placed(tensor: Tensor) -> bool:
    """Whether a parameter or buffer of a parallel model is one that ``prepare`` made, or a copy of it."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "_autopar_placed")


def _digest(tensor: Tensor) -> int | str:
    """Equal where ranks hold the same values."""
    if tensor.is_meta:
        return "meta"
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def _from_first(whole: Tensor, device: torch.device) -> Tensor:
    """The values of rank 0."""
    received = torch.empty_like(whole, device=device)
    if this_rank() == 0:
        received.copy_(whole)
    received = received.contiguous()
    dist.broadcast(received, src=0)
    return received


def install(replacements: list[Replacement], optimizers: Sequence[Optimizer] = (), *, cast: bool = True) -> None:
    """Put the prepared tensors where they belong, also in ``optimizers``; tied parameters stay one object.

    Args:
        cast: whether optimizer state in a parameter's dtype stays in it, where that is stored in another from now on.
    """
    for replacement in replacements:
        for owner in replacement.owners:
            owner.table[owner.attribute] = replacement.tensor
    new = [r for r in replacements if isinstance(r.old, nn.Parameter) and placed(r.old) is None]
    for replacement in new:
        _successors[replacement.old] = replacement.tensor
    hand_over([(r.owners[0].fqn, r.old, r.tensor) for r in new], optimizers, cast=cast)


def _parameter(
    whole: Tensor,
    spec: ShardingSpec,
    mesh: Mesh,
    device_mesh: DeviceMesh,
    coordinate: tuple[int, ...],
    device: torch.device,
    requires_grad: bool,
) -> nn.Parameter:
    part = whole[spec.local_slices(tuple(whole.shape), mesh, coordinate)]
    # A parameter that stays whole keeps its memory; a shard must not hold the whole.
    copied = part.shape != whole.shape
    local = torch.empty_like(part, device=device) if part.is_meta else part.to(device, copy=copied).contiguous()
    stride = torch.empty(whole.shape, device="meta").stride()
    tensor = DTensor.from_local(
        local,
        device_mesh,
        to_placements(spec, mesh, tuple(whole.shape)),
        run_check=False,
        shape=whole.shape,
        stride=stride,
    )
    parameter = nn.Parameter(tensor, requires_grad=requires_grad)
    mark(parameter)
    return parameter


@contextlib.contextmanager
def _stand_ins(found: list[tuple[Tensor, tuple[Owner, ...]]]) -> Iterator[None]:
    """While tensors on meta are initialised, all others are on meta too: an initialiser sets all that it knows."""
    replaced = [(old, places) for old, places in found if not old.is_meta]
    if len(replaced) == len(found):
        yield
        return
    try:
        for old, places in replaced:
            _place(_like(torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="meta"), old), places)
        yield
    finally:
        for old, places in replaced:
            _place(old, places)


def _place(tensor: Tensor, places: tuple[Owner, ...]) -> None:
    for owner in places:
        owner.table[owner.attribute] = tensor


def _like(tensor: Tensor, old: Tensor) -> Tensor:
    return nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else tensor


def _initialised(model: nn.Module, meta: Tensor, place: Owner, seed: int) -> Tensor:
    """The whole tensor, initialised alone: every other tensor of the model is on the meta device."""
    value = float("nan") if meta.is_floating_point() else 0
    real = _like(torch.full_like(meta, value, device="cpu"), meta)
    untouched = real._version
    try:
        place.table[place.attribute] = real
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed((seed + zlib.crc32(place.fqn.encode())) % 2**31)
            for initialise in _initialisers(model, place.path):
                initialise()
        result: Tensor = place.table[place.attribute]
    finally:
        place.table[place.attribute] = meta
    unset = result is real and real._version == untouched
    if unset or result.is_meta or (result.is_floating_point() and bool(result.isnan().any())):
        raise _uninitialised(place.fqn, model.get_submodule(place.path))
    return result.detach()


def _initialisers(model: nn.Module, path: str) -> list[Callable[[], Any]]:
    """What sets the tensors of the module at ``path``, in the order of construction.

    First ``reset_parameters`` of the module and of those around it, then the models' ``_init_weights(module)``.
    """
    parts = path.split(".") if path else []
    chain = [model.get_submodule(".".join(parts[:i])) for i in range(len(parts), -1, -1)]
    resets = (getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", None) for m in chain)
    made: list[Callable[[], Any]] = [r for r in resets if callable(r)]
    for i, module in enumerate(chain):
        model_init = next((init for m in chain[i:] if (init := _model_init(m))), None)
        if model_init is not None:
            made.append(functools.partial(model_init, module))
    return made


def _model_init(module: nn.Module) -> Callable[[nn.Module], Any] | None:
    """``_init_weights(module)``, which sets one module, where ``module`` has it."""
    init = getattr(module, "_init_weights", None)
    if not callable(init):
        return None
    required = [p for p in inspect.signature(init).parameters.values() if p.default is inspect.Parameter.empty]
    return init if len(required) == 1 else None


def _uninitialised(fqn: str, module: nn.Module) -> AutoparError:
    return AutoparError(
        f"{fqn} is on the meta device and nothing initialises it.",
        found=f"{type(module).__name__} without a reset_parameters() that sets it",
        hint="give the module a reset_parameters method, or build the model on the CPU.",
    )
