"""What a call of a parallel module asks for, on which all ranks have to agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autopar.errors import InputError
from autopar.guards import Difference
from autopar.runtime.agreement import DTYPES, FROZEN, same_call
from autopar.runtime.tables import Tables, tables
from autopar.runtime.variants import Call, ParallelBase, Variant


@dataclass(frozen=True)
class Request:
    """A call as one rank sees it.

    Args:
        key: the key of the programs that may serve it.
        variant: a program whose guards hold; None if it has to be compiled.
        loose: parameters and buffers that the user has put into the model since it was placed.
    """

    call: Call
    key: Any
    variant: Variant | None
    loose: tuple[str, ...]

    @property
    def number(self) -> int | None:
        return self.variant.number if self.variant is not None else None


def agreed_request(
    model: ParallelBase, args: Sequence[Any], kwargs: Mapping[str, Any], stored: Tables
) -> tuple[Request, Callable[[], None]]:
    """Bind a call. It is known to be the same on every rank once the second result was called."""
    state = model._autopar

    def bound() -> Request:
        call = state.bind(model, args, kwargs)
        with state.precision():
            key = variant_key(model, call, stored)
        known = state.variants.get(key, ())
        if not known:
            check_call(state.planned, call)
        variant = next((v for v in known if stored.meet(v.guards, model)), None)
        return Request(call, key, variant, stored.layout.loose)

    gradients = torch.is_grad_enabled()
    return same_call(
        bound,
        lambda request: state.number_of((request.key, request.number, request.loose)),
        lambda request: _description(model, request, gradients),
    )


def _description(model: ParallelBase, request: Request, gradients: bool) -> dict[str, str]:
    call = request.call
    properties = {n: f"{tuple(t.shape)} {t.dtype}" for n, t in zip(call.names, call.tensors, strict=True)}
    properties |= {path: repr(value) for path, value in call.structure.plain}
    changed = str(unmet_guard(model, request) or "nothing") if request.variant is None else "nothing"
    properties |= {"changed since the program was captured": changed, "put into the model": ", ".join(request.loose)}
    held = dict(model.named_parameters())
    properties[FROZEN] = ", ".join(name for name, p in held.items() if not p.requires_grad) or "none"
    properties[DTYPES] = ", ".join(sorted({str(p.dtype) for p in held.values()}))
    return properties | {"training": str(model.training), "gradients": str(gradients)}


def unmet_guard(model: ParallelBase, request: Request) -> Difference | None:
    """Return why no program of these shapes serves a call: the difference from the one that fits best."""
    found = (variant.guards.difference(model) for variant in model._autopar.variants.get(request.key, ()))
    return max((d for d in found if d is not None), key=lambda d: d.at, default=None)


def variant_key(model: nn.Module, call: Call, stored: Tables | None = None) -> Any:
    """Return what a program depends on: shapes, plain arguments, modules' modes, the model's tensors, and autocast.

    Args:
        stored: the model's tables, if known.
    """
    named, stored = zip(call.names, call.tensors, strict=True), stored or tables(model)
    tensors = tuple((name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in named)
    plain = tuple((path, type(value), value) for path, value in call.structure.plain)
    parameters = tuple([(p.requires_grad, p.dtype) for p in stored.parameters])
    cast = tuple(torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
    return tensors, plain, stored.modes(model), parameters, stored.layout.digest, (*cast, torch.get_default_dtype())


def check_call(planned: Call, call: Call) -> None:
    """Refuse inputs of another kind than the plan was made for.

    Sizes may differ. Without gradients, as in a validation without labels, inputs may be added or missing.

    Raises:
        InputError: another structure, number of dims or dtype.
    """
    missing, new = set(planned.names) - set(call.names), set(call.names) - set(planned.names)
    if (missing or new) and torch.is_grad_enabled():
        raise InputError(
            "The inputs have another structure than the plan was made for.",
            found=f"missing {sorted(missing)}, new {sorted(new)}",
            hint="call the model with the arguments that meta_inputs had, or under torch.no_grad().",
        )
    known = dict(zip(planned.names, planned.tensors, strict=True))
    for name, tensor in zip(call.names, call.tensors, strict=True):
        like = known.get(name, tensor)
        if tensor.ndim != like.ndim or tensor.dtype != like.dtype:
            raise InputError(
                f"The input {name} has another number of dims or another dtype than the plan was made for.",
                found=f"{tuple(tensor.shape)} {tensor.dtype}, planned {tuple(like.shape)} {like.dtype}",
                hint="convert the input, or parallelize the model with meta_inputs like it.",
            )
