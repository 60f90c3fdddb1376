"""The state of a run by names that no plan changes, and its way back into a model and an optimizer."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.training.optimizers import parameters


def of_training(model: nn.Module, optimizer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every tensor by name, and what is not a tensor.

    Names are ``model/FQN`` and ``optimizer/FQN/key``: an optimizer's own numbers of parameters are taken apart.
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
    return tensors, common | {"groups": groups, "state": plain}


def to_load(
    model: nn.Module, optimizer: Any, there: Mapping[str, Any], common: Mapping[str, Any]
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Where the tensors of a checkpoint go, placed as this run's plan places them, and what to do when they are there.

    Args:
        there: of every name in the checkpoint, what is known of its tensor.
        common: as ``of_training`` made it.

    Raises:
        AutoparError: the checkpoint is of another model or optimizer.
    """
    targets = {f"model/{n}": t for n, t in model.state_dict().items() if isinstance(t, Tensor)}
    known = {name for name in there if name.startswith("model/")}
    _check_same("model", set(targets), known)
    for name, tensor in targets.items():
        if tuple(there[name].size) != tuple(tensor.shape):
            found = f"{name.removeprefix('model/')}: {tuple(there[name].size)} saved, {tuple(tensor.shape)} here"
            raise AutoparError("The checkpoint has another shape.", found=found, hint="load it into a model like it.")
    states: dict[int, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    if optimizer is not None and "groups" in common:
        names = _names(model, optimizer)
        groups = _groups(model, optimizer, common["groups"])
        for i, parameter in enumerate(parameters(optimizer)):
            states[i] = dict(common["state"].get(names[i], {}))
            prefix = f"optimizer/{names[i]}/"
            for name in (n for n in there if n.startswith(prefix)):
                key = name.removeprefix(prefix)
                states[i][key] = targets[name] = _room(there[name], parameter)

    def finish() -> None:
        if common["model"]:
            model.load_state_dict(common["model"], strict=False)
        if optimizer is not None and "groups" in common:
            optimizer.load_state_dict({"state": {i: s for i, s in states.items() if s}, "param_groups": groups})

    return targets, finish


def _groups(model: nn.Module, optimizer: Any, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved groups with this optimizer's numbers of their parameters."""
    names = _names(model, optimizer)
    here = [g["params"] for g in optimizer.state_dict()["param_groups"]]
    if [{names[i] for i in members} for members in here] != [set(g["params"]) for g in saved]:
        raise AutoparError(
            "The checkpoint belongs to an optimizer with other groups.",
            found=f"groups of {[len(g['params']) for g in saved]} parameters saved, {list(map(len, here))} here",
            hint="make the groups as they were.",
        )
    return [{**g, "params": members} for g, members in zip(saved, here, strict=True)]


def _names(model: nn.Module, optimizer: Any) -> list[str]:
    """FQNs of an optimizer's parameters in its order."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), name)
    held = parameters(optimizer)
    if any(id(p) not in names for p in held):
        raise AutoparError(
            "The optimizer has parameters that are not the model's.",
            found=f"{sum(id(p) not in names for p in held)} of {len(held)}",
            hint="make it of model.parameters(), after the model is parallel.",
        )
    return [names[id(p)] for p in held]


def _room(there: Any, parameter: Tensor) -> Tensor:
    """An empty tensor for one of an optimizer's, placed as its parameter where it has that one's shape."""
    assert isinstance(there, TensorStorageMetadata)
    dtype = there.properties.dtype
    if isinstance(parameter, DTensor) and there.size == parameter.shape and parameter.ndim:
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    return torch.zeros(there.size, dtype=dtype)


def _check_same(what: str, here: set[str], saved: set[str]) -> None:
    missing, new = sorted(here - saved), sorted(saved - here)
    if missing or new:
        raise AutoparError(
            f"The checkpoint belongs to another {what}.",
            found=f"missing {missing[:5] or 'none'}, new {new[:5] or 'none'}",
            hint="build what was saved, with the same names.",
        )


def of_generators() -> dict[str, Any]:
    """The states of Python's, numpy's and torch's generators, and of the current CUDA device's."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  data sets draw from it
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }


def set_generators(states: Mapping[str, Any]) -> None:
    """Put back what ``of_generators`` gave."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002  likewise
