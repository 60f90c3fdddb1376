"""Values that a forward asks of tensors and that buffers alone decide: known at capture, and watched by a guard.

``if self.ready:`` and ``self.step % 10 == 0`` depend on buffers, whose values are there when the program is captured.
They are computed by the part of the traced graph that leads to them. A program serves a call while that part, on the
buffers of the call, gives the same value.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from unittest import mock

from torch import Tensor, fx, nn

from autopar._torch import FakeTensor, OpOverload, is_mutable, is_random, traced_constant, traced_node
from autopar.errors import CaptureError
from autopar.guards import Condition

_ASKING = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
_METHODS = [(kind, name) for kind in (Tensor, FakeTensor) for name in _ASKING if kind is Tensor or name in vars(kind)]


class KnownValues:
    """What a forward of ``copied`` asks, answered by the buffers of ``model``, which it is a copy of."""

    def __init__(self, model: nn.Module, copied: nn.Module) -> None:
        self.conditions: list[Condition] = []
        self._copied = copied
        self._values = {name: b.detach() for name, b in model.named_buffers() if type(b) is Tensor and not b.is_meta}
        self._placeholders: dict[fx.Node, str] = {}
        self._answers: list[Any] = []
        self._asked = 0

    def begin(self) -> None:
        """Note, as a run of the forward begins, which nodes of a trace are buffers."""
        self._asked = 0
        nodes = ((traced_node(buffer), name) for name, buffer in self._copied.named_buffers() if name in self._values)
        self._placeholders = {node: name for node, name in nodes if node is not None}
        if self._placeholders:
            self._answers, self.conditions = [], []

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """While the forward runs: tensors whose values buffers decide are asked there."""
        with contextlib.ExitStack() as stack:
            for kind, name in _METHODS:
                stack.enter_context(mock.patch.object(kind, name, self._asking(name, getattr(kind, name))))
            yield

    def _asking(self, name: str, ordinary: Callable[..., Any]) -> Callable[..., Any]:
        def ask(tensor: Tensor) -> Any:
            node = traced_node(tensor)
            if node is None:
                return self._repeated(tensor, ordinary)
            condition = _condition(node, self._placeholders, name, self._values) if self._placeholders else None
            if condition is None:
                return ordinary(tensor)
            self.conditions.append(condition)
            self._answers.append(condition.value)
            self._asked += 1
            return condition.value

        return ask

    def _repeated(self, tensor: Tensor, ordinary: Callable[..., Any]) -> Any:
        """Outside of a trace a forward asks what it asked before."""
        try:
            return ordinary(tensor)
        except Exception:
            if self._asked >= len(self._answers):
                raise
            self._asked += 1
            return self._answers[self._asked - 1]

    def refuse_changing(self, changed: Collection[str]) -> None:
        """A number that is another at every call would be another program at every call.

        Args:
            changed: buffers that the program changes.

        Raises:
            CaptureError: the forward computes with such a number.
        """
        for condition in self.conditions:
            name = next((n for n in condition.buffers if n in changed), None)
            if name is not None and not isinstance(condition.value, bool):
                raise CaptureError(
                    f"The forward takes a Python number from the buffer {name}, which it changes.",
                    found=f"{condition.value!r} when it was captured",
                    hint="compute with the buffer itself: the captured program would keep one number.",
                )


def _condition(
    node: fx.Node, placeholders: Mapping[fx.Node, str], ask: str, values: Mapping[str, Tensor]
) -> Condition | None:
    """What computes a value from buffers; None where something else decides it too."""
    inside = _leading_to(node, placeholders)
    if inside is None:
        return None
    graph, copies, constants = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, Any]()
    for each in inside:
        copies[each] = graph.node_copy(each, copies.__getitem__)
        if each.op == "get_attr":
            constants[str(each.target)] = traced_constant(each)
    graph.output(copies[node])
    buffers = tuple(placeholders[each] for each in inside if each.op == "placeholder")
    return Condition(buffers, fx.GraphModule(constants, graph), ask).with_value([values[name] for name in buffers])


def _leading_to(node: fx.Node, placeholders: Mapping[fx.Node, str]) -> list[fx.Node] | None:
    """The nodes that a value is computed by, in order; None where it takes more than buffers and constants."""
    wanted, waiting = set[fx.Node](), [node]
    while waiting:
        each = waiting.pop()
        if each not in wanted:
            wanted.add(each)
            waiting += each.all_input_nodes
    if not all(map(functools.partial(_is_known, placeholders=placeholders), wanted)):
        return None
    inside = []
    for each in node.graph.nodes:
        if each in wanted:
            inside.append(each)
        elif is_mutable(each.target) and wanted.intersection(each.all_input_nodes):
            return None  # something else has changed what the value is computed from
        if each is node:
            break
    return inside if any(each.op == "placeholder" for each in inside) else None


def _is_known(node: fx.Node, placeholders: Mapping[fx.Node, str]) -> bool:
    if node.op == "placeholder":
        return node in placeholders
    if node.op == "get_attr":
        return type(traced_constant(node)) is Tensor
    return node.op == "call_function" and isinstance(node.target, OpOverload) and not is_random(node.target)
