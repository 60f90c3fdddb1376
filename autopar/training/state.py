"""The state of a run under names that do not depend on the plan, and its way back into a model and an optimizer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.plans.pipeline import PipelinePlan
from autopar.training.optimizers import parameters

T = TypeVar("T")


def of_training(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return every tensor by name, and everything that is not a tensor.

    Names are ``model/FQN`` and ``optimizer/FQN/key``: they replace the optimizer's own indices of parameters.
    """
    held: dict[str, Any] = dict(model.state_dict())
    tensors = {f"model/{name}": t for name, t in held.items() if isinstance(t, Tensor)}
    common: dict[str, Any] = {"model": {n: v for n, v in held.items() if not isinstance(v, Tensor)}}
    if optimizer is None:
        return tensors, common
    names = _names(model, optimizer)
    saved = optimizer.state_dict()
    plain: dict[str, dict[str, Any]] = {}
    for i, each in saved["state"].items():
        for key, value in each.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer/{names[i]}/{key}"] = value
            else:
                plain.setdefault(names[i], {})[key] = value
    groups = [{**g, "params": [names[i] for i in g["params"]]} for g in saved["param_groups"]]
    every = of_every_stage(model, (groups, plain))
    common["groups"] = [
        {**g, "params": list(dict.fromkeys(n for other, _ in every for n in other[at]["params"]))}
        for at, g in enumerate(groups)
    ]
    return tensors, common | {"state": {name: values for _, each in every for name, values in each.items()}}


def of_every_stage(model: nn.Module, value: T) -> list[T]:
    """Return a value of every rank if the model is a pipeline, whose ranks hold parts of it, else this rank's."""
    if not isinstance(getattr(model, "plan", None), PipelinePlan) or not dist.is_initialized():
        return [value]
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    return every


Held = tuple[set[str], list[set[str]]]
"""Names of the model's tensors, and of the parameters of each of the optimizer's groups."""


def held(model: nn.Module, optimizer: Any) -> Held:
    """Return what this rank has."""
    tensors = {f"model/{n}" for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    if optimizer is None:
        return tensors, []
    names = _names(model, optimizer)
    return tensors, [{names[i] for i in g["params"]} for g in optimizer.state_dict()["param_groups"]]


def together(parts: Sequence[Held]) -> Held:
    """Return what all ranks have."""
    groups = itertools.zip_longest(*(groups for _, groups in parts), fillvalue=set[str]())
    return set[str]().union(*(tensors for tensors, _ in parts)), [set[str]().union(*each) for each in groups]


def to_load(
    model: nn.Module, optimizer: Any, saved: Mapping[str, Any], common: Mapping[str, Any], everywhere: Held
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Return target tensors, placed as this run's plan places them, and a function to call once they are loaded.

    Args:
        saved: metadata of every tensor in the checkpoint, by name.
        common: the second result of ``of_training``.
        everywhere: what all ranks hold.

    Raises:
        AutoparError: the checkpoint belongs to another model or optimizer.
    """
    targets = {f"model/{n}": t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    known = {name for name in saved if name.startswith("model/")}
    _check_same("model", everywhere[0], known)
    for name, tensor in targets.items():
        if tuple(saved[name].size) != tuple(tensor.shape):
            found = f"{name.removeprefix('model/')}: {tuple(saved[name].size)} saved, {tuple(tensor.shape)} here"
            raise AutoparError(
                "A tensor has another shape in the checkpoint.", found=found, hint="load it into a model like it."
            )
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    if optimizer is not None and "groups" in common:
        names = _names(model, optimizer)
        groups = _groups(optimizer, common["groups"], everywhere[1])
        for i, parameter in enumerate(parameters(optimizer)):
            states[i] = dict(common["state"].get(names[i], {}))
            prefix = f"optimizer/{names[i]}/"
            for name in (n for n in saved if n.startswith(prefix)):
                key = name.removeprefix(prefix)
                states[i][key] = targets[name] = _empty_like(saved[name], parameter)

    def finish() -> None:
        if common["model"]:
            model.load_state_dict(common["model"], strict=False)
        if optimizer is not None and "groups" in common:
            optimizer.load_state_dict({"state": {i: s for i, s in states.items() if s}, "param_groups": groups})

    return targets, finish


def _groups(optimizer: Any, saved: list[dict[str, Any]], everywhere: list[set[str]]) -> list[dict[str, Any]]:
    """Return the saved groups with this optimizer's indices of their parameters."""
    here = [g["params"] for g in optimizer.state_dict()["param_groups"]]
    if everywhere != [set(g["params"]) for g in saved]:
        raise AutoparError(
            "The checkpoint belongs to an optimizer with other parameter groups.",
            found=f"groups of {[len(g['params']) for g in saved]} parameters saved, {list(map(len, everywhere))} here",
            hint="create the same groups as when it was saved.",
        )
    return [{**g, "params": members} for g, members in zip(saved, here, strict=True)]


def _names(model: nn.Module, optimizer: Any) -> list[str]:
    """Return the FQNs of an optimizer's parameters, in its order."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    held = parameters(optimizer)
    if any(id(p) not in names for p in held):
        raise AutoparError(
            "The optimizer has parameters that are not the model's.",
            found=f"{sum(id(p) not in names for p in held)} of {len(held)}",
            hint="create it from model.parameters() after the model is made parallel.",
        )
    return [names[id(p)] for p in held]


def _empty_like(saved: Any, parameter: Tensor) -> Tensor:
    """Return an empty tensor for one of the optimizer's, placed like its parameter if the shapes match."""
    assert isinstance(saved, TensorStorageMetadata)
    dtype = saved.properties.dtype
    if isinstance(parameter, DTensor) and saved.size == parameter.shape and parameter.ndim:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(saved.size, dtype=dtype)


def _check_same(what: str, here: set[str], saved: set[str]) -> None:
    missing, new = sorted(here - saved), sorted(saved - here)
    if missing or new:
        raise AutoparError(
            f"The checkpoint belongs to another {what}.",
            found=f"missing {missing[:5] or 'none'}, new {new[:5] or 'none'}",
            hint="build the model that was saved, with the same names.",
        )


def of_generators() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's generators, and of the current CUDA device's."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  data sets draw from it
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Restore the states that ``of_generators`` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002  likewise
