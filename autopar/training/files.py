"""Model, optimizer and scheduler files that programs without autopar can read: whole tensors, one file or several."""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from autopar.errors import AutoparError
from autopar.runtime.agreement import on_all_ranks, this_rank
from autopar.runtime.gathering import EVERY_RANK, gather_whole
from autopar.runtime.loading import state_like
from autopar.runtime.safetensors import files_of_index
from autopar.runtime.waiting import roll_call
from autopar.training.optimizers import parameters

PathLike = str | os.PathLike[str]
MEBIBYTE = 2**20


def save_model(
    model: nn.Module, checkpoint: PathLike, shard: bool = False, *, size_per_shard: int = 1024, prefix: str = "model"
) -> None:
    """Write the whole model. Every rank must call it; rank 0 writes.

    Args:
        checkpoint: a file (safetensors if its name ends so, else torch's format), or a directory if ``shard`` is set.
        shard: write ``{prefix}-00001-of-0000N.safetensors`` with ``{prefix}.safetensors.index.json`` and the model's
            config if it has one, a directory that ``from_pretrained`` of Hugging Face reads. Rank 0 then holds at most
            one file's tensors at a time.
        size_per_shard: maximum MiB per file, unless a single tensor is larger.

    Raises:
        AutoparError: it cannot be written; raised on every rank.
    """
    roll_call("save_model", EVERY_RANK)
    state = model.state_dict(keep_vars=True)
    path = Path(checkpoint)
    if shard:
        _on_every_rank(_Directory(path, prefix, _untied(state), size_per_shard * MEBIBYTE, model).write)
        return

    safe = path.suffix == ".safetensors"
    whole: dict[int, Tensor] = {}
    gathered = {}
    for name, tensor in (_untied(state) if safe else state).items():
        if isinstance(tensor, Tensor):  # modules may keep extra state of any type
            if id(tensor) not in whole:
                whole[id(tensor)] = _gather_to_rank_0(tensor)
            tensor = whole[id(tensor)]
        gathered[name] = tensor
    write = _write_safetensors if safe else torch.save
    _on_every_rank(lambda: _replace_file(path, lambda to: write(gathered, to)) if this_rank() == 0 else None)


def load_model(model: nn.Module, checkpoint: PathLike, strict: bool = True) -> None:
    """Load whole tensors from a file, or from a directory of files with an index, into a model, parallel or not.

    Every rank reads, one file at a time.

    Raises:
        AutoparError: the path does not exist, or with ``strict`` names are missing or unexpected.
    """
    roll_call("load_model", EVERY_RANK)
    path = Path(checkpoint)

    def load() -> None:
        expected = model.state_dict(keep_vars=True)
        ties = _ties(expected)
        found: set[str] = set()
        for file in _files_of(path):
            part = _read(file)
            found |= set(part)
            part |= {name: part[first] for name, first in ties.items() if first in part and name not in part}
            model.load_state_dict(part, strict=False)
        missing = {ties.get(n, n) for n in expected if n not in found and ties.get(n) not in found}
        if strict and (missing or found - set(expected)):
            raise AutoparError(
                "The file belongs to a different model.",
                found=f"missing {_names_text(missing)}, unexpected {_names_text(found - set(expected))}",
                hint="load it into the model that was saved, or pass strict=False.",
            )

    _on_every_rank(load)


def save_optimizer(
    optimizer: Optimizer,
    checkpoint: PathLike,
    shard: bool = False,
    *,
    size_per_shard: int = 1024,
    prefix: str = "optimizer",
) -> None:
    """Write ``optimizer.state_dict()`` with whole tensors. Every rank must call it; rank 0 writes.

    Args:
        checkpoint: a file, or with ``shard`` a directory of files of at most ``size_per_shard`` MiB each.

    Raises:
        AutoparError: it cannot be written; raised on every rank.
    """
    roll_call("save_optimizer", EVERY_RANK)
    state = optimizer.state_dict()
    path = Path(checkpoint)
    sizes = {i: sum(_bytes(v) for v in each.values()) for i, each in state["state"].items()}
    groups = _partition(sizes, size_per_shard * MEBIBYTE) if shard else [list(sizes)]
    first = this_rank() == 0
    names = (
        [path] if not shard else [path / f"{prefix}-{i + 1:05d}-of-{len(groups):05d}.bin" for i in range(len(groups))]
    )
    writer = _Writer()
    for file, members in zip(names, groups, strict=True):
        part = {i: {k: _gather_to_rank_0(v) for k, v in state["state"][i].items()} for i in members}
        if first:
            data = {"state": part, "param_groups": state["param_groups"]}
            writer.attempt(functools.partial(_replace_file, file, functools.partial(torch.save, data)))
        del part
    if shard and first:
        index = json.dumps({"files": [n.name for n in names]})
        writer.attempt(lambda: _replace_file(path / f"{prefix}.index.json", lambda to: Path(to).write_text(index)))
    _on_every_rank(writer.check)


def load_optimizer(optimizer: Optimizer, checkpoint: PathLike) -> None:
    """Load what ``save_optimizer`` wrote, under any plan: each tensor is sharded like its parameter.

    Raises:
        AutoparError: the path does not exist, or the state belongs to other parameters.
    """
    roll_call("load_optimizer", EVERY_RANK)
    path = Path(checkpoint)

    def load() -> None:
        parts = [read_plain(file) for file in _files_of(path)]
        state = {i: each for part in parts for i, each in part["state"].items()}
        optimizer.load_state_dict(
            {"state": cut(state, parameters(optimizer)), "param_groups": parts[0]["param_groups"]}
        )

    _on_every_rank(load)


def save_lr_scheduler(lr_scheduler: Any, checkpoint: PathLike) -> None:
    """Write ``lr_scheduler.state_dict()`` on rank 0."""
    roll_call("save_lr_scheduler", EVERY_RANK)
    state = lr_scheduler.state_dict()
    _on_every_rank(
        lambda: _replace_file(Path(checkpoint), lambda to: torch.save(state, to)) if this_rank() == 0 else None
    )


def load_lr_scheduler(lr_scheduler: Any, checkpoint: PathLike) -> None:
    """Load what ``save_lr_scheduler`` wrote."""
    roll_call("load_lr_scheduler", EVERY_RANK)
    _on_every_rank(lambda: lr_scheduler.load_state_dict(read_plain(_checked_path(Path(checkpoint)))))


def cut(state: Mapping[int, Mapping[str, Any]], of: Sequence[Tensor]) -> dict[int, dict[str, Any]]:
    """Return optimizer state by parameter index, with every tensor of the parameter's shape sharded like it."""
    return {i: {k: state_like(k, v, of[i]) for k, v in each.items()} for i, each in state.items()}


def _gather_to_rank_0(value: Any) -> Any:
    """Gather the whole tensor to rank 0's host; other ranks keep nothing."""
    if not isinstance(value, Tensor):
        return value
    gathered = gather_whole(value)
    return gathered.cpu().contiguous() if this_rank() == 0 else torch.empty(0)


class _Writer:
    """Keeps rank 0's first write error until all ranks listen, so that rank 0 goes on taking part in collectives."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def attempt(self, write: Callable[[], Any]) -> None:
        if self.error is None:
            try:
                write()
            except Exception as caught:  # noqa: BLE001  check() raises it once all ranks listen
                self.error = caught

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class _Directory:
    """A directory of safetensors files in Hugging Face's layout."""

    def __init__(self, path: Path, prefix: str, state: Mapping[str, Any], most_bytes: int, model: nn.Module) -> None:
        self.path, self.prefix, self.model = path, prefix, model
        self.state = {name: t for name, t in state.items() if isinstance(t, Tensor)}
        self.groups = _partition({name: _bytes(t) for name, t in self.state.items()}, most_bytes)

    def write(self) -> None:
        writer = _Writer()
        for i, names in enumerate(self.groups):
            part = {name: _gather_to_rank_0(self.state[name]) for name in names}
            if this_rank() == 0:
                file = self.path / self._name(i)
                writer.attempt(functools.partial(_replace_file, file, functools.partial(_write_safetensors, part)))
            del part
        if this_rank() == 0:
            writer.attempt(self._describe)
        writer.check()

    def _name(self, i: int) -> str:
        return f"{self.prefix}-{i + 1:05d}-of-{len(self.groups):05d}.safetensors"

    def _describe(self) -> None:
        weights = {name: self._name(i) for i, names in enumerate(self.groups) for name in names}
        size = sum(map(_bytes, self.state.values()))
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": weights}, indent=2)
        index = self.path / f"{self.prefix}.safetensors.index.json"
        config: Any = copy.deepcopy(getattr(self.model, "config", None))
        if hasattr(config, "save_pretrained"):
            config.architectures = [getattr(type(self.model), "_autopar_original", type(self.model)).__name__]
            config.save_pretrained(self.path)
        _replace_file(index, lambda to: Path(to).write_text(text))  # last: the index marks the directory as complete


def _partition(sizes: Mapping[Any, int], most_bytes: int) -> list[list[Any]]:
    """Split names, in order, into groups of at most ``most_bytes`` unless one alone is larger; at least one group."""
    groups: list[list[Any]] = [[]]
    held = 0
    for name, size in sizes.items():
        if groups[-1] and held + size > most_bytes:
            groups.append([])
            held = 0
        groups[-1].append(name)
        held += size
    return groups


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0


def _ties(state: Mapping[str, Any]) -> dict[str, str]:
    """Map every further name of a tensor that has several to its first."""
    first: dict[int, str] = {}
    return {n: first[id(t)] for n, t in state.items() if first.setdefault(id(t), n) != n}


def _untied(state: Mapping[str, Any]) -> dict[str, Any]:
    ties = _ties(state)
    return {name: t for name, t in state.items() if name not in ties}


def _replace_file(path: Path, write: Callable[[str], Any]) -> None:
    """Write to a temporary file beside ``path`` and rename it, so that ``path`` is never half written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    write(str(temporary))
    with open(temporary, "rb") as written:
        os.fsync(written.fileno())
    os.replace(temporary, path)  # noqa: PTH105  overwrites an existing file on every system


def _write_safetensors(tensors: dict[str, Tensor], path: str) -> None:
    _safetensors().save_file(tensors, path, metadata={"format": "pt"})


def _safetensors() -> Any:
    try:
        import safetensors.torch as library
    except ImportError:
        raise AutoparError(
            "The package safetensors is not installed.",
            found="a name that ends in .safetensors, or shard=True",
            hint="pip install safetensors, or choose a file name with another ending.",
        ) from None
    return library


def _files_of(path: Path) -> list[Path]:
    """Return the files that make up a checkpoint: the file itself, or those that a directory's index names."""
    if not path.is_dir():
        return [_checked_path(path)]
    indices = sorted(path.glob("*.index.json"))
    if not indices:
        single = sorted(path.glob("*.safetensors"))
        if len(single) == 1:
            return single
        raise AutoparError(
            "The checkpoint directory has no index.", found=f"{path} without *.index.json", hint="give what save wrote."
        )
    return [_checked_path(path / name) for name in dict.fromkeys(files_of_index(indices[0]).values())]


def _checked_path(path: Path) -> Path:
    if not path.is_file():
        raise AutoparError("The file does not exist.", found=str(path), hint="give the path that was saved to.")
    return path


def _read(file: Path) -> dict[str, Any]:
    tensors: dict[str, Any] = _safetensors().load_file(file) if file.suffix == ".safetensors" else read_plain(file)
    return dict(tensors)


def read_plain(file: Path) -> Any:
    """Read tensors and plain data that ``torch.save`` wrote; reject a file that holds anything else.

    Raises:
        AutoparError: the file is damaged, or holds other objects.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (ValueError, LookupError, EOFError, RuntimeError, TypeError, pickle.UnpicklingError) as error:
        raise AutoparError(
            "The file does not hold only tensors and plain data.",
            found=f"{file}: {type(error).__name__}: {error!s:.200}",
            hint="the file is damaged or was altered; files that torch.save wrote from a state_dict can be read.",
        ) from None


def _names_text(names: set[str]) -> str:
    return ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"


def _on_every_rank(function: Callable[[], Any]) -> None:
    """Run ``function`` on every rank; if it raises on one, all raise."""

    def run() -> bool:
        try:
            function()
        except OSError as error:
            hint = "check that this process may write to the path, and that there is room."
            raise AutoparError("The file cannot be written or read.", found=str(error), hint=hint) from error
        return True

    on_all_ranks(run)
