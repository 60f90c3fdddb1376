"""Undoes what Hugging Face models do differently under export than when they run."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from torch import nn


def without_caches(model: nn.Module) -> bool:
    """Switch caches off in ``model``, which is our copy: they serve generation and break the capture of training.

    Return whether any was on.
    """
    found = False
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False
            found = True
    return found


@contextlib.contextmanager
def masks_as_in_eager(names: Sequence[str], *, cached: bool) -> Iterator[None]:
    """Let attention be marked as causal, as it is outside of tracing.

    Under export these models build the [b, 1, s, s] mask instead, which needs another kernel than the one that will
    run. The mask stays if inputs may contain padding or packed sequences; with a cache (``cached``) the models do not
    look for packed sequences. It also stays in models that make a padding mask themselves, whose values no capture
    knows.
    """
    masking = _masking()
    packed = any("position" in n for n in names) and not cached
    with contextlib.ExitStack() as stack:
        if masking is not None and not packed and not any("mask" in n for n in names):
            replaced = {
                "find_packed_sequence_indices": lambda *a, **k: None,
                "is_torchdynamo_exporting": lambda *a, **k: False,
                "is_tracing": _is_given,
            }
            for name, function in replaced.items():
                if hasattr(masking, name):
                    stack.enter_context(mock.patch.object(masking, name, function))
        yield


def _is_given(tensor: Any = None) -> bool:
    """Whether there is a tensor whose values would have to be known."""
    return tensor is not None


def _masking() -> types.ModuleType | None:
    """Return the module that makes masks; None if the model cannot use it."""
    if "transformers" not in sys.modules:
        return None
    try:
        return importlib.import_module("transformers.masking_utils")
    except ImportError:
        return None
