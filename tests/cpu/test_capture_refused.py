"""What a graph cannot hold is refused, by the line of the user's code, rather than captured wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from tests.cpu.bad_input_checks import refused, untouched
from tests.cpu.capture_checks import captured

HERE = "test_capture_refused.py:"


class Refused(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.constant = torch.ones(4)
        self.register_buffer("state", torch.zeros(4))
        self.body = body

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def branch(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) if x.sum() > 0 else x


def item(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * x.max().item()


def to_list(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * x.tolist()[0][0]


def to_numpy(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * float(x.detach().numpy().sum())


def formatted(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * len(f"{x.mean():.3f}")


def loop(m: Any, x: Tensor) -> Tensor:
    for _ in range(int(x[0, 0])):
        x = m.lin(x)
    return x


def selected(m: Any, x: Tensor) -> Tensor:
    return m.lin(x)[x[:, 0] > 0]


def unique(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) + torch.unique(x).sum()


def python_random(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * random.random()


def numpy_random(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) * np.random.rand()


def hook(m: Any, x: Tensor) -> Tensor:
    h = m.lin(x)
    h.register_hook(lambda grad: grad * 2)
    return h


def packs(m: Any, x: Tensor) -> Any:
    return nn.utils.rnn.pack_padded_sequence(m.lin(x).unsqueeze(0), torch.tensor([4]), batch_first=True).data


def chooses(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, m.lin, torch.sin, (x,))


def wrong_shape(m: Any, x: Tensor) -> Tensor:
    return m.lin(x) @ torch.ones(3, 3)


def raises(m: Any, x: Tensor) -> Tensor:
    raise ValueError("the user's own")


@pytest.mark.parametrize(
    "body",
    [
        branch,
        item,
        to_list,
        to_numpy,
        formatted,
        loop,
        selected,
        unique,
        python_random,
        numpy_random,
        hook,
        packs,
        chooses,
        wrong_shape,
        raises,
    ],
)
def test_the_line_is_named(body: Callable[[Any, Tensor], Any]) -> None:
    model = Refused(body)
    states = random.getstate(), np.random.get_state()[1].tolist()
    with untouched(model), refused(CaptureError, HERE):
        captured(model, torch.randn(4, 4))
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states


def test_the_error_is_all_that_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    with refused(CaptureError, HERE):
        captured(Refused(branch), torch.randn(4, 4))
    assert capfd.readouterr() == ("", "")


def test_nothing_of_what_is_refused_hooks_later_modules() -> None:
    """torch.export leaves a hook on every module's buffers where it fails, which holds what was exported."""
    hooks = nn.modules.module._global_buffer_registration_hooks
    before = dict(hooks)
    with refused(CaptureError, HERE):
        captured(Refused(branch), torch.randn(4, 4))
    assert dict(hooks) == before


def test_a_constant_that_changes() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.constant.add_(1)
        return m.lin(x) * m.constant

    with refused(CaptureError, "constant in place", "register_buffer"):
        captured(Refused(body), torch.randn(4, 4))


def test_a_parameter_that_changes() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.lin.weight.mul_(0.9)
        return m.lin(x)

    with refused(CaptureError, "lin.weight in place"):
        captured(Refused(body), torch.randn(4, 4))


def test_a_buffer_that_would_keep_the_graph_of_its_value() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        y = m.lin(x)
        m.state.copy_(y[0])
        return y

    with refused(CaptureError, "state keeps the graph", "value.detach()"):
        captured(Refused(body), torch.randn(4, 4))


class Converted(nn.Module):
    """Converts a table of positions to the dtype of what it is added to, as it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        if self.table.dtype != hidden.dtype:
            self.table = self.table.to(hidden.dtype)
        return (hidden + self.table).float().pow(2).mean()


def test_a_buffer_that_the_forward_converts_is_to_be_converted_before() -> None:
    model, x = nn.Sequential(Converted()), torch.randn(8, 4)
    with pytest.raises(CaptureError, match=r"buffer 0\.table") as caught:
        autopar.plan(model, x, mesh=(2,), mixed_precision="bf16")
    exec(caught.value.hint.split(": ")[1].removesuffix("."), {"model": model, "torch": torch})
    assert autopar.plan(model, x, mesh=(2,), mixed_precision="bf16").parameters


def test_a_buffer_that_changes_its_shape() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.state = torch.cat([m.state, m.state])
        return m.lin(x)

    with refused(CaptureError, "state", "(4,)", "(8,)"):
        captured(Refused(body), torch.randn(4, 4))


@pytest.mark.parametrize("body", [lambda m, x: m.lin(x).detach(), lambda m, x: torch.zeros(4), lambda m, x: "text"])
def test_nothing_to_train(body: Callable[[Any, Tensor], Any]) -> None:
    with refused(CaptureError, "gradient"):
        captured(Refused(body), torch.randn(4, 4))


def test_a_plain_attribute_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Refused(lambda m, x: m.lin(x) * m.constant)
    with refused(CaptureError, "constant", "register_buffer"):
        captured(model, torch.randn(4, 4))


def test_a_tensor_that_is_set_elsewhere_in_forward_is_a_notice() -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        m.last = m.lin(x)
        Refused.last = m.last
        return m.last * 2

    capture = captured(Refused(body), torch.randn(4, 4))
    assert [each.names for each in capture.attribute_outputs] == [["last"]]
    assert capture.lost == ("Refused.last",)
    assert any(n.startswith("Refused.last is set in forward") for n in capture.notices)


def test_printing_is_no_harm(capsys: pytest.CaptureFixture[str]) -> None:
    def body(m: Any, x: Tensor) -> Tensor:
        print(x.shape, x)  # noqa: T201  what users write while they debug
        return m.lin(x)

    captured(Refused(body), torch.randn(4, 4))
    assert "FakeTensor" in capsys.readouterr().out


def remove_self_loops(edges: Tensor) -> Tensor:
    """As libraries of graph networks have it."""
    mask = edges[0] != edges[1]
    return edges[:, mask]


def with_self_loops(edges: Tensor, n: int) -> Tensor:
    return torch.cat([remove_self_loops(edges), torch.arange(n).expand(2, n)], 1)


def chosen_in_the_layer(edge_index: Tensor, n: int) -> Tensor:
    return torch.cat([edge_index[:, edge_index[0] < edge_index[1]], torch.arange(n).expand(2, n)], 1)


def nodes_counted(edges: Tensor, n: int) -> Tensor:
    num_nodes = int(edges.max()) + 1
    return torch.cat([edges, torch.arange(num_nodes).expand(2, num_nodes)], 1)


class GraphConvolution(nn.Module):
    def __init__(self, edges_of: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.lin, self.edges_of = nn.Linear(4, 4), edges_of

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = self.edges_of(edge_index, x.shape[0])
        h = self.lin(x)
        return torch.zeros_like(h).index_add(0, target, h[source]).square().mean()


GRAPH = (torch.randn(5, 4), torch.tensor([[0, 1, 2, 2], [1, 2, 2, 4]]))


@pytest.mark.parametrize(
    ("edges_of", "hint"),
    [
        (with_self_loops, "add_self_loops=False"),
        (chosen_in_the_layer, "weight of zero"),
        (nodes_counted, "num_nodes=x.shape[0]"),
    ],
)
def test_what_a_graph_convolution_reads_from_its_edges_says_how_to_do_without(edges_of: Any, hint: str) -> None:
    with refused(CaptureError, HERE, hint):
        captured(GraphConvolution(edges_of), GRAPH)


def test_a_graph_convolution_whose_edges_are_given_is_captured() -> None:
    captured(GraphConvolution(lambda edges, n: torch.cat([edges, torch.arange(n).expand(2, n)], 1)), GRAPH)


def test_tokens_that_see_each_other_are_chosen_by_indices() -> None:
    """How long the rows of scores are would depend on the mask."""
    attention, mask = nn.MultiheadAttention(4, 2, batch_first=True), torch.tensor([True, False, True, True])

    class Chosen(nn.Module):
        def __init__(self, chosen: Tensor) -> None:
            super().__init__()
            self.attention = attention
            self.register_buffer("chosen", chosen)

        def forward(self, x: Tensor) -> Tensor:
            kept = x[:, self.chosen]
            return self.attention(kept, kept, kept)[0].square().mean()

    with refused(CaptureError, HERE, "x[:, index]", "mask.nonzero()"):
        captured(Chosen(mask), torch.randn(2, 4, 4))
    captured(Chosen(mask.nonzero()[:, 0]), torch.randn(2, 4, 4))
