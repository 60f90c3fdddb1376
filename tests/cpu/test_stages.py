"""A model that is cut into pipeline stages computes what it computes on one device."""

from __future__ import annotations

import itertools
import random
import warnings
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from autopar import codegen, passes, planner
from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.mesh import Mesh
from autopar.planner.answers.make_plan import make_plan
from autopar.planner.memory.exact import profile, saved_bytes
from autopar.planner.pipeline.renamed import Names, renamed
from autopar.planner.pipeline.stages import Seams, Stage, cut, seams, split_at
from autopar.planner.pricing.prices import Prices
from autopar.planner.problem.constraints import resolve
from autopar.planner.problem.decide import decide
from autopar.planner.schedule.timeline import simulate_streams
from autopar.plans import Plan
from autopar.spmd import local_ranks
from autopar.tracer import ColoTracer
from tests.cpu.model_checks import TOLERANCE, Promoted, Subject, assert_equal, cluster_where_sharding_pays, eager
from tests.models import BATCH, DECODER, FEED_FORWARD, HEADS, HIDDEN, VOCABULARY, images, language, padded_language
from tests.stage_runs import StageProgram, assert_is_cut, merged, plan_stages, run_stages
from tests.zoo import ZOO
from tests.zoo.measure import captured

LAYERS = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(self.norm(x) + shared)
        return x + self.down(F.gelu(h)), h.square().mean()


class Skips(nn.Module):
    """A skip over all blocks, an auxiliary loss in each, and one vector that all of them read."""

    def __init__(self, width: int = 16, layers: int = LAYERS) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.shared = nn.Parameter(torch.randn(width))
        self.head = nn.Linear(2 * width, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = skip = self.first(x)
        auxiliary = x.new_zeros(())
        for layer in self.layers:
            h, more = layer(h, self.shared)
            auxiliary = auxiliary + more
        return F.cross_entropy(self.head(torch.cat([h, skip], -1)), labels) + 0.1 * auxiliary


class Plain(nn.Module):
    """A stack of layers without repetition."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 24),
            nn.GELU(),
            nn.Linear(24, 20),
            nn.Tanh(),
            nn.Linear(20, 12),
            nn.LayerNorm(12),
            nn.Linear(12, 5),
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layers(x), labels)


class Functions(nn.Module):
    """A model without submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8, 8) * 0.3 for _ in range(4))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for weight in self.weights:
            x = x + (x @ weight).tanh()
        return F.cross_entropy(x, labels)


class Tally(nn.Module):
    """Counts its calls in a buffer that a later block reads, and keeps a running mean of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.calls.add_(1)
        for i, layer in enumerate(self.layers):
            x = layer(x).tanh() * (1 + 0.1 * self.calls)
            if i == 1:
                x = x - self.mean
                self.mean.copy_(0.9 * self.mean + 0.1 * x.detach().mean(0))
        return F.cross_entropy(x, labels)


def vectors() -> dict[str, Tensor]:
    return {"x": torch.randn(BATCH, 8), "labels": torch.randint(0, 5, (BATCH,))}


def gpt2() -> nn.Module:
    sizes = dict(n_embd=HIDDEN, n_inner=FEED_FORWARD, n_head=HEADS, vocab_size=VOCABULARY, n_positions=16)
    quiet = dict(attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=LAYERS, **sizes, **quiet))


def llama(*, tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(**DECODER, num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    experts = dict(num_local_experts=3, num_experts_per_tok=2, output_router_logits=True)
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**DECODER, num_hidden_layers=3, **experts))


ENCODER = dict(hidden_size=HIDDEN, intermediate_size=FEED_FORWARD, num_hidden_layers=3, num_attention_heads=HEADS)
QUIET = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def bert() -> nn.Module:
    sizes = dict(ENCODER, vocab_size=VOCABULARY, max_position_embeddings=16)
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, **QUIET))


def vit() -> nn.Module:
    config = transformers.ViTConfig(**ENCODER, **QUIET, image_size=8, patch_size=4, num_labels=5)
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    sizes = dict(d_model=HIDDEN, d_ff=FEED_FORWARD, num_heads=HEADS, d_kv=8, vocab_size=VOCABULARY, num_layers=3)
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


MODELS = {
    "gpt2": (gpt2, language),
    "llama": (llama, language),
    "tied_llama": (lambda: llama(tied=True), language),
    "bert": (bert, padded_language),
    "t5": (t5, padded_language),
    "vit": (vit, lambda: images(8)),
    "mixtral": (mixtral, language),
    "skips": (Skips, vectors),
    "plain": (Plain, vectors),
    "functions": (Functions, vectors),
    "tally": (Tally, vectors),
}
OF_ZOO = ("unet", "resnet")
SINGLE = ("mixtral",)
"""Models that run in float32 alone."""


@dataclass(frozen=True)
class Cuttable:
    of: Subject
    seams: Seams

    @property
    def graph(self) -> Graph:
        return self.of.capture.graph


@cache
def cuttable(name: str) -> Cuttable:
    if name in MODELS:
        torch.manual_seed(0)
        build, inputs = MODELS[name]
        dtype = torch.float32 if name in SINGLE else torch.float64
        model = build().to(dtype).train()
        batch = {k: t.to(dtype) if t.is_floating_point() else t for k, t in inputs().items()}
        with Promoted() if dtype is torch.float64 else warnings.catch_warnings():
            of = Subject(model, batch, ColoTracer().capture(model, batch), eager(model, batch))
    else:
        of = captured(ZOO[name])
    return Cuttable(of, seams(of.capture.graph))


def some_starts(of: Cuttable, count: int, seed: int = 0) -> tuple[int, ...]:
    blocks = len(of.seams.blocks)
    return (0, *sorted(random.Random(seed).sample(range(1, blocks), min(count, blocks) - 1)))


def checked(of: Cuttable, starts: tuple[int, ...]) -> tuple[Stage, ...]:
    stages = cut(of.graph, of.seams, starts)
    assert_is_cut(of.graph, of.seams, stages)
    return stages


def check(of: Cuttable, starts: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Run one step of all stages and compare it with one device."""
    mesh = Mesh(shape)
    programs = plan_stages(checked(of, starts), mesh, cluster_where_sharding_pays().sized(mesh.size))
    found = merged(run_stages(programs, mesh, of.of.named()))
    dtype = next(p.dtype for p in of.of.model.parameters())
    assert of.of.reference is not None
    assert_equal(found, of.of.reference, TOLERANCE[dtype])


@pytest.mark.parametrize("shape", [(1,), (2,)], ids=str)
@pytest.mark.parametrize(("name", "count"), [(n, 2 + i % 3) for i, n in enumerate((*MODELS, *OF_ZOO))])
def test_stages_compute_what_one_device_does(name, count, shape) -> None:
    of = cuttable(name)
    check(of, some_starts(of, count, seed=len(name)), shape)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ZOO)
def test_every_model_can_be_cut_at_every_third_seam(name) -> None:
    of = cuttable(name)
    for seam in range(1, len(of.seams.blocks), 3):
        check(of, (0, seam), (1,))


@given(st.data())
@pytest.mark.parametrize("name", ["gpt2", "t5", "mixtral", "skips", "unet", "resnet", "functions", "tally"])
def test_any_cut_is_the_graph_taken_apart(name, data) -> None:
    of = cuttable(name)
    blocks = len(of.seams.blocks)
    starts = data.draw(st.sets(st.integers(1, blocks - 1), max_size=min(6, blocks - 1)))
    checked(of, (0, *sorted(starts)))


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("gpt2", [f"transformer.h.{i}" for i in range(LAYERS)]),
        ("llama", [f"model.layers.{i}" for i in range(LAYERS)]),
        ("bert", [f"bert.encoder.layer.{i}" for i in range(3)]),
        ("t5", [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(3)]),
        ("skips", [f"layers.{i}" for i in range(LAYERS)]),
    ],
)
def test_repeated_modules_are_blocks_of_their_own(name, blocks) -> None:
    found = cuttable(name).seams.blocks
    assert [b for b in found if b in blocks] == blocks
    inside = [b for b in found if any(b.startswith(f"{block}.") for block in blocks)]
    assert not inside


def test_embeddings_head_and_loss_are_blocks_beside_the_layers() -> None:
    found = cuttable("llama").seams.blocks
    assert found[0] == "model.embed_tokens"
    assert found[-3:] == ("model.norm", "lm_head", "")


@pytest.mark.parametrize("name", ["gpt2", "llama", "tied_llama", "bert"])
def test_one_activation_and_one_gradient_cross_between_layers(name) -> None:
    of = cuttable(name)
    layers = [i for i, b in enumerate(of.seams.blocks) if b.rpartition(".")[2].isdigit()]
    for stage in checked(of, (0, *layers[1:]))[1:]:
        assert len(stage.receives) == 1
        assert stage.returns == stage.receives
    hidden = of.of.capture.graph.meta  # [batch, sequence, hidden] in the model's dtype
    sizes = {of.seams.bytes[i - 1] for i in layers[1:]}
    assert sizes == {next(hidden(o.value).bytes for o in of.graph.outputs if o.name == "logits") * HIDDEN // VOCABULARY}


def test_a_skip_passes_through_the_stages_between() -> None:
    of = cuttable("skips")
    stages = checked(of, split_at(of.graph, of.seams, ["layers.1", "layers.2", "layers.3"]))
    skip = set.intersection(*(set(s.sends) for s in stages[:-1]))
    assert len(skip) == 1
    assert all(skip <= {*s.receives, *s.returns} for s in stages[1:])


def test_tied_weights_have_a_copy_and_a_part_of_the_gradient_in_both_stages() -> None:
    of = cuttable("gpt2")
    first, middle, last = checked(of, split_at(of.graph, of.seams, ["transformer.h.1", "transformer.h.2"]))
    weight = "transformer.wte.weight"
    for stage, has in ((first, True), (middle, False), (last, True)):
        assert (weight in {i.name for i in stage.graph.inputs}) == has
        assert (weight in {o.name for o in stage.graph.outputs if o.kind == "gradient"}) == has


def test_later_stages_copy_what_depends_on_inputs_alone_instead_of_receiving_it() -> None:
    of = cuttable("bert")
    stages = checked(of, split_at(of.graph, of.seams, ["bert.encoder.layer.1", "bert.encoder.layer.2"]))
    for stage in stages:
        assert "attention_mask" in {i.name for i in stage.graph.inputs if i.kind == "input"}
    assert all(len(s.receives) == 1 for s in stages[1:])


def test_a_buffer_is_changed_in_every_stage_that_reads_it() -> None:
    of = cuttable("tally")
    stages = checked(of, (0, *range(1, len(of.seams.blocks))))
    changing = [{o.name for o in s.graph.outputs if o.kind == "mutation"} for s in stages]
    assert sum("calls" in names for names in changing) >= 3
    assert sum("mean" in names for names in changing) == 1


def test_micro_batches_add_up() -> None:
    """Of equal parts of a batch without a mean over it, gradients add up to those of the whole."""
    of, mesh = cuttable("skips"), Mesh((2,))
    model = of.of.model
    batches = [vectors() | {"x": torch.randn(BATCH, 8, dtype=torch.float64)} for _ in range(3)]
    programs = plan_stages(checked(of, some_starts(of, 3)), mesh, cluster_where_sharding_pays().sized(2))
    found = run_stages(programs, mesh, of.of.named(), batches, tangent=1 / 3)
    (sum(model(**b) for b in batches) / 3).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.grads[name], parameter.grad)
        parameter.grad = None
    for outputs, batch in zip(found.outputs, batches, strict=True):
        torch.testing.assert_close(*outputs.values(), model(**batch).detach())


def test_dropout_is_the_same_at_every_cut() -> None:
    """Random numbers depend on the seed and their place in the model, not on the stage that draws them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.4)) for _ in range(4))).train()
    batch = {"input": torch.randn(BATCH, 8)}
    capture = ColoTracer().capture(model, batch)
    of, mesh = Cuttable(Subject(model, batch, capture, None), seams(capture.graph)), Mesh((1,))
    runs = []
    for count in (1, 2, 4):
        programs = plan_stages(checked(of, some_starts(of, count)), mesh, cluster_where_sharding_pays().sized(1))
        runs.append(run_stages(programs, mesh, of.of.named(), seed=7))
    for other in runs[1:]:
        assert all(torch.equal(t, other.outputs[0][n]) for n, t in runs[0].outputs[0].items())
        for name, grad in runs[0].grads.items():
            torch.testing.assert_close(other.grads[name], grad)


def test_a_stage_is_planned_verified_and_emitted_like_any_model() -> None:
    of, mesh = cuttable("llama"), Mesh((1,))
    stages = checked(of, split_at(of.graph, of.seams, ["model.layers.1", "model.layers.3"]))
    programs = plan_stages(stages, mesh, cluster_where_sharding_pays().sized(1))
    options = planner.Options(outputs="dtensor", device="cpu")
    for p in programs:
        plan = make_plan(p.planned, p.graph, mesh, cluster_where_sharding_pays().sized(1), options, "", ())
        planner.verify(plan, p.graph, options)
        names = {f"received:{n}" for n in p.stage.receives} | {f"sent:{n}" for n in p.stage.sends}
        names |= {f"received:{n}.grad" for n in p.stage.returns} | {f"sent:{n}.grad" for n in p.stage.takes}
        assert names <= plan.specs.keys()
        assert Plan.from_json(plan.to_json()).program == plan.program
        source = codegen.emit(p.lowered, mesh, [], of.of.capture.constants, 1)
        emitted = codegen.load(source, "stage", p.graph)
        feed = [torch.randn(m.shape).double() for i, _ in p.lowered.inputs if (m := p.graph.by_name[i.node].outputs[0])]
        if p.stage.receives and not any(i.kind == "input" for i, _ in p.lowered.inputs):
            assert emitted["forward"](local_ranks(mesh)[0], feed)


EQUAL = ["gpt2", "llama", "bert", "vit"]
"""Models that are cut at every seam, so that layers are stages of their own."""


@pytest.mark.parametrize("name", EQUAL)
def test_equal_stages_take_over_a_plan_under_their_own_names(name: str) -> None:
    of, mesh = cuttable(name), Mesh((1,))
    programs: list[StageProgram] = []
    taken = 0
    for stage in cut(of.graph, of.seams, range(len(of.seams.blocks))):
        known = next((p for p in programs if Names.between(p.stage.graph, stage.graph)), None)
        if known is None:
            programs += plan_stages([stage], mesh, cluster_where_sharding_pays().sized(1))
            continue
        taken += 1
        names = Names.between(known.graph, stage.graph)
        assert names is not None
        planned = renamed(known.planned, stage.graph, names)
        lowered = passes.compose(passes.lower(planned.program, stage.graph, mesh), stage.graph)
        programs.append(StageProgram(stage, planned, lowered))
    assert taken >= 2
    assert of.of.reference is not None
    assert_equal(merged(run_stages(programs, mesh, of.of.named())), of.of.reference, TOLERANCE[torch.float64])


@pytest.mark.parametrize("name", EQUAL)
def test_a_plan_that_was_taken_over_costs_and_holds_what_it_says(name: str) -> None:
    of, mesh = cuttable(name), Mesh((2, 2))
    stages = cut(of.graph, of.seams, range(len(of.seams.blocks)))
    one, other = next(pair for pair in itertools.combinations(stages, 2) if Names.between(*(s.graph for s in pair)))
    cluster, options = cluster_where_sharding_pays().sized(4), planner.Options(outputs="dtensor", device="cpu", gap=0.1)
    (known,) = plan_stages([one], mesh, cluster, options)
    names = Names.between(known.graph, other.graph)
    assert names is not None
    held, _ = saved_bytes(known.planned.program, known.graph, mesh, options)
    planned = renamed(known.planned, other.graph, names, 2 * held)
    assert planned.memory == profile(planned.program, other.graph, mesh, replace(options, in_flight=3))
    prices = Prices(mesh, cluster)
    timeline = simulate_streams(planned.program, prices.overlap)
    assert planned.timeline.intervals == timeline.intervals and planned.timeline.seconds == timeline.seconds
    d, forced = planned.decisions, resolve(other.graph, mesh, {}, {})
    made = decide(other.graph, mesh, options, forced, recompute=known.planned.decisions.recomputes)
    assert (d.variables, d.uses, d.index, d.widened) == (made.variables, made.uses, made.index, made.widened)
    planner.verify(make_plan(planned, other.graph, mesh, cluster, options, "", ()), other.graph, options)


def test_stages_that_differ_in_more_than_names_are_not_equal() -> None:
    of = cuttable("llama")
    one, other = (s.graph for s in cut(of.graph, of.seams, range(len(of.seams.blocks)))[2:4])
    scaled = next(n for n in other.nodes if any(isinstance(a, float) for a in n.args))
    args = tuple(2 * a if isinstance(a, float) else a for a in scaled.args)
    nodes = tuple(replace(n, args=args) if n is scaled else n for n in other.nodes)
    assert Names.between(one, other) is not None
    assert Names.between(one, replace(other, nodes=nodes)) is None
    assert Names.between(one, replace(other, outputs=other.outputs[::-1])) is None
    first = next(i for i in other.inputs if i.kind == "parameter")
    tied = tuple(replace(i, name=first.name) if i.kind == "parameter" else i for i in other.inputs)
    assert Names.between(one, replace(other, inputs=tied)) is None


def test_constraints_decide_the_specs_of_what_is_exchanged() -> None:
    of, mesh = cuttable("llama"), Mesh((2,))
    _, middle, _ = checked(of, split_at(of.graph, of.seams, ["model.layers.1", "model.layers.3"]))
    (received,), (sent,) = middle.receives, middle.sends
    wanted = {f"received:{received}": "S0RR", f"sent:{sent}": "RS0R", f"received:{received}.grad": "RS0R"}
    wanted[f"sent:{sent}.grad"] = "S0RR"
    options = planner.Options(outputs="dtensor", device="cpu", constraints=wanted, gap=0.1)
    (program,) = plan_stages([middle], mesh, cluster_where_sharding_pays().sized(2), options)
    lowered = program.lowered
    specs = {f"received:{i.name}": s for i, s in lowered.inputs if i.kind == "received"}
    specs |= {f"sent:{i.name}.grad": s for i, s in lowered.tangents}
    specs |= {f"sent:{o.name}": s for o, s in lowered.results if o.kind == "sent"}
    goes = [(o, s) for o, s in lowered.gradients if program.graph.goes_to_stage(o)]
    specs |= {f"received:{o.name.removeprefix('input:')}.grad": s for o, s in goes}
    assert {n: str(s) for n, s in specs.items()} == wanted


def test_what_is_exchanged_is_held_no_longer_than_it_is_read_or_until_it_is_sent() -> None:
    of, mesh = cuttable("llama"), Mesh((1,))
    _, middle, _ = checked(of, split_at(of.graph, of.seams, ["model.layers.1", "model.layers.3"]))
    (program,) = plan_stages([middle], mesh, cluster_where_sharding_pays().sized(1))
    held = program.planned.memory.by_kind
    assert not held.get("inputs")
    assert not held.get("outputs")
    as_own = replace(
        middle.graph,
        part=None,
        inputs=tuple(replace(i, kind="input") if i.kind == "received" else i for i in middle.graph.inputs),
        outputs=tuple(replace(o, kind="output") if o.kind == "sent" else o for o in middle.graph.outputs),
    )
    (other,) = plan_stages([replace(middle, graph=as_own)], mesh, cluster_where_sharding_pays().sized(1))
    assert program.planned.memory.peak_bytes < other.planned.memory.peak_bytes


def test_a_stage_is_planned_within_a_budget() -> None:
    of, mesh = cuttable("gpt2"), Mesh((1,))
    stages = checked(of, split_at(of.graph, of.seams, ["transformer.h.1", "transformer.h.3"]))
    cluster = cluster_where_sharding_pays().sized(1)
    options = planner.Options(outputs="dtensor", device="cpu", optimizer="sgd", gap=0.1, time_limit_s=5.0)
    (free,) = plan_stages([stages[1]], mesh, cluster, options)
    fixed = free.planned.memory.by_kind["parameters"] + free.planned.memory.by_kind.get("gradients", 0)
    budget = int(fixed + 0.8 * (free.planned.memory.peak_bytes - fixed))
    within = [replace(options, memory_budget_bytes=b) for b in (None, budget, None)]
    programs = [plan_stages([s], mesh, cluster, o)[0] for s, o in zip(stages, within, strict=True)]
    assert programs[1].planned.memory.peak_bytes <= budget
    assert profile(programs[1].planned.program, programs[1].graph, mesh, within[1]).peak_bytes <= budget
    assert of.of.reference is not None
    assert_equal(merged(run_stages(programs, mesh, of.of.named())), of.of.reference, TOLERANCE[torch.float64])


def test_a_split_names_the_first_module_of_each_stage() -> None:
    of = cuttable("gpt2")
    at = of.seams.blocks.index
    assert split_at(of.graph, of.seams, ["transformer.h.2"]) == (0, at("transformer.h.2"))
    assert split_at(of.graph, of.seams, ["transformer.wte", "transformer.h.2"]) == (0, at("transformer.h.2"))
    assert split_at(of.graph, of.seams, ["transformer.h", "lm_head"]) == (0, at("transformer.h.0"), at("lm_head"))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["transformer.h.9"], ["no such module", "'transformer.h.9'", "'transformer.h.3'"]),
        (["transformer.h.1.mlp"], ["no seam lies there", "'transformer.h.1'"]),
        (["transformer.h.2", "transformer.h.1"], ["order", "'transformer.h.1' after 'transformer.h.2'"]),
    ],
)
def test_a_split_that_cannot_be_says_why_and_names_what_can(names, words) -> None:
    of = cuttable("gpt2")
    with pytest.raises(PlanError) as error:
        split_at(of.graph, of.seams, names)
    assert all(word in str(error.value) for word in words), str(error.value)
