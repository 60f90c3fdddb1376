"""Models that take derivatives in their forward: physics-informed networks, gradient penalties.

torch.export stops above autograd and cannot hold them. Their joint graph is traced from the model itself, in which an
inner derivative consists of ordinary ops; the rewrites of the exported graph are not applied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from autopar._torch import function_transforms, joint_graph
from autopar.errors import CaptureError
from autopar.tracer.calls import FlatModel
from autopar.tracer.joint import DECOMPOSITIONS, Joint, separate

aten = torch.ops.aten


class DerivativeError(CaptureError):
    """The forward takes a derivative."""


@contextlib.contextmanager
def refused_derivatives() -> Iterator[None]:
    """Make derivatives raise ``DerivativeError`` during an export."""

    def refuse(*_: Any, **__: Any) -> None:
        raise DerivativeError(
            "The forward takes a derivative.", found="torch.autograd.grad or torch.func", hint="see the documentation."
        )

    with contextlib.ExitStack() as stack:
        for owner, name in ((torch.autograd, "grad"), *function_transforms()):
            stack.enter_context(mock.patch.object(owner, name, refuse))
        yield


class _Direct(nn.Module):
    def __init__(self, flat: FlatModel, detached: Collection[int]) -> None:
        super().__init__()
        self.flat = flat
        self._detached = detached

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        *users, _ = inputs
        return separate(self.flat(*users), inputs, self._detached)


def _addmm(bias: Tensor, x: Tensor, y: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Compute a product and a sum: a product whose inner dim is cut is partial, and the bias is not."""
    return bias * beta + (x @ y) * alpha if (beta, alpha) != (1, 1) else bias + x @ y


def joint_directly(
    flat: FlatModel,
    inputs: Sequence[Tensor],
    seed: Tensor,
    loss: int | None,
    differentiable: tuple[int, ...],
    detached: Collection[int],
) -> Joint:
    """Trace the joint graph of a model as it is written.

    Raises:
        CaptureError: the model draws random numbers, which would differ between ranks.
    """
    module = _Direct(flat, detached)
    graph_module, ins, outs = joint_graph(module, (*inputs, seed), {**DECOMPOSITIONS, aten.addmm.default: _addmm})
    for node in graph_module.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CaptureError(
                "A forward that takes derivatives cannot draw random numbers.",
                found=str(node.target),
                hint="disable dropout, or pass the random numbers as an input.",
            )
        if node.op == "get_attr":
            raise CaptureError(
                "A forward that takes derivatives cannot hold tensors as plain attributes or literals.",
                found=str(node.target),
                hint="register them with register_buffer.",
            )

    canonical = {id(t): n for n, t in (*flat.model.named_parameters(), *flat.model.named_buffers())}
    every = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))

    def named(x: Any) -> Any:
        return x if x is None or x.target not in every else type(x)(x.kind, canonical[id(every[x.target])])

    return Joint(graph_module, [named(i) for i in ins], [named(o) for o in outs], {}, loss, differentiable)
