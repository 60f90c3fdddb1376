"""Refuses side effects of a forward that a graph would silently get wrong, or makes them right."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.errors import CaptureError

_TORCH = str(Path(torch.__file__).parent)
_COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "all_to_all",
    "all_to_all_single",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
    "barrier",
)


@contextlib.contextmanager
def refused_side_effects(overridden: list[str]) -> Iterator[None]:
    """Refuse side effects while tracing; inference mode becomes no_grad, whose tensors a graph can hold.

    Args:
        overridden: receives the user's own checkpoints.
    """
    refusals: list[tuple[Any, str, str, str]] = [
        (Tensor, "backward", "calls backward", "return the loss; for a gradient in forward use torch.autograd.grad"),
        (torch.autograd, "backward", "calls backward", "return the loss, and call backward outside"),
        (torch, "manual_seed", "seeds torch's generator", "seed outside of forward"),
        (torch.random, "manual_seed", "seeds torch's generator", "seed outside of forward"),
    ]
    if dist.is_available():
        hint = "remove it: the plan places the program's collectives, and every sum is already over all ranks"
        refusals += [(dist, name, f"calls torch.distributed.{name}", hint) for name in _COLLECTIVES]
    hooks, mode = torch.autograd.graph.saved_tensors_hooks, torch.inference_mode
    with contextlib.ExitStack() as stack:
        for owner, name, what, hint in refusals:
            stack.enter_context(mock.patch.object(owner, name, _refusing(getattr(owner, name), what, hint)))
        stack.enter_context(mock.patch.object(hooks, "__enter__", _checked_enter(hooks.__enter__, overridden)))
        stack.enter_context(mock.patch.object(mode, "__enter__", _enter_inference))
        stack.enter_context(mock.patch.object(mode, "__exit__", _exit_inference))
        stack.enter_context(mock.patch.object(Tensor, "data", property(_data, _set_data)))
        stack.enter_context(mock.patch.object(nn.Module, "to", _only_if_it_changes(nn.Module.to)))
        yield


def _called_by_torch() -> bool:
    """Whether torch itself makes the call, for something that is captured in another way."""
    return sys._getframe(2).f_code.co_filename.startswith(_TORCH)


def _refusing(original: Callable[..., Any], what: str, hint: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        if _called_by_torch():
            return original(*args, **kwargs)
        raise CaptureError(f"The forward {what}.", found="a side effect, done once at capture", hint=f"{hint}.")

    return refuse


def _only_if_it_changes(original: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Skip conversions of a module to the dtype that it has; torch would swap fake tensors, which it cannot."""

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        given = args[0] if args else kwargs.get("dtype")
        tensors = (t for t in (*self.parameters(), *self.buffers()) if t.is_floating_point() or t.is_complex())
        alone = len(args) + len(kwargs) == 1 and isinstance(given, torch.dtype)
        return self if alone and all(t.dtype == given for t in tensors) else original(self, *args, **kwargs)

    return to


def _checked_enter(original: Callable[..., Any], overridden: list[str]) -> Callable[..., Any]:
    def enter(self: Any) -> Any:
        if type(self).__name__ == "_checkpoint_hook":
            overridden.append("torch.utils.checkpoint")
        own = type(self).__module__.partition(".")[0] == "torch" and type(self).__name__ != "saved_tensors_hooks"
        if not own and not _called_by_torch():
            raise CaptureError(
                "The forward packs the tensors that are saved for the backward.",
                found=f"saved_tensors_hooks with {getattr(self.pack_hook, '__qualname__', self.pack_hook)}",
                hint="the plan decides what is saved: with a memory_budget it recomputes or offloads.",
            )
        return original(self)

    return enter


def _enter_inference(self: Any) -> None:
    self._autopar_grad = torch.is_grad_enabled()
    torch.set_grad_enabled(not self.mode)


def _exit_inference(self: Any, *_: Any) -> None:
    torch.set_grad_enabled(self._autopar_grad)


_plain_data: Any = Tensor.data


def _data(tensor: Tensor) -> Any:
    return _plain_data.__get__(tensor) if _called_by_torch() else tensor.detach()


def _set_data(tensor: Tensor, value: Tensor) -> None:
    if _called_by_torch():
        _plain_data.__set__(tensor, value)
        return
    raise CaptureError(
        "The forward assigns to a tensor's data.",
        found=f"an assignment to .data of {tuple(tensor.shape)}",
        hint="compute a new tensor, or change parameters outside of forward.",
    )


@contextlib.contextmanager
def constant_requires_grad(model: nn.Module) -> Iterator[None]:
    """Refuse a forward that changes which parameters train, which must be decided before the capture.

    Raises:
        CaptureError: the forward changes it.
    """
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    yield
    for name, parameter in model.named_parameters():
        if name in before and parameter.requires_grad != before[name]:
            raise CaptureError(
                f"The forward changes whether {name} is trained.",
                found=f"requires_grad {before[name]} becomes {parameter.requires_grad}",
                hint="call requires_grad_ before autoparallelize; a later change compiles the program again.",
            )
