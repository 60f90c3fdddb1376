"""Losses in chunks of classes: the op, the graph that has it, and the plans that choose it."""

from __future__ import annotations

import copy
import itertools
import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar import kernels, passes, planner
from autopar.errors import InfeasibleError
from autopar.mesh import Cluster, Mesh
from autopar.ops import linear_nll
from autopar.planner.footprint import transients_of_losses as transients
from autopar.planner.graphs.chunked import with_chunked_losses
from autopar.planner.search import forms
from autopar.runtime.meter import MemoryMeter
from autopar.runtime.simulation import simulate_program
from autopar.tracer import ColoTracer
from tests.cpu.capture_checks import captured_once
from tests.cpu.model_checks import Subject, assert_equals_one_device, cluster_where_sharding_pays, eager
from tests.infeasible import smallest_budget
from tests.models import ZOO

OPS = torch.ops.autopar
CLASSES, WIDTH = 1501, 8


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a small model has is more than a chunk."""
    monkeypatch.setattr(linear_nll, "CPU_CHUNK", 1 << 12)
    monkeypatch.setattr(transients, "CHUNKS", dict.fromkeys(transients.CHUNKS, 1 << 12))
    monkeypatch.setattr(forms, "CHUNKS", transients.CHUNKS)


def test_the_planner_knows_the_chunks() -> None:
    assert {"cpu": linear_nll.CPU_CHUNK, "cuda": linear_nll.CHUNK} == transients.CHUNKS
    assert linear_nll.LEAST_CLASSES == transients.LEAST_CLASSES


# The op.


def reference(
    x: Tensor, table: Tensor, bias: Tensor | None, target: Tensor, ignore_index: int, smoothing: float = 0.0
) -> Tensor:
    logits = functional.linear(x, table, bias).view(-1, len(table))
    options = {"ignore_index": ignore_index, "label_smoothing": smoothing, "reduction": "none"}
    return functional.cross_entropy(logits, target.view(-1), **options).view(target.shape)


def in_shards(x, table, bias, target, grad, cuts, ignore_index, smoothing=0.0):
    """Loss, log-sum-exp and gradients, as ranks that hold parts of the table compute them."""
    parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    own = [(table[p].contiguous(), None if bias is None else bias[p].contiguous(), p.start) for p in parts]
    smoothed = {"ignore_index": ignore_index, "own": 1 - smoothing, "each": smoothing / len(table)}
    told = torch.stack([OPS.linear_nll_part(x, w, b, target, offset=o, **smoothed) for w, b, o in own])
    loss, lse = OPS.linear_nll_of_parts(told, target, ignore_index=ignore_index)
    options = smoothed | {"mask": [True, True, bias is not None]}
    found = [OPS.linear_nll_backward(grad, x, w, b, lse, target, offset=o, **options) for w, b, o in own]
    dx, dw, db = zip(*found, strict=True)
    return loss, sum(d.to(lse.dtype) for d in dx), torch.cat(dw), torch.cat(db)


@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("ignore_index", [-100, 3])
@pytest.mark.parametrize("cuts", [(0, 700), (0, 350, 700), (0, 1, 300, 300, 700), (0, 700, 700)], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shards_and_chunks_of_classes_make_up_the_loss(cuts, ignore_index, biased, smoothing, small_chunks) -> None:
    torch.manual_seed(0)
    x, table = torch.randn(3, 11, 5, dtype=torch.float64), torch.randn(700, 5, dtype=torch.float64) * 3
    bias = torch.randn(700, dtype=torch.float64) if biased else None
    target, grad = torch.randint(0, 700, (3, 11)), torch.randn(3, 11, dtype=torch.float64)
    target[1, 2:9] = ignore_index
    assert len(list(linear_nll._chunks(x.view(-1, 5), 700))) > 4
    leaves = [t.clone().requires_grad_() for t in (x, table, *([bias] if biased else []))]
    expected = reference(*leaves[:2], leaves[2] if biased else None, target, ignore_index, smoothing)
    loss, *grads = in_shards(x, table, bias, target, grad, cuts, ignore_index, smoothing)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    for found, wanted in zip(grads, torch.autograd.grad(expected, leaves, grad), strict=False):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_eight_uneven_shards_of_gpt2s_vocabulary(dtype, smoothing) -> None:
    """In every dtype as exact as the logits that are rounded to it."""
    torch.manual_seed(0)
    classes, rows, width = 50257, 48, 16
    x, table = torch.randn(rows, width).to(dtype), (torch.randn(classes, width) / 4).to(dtype)
    target, grad = torch.randint(0, classes, (rows,)), torch.full((rows,), 1 / rows)
    target[5:9] = -100
    cuts = [min(classes, i * -(-classes // 8)) for i in range(9)]
    leaves = [t.double().requires_grad_() for t in (x, table)]
    expected = reference(*leaves, None, target, -100, smoothing)
    loss, dx, dw, _ = in_shards(x, table, None, target, grad, cuts, -100, smoothing)
    rough = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=rough, atol=rough)
    for found, wanted in zip((dx, dw), torch.autograd.grad(expected, leaves, grad.double()), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=0, atol=rough * float(wanted.abs().max()))


@pytest.mark.parametrize("cuts", [(0, 700), (0, 1, 300, 300, 700)], ids=str)
def test_classes_with_weights_and_smoothed_labels_are_torchs(cuts, small_chunks) -> None:
    """A label's loss, times what it counts, is torch's; weights of 0 are classes of which no label counts."""
    torch.manual_seed(0)
    double, smoothing = {"dtype": torch.float64}, 0.1
    x, table, bias = torch.randn(3, 11, 5, **double), torch.randn(700, 5, **double) * 3, torch.randn(700, **double)
    weight, target = torch.rand(700, **double), torch.randint(0, 700, (3, 11))
    weight[:9], target[0, :2], target[1, 2:9] = 0, 4, -100
    grad, leaves = torch.randn(3, 11, **double), [t.clone().requires_grad_() for t in (x, table, bias)]
    options = {"weight": weight, "label_smoothing": smoothing, "reduction": "none"}
    expected = functional.cross_entropy(functional.linear(*leaves).view(-1, 700), target.view(-1), **options).view(
        3, 11
    )
    counted = target != -100
    own = weight[target.where(counted, 0)] * (1 - smoothing)
    row = (own + weight.sum() * smoothing / 700).where(counted, 0)
    share, classes = own / row.where(counted, 1), weight / weight.sum()
    parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    ignored = {"ignore_index": -100}
    told = [
        OPS.linear_nll_part(x, table[p], bias[p], target, share, classes[p], offset=p.start, **ignored) for p in parts
    ]
    loss, lse = OPS.linear_nll_of_parts(torch.stack(told), target, **ignored)
    torch.testing.assert_close(loss * row, expected.detach(), rtol=1e-12, atol=1e-12)
    every = ignored | {"mask": [True] * 3}
    dx, dw, db = zip(
        *(
            OPS.linear_nll_backward(
                grad * row, x, table[p], bias[p], lse, target, share, classes[p], offset=p.start, **every
            )
            for p in parts
        ),
        strict=True,
    )
    found = (sum(dx), torch.cat(dw), torch.cat(db))
    for a, b in zip(found, torch.autograd.grad(expected, leaves, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    given = [t.clone().requires_grad_() for t in (x, table, bias)]
    whole = OPS.linear_nll(*given, target, share, classes, **ignored)[0]
    for a, b in zip(found, torch.autograd.grad(whole, given, grad * row), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_autograd_knows_the_op() -> None:
    x, table, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((4, 3), (9, 3), (9,)))
    target = torch.tensor([0, 8, -100, 4])
    assert torch.autograd.gradcheck(lambda *g: OPS.linear_nll(*g, target, ignore_index=-100)[0], (x, table, bias))
    (alone,) = torch.autograd.grad(OPS.linear_nll(x, table.detach(), None, target, ignore_index=-100)[0].sum(), x)
    torch.testing.assert_close(alone, torch.autograd.grad(reference(x, table, None, target, -100).sum(), x)[0])
    torch.library.opcheck(OPS.linear_nll.default, (x, table, bias, target), {"ignore_index": -100})


def test_no_more_than_a_chunk_of_logits_and_its_gradient_is_held(small_chunks) -> None:
    rows, classes = 16, 64_000
    x, table, target = torch.randn(rows, 4), torch.randn(classes, 4), torch.randint(0, classes, (rows,))
    chunk, meter = linear_nll.CPU_CHUNK * 4, MemoryMeter()
    meter.hold([x, table, target])
    before = meter.held
    with meter:
        _, lse = OPS.linear_nll(x, table, None, target, ignore_index=-100)
        forward = meter.peak - before
        OPS.linear_nll_backward(
            torch.ones(rows), x, table, None, lse, target, ignore_index=-100, offset=0, mask=[True, True, False]
        )
    assert chunk <= forward < 3 * chunk
    assert meter.peak - before < table.nbytes + 4 * chunk
    assert 4 * chunk < rows * classes * 4 / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_chunks_go_through_the_kernels_of_the_loss(dtype, small_chunks) -> None:
    """On triton's interpreter."""
    triton = pytest.importorskip("triton")
    from tests import triton_interpreter  # noqa: F401

    if not triton.knobs.runtime.interpret:
        pytest.skip("triton was imported before TRITON_INTERPRET was set")
    x, table = torch.randn(5, 8).to(dtype), torch.randn(1000, 8).to(dtype)
    target, grad = torch.tensor([0, 999, -100, 431, 17]), torch.rand(5)
    launched, run, cuts = set(), kernels.run, (0, 333, 1000)
    expected = in_shards(x, table, None, target, grad, cuts, -100)
    with kernels.forced(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "run", lambda name, *a, **k: launched.add(name) or run(name, *a, **k))
        found = in_shards(x, table, None, target, grad, cuts, -100)
    assert launched == {"statistics", "nll_backward"}
    rough = {"rtol": 1e-4, "atol": 1e-5} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(found, expected, **rough)


# The graph.


class Language(nn.Module):
    """A language model that returns its loss alone."""

    def __init__(self, *, shift: bool = False, bias: bool = False, tied: bool = False, smoothing: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.shift, self.smoothing = shift, smoothing

    def logits(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self.embedding(tokens))))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(tokens).float() if self.head.weight.dtype is torch.bfloat16 else self.logits(tokens)
        if self.shift:
            logits, labels = logits[..., :-1, :].contiguous(), labels[..., 1:].contiguous()
        return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1), label_smoothing=self.smoothing)


class ByChannels(Language):
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """As losses of images take their classes."""
        return functional.cross_entropy(self.logits(tokens).transpose(1, 2), labels)


class Weighted(Language):
    """Classes that count differently."""

    def __init__(self, *, reduction: str = "mean", smoothing: float = 0.0, bias: bool = True) -> None:
        super().__init__(bias=bias, smoothing=smoothing)
        self.register_buffer("weight", torch.rand(CLASSES))
        self.reduction = reduction

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits, target = self.logits(tokens).view(-1, CLASSES), labels.view(-1)
        losses = functional.cross_entropy(
            logits, target, weight=self.weight, reduction=self.reduction, label_smoothing=self.smoothing
        )
        return losses if self.reduction != "none" else (losses * torch.linspace(0.5, 1.5, len(losses))).sum()


class WithLogits(Language):
    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(tokens)
        return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1)), logits


class Regularized(Language):
    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits(tokens)
        return functional.cross_entropy(logits.view(-1, CLASSES), labels.view(-1)) + logits.logsumexp(-1).mean()


def batch() -> dict[str, Tensor]:
    torch.manual_seed(1)
    tokens, labels = torch.randint(0, CLASSES, (2, 4, 12))
    labels[0, 3:7] = -100
    return {"tokens": tokens, "labels": labels}


def subject(model: nn.Module, inputs: dict[str, Tensor] | None = None) -> Subject:
    inputs = inputs or batch()
    return Subject(model, inputs, ColoTracer().capture(model, inputs), eager(model, inputs))


MODELS = {
    "plain": Language,
    "shifted": partial(Language, shift=True),
    "biased": partial(Language, bias=True),
    "tied": partial(Language, tied=True),
    "smoothed": partial(Language, bias=True, smoothing=0.1),
    "shifted and biased": partial(Language, shift=True, bias=True),
    "by channels": ByChannels,
    "weighted": Weighted,
    "weighted sum": partial(Weighted, reduction="sum"),
    "weighted rows": partial(Weighted, reduction="none"),
    **{f"weighted and smoothed, {r}": partial(Weighted, reduction=r, smoothing=0.1) for r in ("mean", "sum", "none")},
    "weighted and smoothed without a bias": partial(Weighted, smoothing=0.1, bias=False),
}


QUICK = [
    ("plain", (2, 2)),
    ("shifted and biased", (3,)),
    ("tied", (2,)),
    ("by channels", (3,)),
    *((name, (2,)) for name in MODELS if "weighted" in name),
]
EVERY = [(name, mesh) for mesh in [(2,), (3,), (2, 2)] for name in MODELS]


@pytest.mark.parametrize(
    ("name", "mesh"), [*QUICK, *(pytest.param(*c, marks=pytest.mark.slow) for c in EVERY if c not in QUICK)], ids=str
)
def test_every_kind_of_plan_of_such_a_graph_is_exact(name, mesh, small_chunks) -> None:
    torch.manual_seed(0)
    of = subject(MODELS[name]().double())
    graph, on = with_chunked_losses(of.capture.graph, 1), Mesh(mesh)
    assert {n.packet for n in graph.nodes} >= {"autopar.linear_nll", "autopar.linear_nll_backward"}
    wide = max(n.outputs[0].numel for n in graph.nodes if n.op != "placeholder" and n.outputs[0])
    assert wide <= max(CLASSES * WIDTH, 48 * WIDTH)
    cut = set()
    for seed in range(6):
        options = planner.Options(search=f"random:{seed}", optimizer=0.0)
        found = planner.plan_graph(graph, on, cluster_where_sharding_pays().sized(on.size), options, compare=False)
        lowered = passes.compose(passes.lower(found.program, graph, on), graph)
        outputs, rest = simulate_program(lowered, graph, on, of.named(), 0)
        assert_equals_one_device(of, rest.__class__(**{**vars(rest), "outputs": outputs}), torch.float64)
        strategies = {op.node: op.strategy for op in found.program.ops if op.kind == "compute"}
        cut |= {bool(strategies["linear_nll"].inputs[1].dims[0]), *map(bool, strategies["linear_nll"].inputs[0].dims)}
    assert cut == {False, True}


def test_a_frozen_table_has_no_gradient(small_chunks) -> None:
    model = Language()
    model.head.weight.requires_grad_(False)
    of = subject(model)
    graph = with_chunked_losses(of.capture.graph, 1)
    backward = next(n for n in graph.nodes if n.packet == "autopar.linear_nll_backward")
    assert backward.kwarg("mask") == (True, False, False) and backward.outputs[1:] == (None, None)
    plan = chosen(model, budget(model))
    result = autopar.simulate(model, batch(), plan=plan)
    for name, gradient in of.reference.grads.items():
        torch.testing.assert_close(result.grads[name], gradient)


@pytest.mark.parametrize("model", [WithLogits(), Regularized()], ids=["output", "regularized"])
def test_logits_that_somebody_else_reads_stay(model) -> None:
    graph = subject(model).capture.graph
    assert with_chunked_losses(graph, 1) is graph


def test_losses_of_no_more_than_a_chunk_stay() -> None:
    graph = subject(Language()).capture.graph
    assert with_chunked_losses(graph, 48 * CLASSES) is graph
    assert with_chunked_losses(graph, 48 * CLASSES - 1) is not graph


# Plans.


def budget(model: nn.Module, mesh: tuple[int, ...] = (1,)) -> int:
    """Too little for whole logits."""
    return int(0.8 * autopar.plan(model, batch(), mesh=mesh, cluster="cpu-2", optimizer="sgd").peak_memory)


def chosen(model: nn.Module, most: int, mesh: tuple[int, ...] = (1,), **options: object) -> autopar.Plan:
    return autopar.plan(
        model, batch(), mesh=mesh, cluster="cpu-2", optimizer="sgd", memory_budget=most, time_limit=20, **options
    )


@pytest.mark.parametrize("mesh", [(1,), (2,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@captured_once()
def test_a_budget_chooses_chunks_and_the_peak_is_lower(mesh, dtype, small_chunks) -> None:
    torch.manual_seed(0)
    model = Language().to(dtype)
    free = autopar.plan(model, batch(), mesh=mesh, cluster="cpu-2", optimizer="sgd")
    most = budget(model, mesh)
    plan = chosen(model, most, mesh)
    assert "linear_nll" not in free.source and "linear_nll(" in plan.source
    assert free.objective < plan.objective and plan.lower_bound <= plan.objective
    before, after = (autopar.simulate(model, batch(), plan=p) for p in (free, plan))
    assert after.peak_memory <= plan.peak_memory <= most < before.peak_memory <= free.peak_memory
    rough = {"rtol": 1e-5, "atol": 1e-7} if dtype is torch.float32 else {"rtol": 5e-2, "atol": 5e-4}
    torch.testing.assert_close(after.outputs, before.outputs, **rough)
    for name, gradient in before.grads.items():
        torch.testing.assert_close(after.grads[name], gradient, **rough)
    again = autopar.Plan.from_json(plan.to_json())
    assert autopar.simulate(model, batch(), plan=again).peak_memory == after.peak_memory


def test_a_plan_for_a_range_of_sizes_has_chunks_at_every_size(small_chunks, monkeypatch) -> None:
    """Also where what a small batch has is no more than a chunk."""
    torch.manual_seed(0)
    monkeypatch.setattr(forms, "CHUNKS", dict.fromkeys(transients.CHUNKS, 3 * 12 * CLASSES))
    model, sizes = Language(shift=True), torch.export.Dim("batch", min=2, max=16)
    ranges = {name: {0: sizes} for name in batch()}

    def of(rows: int) -> dict[str, Tensor]:
        return {name: t[:1].expand(rows, -1).contiguous() for name, t in batch().items()}

    def planned(**options: object) -> autopar.Plan:
        return autopar.plan(
            model, of(8), mesh=(1,), cluster="cpu-2", optimizer="sgd", dynamic_shapes=ranges, time_limit=20, **options
        )

    most = int(0.6 * autopar.plan(model, of(16), mesh=(1,), cluster="cpu-2", optimizer="sgd").peak_memory)
    plan = planned(memory_budget=most)
    assert "linear_nll(" in plan.source and "linear_nll(" not in planned().source
    assert not [n for n in plan.notices if "no formula" in n or "planned anew" in n]
    parallel = autopar.autoparallelize(copy.deepcopy(model), of(8), plan=autopar.Plan.from_json(plan.to_json()))
    for rows in (8, 2, 16):
        inputs = of(rows)
        result = autopar.simulate(model, inputs, plan=plan)
        assert result.peak_memory <= most
        wanted = eager(model, inputs)
        torch.testing.assert_close(result.outputs, *wanted.outputs.values())
        parallel.zero_grad()
        parallel(**inputs).backward()
        for name, parameter in parallel.named_parameters():
            torch.testing.assert_close(result.grads[name], wanted.grads[name], rtol=1e-4, atol=1e-7)
            torch.testing.assert_close(parameter.grad.full_tensor(), wanted.grads[name], rtol=1e-4, atol=1e-7)


def test_what_an_error_says_would_fit_does(small_chunks) -> None:
    model = Language()
    with pytest.raises(InfeasibleError, match="smallest budget") as error:
        chosen(model, budget(model) // 4)
    least = smallest_budget(error.value)
    assert "linear_nll" in chosen(model, least).source


def test_llama_of_hugging_face_with_its_loss_alone(small_chunks) -> None:
    class Loss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Tensor) -> Tensor:
            return self.model(**inputs, use_cache=False).loss

    for name in ("gpt2", "llama"):
        model, inputs = ZOO[name].made(torch.float32, 0.0)
        assert with_chunked_losses(ColoTracer().capture(model, inputs).graph, 1).name
        of = subject(Loss(model), dict(inputs))
        assert with_chunked_losses(of.capture.graph, 1) is not of.capture.graph


def trained(model: nn.Module, plan: autopar.Plan | None, **options: object) -> tuple[list[float], dict[str, Tensor]]:
    model = copy.deepcopy(model)
    if plan is not None:
        model = autopar.autoparallelize(model, batch(), plan=plan, **options)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(3):
        loss = model(**batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {n: p.full_tensor() if plan is not None else p for n, p in model.named_parameters()}


SMOOTHED = partial(Language, shift=True, bias=True, smoothing=0.1)


@pytest.mark.parametrize(
    ("backend", "build"),
    [
        ("eager", SMOOTHED),
        pytest.param("inductor", SMOOTHED, marks=pytest.mark.slow),
        ("eager", Weighted),
        ("eager", ByChannels),
        ("eager", partial(Weighted, smoothing=0.1)),
        pytest.param("inductor", partial(Weighted, smoothing=0.1), marks=pytest.mark.slow),
    ],
    ids=["eager", "inductor", "weighted", "by channels", "weighted, smoothed", "weighted, smoothed, inductor"],
)
def test_it_trains_like_the_model_as_it_was(backend, build, small_chunks) -> None:
    torch.manual_seed(0)
    model = build()
    plan = chosen(model, budget(model), backend=backend)
    assert "linear_nll(" in plan.source
    (losses, parameters), (expected, wanted) = trained(model, plan, backend=backend), trained(model, None)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, parameter in wanted.items():
        torch.testing.assert_close(parameters[name], parameter, rtol=1e-4, atol=1e-6)


def test_an_emitted_file_has_the_chunks(tmp_path, small_chunks) -> None:
    torch.manual_seed(0)
    model = Language()
    plan = chosen(model, budget(model))
    script = plan.emit(tmp_path / "step.py")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    torch.save(batch(), tmp_path / "batch.pt")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['autopar'] = None\n")
    files = [f"--{kind}={tmp_path / f'{kind}.pt'}" for kind in ("state", "batch", "out")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "MASTER_PORT": "0"}
    ran = subprocess.run([sys.executable, script, *files], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = torch.load(tmp_path / "out.pt")
    for name, gradient in eager(model, batch()).grads.items():
        torch.testing.assert_close(found["grads"][name], gradient, rtol=1e-4, atol=1e-6)


def test_on_a_gpu_its_kernels_are_those_of_the_loss(small_chunks) -> None:
    model = Language()
    free = autopar.plan(model, batch(), mesh=(1,), cluster=Cluster.load("dgx-h100"), optimizer="sgd")
    plan = autopar.plan(
        model, batch(), mesh=(1,), cluster="dgx-h100", optimizer="sgd", memory_budget=int(0.8 * free.peak_memory)
    )
    assert "linear_nll(" in plan.source
    assert {"statistics", "nll_backward"} <= set(plan.kernels)
