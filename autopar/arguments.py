"""What users write, as the planner takes it: sizes, meshes, clusters, optimizers."""

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
    """Bytes of ``60 * 2**30``, ``"60GiB"`` or ``"60 GB"``; None stays None.

    Raises:
        AutoparError: it is no size, or less than a byte.
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
        "memory_budget is no size.", found=repr(size), hint='write bytes, or text such as "60GiB" or "500 MB".'
    )


def as_constraints(constraints: Any) -> dict[str, str]:
    """Specs or styles by glob; a ``ShardingSpec`` is as good as its text.

    Raises:
        ConstraintError: it is no mapping of names to specs.
    """
    if constraints is None:
        return {}
    pairs = constraints.items() if isinstance(constraints, Mapping) else [("", constraints)]
    for name, spec in pairs:
        if not isinstance(name, str) or not name or not isinstance(spec, (str, ShardingSpec)):
            raise ConstraintError(
                "Constraints are specs or styles by name.",
                found=f"{name!r}: {spec!r}" if name else repr(spec),
                hint='write {"lm_head.weight": "S0R", "*.c_fc.weight": "column"}.',
            )
    return {name: str(spec) for name, spec in pairs}


def as_mesh(mesh: Any) -> Mesh:
    """A ``Mesh`` of ``8``, ``(2, 4)``, ``{"dp": 2, "tp": 4}`` or a torch DeviceMesh.

    Raises:
        MeshError: it is none of these.
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
    raise MeshError("This is no mesh.", found=repr(mesh), hint='write mesh=(2, 4) or mesh={"dp": 2, "tp": 4}.')


def _whole(size: Any) -> Any:
    """NumPy's integers and the like as Python's; the mesh refuses what is none."""
    return operator.index(size) if isinstance(size, SupportsIndex) and not isinstance(size, bool) else size


def as_cluster(cluster: Any) -> Cluster:
    """A ``Cluster``, by name, path or as it is; None is what this process sees."""
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        return seen_cluster()
    return Cluster.load(str(cluster) if isinstance(cluster, Path) else cluster)


def seen_cluster() -> Cluster:
    """The cluster that this process is part of, by the name of its GPU; the CPU where there is none."""
    if torch.cuda.is_available():
        known = cluster_of_device(torch.cuda.get_device_name())
        if known is None:
            raise MeshError(
                "No built-in cluster has this GPU.",
                found=torch.cuda.get_device_name(),
                hint=f"name the nearest, cluster={builtin_clusters()[0]!r}, or the file of one like yours.",
            )
        return known
    return Cluster.load("cpu-2")


def as_optimizer(optimizer: Any) -> str | float:
    """A name with options, such as ``"SGD momentum foreach"``, or bytes per element, of a name, a number, a
    ``torch.optim`` class, a ``functools.partial`` of one, or an instance."""
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
            "optimizer is no optimizer.",
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
    """Every further name of a tied parameter or buffer, with the first."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    for name, tensor in named:
        known = first.setdefault(id(tensor), name)
        if known != name:
            aliases[name] = known
    return aliases
