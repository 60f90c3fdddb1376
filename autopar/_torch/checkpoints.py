"""torch.distributed.checkpoint, read as data."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import StorageMeta

from autopar.errors import AutoparError


def save_shards(tensors: dict[str, Any], writer: Any, group: dist.ProcessGroup | None) -> None:
    """Write each rank's shards; without a group those of this process, for which the public name warns its user."""
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    _save_state_dict(tensors, writer, group, no_dist=group is None)


def load_shards(tensors: dict[str, Any], reader: Any, group: dist.ProcessGroup | None) -> None:
    """Read shards into ``tensors``, likewise."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(tensors, reader, group, no_dist=group is None)


def shard_reader(path: Any) -> Any:
    """A reader of a directory of shards that takes tensors from it and nothing else.

    torch keeps the list of tensors as a pickle, and what is said to be no tensor as another one, which it reads. Here
    the list may name but the few plain types that it is made of, all entries must be tensors, and their files must lie
    in the directory.

    Raises, when it reads:
        AutoparError: the list is something else.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class OfTensors(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            try:
                with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
                    return self._checked(_OfPlainTypes(file).load())
            except AutoparError:
                raise
            except Exception as error:  # noqa: BLE001  a damaged pickle can raise anything
                raise _no_list(path, f"{type(error).__name__}: {error!s:.200}") from None

        def _checked(self, found: Any) -> Any:
            entries = found.state_dict_metadata.values()
            if not all(type(e).__name__ == "TensorStorageMetadata" for e in entries):
                raise _no_list(path, "an entry that is no tensor")
            if not all(Path(i.relative_path).name == i.relative_path for i in found.storage_data.values()):
                raise _no_list(path, "a file outside of the directory")
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    return OfTensors(path)


def _no_list(path: Any, found: str) -> AutoparError:
    return AutoparError(
        "The checkpoint's list of tensors cannot be read.",
        found=f"{path}: {found}",
        hint="load another step; this one was damaged, or changed by someone.",
    )


class _OfPlainTypes(pickle.Unpickler):
    """Reads a pickle of the types that a list of tensors is made of."""

    def find_class(self, module: str, name: str) -> Any:
        from torch.distributed.checkpoint import filesystem, metadata

        plain = {
            **{
                ("torch.distributed.checkpoint.metadata", n): getattr(metadata, n)
                for n in (
                    "Metadata",
                    "MetadataIndex",
                    "TensorStorageMetadata",
                    "ChunkStorageMetadata",
                    "TensorProperties",
                    "StorageMeta",
                    "_MEM_FORMAT_ENCODING",
                )
            },
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
            ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
            ("torch", "Size"): torch.Size,
            ("collections", "OrderedDict"): OrderedDict,
        }
        if (module, name) in plain:
            return plain[module, name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath", "Path"):
            return PurePath
        raise pickle.UnpicklingError(f"it names {module}.{name}")
