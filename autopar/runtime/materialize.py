"""Places parameters and buffers as DTensors: each rank keeps its shard, and holds one whole parameter at a time."""

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
    """A place in a model that holds a parameter or buffer: a module's table, and the key in it."""

    table: dict[str, Any]
    attribute: str
    path: str

    @property
    def fqn(self) -> str:
        return f"{self.path}.{self.attribute}" if self.path else self.attribute


@dataclass(frozen=True)
class Replacement:
    """A tensor of the parallel model, the tensor that it replaces, and every place that holds it.

    Args:
        tensor: None if other ranks hold it.
    """

    owners: tuple[Owner, ...]
    tensor: Tensor | None
    old: Tensor


_successors: Any = WeakTensorKeyDictionary()
"""The DTensor that replaced a parameter when its model was made parallel; another model may share the parameter."""


def existing_dtensor(parameter: Tensor) -> DTensor | None:
    """Return the DTensor that a parameter already is, or that replaced it in another parallel model; else None."""
    found = parameter if isinstance(parameter, DTensor) else _successors.get(parameter)
    return found if isinstance(found, DTensor) else None


def owners(model: nn.Module) -> list[tuple[Tensor, tuple[Owner, ...]]]:
    """Return every parameter and buffer that a program can take, with all places that hold it."""
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
    elsewhere: Collection[str] = (),
) -> list[Replacement]:
    """Create this rank's shard of every parameter as a DTensor at its spec, and copy every buffer to ``device``.

    Tensors on the meta device are initialized as their modules do it, one at a time, each from its own seed, so that
    the values are the same on every mesh. Where ranks have different values, rank 0's are used, so it alone may have
    loaded a checkpoint. Parameters that another parallel model has are shared with it. ``model`` does not change.

    Args:
        dtype_of: returns the dtype in which a tensor is stored.
        initialize: if False, a parameter on the meta device only gets memory for this rank's shard, to be loaded later.
        only: paths of the tensors to prepare; None means all.
        elsewhere: paths of those that other ranks hold.

    Raises:
        AutoparError: a tensor is on the meta device and nothing initializes it.
    """
    every = [(t, places) for t, places in owners(model) if only is None or any(o.fqn in only for o in places)]
    shared = [(old, places, existing) for old, places in every if (existing := existing_dtensor(old)) is not None]
    found = [(old, places) for old, places in every if existing_dtensor(old) is None]
    differs = differing([_digest(old) for old, _ in found])
    made = [Replacement(places, existing, old) for old, places, existing in shared]
    with _others_on_meta(every):
        for (old, places), differ in zip(found, differs, strict=True):
            absent = any(o.fqn in elsewhere for o in places)
            if absent and not differ:
                made.append(Replacement(places, None, old))
                continue
            if old.is_meta and not (differ and this_rank()):
                stays_empty = isinstance(old, nn.Parameter) and not initialize and not differ
                whole = old.detach() if stays_empty else _initialize(model, old, places[0], seed)
            else:
                whole = old.detach()
            if differ:
                whole = _broadcast_from_rank_0(whole, device)
            if absent:
                made.append(Replacement(places, None, old))
                continue
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
    """Whether ``prepare`` made a parameter or buffer of a parallel model, or its original if it is a copy."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "_autopar_placed")


def _digest(tensor: Tensor) -> int | str:
    """Return a value that is equal if ranks hold the same values."""
    if tensor.is_meta:
        return "meta"
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0


def _broadcast_from_rank_0(whole: Tensor, device: torch.device) -> Tensor:
    """Broadcast the values of rank 0."""
    received = torch.empty_like(whole, device=device)
    if this_rank() == 0:
        received.copy_(whole)
    received = received.contiguous()
    dist.broadcast(received, src=0)
    return received


def install(replacements: list[Replacement], optimizers: Sequence[Optimizer] = (), *, cast: bool = True) -> None:
    """Put the prepared tensors into the model and into ``optimizers``; tied parameters stay one object.

    Args:
        cast: whether optimizer state in a parameter's dtype is converted if the parameter's dtype changes.
    """
    for replacement in replacements:
        for owner in replacement.owners if replacement.tensor is not None else ():
            owner.table[owner.attribute] = replacement.tensor
    new = [r for r in replacements if isinstance(r.old, nn.Parameter) and existing_dtensor(r.old) is None]
    for replacement in new:
        if replacement.tensor is not None:
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
    # A parameter that stays whole keeps its memory; a shard is copied, so as not to keep the whole alive.
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
def _others_on_meta(found: list[tuple[Tensor, tuple[Owner, ...]]]) -> Iterator[None]:
    """Move all other tensors to meta while tensors on meta are initialized: an initializer sets all that it knows."""
    replaced = [(old, places) for old, places in found if not old.is_meta]
    if len(replaced) == len(found):
        yield
        return
    try:
        for old, places in replaced:
            _put(_like(torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device="meta"), old), places)
        yield
    finally:
        for old, places in replaced:
            _put(old, places)


def _put(tensor: Tensor, places: tuple[Owner, ...]) -> None:
    for owner in places:
        owner.table[owner.attribute] = tensor


def _like(tensor: Tensor, old: Tensor) -> Tensor:
    return nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else tensor


def _initialize(model: nn.Module, meta: Tensor, place: Owner, seed: int) -> Tensor:
    """Initialize and return one whole tensor, while every other tensor of the model is on the meta device."""
    value = float("nan") if meta.is_floating_point() else 0
    real = _like(torch.full_like(meta, value, device="cpu"), meta)
    untouched = real._version
    try:
        place.table[place.attribute] = real
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed((seed + zlib.crc32(place.fqn.encode())) % 2**31)
            for initialize_one in _initializers(model, place.path):
                initialize_one()
        result: Tensor = place.table[place.attribute]
    finally:
        place.table[place.attribute] = meta
    unset = result is real and real._version == untouched
    if unset or result.is_meta or (result.is_floating_point() and bool(result.isnan().any())):
        raise _uninitialized(place.fqn, model.get_submodule(place.path))
    return result.detach()


def _initializers(model: nn.Module, path: str) -> list[Callable[[], Any]]:
    """Return what sets the tensors of the module at ``path``, in the order of construction.

    First comes ``reset_parameters`` of the module and of those around it, then the models' ``_init_weights(module)``.
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
    """Return ``_init_weights(module)``, which sets one module, if ``module`` has it."""
    init = getattr(module, "_init_weights", None)
    if not callable(init):
        return None
    required = [p for p in inspect.signature(init).parameters.values() if p.default is inspect.Parameter.empty]
    return init if len(required) == 1 else None


def _uninitialized(fqn: str, module: nn.Module) -> AutoparError:
    return AutoparError(
        f"{fqn} is on the meta device and nothing initializes it.",
        found=f"{type(module).__name__} without a reset_parameters() that sets it",
        hint="give the module a reset_parameters method, or build the model on the CPU.",
    )
