"""Hooks of modules: what they compute is captured; what they only observe, or do to gradients, would be lost.

Hooks of the root module run around the compiled program at every call, as without autopar, so they are not captured.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import CaptureError
from autopar.tracer.blame import is_installed

_FORWARD = ("_forward_hooks", "_forward_pre_hooks")
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


def without_lost_hooks(model: nn.Module) -> None:
    """Remove the root's hooks from the copy that is captured, and refuse inner hooks that a graph cannot hold.

    Raises:
        CaptureError: an inner module has a hook on its gradients, or all modules have one. A hook that only observes
            values raises when it runs.
    """
    for hook in (hook for name in OF_ALL_MODULES for hook in hooks_of_all_modules(name)):
        raise CaptureError(
            "A hook is registered on the modules of all models, but would run only once, at capture.",
            found=_described(hook),
            hint="remove it, and register it on the modules that it is meant for.",
        )
    for name in (*_FORWARD, *_BACKWARD):
        getattr(model, name).clear()
    for path, module in model.named_modules():
        for name in _BACKWARD:
            for hook in getattr(module, name).values():
                raise CaptureError(
                    f"The module {path} has a hook on its gradients, which the captured program would not run.",
                    found=_described(hook),
                    hint="write it as a torch.autograd.Function around the module's output, whose backward is "
                    "captured; on parameters, use Parameter.register_hook after autoparallelize.",
                )
        for name in _FORWARD:
            hooks = getattr(module, name)
            for key, hook in list(hooks.items()):
                if not _of_a_library(hook):
                    hooks[key] = _watched(hook, path)


OF_ALL_MODULES = tuple(f"_global{kind}" for kind in (*_FORWARD, *_BACKWARD))
"""torch's tables of hooks that run for every module of every model."""


def hooks_of_all_modules(name: str, default: Any = None) -> tuple[Callable[..., Any], ...]:
    """Return the user's hooks in one of ``OF_ALL_MODULES``; those of libraries, such as profilers, may come and go."""
    table: dict[int, Callable[..., Any]] = vars(nn.modules.module)[name]
    return tuple(hook for hook in table.values() if not _of_a_library(hook))


def lost_parameter_hooks(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield parameters with hooks on their gradients, and the hooks, which a DTensor in their place would drop."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):  # it belongs to another parallel model and stays as it is
            continue
        hooks = {**(parameter._backward_hooks or {}), **(getattr(parameter, "_post_accumulate_grad_hooks", None) or {})}
        yield from ((name, _described(hook)) for hook in list(hooks.values())[:1])


def _watched(hook: Callable[..., Any], path: str) -> Callable[..., Any]:
    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        if result is None:
            raise CaptureError(
                f"The hook on {path} returns nothing, so its effects would happen only once, at capture.",
                found=_described(hook),
                hint="return the module's new value from the hook, or return what it observes from the model's forward "
                "as an output; hooks on the model itself run at every call.",
            )
        return result

    return run


def _of_a_library(hook: Any) -> bool:
    """Whether a hook is a library's: those of torch, such as weight norm, compute, and others are made for tracing."""
    plain = hook.func if isinstance(hook, functools.partial) else hook
    try:
        return is_installed(Path(inspect.getfile(plain if inspect.isroutine(plain) else type(plain))))
    except TypeError:
        return True


def _described(hook: Any) -> str:
    plain = hook.func if isinstance(hook, functools.partial) else hook
    code = getattr(plain, "__code__", None)
    where = f" at {Path(code.co_filename).name}:{code.co_firstlineno}" if code is not None else ""
    return f"{getattr(plain, '__qualname__', type(plain).__name__)}{where}"
