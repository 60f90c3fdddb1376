"""A program runs only while what capture read is unchanged: a model that was changed computes what it has become."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace

import peft
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

import autopar
from autopar.errors import CaptureError
from autopar.tracer import ColoTracer
from autopar.tracer.python_state import changed, plain_state

GAIN = 3.0
SHIFTS = {"last": 1.0}


def shifted(x: Tensor) -> Tensor:
    return x + SHIFTS["last"]


def multiplied(gain: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * gain


class Options:
    def __init__(self) -> None:
        self.scale = 2.0
        self.note = "never read"


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


class Model(nn.Module):
    """Reads what a model can be made of beside tensors."""

    kind = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.drop = nn.Dropout(0.0)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)
        self.register_buffer("bias", None)
        self.register_buffer("ready", torch.tensor(False))
        self.beta = 0.5
        self.options = Options()
        self.space = SimpleNamespace(power=1)
        self.config = {"heads": {"scale": 1.0}}
        self.functions = [torch.relu, multiplied(1.0)]
        self.constant = torch.tensor(2.0)
        self.seen = 0

    @property
    def twice(self) -> float:
        return self.beta * 2

    def rescaled(self, x: Tensor) -> Tensor:
        return x * self.config["heads"]["scale"]

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(x)) * self.beta * self.options.scale * GAIN * type(self).kind
        for layer in self.layers:
            x = layer(x)
        x = shifted(x) if self.bias is None else shifted(x) + self.bias
        for function in self.functions:
            x = function(x)
        if self.ready:
            x = -x
        x = self.rescaled(self.drop(x) * self.twice * self.constant) ** self.space.power
        return self.head(x).square().sum()


X = torch.linspace(-1, 1, 32).reshape(4, 8)


@pytest.fixture(scope="module")
def wrapped() -> nn.Module:
    torch.manual_seed(0)
    return autopar.autoparallelize(Model(), X, mesh=(1,), time_limit=2)


@pytest.fixture
def pair(wrapped: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A parallel model and the same one on one device; each test has copies, which share the compiled programs."""
    plain = Model()
    state = wrapped.state_dict()
    plain.load_state_dict({n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()})
    return copy.deepcopy(wrapped), plain


def programs(model: nn.Module) -> int:
    return model._autopar.compiled


def assert_equal(parallel: nn.Module, plain: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        mine = parallel(X)
    expected = plain(X)
    torch.testing.assert_close(mine, expected)
    for model, loss in ((parallel, mine), (plain, expected)):
        model.zero_grad()
        loss.backward()
    for (name, a), b in zip(parallel.named_parameters(), plain.parameters(), strict=True):
        got = a.grad.full_tensor() if isinstance(a.grad, DTensor) else a.grad
        torch.testing.assert_close(got, b.grad, msg=lambda text, name=name: f"{name}: {text}")


def doubled(module: nn.Module, args: object, out: Tensor) -> Tensor:
    return out * 2


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a coefficient": lambda m: setattr(m, "beta", 1.0),
    "another type of number": lambda m: setattr(m.space, "power", 2),
    "an activation": lambda m: setattr(m.inner, "act", nn.ReLU()),
    "an option of a layer": lambda m: setattr(m.inner.act, "approximate", "tanh"),
    "a probability": lambda m: setattr(m.drop, "p", 1.0),
    "momentum": lambda m: setattr(m.norm, "momentum", None),
    "a field of an object": lambda m: setattr(m.options, "scale", 5.0),
    "an item of a dict in a dict": lambda m: m.config["heads"].update(scale=4.0),
    "a list of functions": lambda m: m.functions.append(torch.tanh),
    "a tensor that is no buffer": lambda m: setattr(m, "constant", torch.tensor(3.0)),
    "a tensor in place": lambda m: m.constant.fill_(7.0),
    "a buffer that was None": lambda m: setattr(m, "bias", torch.ones(8)),
    "a buffer that a branch looks at": lambda m: m.ready.fill_(value=True),
    "a layer less": lambda m: m.layers.pop(1),
    "a layer more": lambda m: m.layers.append(nn.Identity()),
    "a hook that computes": lambda m: m.head.register_forward_hook(doubled),
    "a hook before": lambda m: m.head.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "a replaced forward": lambda m: setattr(m.head, "forward", lambda x: x * 3),
    "a replaced method": lambda m: setattr(m, "rescaled", lambda x: x * 6),
    "a frozen layer": lambda m: m.inner.requires_grad_(requires_grad=False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_computes_what_it_has_become(pair, change) -> None:
    parallel, plain = pair
    before = programs(parallel)
    for model in pair:
        CHANGES[change](model)
    assert_equal(parallel, plain)
    compiled = programs(parallel)
    assert compiled > before
    with torch.no_grad():
        parallel(X)
    assert programs(parallel) == compiled


def test_globals_closures_and_class_attributes_are_part_of_the_program(pair, monkeypatch) -> None:
    parallel, plain = pair
    for owner, name, value in ((__import__(__name__, fromlist=["x"]), "GAIN", 2.0), (Model, "kind", 0.5)):
        monkeypatch.setattr(owner, name, value)
        assert_equal(parallel, plain)
    monkeypatch.setitem(SHIFTS, "last", -1.0)
    assert_equal(parallel, plain)
    for model in pair:  # copies of a model share its functions
        monkeypatch.setattr(model.functions[1].__closure__[0], "cell_contents", 2.0)
    assert_equal(parallel, plain)


def test_what_was_not_read_and_what_is_equal_change_no_program(pair) -> None:
    parallel, plain = pair
    assert_equal(parallel, plain)
    before = programs(parallel)
    for model in pair:
        model.seen += 1
        model.options.note = "another"
        model.inner.act = nn.GELU()
        model.options = Options()
        model.beta = float("0.5")
        model.constant = model.constant.clone()
        model.config = copy.deepcopy(model.config)
    assert_equal(parallel, plain)
    assert programs(parallel) == before


def test_a_change_that_is_taken_back_has_its_program(pair) -> None:
    parallel, plain = pair
    for beta in (0.75, 0.5, 0.75, 0.5):
        parallel.beta = plain.beta = beta
        assert_equal(parallel, plain)
    compiled = programs(parallel)
    parallel.beta = plain.beta = 0.75
    assert_equal(parallel, plain)
    assert programs(parallel) == compiled


def test_the_warning_names_what_changed(pair) -> None:
    parallel, _ = pair
    parallel.drop.p = 0.25
    with pytest.warns(UserWarning, match=r"drop\.p was 0\.0 and is 0\.25, so the program is compiled again"):
        parallel(X)


def refused_at_the_next_call(model: nn.Module, handle: RemovableHandle, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        model(X)
    handle.remove()
    model(X)


@pytest.mark.filterwarnings("ignore")
def test_a_hook_that_cannot_be_captured_is_refused_and_its_module_named(pair) -> None:
    parallel, _ = pair
    looks = parallel.inner.linear.register_forward_hook(lambda *_: None)
    refused_at_the_next_call(parallel, looks, r"hook on inner\.linear")
    backward = parallel.head.register_full_backward_hook(lambda *_: None)
    refused_at_the_next_call(parallel, backward, "module head has a hook on its gradients")
    of_all = nn.modules.module.register_module_forward_hook(doubled)
    refused_at_the_next_call(parallel, of_all, "modules of all models")


REPLACED: dict[str, Callable[[nn.Module], object]] = {
    "a module": lambda m: setattr(m, "head", nn.Linear(8, 4)),
    "a module of another width": lambda m: setattr(m, "head", nn.Linear(8, 6)),
    "a parameter": lambda m: setattr(m.head, "weight", nn.Parameter(torch.randn(4, 8))),
    "no parameter": lambda m: setattr(m.head, "bias", None),
    "layers in another order": lambda m: setattr(m, "layers", nn.ModuleList([*m.layers][::-1])),
    "tied parameters": lambda m: setattr(m.layers[0], "weight", m.layers[1].weight),
}


@pytest.mark.parametrize("kind", REPLACED)
def test_tensors_that_are_put_into_the_model_are_placed(pair, kind) -> None:
    parallel, plain = pair
    for model in pair:
        torch.manual_seed(3)
        REPLACED[kind](model)
    assert_equal(parallel, plain)
    assert all(isinstance(p, DTensor) for p in parallel.parameters())


class Unregistered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = [nn.Linear(8, 8) for _ in range(2)], nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().sum()


def test_modules_that_are_not_registered_are_constants_that_are_watched() -> None:
    plain = Unregistered()
    with pytest.raises(CaptureError, match=r"parameter blocks\[0\]\.(weight|bias) is trained but"):
        ColoTracer().capture(plain, X)
    for block in plain.blocks:
        block.requires_grad_(requires_grad=False)
    parallel = autopar.autoparallelize(copy.deepcopy(plain), X, mesh=(1,), time_limit=2)
    assert_equal(parallel, plain)
    for model in (parallel, plain):
        with torch.no_grad():
            model.blocks[1].weight.mul_(2)
    assert_equal(parallel, plain)
    for model in (parallel, plain):
        model.blocks.pop(0)
    assert_equal(parallel, plain)


def test_adapters_that_are_merged_or_disabled_are_no_longer_added() -> None:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.0)
    plain = peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    ids = torch.randint(32, (2, 6))
    batch = {"input_ids": ids, "labels": ids}
    parallel = autopar.autoparallelize(copy.deepcopy(plain), batch, mesh=(1,), time_limit=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for change in ("merge_adapter", "unmerge_adapter"):
            for model in (parallel, plain):
                getattr(model, change)()
            torch.testing.assert_close(parallel(**batch).loss, plain(**batch).loss)
        with torch.no_grad(), parallel.disable_adapter(), plain.disable_adapter():
            torch.testing.assert_close(parallel(**batch).loss, plain(**batch).loss)
        parallel.config.output_hidden_states = True
        assert len(parallel(**batch).hidden_states) == 2


class Counting(nn.Module):
    """Asks its buffers for values."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(8, 8), kind
        self.register_buffer("started", torch.tensor(False))
        self.register_buffer("step", torch.tensor(0))
        self.register_buffer("scales", torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.kind == "starts" and not self.started:
            self.scales.copy_(self.scales + 1)
            self.started.fill_(value=True)
        if self.kind == "every third":
            self.step += 1
            x = -x if self.step % 3 == 0 else x
        if self.kind == "numbers":
            x = x * self.scales[2].item() + sum(self.scales.tolist()) + int(self.step)
        if self.kind == "changing number":
            self.step += 1
            x = x * self.step.item()
        return (x * self.scales.sum()).sum()


@pytest.mark.parametrize(("kind", "compiled"), [("starts", 2), ("every third", 2), ("numbers", 2)])
def test_what_a_forward_asks_of_buffers_is_known(kind, compiled) -> None:
    plain = Counting(kind)
    parallel = autopar.autoparallelize(copy.deepcopy(plain), X, mesh=(1,), time_limit=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(7):
            if kind == "numbers" and step == 3:
                plain.scales.mul_(2)
                parallel.scales.mul_(2)
            torch.testing.assert_close(parallel(X), plain(X))
    assert programs(parallel) == compiled


def test_a_number_that_is_another_at_every_call_is_refused() -> None:
    with pytest.raises(CaptureError, match="takes a Python number from the buffer step, which it changes"):
        ColoTracer().capture(Counting("changing number"), X)


def test_containers_in_containers_that_nobody_touches_are_unchanged() -> None:
    model = Inner()
    model.kw = {f"o{i}": {f"k{j}": [j, (j, {"x": j})] for j in range(3)} for i in range(3)}
    assert not changed(plain_state(model), plain_state(model))
    before = plain_state(model)
    model.kw["o1"]["k2"][1][1]["x"] = 7
    assert set(changed(before, plain_state(model))) == {"kw"}


def test_a_check_takes_a_place_of_its_own_in_a_deep_model() -> None:
    """Blocks that capture skips since they equal others are watched as these are."""
    config = transformers.GPT2Config(n_layer=10, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(32, (2, 8))
    guards = ColoTracer().capture(model, {"input_ids": ids, "labels": ids}).guards
    binding = guards.bind(model)
    assert binding.is_unchanged()
    assert guards.difference(copy.deepcopy(model)) is None
    model.transformer.h[5].attn.attn_dropout.p = 0.3
    assert not binding.is_unchanged()
    assert str(guards.difference(model)) == "transformer.h.5.attn.attn_dropout.p was 0.1 and is 0.3"
