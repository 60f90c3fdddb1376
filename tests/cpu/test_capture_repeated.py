"""Equal blocks are captured in part and copied: the graph is the one that capturing every block gives."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.tracer import Capture, ColoTracer
from autopar.tracer.repeated import FEWEST, repeated_blocks

LAYERS, WIDTH = 9, 8
PARTLY = 5
"""How many blocks of a run are captured."""


def note(number: int) -> None:
    """Count how often each block's own Python ran, by its number, where a capture does not look: other names of this
    file it puts back."""
    note.calls[number] += 1


note.calls = collections.Counter()


class Block(nn.Module):
    """With a residual, dropout and a number that it does not look at."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, *more: Any, scale: Any = None) -> Any:
        note(vars(self)["number"])
        y = self.drop(self.linear(self.norm(x)))
        return x + (y if scale is None else y * scale)


class Stack(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module] = Block, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(block(i) for i in range(layers))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Any:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.dropout(self.head(x), 0.1).square().mean()


def same(model: nn.Module, inputs: Any, *, ran: int | None, **options: Any) -> Capture:
    """Both captures give one graph, and so many blocks ran, or, where blocks differ, all."""
    note.calls.clear()
    made = ColoTracer(**options).capture(model, inputs)
    seen = len(note.calls)
    whole = ColoTracer(whole=True, **options).capture(model, inputs)
    assert ran is None or seen == ran
    assert made.graph == whole.graph
    assert made.graph_module.code == whole.graph_module.code
    assert [m.shape for m in _values(made)] == [m.shape for m in _values(whole)]
    assert (made.notices, made.differentiable, made.requires_grad) == (
        whole.notices,
        whole.differentiable,
        whole.requires_grad,
    )
    return made


def _values(capture: Capture) -> list[Tensor]:
    values = [n.meta.get("val") for n in capture.graph_module.graph.nodes if n.op != "output"]
    return [t for v in values for t in (v if isinstance(v, (tuple, list)) else [v]) if isinstance(t, Tensor)]


X = torch.randn(4, WIDTH)


def test_equal_blocks_run_in_part() -> None:
    model = Stack()
    (run,) = repeated_blocks(model)
    assert run.paths == tuple(f"layers.{i}" for i in range(LAYERS))
    assert run.differing == {(Block, "number")}
    made = same(model, X, ran=PARTLY)
    modules = {n.module for n in made.graph.nodes}
    assert {f"layers.{i}.linear" for i in range(LAYERS)} <= modules


def test_a_short_run_is_captured_whole() -> None:
    same(Stack(layers=FEWEST - 1), X, ran=FEWEST - 1)


@pytest.mark.parametrize("options", [{"every_tangent": True}, {"outputs": "whole"}])
def test_with_other_tangents(options: dict[str, Any]) -> None:
    same(Stack(), X, ran=PARTLY, **options)


def test_in_evaluation() -> None:
    same(Stack().eval(), X, ran=PARTLY)


def test_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        same(Stack(), X, ran=PARTLY)


def test_of_a_model_that_trains_in_part() -> None:
    model = Stack()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("bias" in name)
    same(model, X, ran=PARTLY)
    model.layers[6].linear.bias.requires_grad_(False)  # type: ignore[union-attr,operator]
    same(model, X, ran=LAYERS)


def test_arguments_that_all_blocks_share() -> None:
    class Model(Stack):
        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            scale = self.embed(scale)  # has a gradient, which adds up over the blocks
            for layer in self.layers:
                x = layer(x, None, {"none": [1, "a"]}, scale=scale)
            return self.head(x).sum()

    same(Model(), (X, X.clone()), ran=PARTLY)


def test_blocks_that_return_what_they_got() -> None:
    class Passing(Block):
        def forward(self, x: Tensor, *more: Any, scale: Any = None) -> Any:
            return {"x": super().forward(x), "scale": more[0], "none": None}

    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            scale = self.embed(x)
            for layer in self.layers:
                made = layer(x, scale)
                x, scale = made["x"], made["scale"]
            return (self.head(x) * scale.sum()).sum()

    same(Model(Passing), X, ran=PARTLY)


def test_checkpointed_blocks() -> None:
    class Model(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.head(x).sum()

    same(Model(), X, ran=None)


def test_two_runs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = nn.Sequential(*map(Block, range(9))), nn.Sequential(*map(Block, range(10, 21)))

        def forward(self, x: Tensor) -> Tensor:
            return self.decoder(self.encoder(x).relu()).sum()

    same(Model(), X, ran=2 * PARTLY)


class ReadsItsNumber(Block):
    def forward(self, x: Tensor, *more: Any, scale: Any = None) -> Any:
        return super().forward(x) / (self.number + 1)


class OtherInTheMiddle(Block):
    def forward(self, x: Tensor, *more: Any, scale: Any = None) -> Any:
        return super().forward(x if self.number != 4 else x * 2)


class Counts(Block):
    seen: list[int] = []  # noqa: RUF012

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.shared = Counts.seen

    def forward(self, x: Tensor, *more: Any, scale: Any = None) -> Any:
        self.shared.append(1)
        return super().forward(x)


class Wide(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        width = WIDTH + number % 2
        self.linear = nn.Sequential(nn.Linear(WIDTH, width), nn.Linear(width, WIDTH))  # type: ignore[assignment]


class DropsMore(Block):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.drop.p = number / 20


class Literal(Block):
    def forward(self, x: Tensor, *more: Any, scale: Any = None) -> Any:
        return super().forward(x) * torch.tensor(2.0)


class Normalizes(Block):
    """Changes buffers."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, *more: Any, scale: Any = None) -> Any:
        return self.batch(super().forward(x))


@pytest.mark.parametrize(
    "block", [ReadsItsNumber, OtherInTheMiddle, Counts, Wide, DropsMore, Literal, Normalizes], ids=lambda c: c.__name__
)
def test_blocks_that_are_not_equal(block: type[Block]) -> None:
    Counts.seen.clear()
    same(Stack(block), X, ran=LAYERS)


def test_a_hooked_block() -> None:
    model = Stack()
    model.layers[4].register_forward_hook(lambda module, args, out: out * 2)
    same(model, X, ran=LAYERS)


def test_a_parameter_that_two_blocks_share() -> None:
    model = Stack()
    model.layers[4].linear.weight = model.layers[6].linear.weight  # type: ignore[union-attr]
    same(model, X, ran=LAYERS)


def _forward(written: Callable[[Stack, Tensor], Any]) -> Stack:
    class Model(Stack):
        def forward(self, x: Tensor) -> Any:
            return written(self, x)

    return Model()


def _every_second_scaled(model: Stack, x: Tensor) -> Tensor:
    full, window = x * 2, x * 3
    for i, layer in enumerate(model.layers):
        x = layer(x, scale=full if i % 2 else window)
    return model.head(x).sum()


def _one_of_another_kind(model: Stack, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x, scale=3.0 if i == 5 else 2.0)
    return model.head(x).sum()


def _one_left_out(model: Stack, x: Tensor) -> Tensor:
    for i, layer in enumerate(model.layers):
        x = layer(x) if i != 5 else x
    return model.head(x).sum()


def _twice(model: Stack, x: Tensor) -> Tensor:
    for layer in (*model.layers, *model.layers):
        x = layer(x)
    return model.head(x).sum()


def _backwards(model: Stack, x: Tensor) -> Tensor:
    for layer in reversed(model.layers):
        x = layer(x)
    return model.head(x).sum()


def _between(model: Stack, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x).relu()
    return model.head(x).sum()


def _every_state(model: Stack, x: Tensor) -> Any:
    states = [x := layer(x) for layer in model.layers]
    return model.head(x).sum(), torch.stack(states)


def _an_early_state(model: Stack, x: Tensor) -> Any:
    states = [x := layer(x) for layer in model.layers]
    return model.head(x).sum() + states[1].sum()


def _skips(model: Stack, x: Tensor) -> Tensor:
    down = []
    for i, layer in enumerate(model.layers):
        x = layer(x if i < 5 else x + down[8 - i])
        down.append(x)
    return model.head(x).sum()


def _cache(model: Stack, x: Tensor) -> Tensor:
    cache: dict[str, Tensor] = {}
    for layer in model.layers:
        x = layer(x, cache)
        cache["last"] = x * 2
    return model.head(x).sum() + cache["last"].sum()


def _in_parallel(model: Stack, x: Tensor) -> Tensor:
    return torch.stack([layer(x) for layer in model.layers]).sum()


@pytest.mark.parametrize(
    "written",
    [
        _every_second_scaled,
        _one_left_out,
        _twice,
        _between,
        _skips,
        _in_parallel,
        *(
            pytest.param(f, marks=pytest.mark.slow, id=f.__name__[1:])
            for f in (_one_of_another_kind, _backwards, _every_state, _an_early_state, _cache)
        ),
    ],
    ids=lambda f: f.__name__[1:],
)
def test_models_that_do_not_chain_their_blocks(written: Callable[[Stack, Tensor], Any]) -> None:
    same(_forward(written), X, ran=None)


def test_an_error_is_that_of_the_whole_model() -> None:
    class Fails(Block):
        def forward(self, x: Tensor, *more: Any, scale: Any = None) -> Any:
            return super().forward(x) if x.sum() > 0 else x

    errors = []
    for whole in (False, True):
        with pytest.raises(Exception, match=r"test_capture_repeated\.py") as raised:
            ColoTracer(whole=whole).capture(Stack(Fails), X)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


SLOW = pytest.mark.slow
IDS = {"input_ids": torch.randint(40, (2, 6)), "labels": torch.randint(40, (2, 6)), "use_cache": False}
SMALL = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=9, vocab_size=40)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("GPT2LMHeadModel", transformers.GPT2Config(n_embd=16, n_layer=9, n_head=2, vocab_size=40)),
        pytest.param("LlamaForCausalLM", transformers.LlamaConfig(**SMALL, num_key_value_heads=1), marks=SLOW),
        pytest.param(
            "Gemma2ForCausalLM",
            transformers.Gemma2Config(**SMALL, num_key_value_heads=1, head_dim=8, sliding_window=4),
            marks=SLOW,
        ),
    ],
)
def test_models_of_hugging_face(model: str, config: Any) -> None:
    same(getattr(transformers, model)(config), IDS, ran=None)
