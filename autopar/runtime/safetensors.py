"""Reads weights in Hugging Face's format shard by shard: each rank reads the bytes of its own shards."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.spmd.placements import from_placements

INDEX = "*.safetensors.index.json"


def load_safetensors(model: nn.Module, path: str | Path, *, strict: bool = True) -> tuple[list[str], list[str]]:
    """Fill parameters and buffers of ``model``, parallel or plain, from files that ``from_pretrained`` can read.

    Args:
        path: a ``.safetensors`` file, or a folder of them, with an index if there are several.
        strict: whether a name that only the model or only the files have is an error.

    Returns:
        Names of the model's parameters that the files lack, and of the files' tensors that the model lacks.

    Raises:
        AutoparError: there are no such files, shapes differ, or with ``strict`` a name exists on one side only.
    """
    held = _files(Path(path))
    places = _places(model)
    prefix = getattr(model, "base_model_prefix", "")
    open_files: dict[Path, Any] = {}
    read: set[str] = set()
    missing = []
    with torch.no_grad():
        for tensor, names in places:
            name = next((n for n in _spelled(names, prefix) if n in held), None)
            if name is None:
                missing += [] if not isinstance(tensor, nn.Parameter) else names[:1]
                continue
            file = held[name]
            if file not in open_files:
                open_files[file] = _safetensors().safe_open(file, framework="pt")
            _fill(tensor, open_files[file].get_slice(name), names[0])
            read.update(n for n in _spelled(names, prefix) if n in held)
    unexpected = sorted(set(held) - read)
    if strict and (missing or unexpected):
        raise AutoparError(
            "The files and the model do not hold the same tensors.",
            found=f"{len(missing)} missing: {', '.join(missing[:3])}; {len(unexpected)} more: "
            f"{', '.join(unexpected[:3])}",
            hint="pass strict=False to load the common tensors, or give the model's own files.",
        )
    return missing, unexpected


def _spelled(names: list[str], prefix: str) -> Iterator[str]:
    """Yield the spellings of names in files: with or without the prefix of the base model in a model with a head."""
    yield from names
    for name in names:
        if prefix:
            yield name.removeprefix(f"{prefix}.") if name.startswith(f"{prefix}.") else f"{prefix}.{name}"


def _places(model: nn.Module) -> list[tuple[Tensor, list[str]]]:
    """Return every parameter and stored buffer with all of its names; files may hold tied ones under any of them."""
    stored = set(model.state_dict(keep_vars=True))
    found: dict[int, tuple[Tensor, list[str]]] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        if name in stored:
            found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return list(found.values())


def _files(path: Path) -> Mapping[str, Path]:
    """Return the file that holds each tensor."""
    if path.is_file():
        return dict.fromkeys(_names(path), path)
    index = sorted(path.glob(INDEX))
    if index:
        return {name: path / file for name, file in files_of_index(index[0]).items()}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise AutoparError(
            "There are no safetensors files.", found=str(path), hint="give a .safetensors file, or a folder of them."
        )
    return {name: file for file in files for name in _names(file)}


def files_of_index(index: Path) -> dict[str, str]:
    """Return, from an index, the file that holds each tensor.

    Raises:
        AutoparError: the index cannot be read, or names files outside its folder.
    """
    try:
        data = json.loads(index.read_text(encoding="utf-8"))
        where = data["files"] if "files" in data else data["weight_map"]
        found = {name: name for name in where} if isinstance(where, list) else dict(where)
        outside = [file for file in found.values() if Path(file).is_absolute() or ".." in Path(file).parts]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise _no_index(f"{index}: {type(error).__name__}: {error!s:.200}") from None
    if outside:
        raise _no_index(f"{index} names {outside[0]!r:.200}")
    return found


def _no_index(found: str) -> AutoparError:
    return AutoparError(
        "The index of the files is invalid.", found=found, hint="it must name a file in its folder for each tensor."
    )


def _names(file: Path) -> list[str]:
    with _safetensors().safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _fill(tensor: Tensor, stored: Any, name: str) -> None:
    shape = tuple(stored.get_shape())
    if shape != tuple(tensor.shape):
        raise AutoparError(
            f"The stored tensor {name} has another shape.",
            found=f"{shape} in the file, {tuple(tensor.shape)} in the model",
            hint="build the model from the config beside the files.",
        )
    if not isinstance(tensor, DTensor):
        tensor.copy_(stored[...])
        return
    mesh, coordinate = Mesh(tuple(tensor.device_mesh.mesh.shape)), tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    part = from_placements(tensor.placements, tensor.ndim, mesh).local_slices(shape, mesh, tuple(coordinate))
    if part:
        tensor.to_local().copy_(stored[part])
    else:
        tensor.to_local().copy_(stored[...])


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors")
    except ImportError:
        raise AutoparError(
            "Reading safetensors needs the package safetensors.",
            found="it is not installed",
            hint="pip install safetensors",
        ) from None
