"""Micro-batches compute what the whole batch does, for any number of them and on any mesh, or say what they do not."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar import codegen, passes, planner
from autopar.errors import InputError, PlanError
from autopar.ir import Value
from autopar.mesh import Mesh
from autopar.planner.graphs.chunked import with_chunked_losses
from autopar.planner.pipeline.microbatches import OTHER_LOSS, micro_batch
from autopar.runtime.simulation import simulate_program
from autopar.tracer import ColoTracer
from tests import models
from tests.cpu.model_checks import FLOOR, Promoted, cluster_where_sharding_pays, subject
from tests.micro_batches import in_micro_batches, whole_batch
from tests.zoo import ZOO

TOLERANCE = 1e-9
SEED = 3


def captured(model: nn.Module, inputs):
    """Return the graph of a step, and what it is fed."""
    with Promoted():
        capture = ColoTracer().capture(model, inputs)
    given = {("constant", n): t for n, t in capture.constants.items()}
    given |= {("parameter", n): p.detach() for n, p in model.named_parameters()}
    given |= {("buffer", n): b.detach() for n, b in model.named_buffers()}
    values = inputs if isinstance(inputs, dict) else dict(zip(capture.call.names, inputs, strict=True))
    given |= {("input", n): values[n] for n in capture.call.names}
    given |= {("seed", i.name): torch.tensor(SEED) for i in capture.graph.inputs if i.kind == "seed"}
    return capture.graph, given


def assert_equal(found, expected) -> None:
    assert found.keys() == expected.keys()
    grads = [t for (kind, _), t in expected.items() if kind == "gradient"]
    largest = max((float(t.abs().max()) for t in grads if t.numel()), default=0.0)
    for key, tensor in expected.items():
        assert found[key].shape == tensor.shape, key
        if not tensor.is_floating_point():
            assert torch.equal(found[key], tensor), key
            continue
        scale = max(float(tensor.abs().max()) if tensor.numel() else 0.0, FLOOR * largest * (key[0] == "gradient"))
        assert float((found[key] - tensor).abs().max()) <= TOLERANCE * scale, key


def checked(model: nn.Module, inputs, micro_batches: int = 4):
    """Assert that micro-batches of a model compute what the whole batch does; return one of them."""
    graph, given = captured(model.double().train(), inputs)
    made = micro_batch(graph, micro_batches)
    assert_equal(in_micro_batches(graph, made, given), whole_batch(graph, given))
    return made


EXACT = ["mlp", "outside", "gpt2", "llama", "bert", "t5", "vit"]


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("micro_batches", [1, 2, 8])
def test_outputs_and_gradients_are_those_of_the_whole_batch(name, micro_batches) -> None:
    # Labels are masked unevenly, GPT-2's embeddings are tied, and T5 has two batches of sequences.
    dropout = 0.3 if models.ZOO[name].has_dropout else 0.0
    model, inputs = models.ZOO[name].made(torch.float64, dropout)
    graph, given = captured(model, inputs)
    made = micro_batch(graph, micro_batches)
    assert made.notices == ()
    assert_equal(in_micro_batches(graph, made, given), whole_batch(graph, given))


def test_the_whole_batch_is_one_device() -> None:
    of = subject("llama")
    assert of.reference is not None
    found = whole_batch(of.capture.graph, of.named() | {("seed", "seed"): torch.tensor(0)})
    for name, gradient in of.reference.grads.items():
        torch.testing.assert_close(found["gradient", name], gradient)


def test_the_count_of_labels_is_taken_ahead_and_nothing_else() -> None:
    graph, _ = captured(*models.ZOO["llama"].made(torch.float64))
    made = micro_batch(graph, 4)
    (name,) = made.ahead
    assert made.prologue is not None
    (count,) = made.prologue.outputs
    assert (count.name, made.prologue.meta(count.value).shape) == (name, ())
    assert {i.kind for i in made.prologue.inputs} <= {"input", "constant", "buffer"}
    assert made.outputs["loss"] == "sum"
    assert made.outputs["logits"] == "concatenate"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_graph_of_a_micro_batch_is_a_capture_of_it_but_for_constants(name) -> None:
    model, inputs = models.ZOO[name].made(torch.float64)
    made = micro_batch(captured(model, inputs)[0], 4).graph
    small, _ = captured(model, {k: t[:2] for k, t in inputs.items()})
    assert [n.op for n in made.nodes if n.op != "placeholder"] == [
        n.op for n in small.nodes if n.op != "placeholder" and n.name in made.by_name
    ]
    same = [n.name for n in small.nodes if n.name in made.by_name and made.by_name[n.name].outputs == n.outputs]
    ahead = [n.name for n in small.nodes if n.name not in made.by_name]
    assert len(same) + len(ahead) == len(small.nodes)
    assert len(ahead) <= 2  # the comparison of labels and its sum


# What is not divided by rows alone.


class Classifier(nn.Module):
    """Takes each sequence at its own length, as sequence classifiers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 6), nn.Linear(6, 3)
        self.register_buffer("weight", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, ids: Tensor, last: Tensor, labels: Tensor) -> Tensor:
        scores = self.head(self.embed(ids))
        return F.cross_entropy(scores[torch.arange(len(ids)), last], labels, weight=self.weight)


class Merged(nn.Module):
    """Batch and heads, and batch and positions, are one dim; the products are of matrices."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        b, s, d = x.shape
        q = self.q(x.view(b * s, d)).view(b, s, 2, d // 2).transpose(1, 2).reshape(b * 2, s, d // 2)
        weights = F.dropout(torch.softmax(torch.bmm(q, q.transpose(1, 2)), -1), 0.4)
        out = torch.bmm(weights, q).view(b, 2, s, d // 2).transpose(1, 2).reshape(b * s, d)
        return F.mse_loss(F.dropout(out, 0.3), y.view(b * s, d)), out

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 6)


class Masked(nn.Module):
    """A mean over a mask, a penalty on weights, and smoothed labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 4)

    def forward(self, x: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.second(self.first(x).tanh())
        picked = F.cross_entropy(scores, labels, label_smoothing=0.1, reduction="none")
        penalty = 0.01 * self.first.weight.square().sum()
        return (picked * mask).sum() / mask.sum().clamp(min=1) + penalty, scores.argmax(-1), mask.sum()


class Queries(nn.Module):
    """Learned queries that attend to each other before they see the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, 6))
        self.self_attention = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, memory: Tensor) -> Tensor:
        q = self.queries.expand(len(memory), -1, -1)
        q = self.drop(torch.softmax(q @ self.self_attention(q).transpose(1, 2), -1) @ q)
        return (torch.softmax(q @ memory.transpose(1, 2), -1) @ memory).square().mean()


class PositionsAsLong(nn.Module):
    """An input that has as many elements as the batch has rows, but not of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(20, 6), nn.Embedding(8, 6)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        return (self.embed(ids) * self.places(places)).square().sum(-1).mean()


class Mixed(nn.Module):
    """Mixes each sample with another one of the batch before the model sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(0.7 * x + 0.3 * x.flip(0)), labels)


class Pairs(nn.Module):
    """Runs two batches as one, and compares their results in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.layer(torch.cat([x.tanh(), y])).tanh().chunk(2)
        return (a - b).square().sum(-1).mean()


class Repeated(nn.Module):
    """Runs each sample twice, before and after a layer, with copies of the batch behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x.repeat(2, 1)).tanh().repeat(3, 2)
        out = self.second(h).view(3, 2, len(x), 3) * torch.arange(1, 4).view(3, 1, 1, 1)
        return (out - y.repeat(2, 1, 1)).square().mean()


class Behind(nn.Module):
    """Averages over two batches that lie behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(torch.cat([x, y]))
        return h.square().mean() + F.mse_loss(self.layer(x.repeat(2, 1)), h.detach().tanh())


class Filled(nn.Module):
    """Makes tensors of ones and zeros in the shape of others, cut or not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        ahead = torch.cat([torch.zeros_like(h)[:, :1], torch.ones_like(h)[:, 1:]], 1)
        return (h * ahead + h.new_ones(8, 5) * torch.full_like(h.mean(), 2.0)).square().mean()


def _ids(*shape: int) -> Tensor:
    return torch.randint(0, 20, shape)


CASES = {
    "classifier": (Classifier, lambda: {"ids": _ids(8, 5), "last": _ids(8) % 5, "labels": _ids(8) % 3}),
    "merged": (Merged, lambda: {"x": torch.randn(8, 5, 6).double(), "y": torch.randn(8, 5, 6).double()}),
    "masked": (
        Masked,
        lambda: {"x": torch.randn(8, 5).double(), "mask": (torch.rand(8) > 0.4).double(), "labels": _ids(8) % 4},
    ),
    "queries": (Queries, lambda: {"memory": torch.randn(8, 4, 6).double()}),
    "places": (PositionsAsLong, lambda: {"ids": _ids(8, 8), "places": torch.arange(8)}),
    "mixed": (Mixed, lambda: {"x": torch.randn(8, 5).double(), "labels": _ids(8) % 3}),
    "pairs": (Pairs, lambda: {"x": torch.randn(8, 5).double(), "y": torch.randn(8, 5).double()}),
    "behind": (Behind, lambda: {"x": torch.randn(8, 5).double(), "y": torch.randn(8, 5).double()}),
    "repeated": (
        Repeated,
        lambda: {"x": torch.randn(8, 5).double(), "y": torch.randn(8, 3).double()},
    ),
    "filled": (Filled, lambda: {"x": torch.randn(8, 5).double()}),
    "lstm": (ZOO["lstm"].build, ZOO["lstm"].inputs),
    "recommender": (ZOO["recommender"].build, ZOO["recommender"].inputs),
}


@pytest.mark.parametrize("micro_batches", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_unusual_uses_of_the_batch(name, micro_batches) -> None:
    torch.manual_seed(0)
    build, inputs = CASES[name]
    given = {k: t.double() if t.is_floating_point() else t for k, t in inputs().items()}
    assert checked(build(), given, micro_batches).notices == ()


def test_queries_are_computed_for_the_rows_of_the_micro_batch_alone() -> None:
    made = checked(Queries(), {"memory": torch.randn(8, 4, 6).double()})
    shapes = {
        m.shape[0] for n in made.graph.nodes if n.op != "placeholder" for m in n.outputs if m and len(m.shape) == 3
    }
    assert 8 not in shapes


def test_rows_come_out_as_they_went_in() -> None:
    made = checked(Masked(), CASES["masked"][1]())
    assert dict(made.outputs) == {"0": "sum", "1": "concatenate", "2": "sum"}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_losses_in_chunks_are_cut_too(name) -> None:
    graph, given = captured(*models.ZOO[name].made(torch.float64))
    chunked = with_chunked_losses(_without_logits(graph), 0)
    assert any(n.packet == "autopar.linear_nll" for n in chunked.nodes)
    made = micro_batch(chunked, 4)
    assert_equal(in_micro_batches(chunked, made, given), whole_batch(chunked, given))
    # The same comes of a micro-batch whose losses are put into chunks afterwards.
    again = with_chunked_losses(micro_batch(_without_logits(graph), 4).graph, 0)
    assert any(n.packet == "autopar.linear_nll" for n in again.nodes)


def _without_logits(graph):
    return dataclasses.replace(graph, outputs=tuple(o for o in graph.outputs if o.kind != "output" or o.name == "loss"))


def test_gradients_of_inputs_are_rows_of_the_batch() -> None:
    x = torch.randn(8, 5).double().requires_grad_()
    made = checked(nn.Sequential(nn.Linear(5, 3), nn.Tanh()), (x,))
    assert [how for name, how in made.outputs.items() if name.startswith("input:")] == ["concatenate"]


# Statistics.


class Skewed(nn.Module):
    """The square of a mean over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h.square().mean() + 0.1 * h.mean(0).square().sum()


def _of_each(model: nn.Module, inputs, micro_batches: int):
    """Return the mean loss of micro-batches that know nothing of each other, with its gradients and buffers."""
    model = copy.deepcopy(model)
    losses = []
    with Promoted():
        for number in range(micro_batches):
            rows = {k: t.chunk(micro_batches)[number] for k, t in inputs.items()}
            made = model(**rows)
            losses.append(made[0] if isinstance(made, tuple) else made)
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, dict(model.named_buffers())


@pytest.mark.parametrize(
    ("build", "modules"), [(models.CNN, ["features.1", "features.5"]), (Skewed, ["Skewed"])], ids=["cnn", "skewed"]
)
def test_each_micro_batch_has_its_own_statistics_and_a_notice_says_so(build, modules) -> None:
    torch.manual_seed(0)
    model = build().double().train()
    inputs = models.images(8) if build is models.CNN else {"x": torch.randn(8, 5)}
    inputs = {k: t.double() if t.is_floating_point() else t for k, t in inputs.items()}
    graph, given = captured(model, inputs)
    made = micro_batch(graph, 2)
    assert [notice.split(":")[0] for notice in made.notices] == modules
    assert all("4 rows" in notice and "all 8" in notice for notice in made.notices)
    found = in_micro_batches(graph, made, given)
    loss, grads, buffers = _of_each(model, inputs, 2)
    torch.testing.assert_close(found["output", "0"], loss)
    for name, gradient in grads.items():
        torch.testing.assert_close(found["gradient", name], gradient)
    for name, buffer in buffers.items():
        if "running_mean" in name:
            torch.testing.assert_close(found["mutation", name], buffer)


def test_a_balance_of_experts_is_that_of_each_micro_batch() -> None:
    model, inputs = models.ZOO["mixtral_batched"].made(torch.float64)
    graph, given = captured(model, inputs)
    made = micro_batch(graph, 2)
    assert [n.split(":")[0] for n in made.notices] == ["MixtralForCausalLM"]
    total = (inputs["labels"][:, 1:] != -100).sum()
    loss = torch.zeros((), dtype=torch.float64)
    with Promoted():
        for number in range(2):
            rows = {k: t.chunk(2)[number] for k, t in inputs.items()}
            out, labels = model(**rows), (rows["labels"][:, 1:] != -100).sum()
            balance = model.router_aux_loss_coef * out.aux_loss
            loss = loss + (out.loss - balance) * labels / total + balance / 2
    loss.backward()
    found = in_micro_batches(graph, made, given)
    torch.testing.assert_close(found["output", "loss"], loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found["gradient", name], parameter.grad)


class Counting(nn.Module):
    """Counts its steps, and the tokens that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.steps += 1
        self.seen += h.detach().abs().sum(0)
        return h.square().mean() / self.steps


def test_buffers_are_written_as_one_step_of_the_whole_batch_does() -> None:
    made = checked(Counting(), {"x": torch.randn(8, 5).double()})
    assert dict(made.buffers) == {"steps": "same", "seen": "sum"}


def test_statistics_in_buffers_are_written_by_each_micro_batch() -> None:
    graph, _ = captured(
        models.CNN().double().train(),
        {k: t.double() if t.is_floating_point() else t for k, t in models.images(8).items()},
    )
    buffers = micro_batch(graph, 2).buffers
    assert {how for name, how in buffers.items() if "running" in name} == {None}
    assert {how for name, how in buffers.items() if "num_batches" in name} == {"same"}


def _squared_error(h: Tensor, y: Tensor) -> Tensor:
    return (h - y).square().mean()


class Fitted(nn.Module):
    """A layer with a loss that is given."""

    def __init__(self, loss) -> None:
        super().__init__()
        self.layer, self.loss = nn.Linear(5, 3), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.layer(x), y)


def _fitted_inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(8, 5).double(), "y": torch.randn(8, 3).double()}


SUMS = {
    "shifted": lambda h, y: _squared_error(h, y) + 1.0,
    "taken from a number": lambda h, y: 2 - 2 * F.cosine_similarity(h, y).mean(),
    "weighted": lambda h, y: 0.3 * _squared_error(h, y) + 0.7 * h.abs().mean() - 1,
    "scaled and taken": lambda h, y: torch.rsub(h.mean(), 4.0, alpha=2.0),
}


@pytest.mark.parametrize("name", SUMS)
def test_losses_that_are_linear_in_means_are_those_of_the_whole_batch(name) -> None:
    assert checked(Fitted(SUMS[name]), _fitted_inputs()).notices == ()


@pytest.mark.parametrize(
    ("loss", "heard"),
    [
        (lambda h, y: _squared_error(h, y) + F.relu(1 - h.std(0)).mean(), True),
        (lambda h, y: _squared_error(h / h.std(0), y), False),
        (lambda h, y: _squared_error(h / h.abs().max(), y), False),
    ],
    ids=["term", "normalized", "scaled"],
)
def test_a_notice_says_where_statistics_are_a_term_of_the_loss(loss, heard) -> None:
    (notice,) = micro_batch(captured(Fitted(loss).double(), _fitted_inputs())[0], 4).notices
    assert (OTHER_LOSS in notice) == heard


def test_planning_warns_of_a_changed_loss() -> None:
    model, pipeline = Skewed(), autopar.Pipeline(micro_batches=2)
    model.layer = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3))
    with pytest.warns(UserWarning, match=OTHER_LOSS):
        autopar.plan(model, torch.randn(8, 5), mesh={"pp": 2}, cluster="cpu-2", pipeline=pipeline)


# What is refused.


OTHERS = {
    "sqrt": lambda h, y: _squared_error(h, y).sqrt(),
    "max": lambda h, y: (h - y).square().mean(1).max(),
    "log": lambda h, y: (h - y).square().sum().log(),
    "mul": lambda h, y: h.mean() * _squared_error(h, y),
    "linalg_vector_norm": lambda h, y: (h - y).norm() + h.mean(),
    "div": lambda h, y: h.square().sum() / h.abs().sum(),
}


@pytest.mark.parametrize("op", OTHERS)
def test_losses_that_are_no_sums_over_samples_are_refused(op) -> None:
    graph, _ = captured(Fitted(OTHERS[op]).double(), _fitted_inputs())
    with pytest.raises(PlanError, match="change the loss of") as caught:
        micro_batch(graph, 4)
    assert f"aten.{op} of" in caught.value.found
    assert "micro_batches=1" in caught.value.hint
    assert micro_batch(graph, 1).notices == ()


class Tower(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layer(x), dim=-1)


class Similarity(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.cross_entropy(a @ b.T, torch.arange(len(a)))


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text, self.loss = Tower(8), Tower(7), Similarity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.image(x), self.text(y))


def test_similarities_of_the_whole_batch_are_refused_by_name() -> None:
    graph, _ = captured(Contrastive().double(), {"x": torch.randn(8, 8).double(), "y": torch.randn(8, 7).double()})
    with pytest.raises(PlanError) as caught:
        micro_batch(graph, 4)
    assert re.search(r"change what loss computes", caught.value.what)
    assert "a @ b.T" in caught.value.found
    assert "test_micro_batches.py" in caught.value.found
    assert "Pipeline(micro_batches=1)" in caught.value.hint


class Neighbours(nn.Module):
    """Rows of the batch read each other, as the positions of a sequence that comes before the batch do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.keys = kind, nn.Linear(6, 6), nn.Parameter(torch.randn(1, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        rows, keys = h[None], self.keys if self.kind == "own keys" else h[None]
        if self.kind == "pooled":
            with torch.no_grad():
                scale = F.avg_pool1d(rows.mT, 3, 1, 1).mT[0]
            return (h * scale).square().mean()
        causal = self.kind != "plain"
        return F.scaled_dot_product_attention(rows, keys, keys, is_causal=causal).square().mean()


@pytest.mark.parametrize("kind", ["plain", "causal", "own keys", "pooled"])
def test_rows_that_ranks_would_pass_to_each_other_are_refused(kind) -> None:
    graph, _ = captured(Neighbours(kind).double(), {"x": torch.randn(8, 6).double()})
    with pytest.raises(PlanError, match="change what"):
        micro_batch(graph, 2)


def test_a_loss_of_which_micro_batches_would_divide_nothing_is_refused() -> None:
    class Sorted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.sort(0).values.flip(0)).square().mean()

    graph, _ = captured(Sorted().double(), {"x": torch.randn(8, 5).double()})
    with pytest.raises(PlanError):
        micro_batch(graph, 4)


@pytest.mark.parametrize(("micro_batches", "nearest"), [(3, 2), (5, 4), (7, 8), (16, 8), (0, 1)])
def test_a_batch_that_does_not_divide_names_the_nearest_number(micro_batches, nearest) -> None:
    graph, _ = captured(nn.Linear(5, 3).double(), (torch.randn(8, 5).double(),))
    with pytest.raises(InputError) as caught:
        micro_batch(graph, micro_batches)
    assert f"take {nearest} micro-batches" in caught.value.hint


# Random numbers, planned and lowered.


def _lowered(graph, mesh: Mesh):
    options = planner.Options(search="baseline:DDP" if mesh.size > 1 else "joint", outputs="whole", time_limit_s=5)
    planned = planner.plan_graph(graph, mesh, cluster_where_sharding_pays().sized(mesh.size), options)
    return planned.program, passes.lower(planned.program, planned.decisions.graph, mesh), planned.decisions.graph


@pytest.mark.parametrize("shape", [(1,), (2,)])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_dropout_is_that_of_one_device_for_any_micro_batches_and_mesh(name, shape) -> None:
    model, inputs = models.ZOO[name].made(torch.float64, 0.3)
    graph, given = captured(model, inputs)
    made, mesh = micro_batch(graph, 4), Mesh(shape)
    _, lowered, planned = _lowered(made.graph, mesh)
    expected = whole_batch(graph, given)
    held = dict(given)
    assert made.prologue is not None
    held |= {("input", n): t for (_, n), t in whole_batch(made.prologue, given).items()}
    loss, grads = 0.0, dict[str, Tensor]()
    for number in range(4):
        fed = {k: t[2 * number : 2 * number + 2] if k[0] == "input" and k[1] in inputs else t for k, t in held.items()}
        outputs, result = simulate_program(lowered, planned, mesh, fed, SEED, number)
        loss += float(outputs["loss"])
        grads = {n: grads.get(n, 0) + g for n, g in result.grads.items()}
    assert loss == pytest.approx(float(expected["output", "loss"]), rel=1e-9)
    for n, gradient in grads.items():
        torch.testing.assert_close(gradient, expected["gradient", n], rtol=1e-7, atol=1e-9)


def test_an_emitted_program_states_the_micro_batch_and_is_read_back() -> None:
    model, inputs = models.ZOO["gpt2"].made(torch.float64, 0.3)
    graph, _ = captured(model, inputs)
    mesh = Mesh((2,))
    _, lowered, planned = _lowered(micro_batch(graph, 4).graph, mesh)
    text = codegen.emit(passes.compose(lowered, planned), mesh, [], {}, 1)
    assert "spmd.offset(rank, 2, (0,), 2)" in text
    codegen.load(text, "micro", planned)


# The zoo.

REFUSED = {
    "siglip": "logits of all images and texts",
    "clip": "logits of all images and texts",
    "llava": "the features of all images are joined",
    "graph_network": "the nodes of one graph",
}
"""Models of which micro-batches would change the meaning."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_models_of_the_zoo(name) -> None:
    model, inputs = ZOO[name].made()
    if ZOO[name].dtype is not torch.float64:
        pytest.skip("runs in float32 alone")
    graph, given = captured(model, inputs)
    if name in REFUSED:
        with pytest.raises(PlanError):
            micro_batch(graph, 4)
        return
    made = micro_batch(graph, 4)
    found = in_micro_batches(graph, made, given)
    if not made.notices:
        assert_equal(found, whole_batch(graph, given))
    assert all(n.op == "placeholder" or made.graph.meta(Value(n.name)) for n in made.graph.nodes if n.outputs[0])
