"""Experts that a model goes through in a loop over those that were hit."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import CaptureError
from autopar.tracer import ColoTracer
from tests.cpu.bad_input_checks import refused
from tests.cpu.model_checks import Reference, Subject, assert_equal, eager, run

WIDTH, EXPERTS, CHOSEN = 8, 4, 2
KINDS = (
    "index_add",
    "where",
    "modules",
    "one class more",
    "under no_grad",
    "two experts",
    "first only",
    "dropped",
    "numbers",
    "twice the same",
)
ALIKE = ("one class more", "under no_grad", "first only", "numbers", "twice the same")
"""Those that differ from another in a line or two."""


class Hit(nn.Module):
    """A mixture of experts as libraries write it, in several ways."""

    seen: Tensor

    def __init__(self, kind: str, count: int = EXPERTS) -> None:
        super().__init__()
        self.kind, self.count = kind, 2 if kind == "two experts" else count
        self.register_buffer("seen", torch.zeros(self.count))
        self.gate = nn.Linear(WIDTH, self.count)
        if kind == "modules":
            self.experts = nn.ModuleDict({f"expert_{i}": nn.Linear(WIDTH, WIDTH) for i in range(self.count)})
        else:
            self.up, self.down = (nn.Parameter(torch.randn(self.count, WIDTH, WIDTH)) for _ in range(2))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows, weights, and which expert they go to."""
        scores = self.gate(x).softmax(-1)
        if self.kind in ("first only", "dropped"):
            chosen = functional.one_hot(scores.argmax(-1), self.count)
            if self.kind == "dropped":
                chosen = chosen * (chosen.cumsum(-2) <= 2)
            return x.view(-1, WIDTH), scores.amax(-1).view(-1, 1), chosen.view(-1, 1, self.count)
        w, ids = scores.view(-1, self.count).topk(1 if self.count == 2 else CHOSEN, -1)
        if "twice the same" in self.kind:
            ids = ids % 2 * ids
        return x.view(-1, WIDTH), w, functional.one_hot(ids, self.count + (self.kind == "one class more"))

    def hit(self, mask: Tensor) -> Tensor:
        found = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        return found.flatten() if self.kind == "numbers" else found

    def expert(self, x: Tensor, e: Tensor) -> Tensor:
        if self.kind == "modules":
            made: Tensor = self.experts[f"expert_{e[0]}"](x).relu()
            return made
        e = e if self.kind == "numbers" else e[0]
        return functional.silu(x @ self.up[e].T) @ self.down[e]

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.made(x)).square().mean()

    def made(self, x: Tensor) -> Tensor:
        rows, w, chosen = self.route(x)
        out = torch.zeros_like(rows)
        with torch.no_grad():
            self.seen += chosen.sum((0, 1))[: self.count]
        with torch.set_grad_enabled(self.kind != "under no_grad"):
            mask = chosen.permute(2, 1, 0)
            hit = self.hit(mask)
        for e in hit:
            with torch.set_grad_enabled(self.kind != "under no_grad"):
                chosen_by = mask[e[0]] if self.kind == "under no_grad" else mask[e]
                k, t = torch.where(chosen_by if chosen_by.ndim == 2 else chosen_by.squeeze(0))
            made = self.expert(rows[None, t].reshape(-1, WIDTH), e) * w[t, k, None]
            if self.kind in ("where", "twice the same, put"):
                out[t] += made
            else:
                out.index_add_(0, t, made)
        return out.view(x.shape)


def batch(seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(4, 6, WIDTH, dtype=torch.float64)


def capture(model: nn.Module) -> autopar.tracer.Capture:
    return ColoTracer().capture(model, {"x": batch()})


def zeros_for_none(of: Reference, model: nn.Module) -> Reference:
    """Experts without tokens have no gradient on one device, and zeros in a program."""
    grads = {n: of.grads.get(n, torch.zeros_like(p)) for n, p in model.named_parameters()}
    return Reference(of.outputs, grads, of.buffers)


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in ALIKE)) for k in KINDS])
def test_a_loop_over_experts_that_were_hit_equals_one_device_whichever_they_are(kind: str) -> None:
    torch.manual_seed(0)
    model = Hit(kind).double()
    made, hits = capture(model), set()
    assert any("gradients of zeros" in n for n in made.notices) == (kind == "modules")
    for seed in range(4):
        with torch.no_grad():
            model.gate.bias.normal_().mul_(seed)  # from all experts to few
        inputs = {"x": batch(seed)}
        hits.add(int((model.route(inputs["x"])[2].sum((0, 1)) > 0).sum()))
        expected = zeros_for_none(eager(model, inputs), model)
        for mesh in ((2,), (2, 2)):
            assert_equal(run(Subject(model, inputs, made, expected), mesh).result, expected, 1e-9)
    assert min(hits) < model.count
    assert len(hits) > 1


@pytest.mark.slow
def test_many_such_blocks_are_captured_from_a_few() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Layer("one class more") for _ in range(9))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.square().mean()

    class Layer(Hit):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.made(x)

    model = Chain().double()
    made, whole = capture(model), ColoTracer(whole=True).capture(model, {"x": batch()})
    assert made.guards != whole.guards  # other blocks were not read
    assert [n.packet for n in made.graph.nodes] == [n.packet for n in whole.graph.nodes]


def test_experts_with_a_mask_for_one_more_that_skip_it_equal_one_device() -> None:
    library = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    config = transformers.Step3p7TextConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=16,
        share_expert_dim=16,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    model = library.Step3p7SparseMoeBlock(config, 0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    inputs = {"hidden_states": batch().float()}
    expected = eager(model, inputs)
    made = ColoTracer().capture(model, inputs)
    assert_equal(run(Subject(model, inputs, made, expected), (2, 2)).result, expected, 1e-4)


class Otherwise(Hit):
    """A loop that does something else with the experts that were hit."""

    def forward(self, x: Tensor) -> Tensor:
        rows, w, chosen = self.route(x)
        out, extra, parts, last = torch.zeros_like(rows), torch.zeros((), dtype=x.dtype), list[Tensor](), 0
        mask, other = (c.permute(2, 1, 0) for c in (chosen, self.route(-x)[2]))
        hit = torch.greater(mask.sum(dim=(-1, -2)), 1 if self.kind == "only those with two tokens" else 0).nonzero()
        for i, expert in enumerate(hit):
            k, t = torch.where((other if self.kind == "tokens of another" else mask)[expert].squeeze(0))
            made = self.expert(rows[t], expert) * w[t, k, None]
            match self.kind:
                case "a list":
                    parts.append(made.sum())
                case "another number":
                    made = self.expert(rows[t], torch.tensor([i])) * w[t, k, None]
                case "a penalty for each":
                    extra = extra + self.up[int(expert)].square().sum()
                case "changes a buffer":
                    self.seen[expert] += 1
                case "changes rows":
                    rows[t] *= 2
                case "changes a sum":
                    extra += made.sum()
                case "the largest" | "the last":
                    last = max(last, int(expert)) if self.kind == "the largest" else int(expert)
                case "changes the choices":
                    chosen.mul_(1)
                case "mixes rows":
                    made = made - made.mean(0)
                case "stops":
                    if i == 1:
                        break
            out.index_add_(0, t, made)
        extra = extra + sum(parts) + last
        if self.kind == "counts":
            extra = extra + (i + 1)
        if self.kind == "asks how many":
            extra = extra + len(hit)
        return out.square().mean() + extra


def test_rows_of_a_token_that_are_put_over_each_other_are_refused() -> None:
    with refused(CaptureError, "for e in hit", "values"):
        capture(Hit("twice the same, put").double())


OTHERWISE = (
    "a list",
    "another number",
    "a penalty for each",
    "changes a buffer",
    "changes rows",
    "changes a sum",
    "changes the choices",
    "mixes rows",
    "the largest",
    "the last",
    "stops",
    "counts",
    "asks how many",
    "tokens of another",
    "only those with two tokens",
)


@pytest.mark.parametrize("count", [2, EXPERTS])
@pytest.mark.parametrize("kind", OTHERWISE)
def test_a_loop_that_does_anything_else_is_refused_as_it_is(kind: str, count: int) -> None:
    model = Otherwise(kind, count).double()
    with refused(CaptureError, "in enumerate(hit)", "data-dependent"):
        capture(model)
