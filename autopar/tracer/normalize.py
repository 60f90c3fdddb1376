"""Runs the exported graph under the joint tracer, with ops replaced and flattened dims kept apart."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from autopar.ops.registration import HALF
from autopar.tracer import flat, linear_algebra, losses, masked, masked_ops, random_ops
from autopar.tracer.flat import Flat
from autopar.tracer.replacements import REPLACEMENTS

REGISTERED = (linear_algebra, losses, random_ops)
"""Modules imported for the replacements that they register."""

aten = torch.ops.aten

_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_copy.default}
_MAY_COPY = {aten.reshape.default, aten.flatten.using_ints}
_NO_OPS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
}
# Ops over the last dim only, and sums over everything: the leading dims may stay apart.
_LAST_DIM = {aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten._log_softmax.default}


_SAME_SHAPE = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.contiguous.default,
    aten.alias.default,
    aten.detach.default,
}

# Products that autocast runs in its lower dtype; their replacements are unknown to autocast.
_AUTOCAST = {
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.baddbmm.default,
    aten.einsum.default,
    aten.scaled_dot_product_attention.default,
}


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    """Cast every floating-point tensor except float64 to ``dtype``, as autocast does."""

    def cast(x: Any) -> Any:
        if isinstance(x, Flat):
            return Flat(cast(x.base), x.lead)
        eligible = isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64
        return x.to(dtype) if eligible else x

    return tree_map(cast, tree, is_leaf=lambda x: isinstance(x, Flat))


_WIDENS = {aten.to.dtype, aten._to_copy.default}
_SHIFTS = {aten.slice.Tensor, aten.contiguous.default, aten.clone.default, aten.alias.default}
"""Ops that models apply to logits between their conversion to float32 and the loss."""

CONTEXTS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Ops that run a graph under another state."""


class Normalizing(fx.Interpreter):
    """Interprets an exported graph; what it runs is traced into the joint graph."""

    def __init__(self, module: fx.GraphModule, seed: torch.Tensor, sites: list[int] | None = None) -> None:
        super().__init__(module)
        self.seed = seed
        self._sites = sites if sites is not None else [0]
        self.wider_masks: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._narrow: dict[int, tuple[torch.Tensor, Callable[[], torch.Tensor]]] = {}

    def next_site(self) -> int:
        """Return the next random op's number, in program order."""
        self._sites[0] += 1
        return self._sites[0]

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if (n.target in _WIDENS and _only_for_losses(n)) or n.target in _SHIFTS:
            self._record_narrow_source(n.target, *self.fetch_args_kwargs_from_env(n), result)
        return result

    def before_widening(self, x: torch.Tensor) -> torch.Tensor:
        """Return the half-precision tensor from which ``x`` was converted to float32 for losses only, else ``x``.

        If others read it too, gradients would be added after rounding.
        """
        return self._narrow[id(x)][1]() if id(x) in self._narrow else x

    def _record_narrow_source(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Record which half-precision tensor a float32 one comes from; holding it keeps its identity unique."""
        x, made = args[0], result
        if not isinstance(x, torch.Tensor) or not isinstance(made, torch.Tensor) or x is made:
            return
        if target in _WIDENS and x.dtype in HALF and made.dtype == torch.float32:
            self._narrow[id(made)] = made, lambda: x
        elif target in _SHIFTS and id(x) in self._narrow:
            of_narrow = self._narrow[id(x)][1]
            self._narrow[id(made)] = made, lambda: target(of_narrow(), *args[1:], **kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in _NO_OPS:
            return None
        name = getattr(target, "__name__", str(target))
        if name in CONTEXTS:
            return self._nested(name, args)
        if masked.has_masked((args, kwargs)):
            result = masked_ops.run(self, target, args, kwargs)
            if result is not NotImplemented:
                return result
            args, kwargs = flat.materialize((args, kwargs))
        if target in _VIEWS or target is aten.flatten.using_ints:
            return self._view(target, args, kwargs)
        if target in _AUTOCAST and torch.is_autocast_enabled("cpu"):
            args, kwargs = _cast((args, kwargs), torch.get_autocast_dtype("cpu"))
        if target in REPLACEMENTS:
            result = REPLACEMENTS[target](self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if flat.has_flat((args, kwargs)):
            result = self._on_flat(target, args, kwargs)
            if result is not NotImplemented:
                return result
            args, kwargs = flat.materialize((args, kwargs))
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = flat.materialize((args, kwargs))
        return super().call_method(target, args, kwargs)

    def output(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().output(target, flat.materialize(args), kwargs)

    def _view(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = args[0]
        shape: Any
        if target is aten.flatten.using_ints:
            shape = _flattened(tuple(x.shape), *args[1:], **kwargs)
        else:
            shape = args[1] if len(args) > 1 else kwargs.get("size", kwargs.get("shape"))
        if all(isinstance(n, int) for n in shape):
            result = flat.view(flat.copied(x, shape) if target in _MAY_COPY else x, shape)
            if result is not NotImplemented:
                return result
        return flat.materialize(x).reshape(shape)

    def _on_flat(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is operator.getitem:
            return args[0][args[1]]
        x = args[0] if args else None
        tags = getattr(target, "tags", ())
        if torch.Tag.pointwise in tags and not target._schema.is_mutable:
            return flat.pointwise(target, args, kwargs)
        if target in _SAME_SHAPE:
            return flat.trailing(target, x, *args[1:], **kwargs) if isinstance(x, Flat) else NotImplemented
        if not isinstance(x, Flat):
            return NotImplemented
        if target is aten.sum.default:
            return target(x.base, **kwargs)
        if target is aten.layer_norm.default and tuple(args[1]) == x.rest:
            return flat.trailing(target, x, *args[1:], **kwargs)
        if target in _LAST_DIM and x.rest and args[1] in (-1, len(x.rest)) and len(x.rest) == 1:
            return flat.trailing(target, x, -1, *args[2:], **kwargs)
        return flat.along_rest(target, x, args[1:], kwargs)

    def _nested(self, name: str, args: tuple[Any, ...]) -> Any:
        """Run a graph of its own, which code under no_grad or autocast becomes."""
        context: contextlib.AbstractContextManager[Any]
        if name == "wrap_with_set_grad_enabled":
            enabled, body, *inputs = args
            context = torch.set_grad_enabled(enabled)
        else:
            # The graph is traced on the CPU, whatever device the model names.
            _, dtype, enabled, cache, body, *inputs = args
            context = torch.autocast("cpu", dtype=dtype, enabled=enabled, cache_enabled=cache)
        with context:
            return Normalizing(body, self.seed, self._sites).run(*flat.materialize(tuple(inputs)))


def _only_for_losses(node: fx.Node) -> bool:
    """Whether only cross-entropy reads a tensor and its parts and views."""
    moves = _SHIFTS | _VIEWS | {aten.flatten.using_ints}
    return all(
        u.target is aten.cross_entropy_loss.default or (u.target in moves and _only_for_losses(u)) for u in node.users
    )


def _flattened(shape: tuple[int, ...], start_dim: int = 0, end_dim: int = -1) -> tuple[int, ...]:
    if not shape:
        return (1,)
    start, end = start_dim % len(shape), end_dim % len(shape)
    size = 1
    for n in shape[start : end + 1]:
        size *= n
    return (*shape[:start], size, *shape[end + 1 :])
