"""Convert what users write (sizes, meshes, clusters, optimizers) to what the planner takes."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import nn

from autopar.cost_models.memory import OPTIMIZERS
from autopar.errors import AutoparError, ConstraintError, MeshError
from autopar.mesh import Cluster, Mesh, builtin_clusters, cluster_of_device
from autopar.sharding import ShardingSpec

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}
_UNITS |= {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}


def as_bytes(size: Any) -> int | None:
    """Parse a size such as ``60 * 2**30``, ``"60GiB"`` or ``"60 GB"`` into bytes; None stays None.

    Raises:
        AutoparError: if it is not a size, or less than a byte.
    """
    if size is None:
        return None
    found = size
    if isinstance(size, str):
        m = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        found = float(m[1]) * _UNITS[m[2].lower()] if m and m[2].lower() in _UNITS else None
    try:
        if not isinstance(size, bool) and found >= 1:
            return int(found)
    except (TypeError, ValueError, OverflowError):
        pass
    raise AutoparError(
        "memory_budget is not a size.", found=repr(size), hint='write bytes, or a string such as "60GiB" or "500 MB".'
    )


def as_constraints(constraints: Any) -> dict[str, str]:
    """Return specs or styles as strings, by glob. A ``ShardingSpec`` becomes its text.

    Raises:
        ConstraintError: if it is not a mapping from names to specs.
    """
    if constraints is None:
        return {}
    pairs = constraints.items() if isinstance(constraints, Mapping) else [("", constraints)]
    for name, spec in pairs:
        if not isinstance(name, str) or not name or not isinstance(spec, (str, ShardingSpec)):
            raise ConstraintError(
                "Constraints must map names to specs or styles.",
                found=f"{name!r}: {spec!r}" if name else repr(spec),
                hint='write {"lm_head.weight": "S0R", "*.c_fc.weight": "column"}.',
            )
    return {name: str(spec) for name, spec in pairs}


def as_mesh(mesh: Any) -> Mesh:
    """Return the ``Mesh`` for ``8``, ``(2, 4)``, ``{"dp": 2, "tp": 4}`` or a torch DeviceMesh.

    Raises:
        MeshError: if it is none of these.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if isinstance(mesh, SupportsIndex) and not isinstance(mesh, bool):
        return Mesh((operator.index(mesh),))
    if isinstance(mesh, Mapping):
        return Mesh(tuple(map(_whole, mesh.values())), tuple(map(str, mesh)))
    if isinstance(mesh, (tuple, list)):
        return Mesh(tuple(map(_whole, mesh)))
    if hasattr(mesh, "mesh_dim_names") and hasattr(mesh, "mesh"):
        return Mesh(tuple(mesh.mesh.shape), tuple(mesh.mesh_dim_names or ()))
    raise MeshError("This is not a mesh.", found=repr(mesh), hint='write mesh=(2, 4) or mesh={"dp": 2, "tp": 4}.')


def _whole(size: Any) -> Any:
    """Convert integers such as NumPy's to Python's. ``Mesh`` rejects everything else."""
    return operator.index(size) if isinstance(size, SupportsIndex) and not isinstance(size, bool) else size


def as_cluster(cluster: Any) -> Cluster:
    """Return the ``Cluster`` with this name or path; None is the one that this process runs on."""
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        return seen_cluster()
    return Cluster.load(str(cluster) if isinstance(cluster, Path) else cluster)


def seen_cluster() -> Cluster:
    """Return the built-in cluster with this process's GPU, or that of CPUs if it has none.

    Raises:
        MeshError: if no built-in cluster has this GPU.
    """
    if torch.cuda.is_available():
        known = cluster_of_device(torch.cuda.get_device_name())
        if known is None:
            raise MeshError(
                "No built-in cluster has this GPU.",
                found=torch.cuda.get_device_name(),
                hint=f"pass the closest one, such as cluster={builtin_clusters()[0]!r}, or your own cluster file.",
            )
        return known
    return Cluster.load("cpu-2")


def as_optimizer(optimizer: Any) -> str | float:
    """Return the optimizer's name with options, such as ``"SGD momentum foreach"``, or state bytes per element.

    ``optimizer`` is a name, a number, a ``torch.optim`` class, a ``functools.partial`` of one, or an instance.

    Raises:
        AutoparError: if it is none of these.
    """
    if isinstance(optimizer, (str, int, float)):
        return optimizer if isinstance(optimizer, str) else float(optimizer)
    options: Mapping[str, Any] = {}
    if isinstance(optimizer, functools.partial):
        optimizer, options = optimizer.func, optimizer.keywords
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer, options = type(optimizer), optimizer.defaults
    names = [kind.__name__ for kind in optimizer.__mro__] if isinstance(optimizer, type) else []
    names = [getattr(optimizer, "__name__", None) or "", *names]
    if not names[0]:
        raise AutoparError(
            "optimizer is not an optimizer.",
            found=repr(optimizer),
            hint='write a name such as "adamw", a torch.optim class, or bytes of state per parameter element.',
        )
    name = next((n for n in names if n.lower() in OPTIMIZERS), names[0])
    flags = ["amsgrad", "centered", "nesterov", "weight_decay", "foreach", "fused"]
    if name.lower() in ("sgd", "rmsprop"):
        flags.append("momentum")
    said = [flag for flag in flags if options.get(flag)]
    if options.get("foreach") is False and not options.get("fused"):
        said.append("for-loop")
    return " ".join([name, *said])


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Map every further name of a tied parameter or buffer to its first name."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        known = first.setdefault(id(tensor), name)
        if known != name:
            aliases[name] = known
    return aliases
