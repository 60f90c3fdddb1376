"""Python values that a forward takes from tensors which depend on buffers alone: known at capture, checked by a guard.

``if self.ready:`` and ``self.step % 10 == 0`` depend on buffers, whose values exist when the program is captured. The
part of the traced graph that leads to such a value computes it. A program serves a call only if that part gives the
same value for the buffers of the call.
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

_VALUE_METHODS = ("__bool__", "__int__", "__float__", "__index__", "item", "tolist")
_METHODS = [
    (kind, name) for kind in (Tensor, FakeTensor) for name in _VALUE_METHODS if kind is Tensor or name in vars(kind)
]


class KnownValues:
    """Answers a forward of ``copied`` from the buffers of ``model``, of which it is a copy."""

    def __init__(self, model: nn.Module, copied: nn.Module) -> None:
        self.conditions: list[Condition] = []
        self._copied = copied
        self._values = {name: b.detach() for name, b in model.named_buffers() if type(b) is Tensor and not b.is_meta}
        self._placeholders: dict[fx.Node, str] = {}
        self._answers: list[Any] = []
        self._answered = 0

    def begin(self) -> None:
        """Find the nodes that stand for buffers in a trace, at the beginning of a run of the forward."""
        self._answered = 0
        nodes = ((traced_node(buffer), name) for name, buffer in self._copied.named_buffers() if name in self._values)
        self._placeholders = {node: name for node, name in nodes if node is not None}
        if self._placeholders:
            self._answers, self.conditions = [], []

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Patch tensors while the forward runs, so that values that buffers determine are computed from them."""
        with contextlib.ExitStack() as stack:
            for kind, name in _METHODS:
                stack.enter_context(mock.patch.object(kind, name, self._patched(name, getattr(kind, name))))
            yield

    def _patched(self, name: str, ordinary: Callable[..., Any]) -> Callable[..., Any]:
        def value_of(tensor: Tensor) -> Any:
            node = traced_node(tensor)
            if node is None:
                return self._repeated(tensor, ordinary)
            condition = _condition(node, self._placeholders, name, self._values) if self._placeholders else None
            if condition is None:
                return ordinary(tensor)
            self.conditions.append(condition)
            self._answers.append(condition.value)
            self._answered += 1
            return condition.value

        return value_of

    def _repeated(self, tensor: Tensor, ordinary: Callable[..., Any]) -> Any:
        """Repeat the earlier answer if a forward outside of a trace takes the same value again."""
        try:
            return ordinary(tensor)
        except Exception:
            if self._answered >= len(self._answers):
                raise
            self._answered += 1
            return self._answers[self._answered - 1]

    def refuse_changing(self, changed: Collection[str]) -> None:
        """Refuse Python numbers that change in every call, since every call would need another program.

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
                    found=f"{condition.value!r} at capture",
                    hint="compute with the buffer itself: the captured program would keep a single number.",
                )


def _condition(
    node: fx.Node, placeholders: Mapping[fx.Node, str], method: str, values: Mapping[str, Tensor]
) -> Condition | None:
    """Return the computation of a value from buffers; None if anything else determines it too."""
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
    return Condition(buffers, fx.GraphModule(constants, graph), method).with_value([values[name] for name in buffers])


def _leading_to(node: fx.Node, placeholders: Mapping[fx.Node, str]) -> list[fx.Node] | None:
    """Return the nodes that compute a value, in order; None if they need more than buffers and constants."""
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
            return None  # another op has changed an input of the computation
        if each is node:
            break
    return inside if any(each.op == "placeholder" for each in inside) else None


def _is_known(node: fx.Node, placeholders: Mapping[fx.Node, str]) -> bool:
    if node.op == "placeholder":
        return node in placeholders
    if node.op == "get_attr":
        return type(traced_constant(node)) is Tensor
    return node.op == "call_function" and isinstance(node.target, OpOverload) and not is_random(node.target)
