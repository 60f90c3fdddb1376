"""Mixtures of experts: what each token gives, cut by tokens, by experts and by both."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError
from autopar.mesh import Mesh
from autopar.ops import experts as products
from autopar.sharding import ShardingSpec
from autopar.tracer import Capture, ColoTracer
from tests.cpu.bad_input_checks import refused
from tests.cpu.model_checks import Promoted, Ran, Subject, assert_equal, eager, run

OPS = torch.ops.autopar
EXPERTS, CHOSEN, HIDDEN = 4, 2, 16
SIZES = dict(
    hidden_size=HIDDEN,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=24,
    max_position_embeddings=16,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    use_cache=False,
)
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": dict(SIZES, num_local_experts=3, num_experts_per_tok=CHOSEN, output_router_logits=True),
    "Qwen3Moe": dict(SIZES, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=16, head_dim=8),
    "GptOss": dict(SIZES, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, head_dim=8, sliding_window=4),
}
KINDS = {
    "gated": ("mixtral", "MixtralExperts"),
    "with biases and its own gate": ("gpt_oss", "GptOssExperts"),
    "without a gate": ("nemotron_h", "NemotronHExperts"),
    "transposed": ("aria", "AriaExperts"),
    "with a norm": ("muse_spark", "MuseSparkExperts"),
}


class Alone(nn.Module):
    """Experts to which the caller assigns tokens."""

    def __init__(self, kind: str, implementation: str) -> None:
        super().__init__()
        config = SimpleNamespace(
            hidden_size=HIDDEN,
            moe_hidden_size=HIDDEN,
            moe_latent_size=None,
            intermediate_size=32,
            moe_intermediate_size=32,
            num_local_experts=EXPERTS,
            moe_num_experts=EXPERTS,
            n_routed_experts=EXPERTS,
            hidden_act="silu",
            mlp_hidden_act="silu",
            swiglu_alpha=1.7,
            swiglu_limit=7.0,
            post_norm_eps=1e-5,
            _experts_implementation=implementation,
        )
        module, name = KINDS[kind]
        found = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        self.experts = getattr(found, name)(config)
        for p in self.parameters():
            nn.init.normal_(p, std=0.3)

    def forward(self, x: Tensor, ids: Tensor, scale: Tensor) -> Tensor:
        made: Tensor = self.experts(x.view(-1, HIDDEN), ids, scale)
        return made.view(x.shape).float().square().mean()


def assigned(dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(1)
    ids = torch.rand(12, EXPERTS).topk(CHOSEN).indices
    return {"x": torch.randn(4, 3, HIDDEN, dtype=dtype), "ids": ids, "scale": torch.rand(12, CHOSEN, dtype=dtype)}


def alone(kind: str, implementation: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    if not has(KINDS[kind][0]):
        pytest.skip(f"this transformers has no {KINDS[kind][0]}")
    torch.manual_seed(0)
    return Alone(kind, implementation).to(dtype), assigned(dtype)


def has(module: str) -> bool:
    return importlib.util.find_spec(f"transformers.models.{module}") is not None


@functools.cache
def of_model(name: str) -> Subject:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name], experts_implementation="eager")
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    ids = torch.randint(0, config.vocab_size, (4, 6))
    inputs = {"input_ids": ids, "labels": ids}
    with Promoted():
        return Subject(model, inputs, ColoTracer().capture(model, inputs), eager(model, inputs))


def packets(capture: Capture) -> list[str]:
    return [n.packet for n in capture.graph.nodes]


def cut(name: str, over: dict[str, int]) -> dict[str, str]:
    """Constraints: the batch, experts, and the rows or columns of their matrices, each over an axis."""
    axis = {k: f"S{a}" for k, a in over.items()}
    found = {"input:*": f"{axis.get('batch', 'R')}R"}
    if set(axis) - {"batch"}:
        experts, wide = axis.get("experts", "R"), axis.get("columns", "R")
        transposed = name == "GptOss"
        found["*.experts.gate_up_proj"] = f"{experts}R{wide}" if transposed else f"{experts}{wide}R"
        found["*.experts.down_proj"] = f"{experts}{wide}R" if transposed else f"{experts}R{wide}"
    return found


CUTS = [
    ((2,), {"batch": 0}),
    ((2,), {"experts": 0}),
    ((2,), {"columns": 0}),
    ((2, 2), {"batch": 0, "experts": 1}),
    ((2, 2), {"batch": 0, "columns": 1}),
    ((2, 2), {"experts": 0, "columns": 1}),
]


@pytest.mark.parametrize(("mesh", "over"), CUTS, ids=str)
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n == "Qwen3Moe" else n for n in MODELS])
def test_a_model_cut_by_tokens_and_by_experts_equals_one_device(
    name: str, mesh: tuple[int, ...], over: dict[str, int]
) -> None:
    of = of_model(name)
    assert of.reference is not None
    ran = run(of, mesh, cut(name, over))
    assert_equal(ran.result, of.reference, 1e-9)
    tokens = [made.dims[0] for made, _ in specs_of_products(ran) if len(made.dims) == 4]
    assert len(tokens) == 4
    assert all(over["batch"] in axes for axes in tokens if "batch" in over)


def specs_of_products(ran: Ran) -> list[tuple[ShardingSpec, ShardingSpec]]:
    """What each product of tokens, or of weights' gradients, makes, and of its second operand."""
    ops = ran.planned.program.ops
    held = {t.name: t.spec for op in ops for t in op.writes}
    found = [op for op in ops if op.kind == "compute" and op.node.startswith("experts_mm")]
    return [(op.writes[0].spec, held[op.reads[1]]) for op in found]


@pytest.mark.parametrize("name", [n if n == "Mixtral" else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_plans_of_every_kind_equal_one_device(name: str) -> None:
    """Tokens, ways, rows and columns of matrices and experts: over some seed each is cut."""
    of, cuts = of_model(name), set()
    assert of.reference is not None
    for seed in range(8):
        for mesh in ((3,), (2, 2)):
            ran = run(of, mesh, search=f"random:{seed}")
            assert_equal(ran.result, of.reference, 1e-9)
            for made, second in specs_of_products(ran):
                if len(made.dims) == 4:
                    cuts |= {f"result {d}" for d, axes in enumerate(made.dims) if axes}
                    cuts |= {f"weight {d}" for d, axes in enumerate(second.dims) if axes}
    wanted = {"result 0", "result 1", "result 3", "weight 0", "weight 1", "weight 2"}
    assert wanted <= cuts, wanted - cuts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("implementation", "dtype", "tolerance"),
    [
        ("eager", torch.float64, 1e-9),
        ("grouped_mm", torch.float32, 1e-5),
        ("eager", torch.bfloat16, 3e-2),
        ("grouped_mm", torch.bfloat16, 3e-2),
    ],
    ids=str,
)
def test_every_kind_of_experts_is_what_it_was(
    kind: str, implementation: str, dtype: torch.dtype, tolerance: float
) -> None:
    model, inputs = alone(kind, implementation, dtype)
    with Promoted() if dtype is torch.float64 else torch.enable_grad():
        capture, expected = ColoTracer().capture(model, inputs), eager(model, inputs)
    assert packets(capture).count("autopar.experts_mm") == 3  # tokens are inputs, and have no gradient
    assert not {"aten.sort", "aten._grouped_mm"} & set(packets(capture))
    found = run(Subject(model, inputs, capture, expected), (2,), {"input:x": "S0RR"}).result
    assert_equal(found, expected, tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_autocast_gives_every_product_the_dtype_that_it_had(kind: str, implementation: str) -> None:
    """The loop's products are known to autocast, and the grouped ones are not."""
    model, inputs = alone(kind, implementation, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        capture, expected = ColoTracer().capture(model, inputs), eager(model, inputs)
    lower = implementation == "eager"
    dtypes = {o.dtype for n in capture.graph.nodes if "experts_mm" in n.packet for o in n.outputs if o}
    assert dtypes == ({"bfloat16"} if lower else {"float32"})
    found = run(Subject(model, inputs, capture, expected), (2,), {"input:x": "S0RR"}).result
    assert_equal(found, expected, 3e-2 if lower else 1e-5)


def test_batch_and_sequence_stay_dims_of_their_own() -> None:
    for n in of_model("Mixtral").capture.graph.nodes:
        if n.packet == "autopar.experts_mm":
            assert n.outputs[0] is not None
            assert n.outputs[0].shape[:3] == (4, 6, CHOSEN)


def test_experts_of_some_ranks_and_another_implementation_stay_as_they_are() -> None:
    for implementation, parallel in (("batched_mm", False), ("grouped_mm", True)):
        model, inputs = alone("gated", implementation, torch.bfloat16)
        cast(Any, model.experts)._is_expert_parallel = parallel
        found = packets(ColoTracer().capture(model, inputs))
        assert "autopar.experts_mm" not in found
        assert ("aten.sort" in found) == parallel


class Loop(nn.Module):
    """A loop over the experts that were hit, of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in range(int(ids.max()) + 1):
            rows = (ids == expert).nonzero().squeeze(1)
            out = out.index_add(0, rows, x[rows] @ self.weight[expert])
        return out.sum()


class Sorted(nn.Module):
    """Rows sorted by expert and a grouped product, of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        _, order = ids.sort(stable=True)
        ends = torch.nn.functional.one_hot(ids, EXPERTS).sum(0).cumsum(0).to(torch.int32)
        return torch._grouped_mm(x[order], self.weight, offs=ends)[order.argsort()].square().sum()


def test_a_loop_of_ones_own_is_refused() -> None:
    with refused(CaptureError, "int(ids.max())", "values of a tensor"):
        ColoTracer().capture(Loop(), (torch.randn(6, HIDDEN), torch.randint(0, EXPERTS, (6,))))


def test_a_loop_of_a_librarys_own_is_refused_with_what_is_captured() -> None:
    longcat = pytest.importorskip("transformers.models.longcat_flash.modeling_longcat_flash")
    config = transformers.LongcatFlashConfig(
        hidden_size=HIDDEN, expert_ffn_hidden_size=8, n_routed_experts=EXPERTS, moe_topk=CHOSEN, zero_expert_num=0
    )
    with refused(CaptureError, "for expert_idx_tensor in expert_hit", "torch.bmm(weight[ids], x)"):
        ColoTracer().capture(longcat.LongcatFlashMoE(config), (torch.randn(2, 3, HIDDEN),))


class Chosen(nn.Module):
    """A loop over all experts that picks the tokens of each, as it is mostly written."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows = torch.where(ids == i)[0]
            out = out.index_add(0, rows, expert(x[rows]))
        return out.sum()


def test_a_loop_that_picks_tokens_is_refused_with_what_is_captured() -> None:
    with refused(CaptureError, "torch.where(ids == i)", "weights that are zero elsewhere"):
        ColoTracer().capture(Chosen(), (torch.randn(6, HIDDEN), torch.randint(0, EXPERTS, (6,))))


class Gathered(nn.Module):
    """The ways out that the errors name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out = torch.bmm(self.weight[ids], x.unsqueeze(2)).square().sum()
        for i in range(EXPERTS):
            out = out + ((x @ self.weight[i]) * (ids == i).unsqueeze(-1)).sum()
        return out


def test_what_the_error_names_is_captured() -> None:
    torch.manual_seed(0)
    model, inputs = Gathered(), {"x": torch.randn(6, HIDDEN), "ids": torch.randint(0, EXPERTS, (6,))}
    expected = eager(model, inputs)
    found = run(Subject(model, inputs, ColoTracer().capture(model, inputs), expected), (2,)).result
    assert_equal(found, expected, 1e-4)


def test_a_grouped_product_of_ones_own_stays_and_works() -> None:
    torch.manual_seed(0)
    model = Sorted().bfloat16()
    inputs = {"x": torch.randn(6, HIDDEN).bfloat16(), "ids": torch.randint(0, EXPERTS, (6,))}
    capture, expected = ColoTracer().capture(model, inputs), eager(model, inputs)
    assert "aten._grouped_mm" in packets(capture)
    for over in ("S0RR", "RS0R", "RRS0"):
        found = run(Subject(model, inputs, capture, expected), (2,), {"weight": over}).result
        assert_equal(found, expected, 3e-2)


def test_rows_of_no_expert_are_zeros_by_the_kernel_as_by_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    rows, weight, grad = torch.randn(5, 8), torch.randn(3, 8, 16), torch.randn(5, 2, 16)
    ids = torch.tensor([[0, 3], [2, 2], [-1, 0], [7, 2], [3, 3]])

    def both() -> tuple[Tensor, ...]:
        of_weight = functools.partial(OPS.experts_mm_weight, rows, grad, ids, experts=3)
        turned = OPS.experts_mm(grad, weight, ids, transposed=True)
        return OPS.experts_mm(rows, weight, ids), turned, of_weight(), of_weight(transposed=True)

    by_loop = both()
    outside = (ids < 0) | (ids >= 3)
    assert not by_loop[0][outside].any()
    assert not by_loop[1][outside].any()
    chosen = torch.einsum("tk,trkn->trn", rows, weight[ids.clamp(0, 2)]) * ~outside.unsqueeze(-1)
    torch.testing.assert_close(by_loop[0], chosen)
    with monkeypatch.context() as patched:
        patched.setattr(products, "_has_kernel", lambda *operands: True)
        by_kernel = both()
    for a, b in zip(by_loop, by_kernel, strict=True):
        torch.testing.assert_close(a, b)


def test_at_the_scale_of_a_cluster_tokens_are_cut_and_not_gathered() -> None:
    """Where products take their time, each device keeps its tokens, and gathers matrices at most."""
    config = transformers.MixtralConfig(
        hidden_size=2048,
        intermediate_size=7168,
        num_hidden_layers=2,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=1024,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config).bfloat16()
        ids = torch.empty(256, 2048, dtype=torch.long)
    plan = autopar.plan(
        model,
        {"input_ids": ids, "labels": ids},
        mesh=(8, 8),
        cluster="dgx-h100",
        time_limit=20.0,
        memory_budget="40GiB",
    )
    tokens, mesh, plan_room = 256 * 2048, Mesh((8, 8)), 1.5
    made = [op for op in plan.program.ops if op.kind == "compute" and op.node.startswith("experts_mm")]
    products_of_rows = [op.writes[0] for op in made if "weight" not in op.node]
    assert products_of_rows
    for tensor in products_of_rows:
        rows = math.prod(tensor.spec.local_shape(tensor.meta.shape, mesh)[:-1])
        assert rows <= plan_room * tokens * 2 // 64, f"{tensor.name} {tensor.spec}"
    gathered = {t.removesuffix(".grad") for c in plan.collectives if c.kind == "all_gather" for t in c.tensors}
    assert gathered <= {name for name, _ in model.named_parameters()}
