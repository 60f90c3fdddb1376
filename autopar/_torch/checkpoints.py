"""torch.distributed.checkpoint, restricted to reading plain data."""

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
    """Write each rank's shards, or without a group those of this process, for which the public function warns."""
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    _save_state_dict(tensors, writer, group, no_dist=group is None)


def load_shards(tensors: dict[str, Any], reader: Any, group: dist.ProcessGroup | None) -> None:
    """Read shards into ``tensors``; without a group, for this process alone."""
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    _load_state_dict(tensors, reader, group, no_dist=group is None)


def shard_reader(path: Any) -> Any:
    """Return a reader of a directory of shards that reads tensors from it and nothing else.

    torch stores the list of tensors as a pickle, and entries that are not tensors as further pickles, which it loads.
    This reader lets the list refer only to the few plain types that it is made of, and requires that all entries are
    tensors and that their files are in the directory.

    Raises, when it reads:
        AutoparError: the list contains anything else.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class TensorReader(FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            try:
                with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
                    return self._checked(_PlainTypesUnpickler(file).load())
            except AutoparError:
                raise
            except Exception as error:  # noqa: BLE001  a damaged pickle can raise any error
                raise _unreadable_list(path, f"{type(error).__name__}: {error!s:.200}") from None

        def _checked(self, found: Any) -> Any:
            entries = found.state_dict_metadata.values()
            if not all(type(e).__name__ == "TensorStorageMetadata" for e in entries):
                raise _unreadable_list(path, "an entry that is not a tensor")
            if not all(Path(i.relative_path).name == i.relative_path for i in found.storage_data.values()):
                raise _unreadable_list(path, "a file outside the directory")
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    return TensorReader(path)


def _unreadable_list(path: Any, found: str) -> AutoparError:
    return AutoparError(
        "The checkpoint's list of tensors cannot be read.",
        found=f"{path}: {found}",
        hint="load another step; this one is damaged or was altered.",
    )


class _PlainTypesUnpickler(pickle.Unpickler):
    """Unpickles only the types that a list of tensors is made of."""

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
