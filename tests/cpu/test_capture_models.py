"""What models do inside: ties, buffers, constants, frozen parts, attention, dropout, and Hugging Face's habits."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import autopar
from tests.cpu.capture_checks import assert_simulates, captured, captured_once, ops_of

transformers = pytest.importorskip("transformers")


def x(*shape: int) -> Tensor:
    return torch.randn(*(shape or (4, 4)), dtype=torch.float64)


def test_trace_gives_a_value_on_every_node() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
    graph = autopar.ColoTracer().trace(model, (torch.randn(4, 4),))
    assert isinstance(graph, torch.fx.GraphModule)
    assert all("val" in n.meta for n in graph.graph.nodes)
    graph.graph.lint()


def test_capture_changes_nothing_and_draws_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    captured(model, (torch.randn(4, 4, generator=torch.Generator().manual_seed(1)),))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert type(model) is nn.Sequential
    assert all(p.grad is None for p in model.parameters())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_parameters_are_one(device: str) -> None:
    model = Tied().double().to(device)
    model.head.weight = model.embed.weight
    graph = captured(model, torch.randint(8, (4, 4))).graph
    assert [i.name for i in graph.inputs if i.kind == "parameter"] == ["embed.weight"]
    assert [o.name for o in graph.outputs if o.kind == "gradient"] == ["embed.weight"]


def test_tied_parameters_get_the_sum_of_both_gradients() -> None:
    assert_simulates(Tied().double(), torch.randint(8, (4, 4)))


def test_tied_modules() -> None:
    shared = nn.Linear(4, 4)
    assert_simulates(nn.Sequential(shared, nn.Tanh(), shared).double(), x())


def test_batch_norm_changes_its_buffers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).double()
    graph = captured(model, x(4, 3, 4, 4)).graph
    changed = {o.name for o in graph.outputs if o.kind == "mutation"}
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} == changed
    assert_simulates(model, x(4, 3, 4, 4))


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.SyncBatchNorm, nn.InstanceNorm1d])
def test_batch_norm_momentum(kind: type[nn.Module]) -> None:
    assert_simulates(nn.Sequential(nn.Linear(4, 4), kind(4, momentum=0.3)).double(), x(2, 4, 4))


@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_that_averages_all_batches(affine: bool) -> None:
    norm = nn.BatchNorm1d(4, momentum=None, affine=affine)
    norm.num_batches_tracked.fill_(3)
    plan = assert_simulates(nn.Sequential(nn.Linear(4, 4), norm).double(), x(8, 4), search="random:1")
    assert not plan.notices


def test_buffers_changed_in_place_and_anew() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("average", torch.zeros(4))
            self.register_buffer("passing", torch.zeros(4), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            self.count += 1
            self.average.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            self.passing = self.passing + h.detach().amax(0)
            return h * self.count + self.average

    plan = assert_simulates(Counting().double(), x())
    assert plan is not None


def test_plain_tensor_attributes_and_literals() -> None:
    class Literal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
            self.table = [torch.ones(4, dtype=torch.float64) * 2]

        def forward(self, x: Tensor) -> Tensor:
            return self.lin(x) * self.scale + torch.tensor([0.5, 1, 2, 3], dtype=x.dtype) * self.table[0]

    assert_simulates(Literal().double(), x())


def test_parts_without_gradient() -> None:
    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                goal = self.target(x)
            return (self.online(x) - goal).pow(2).mean()

    model = Target().double()
    assert_simulates(model, x())
    gradients = {o.name for o in captured(model, x()).graph.outputs if o.kind == "gradient"}
    assert gradients == {"online.weight", "online.bias"}


def test_frozen_parameters_get_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[0].requires_grad_(False)
    assert_simulates(model, x())
    graph = captured(model, x()).graph
    assert {o.name for o in graph.outputs if o.kind == "gradient"} == {"2.weight", "2.bias"}
    assert {i.name for i in graph.inputs if i.trainable} == {"2.weight", "2.bias"}


def test_unused_parameters_are_planned_and_get_none() -> None:
    class Spare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    plan = assert_simulates(Spare().double(), x())
    assert "used.weight" in plan.specs


def test_a_model_without_trainable_parameters() -> None:
    model = nn.Linear(4, 4).double().requires_grad_(False)
    plan = autopar.plan(model, x(), mesh=(2,))
    result = autopar.simulate(model, given := x(), plan=plan)
    torch.testing.assert_close(result.outputs, model(given))
    assert not result.grads


def test_a_model_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double().eval()
    assert_simulates(model, x())
    assert not [o for o in captured(model, x()).graph.outputs if o.kind == "mutation"]


def test_dropout_has_a_site_of_its_own_each() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.drop = nn.Linear(4, 4), nn.Dropout(0.3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.drop(self.lin(x))
            h = F.dropout(h, 0.2) + nn.functional.dropout1d(h, 0.0)
            return self.drop(h).sum()

    nodes = [n for n in captured(Net(), torch.randn(4, 4)).graph.nodes if n.packet == "autopar.dropout"]
    sites = [dict(n.kwargs)["site"] for n in nodes if n.phase == "forward"]
    assert len(sites) == 3
    assert len(set(sites)) == 3


@pytest.mark.parametrize("train", [True, False])
def test_multihead_attention_is_the_device_neutral_op(train: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    model = Net().double().train(train)
    graph = captured(model, x(3, 5, 8)).graph
    assert any("autopar.attention" in n.op for n in graph.nodes)
    # Its view of heads and batch together would otherwise be one dim that no mesh can cut by samples.
    assert not any(m is not None and m.shape == (15, 8) for n in graph.nodes for m in n.outputs)
    assert_simulates(model, x(2, 4, 8))


@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_layer(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first).double()
    assert any("autopar.attention" in op for op in ops_of(captured(layer, x(2, 4, 8))))
    assert_simulates(layer, x(2, 4, 8))


@pytest.mark.parametrize(
    ("causal", "padded"),
    [
        (None, True),
        (True, False),
        *(
            pytest.param(*c, marks=pytest.mark.slow)
            for c in [(None, False), (True, True), (False, True), (False, False)]
        ),
    ],
)
def test_transformer_encoder_with_a_mask(causal: bool | None, padded: bool) -> None:
    """Torch looks at a mask's values, unless it is told, only to choose a kernel."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, padding: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
            return self.encoder(x, mask, padding if padded else None, causal)

    padding = torch.where(torch.arange(5) > 3, -torch.inf, 0.0).double().expand(2, 5).clone()
    assert_simulates(Net().double(), (x(2, 5, 8), padding))


def test_transformer_with_masks() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
            self.register_buffer("mask", torch.rand(5, 5) > 0.8)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            causal = self.net.generate_square_subsequent_mask(target.shape[1], dtype=target.dtype)
            return self.net(source, target, src_mask=self.mask, tgt_mask=causal)

    assert_simulates(Net().double(), (x(2, 5, 8), x(2, 4, 8)))


def test_encoder_layer_with_dropout_has_no_matrix_of_scores() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    graph = captured(layer, torch.randn(2, 64, 8)).graph
    assert any("autopar.attention" in n.op for n in graph.nodes)
    assert not any(m is not None and m.shape[-2:] == (64, 64) for n in graph.nodes for m in n.outputs)


def llama(**more: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=32,
        max_position_embeddings=16,
        **more,
    )
    return transformers.LlamaForCausalLM(config)


def attention_of(model: nn.Module, inputs: Any) -> Any:
    graph = captured(model, inputs).graph
    return next(n for n in graph.nodes if n.packet == "autopar.attention" and n.phase == "forward")


def test_hugging_face_attention_stays_causal_without_a_mask() -> None:
    ids = torch.randint(32, (2, 8))
    node = attention_of(llama(), dict(input_ids=ids, labels=ids))
    assert dict(node.kwargs)["is_causal"] is True
    assert len(node.inputs) == 3


def test_hugging_face_models_may_make_a_padding_mask_themselves() -> None:
    """BioGPT makes one of ones where it is given none, and asks whether all of it is true."""
    sizes = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    drops = dict.fromkeys(
        ("layerdrop", "hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout"), 0.0
    )
    config = transformers.BioGptConfig(**sizes, **drops)
    ids = torch.randint(32, (2, 8))
    assert_simulates(transformers.BioGptForCausalLM(config).double(), dict(input_ids=ids))


def test_hugging_face_attention_mask_is_honoured() -> None:
    ids = torch.randint(32, (2, 8))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    inputs = dict(input_ids=ids, attention_mask=mask, labels=ids)
    model = llama().double()
    node = attention_of(model, inputs)
    assert len(node.inputs) == 4
    assert dict(node.kwargs)["is_causal"] is False
    assert_masked(model, inputs)


@captured_once()
def assert_masked(model: nn.Module, inputs: Any) -> None:
    """Hugging Face computes parts in float32 whatever the model's dtype."""
    result = autopar.simulate(model, inputs, plan=autopar.plan(model, inputs, mesh=(2,)))
    expected = model(**inputs)
    torch.testing.assert_close(result.outputs.loss, expected.loss, rtol=1e-6, atol=1e-6)
    without = model(**{k: v for k, v in inputs.items() if k != "attention_mask"})
    assert abs(without.loss - expected.loss) > 1e-5
    expected.loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(result.grads[name], p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("use_cache", [True, False])
@captured_once()
def test_hugging_face_packed_positions_mean_what_they_mean_to_the_model(use_cache: bool) -> None:
    """With a cache it does not look for packed sequences, without one it does."""
    ids = torch.randint(32, (2, 8))
    positions = torch.arange(4).repeat(2).expand(2, 8)
    model = llama(use_cache=use_cache).double()
    inputs = dict(input_ids=ids, position_ids=positions, labels=ids)
    result = autopar.simulate(model, inputs, plan=autopar.plan(model, inputs, mesh=(2,)))
    torch.testing.assert_close(result.outputs.loss, model(**inputs).loss, rtol=1e-6, atol=1e-6)


def test_hugging_face_output_comes_back_as_its_own_class() -> None:
    ids = torch.randint(32, (2, 8))
    model = llama()
    capture = captured(model, dict(input_ids=ids, labels=ids))
    built = capture.returned.build([torch.zeros(()), torch.ones(1)])
    assert type(built) is type(model(input_ids=ids, labels=ids))
    assert built.loss is built[0]
    assert built.logits is built["logits"]
    assert built.past_key_values is None


@captured_once()
def test_hugging_face_hidden_states() -> None:
    ids = torch.randint(32, (2, 8))
    model = llama().double()
    inputs = dict(input_ids=ids, labels=ids, output_hidden_states=True)
    result = autopar.simulate(model, inputs, plan=autopar.plan(model, inputs, mesh=(2,)))
    expected = model(**inputs)
    assert len(result.outputs.hidden_states) == len(expected.hidden_states)
    torch.testing.assert_close(result.outputs.hidden_states[1], expected.hidden_states[1], rtol=1e-6, atol=1e-6)


def test_hugging_face_tuple_outputs() -> None:
    ids = torch.randint(32, (2, 8))
    returned = captured(llama(), dict(input_ids=ids, labels=ids, return_dict=False)).returned
    assert isinstance(returned.build([None, None]), tuple)


def test_the_models_config_is_untouched() -> None:
    ids = torch.randint(32, (2, 8))
    model = llama(use_cache=True)
    captured(model, dict(input_ids=ids, labels=ids))
    assert model.config.use_cache is True


class Recurrent(nn.Module):
    """Two layers in both directions, taken apart step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0].square().mean()


def test_capture_leaves_the_collector_of_cycles_and_torch_as_they_were() -> None:
    gc.enable()
    try:
        capture = captured(Recurrent(), torch.randn(4, 5, 8))
        assert gc.isenabled()
    finally:
        gc.disable()  # as it is during tests
    assert len(capture.graph.nodes) > 500
    assert type(torch.fx.symbolic_trace(nn.ReLU())) is not type(capture.graph_module)
    assert "def forward" in capture.graph_module.code


@pytest.mark.parametrize("layer", [nn.LSTM(4, 4, 2), nn.GRU(4, 4, batch_first=True), nn.RNN(4, 4, bidirectional=True)])
def test_recurrent_layers_hold_no_kernel_of_one_device(layer: nn.Module) -> None:
    assert not [op for op in ops_of(captured(layer.double(), x(3, 2, 4))) if "mkldnn" in op]
    assert_simulates(layer.double(), x(3, 2, 4))


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_parametrized_weights(norm: Any) -> None:
    assert_simulates(nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh()).double(), x())


class Tripled(torch.autograd.Function):
    """Its backward is no derivative of its forward, so that one shows which was captured."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, note: str) -> tuple[Tensor, str]:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor, note

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None]:
        (saved,) = ctx.saved_tensors
        return grad * 3 * saved.sign() * ctx.factor, None, None


class Pairwise(torch.autograd.Function):
    @staticmethod
    def forward(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * b, a + b

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return left * b * 5 + right, left * a + right * 7


class WithFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, note = Tripled.apply(self.lin(x), 2.0, "note")
        assert note == "note"
        product, total = Pairwise.apply(h, x)
        return product.pow(2).sum() + total.sum()


def test_a_custom_function_keeps_its_own_backward() -> None:
    assert_simulates(WithFunctions().double(), x())


def test_checkpoints_of_the_user_are_overridden_with_a_notice() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.lin, self.out, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

        def forward(self, x: Tensor) -> Tensor:
            h = torch.utils.checkpoint.checkpoint(self.lin, x, use_reentrant=self.reentrant)
            return self.out(torch.tanh(h))

    for reentrant in (True, False):
        for grad in (True, False):  # a reentrant checkpoint gives no gradients when its inputs need none
            plan = assert_simulates(Checkpointed(reentrant).double(), x().requires_grad_(grad))
            assert any("torch.utils.checkpoint is overridden" in n for n in plan.notices)


def test_hugging_face_gradient_checkpointing() -> None:
    ids = torch.randint(32, (2, 8))
    model = llama()
    plain = captured(model, dict(input_ids=ids, labels=ids)).graph
    model.gradient_checkpointing_enable()
    checkpointed = captured(model, dict(input_ids=ids, labels=ids))
    assert {o.name for o in checkpointed.graph.outputs} == {o.name for o in plain.outputs}
    assert any("torch.utils.checkpoint is overridden" in n for n in checkpointed.notices)


def test_hugging_face_caches_are_none_with_a_notice() -> None:
    ids = torch.randint(32, (2, 8))
    for inputs in (dict(input_ids=ids, labels=ids), dict(input_ids=ids, labels=ids, use_cache=True)):
        assert any("past_key_values" in n for n in captured(llama(), inputs).notices)
    assert not captured(llama(), dict(input_ids=ids, labels=ids, use_cache=False)).notices


SEVENTY_BILLION = """
import resource, warnings
warnings.filterwarnings("ignore")
import torch, transformers, autopar
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)
config = transformers.LlamaConfig(
    hidden_size=8192, intermediate_size=28672, num_hidden_layers={layers}, num_attention_heads=64,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)
with torch.device("meta"):
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    ids = torch.empty(16, 4096, dtype=torch.int64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
capture = autopar.ColoTracer().capture(model, dict(input_ids=ids, labels=ids))
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
assert grown < 1024, grown
count = sum(p.numel() for p in model.parameters())
print(count, round(grown), len(capture.graph.nodes))
"""


@pytest.mark.slow
def test_seventy_billion_parameters_are_captured_without_allocating() -> None:
    """In a process of its own, so that the peak of memory is its own."""
    program = SEVENTY_BILLION.format(layers=80)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[0]) > 70e9


def flat_copy(h: Tensor) -> Tensor:
    """Flattening a transposed tensor copies it; what then changes in place must not change the copy."""
    turned = h.transpose(0, 1)
    flat = turned.reshape(-1, 4)
    turned.add_(1)
    return (flat * torch.arange(8, dtype=h.dtype)[:, None]).sum() + turned.square().sum()


def unflattened_copy(h: Tensor) -> Tensor:
    turned = h.transpose(0, 1)
    other = turned.reshape(-1, 4).view(4, 2, 4)
    other.mul_(2)
    return h.square().sum() + (other * turned).sum()


def flat_view(h: Tensor) -> Tensor:
    """Flattening a contiguous tensor does not copy it: a change of either shows in both."""
    flat = h.view(-1, 4)
    flat.mul_(2)
    flat[1:3] += 1
    h[:, 0].mul_(3)
    return h.square().sum() + flat.sum()


def parts(h: Tensor) -> Tensor:
    h = h.clone()
    first = h[..., :2]
    first.mul_(2)
    h[..., 3] = first[..., 0]
    h.view(-1)[3:9].add_(1)
    h.diagonal(dim1=-2, dim2=-1).zero_()
    return h.square().sum()


@pytest.mark.parametrize("body", [flat_copy, unflattened_copy, flat_view, parts])
@pytest.mark.parametrize("seed", [0, 1])
def test_views_alias_and_copies_do_not(body: Any, seed: int) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return body(self.lin(x).view(2, 4, 4))

    assert_simulates(Net().double(), x(8, 4), (2, 2), search=f"random:{seed}", time_limit=5)


def test_what_a_mask_selects_can_be_replaced() -> None:
    """As masked autoencoders put a token in place of patches: how many depends on values, the result does not."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.token = nn.Linear(4, 4), nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.lin(x)
            h[x[..., 0] > 0] = self.token
            h[x < -1] = h[0, 0, 0] * 2
            h[x > 1] = 7.0
            return h.square().sum()

    for search in ("joint", "random:1"):
        assert_simulates(Masked().double(), x(4, 3, 4), (2, 2), search=search, time_limit=5)
