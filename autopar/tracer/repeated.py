"""Finds equal consecutive blocks of a model by their structure, not by their names."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

FEWEST = 8
"""Runs with fewer blocks are captured whole; of longer ones, five blocks are always captured."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class IrregularError(Exception):
    """Blocks that looked equal are not, so the model has to be captured whole."""


@dataclass(frozen=True)
class Run:
    """Consecutive children of one module, equal but for the values of their parameters and buffers.

    paths: paths of the blocks in the model, in order.
    differing: plain attributes in which blocks differ, such as a layer's number, with the class that has them. Code
        that reads one of these may compute something else in every block.
    """

    paths: tuple[str, ...]
    differing: frozenset[tuple[type[nn.Module], str]]


def repeated_blocks(model: nn.Module) -> tuple[Run, ...]:
    """Return the longest runs of equal blocks, the outermost first."""
    return tuple(_runs(model, "", _shared(model)))


def _runs(module: nn.Module, path: str, shared: frozenset[int]) -> Iterator[Run]:
    children = [(f"{path}.{name}" if path else name, m) for name, m in module._modules.items() if m is not None]
    keys = {name: _skeleton(child, shared) for name, child in children}
    for key, group in itertools.groupby(children, lambda c: keys[c[0]]):
        blocks = list(group)
        if key is not None and len(blocks) >= FEWEST:
            yield Run(tuple(name for name, _ in blocks), _differing([m for _, m in blocks]))
        else:
            for name, child in blocks:
                yield from _runs(child, name, shared)


def _shared(model: nn.Module) -> frozenset[int]:
    """Return identities of modules, parameters and buffers that the model holds in several places."""
    counts: Counter[int] = Counter()
    for _, module in model.named_modules(remove_duplicate=False):
        counts[id(module)] += 1
        counts.update(id(t) for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
    return frozenset(i for i, n in counts.items() if n > 1)


def _skeleton(block: nn.Module, shared: frozenset[int]) -> Any:
    """Return a key that is equal for blocks of the same structure; None if a block has something of its own."""
    parts = []
    for path, module in block.named_modules(remove_duplicate=False):
        state = vars(module)
        hooked = any(state[name] for name in _OF_EVERY_MODULE if "hooks" in name)
        if hooked or id(module) in shared or "forward" in state or "__call__" in state:
            return None
        tensors = []
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if id(tensor) in shared and tensor is not None:
                return None
            tensors.append((name, tensor if tensor is None else _meta(tensor)))
        own = tuple(sorted(state.keys() - _OF_EVERY_MODULE))
        unsaved = tuple(sorted(module._non_persistent_buffers_set))
        parts.append((path, type(module), module.training, tuple(tensors), own, unsaved))
    return tuple(parts)


def _meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)


def _differing(blocks: list[nn.Module]) -> frozenset[tuple[type[nn.Module], str]]:
    found = set()
    first = list(blocks[0].modules())
    for other in blocks[1:]:
        for a, b in zip(first, other.modules(), strict=True):
            attributes, others = vars(a), vars(b)
            found |= {
                (type(a), n) for n in attributes.keys() - _OF_EVERY_MODULE if not _equal(attributes[n], others[n])
            }
    return frozenset(found)


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are indistinguishable: equal plain values, or the same object."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal(a[k], b[k]) for k in a)
    return isinstance(a, _PLAIN) and bool(a == b)
