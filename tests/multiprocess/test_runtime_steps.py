"""What a training loop does with a parallel model, on two processes against one: each feature once."""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import (
    SHARDED,
    Mlp,
    distance,
    gpt2,
    gradient_distance,
    images,
    is_cut,
    pair,
    resnet,
    seeded,
    state_distance,
    tokens,
    whole,
)

pytestmark = pytest.mark.multiprocess
EXACT = 1e-9
FLOAT = 1e-5


def _mlp(**options: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(6, 8, dtype=torch.float64)
    options.setdefault("constraints", SHARDED["mlp"])
    return *pair(Mlp().double(), (x,), (2,), **options), x


def _gpt2(**options: Any) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = gpt2(n_layer=1).double(), tokens(4)
    return *pair(model, batch, (2,), constraints=SHARDED["gpt2"], **options), batch


def _error_of(action: Any) -> str:
    try:
        action()
    except AutoparError as error:
        return str(error)
    return ""


# Outputs that are whole: the loss is outside, as on one device.


def _backwards_of_a_loss_outside() -> dict[str, float]:
    reference, model, x = _mlp()
    found: dict[str, float] = {}
    found["cut"] = sum(is_cut(p) for p in model.parameters())
    for module in (reference, model):
        module(x).pow(2).mean().backward()
    found["one backward"] = gradient_distance(model, reference)
    for module in (reference, model):
        module(2 * x).pow(2).mean().backward()
    found["accumulated"] = gradient_distance(model, reference)
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (reference, model)]
    found["norm"] = distance(norms[1], norms[0])
    found["clipped"] = gradient_distance(model, reference)
    for module in (reference, model):
        module.zero_grad(set_to_none=False)
        first, second = module(x), module(x + 1)
        (first.sum() * second.mean()).backward()
    found["two forwards, one backward"] = gradient_distance(model, reference)
    for module in (reference, model):
        module.zero_grad()
        scaled = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        scaled.scale(module(x).sum()).backward()
        scaled.unscale_(optimizer)
        scaled.step(optimizer)
        scaled.update()
    found["scaled step"] = state_distance(model, reference)
    return found


def test_gradients_of_a_loss_outside_equal_one_process(pool: RankPool):
    for found in pool.run(_backwards_of_a_loss_outside):
        assert found.pop("cut") == 3
        assert {name: value for name, value in found.items() if value > EXACT} == {}


def _gradient_of_an_input() -> float:
    reference, _, x = _mlp()
    torch.manual_seed(0)
    known = x.clone().requires_grad_()
    _, model = pair(Mlp().double(), (known,), (2,), constraints={**SHARDED["mlp"], "input:x": "S0R"})
    reference.load_state_dict({k: whole(v) for k, v in model.state_dict().items()})
    mine = x.clone().requires_grad_()
    reference(known).pow(2).sum().backward()
    model(mine).pow(2).sum().backward()
    return distance(mine.grad, known.grad)


def test_an_input_that_the_plan_cuts_gets_its_whole_gradient(pool: RankPool):
    assert max(pool.run(_gradient_of_an_input)) < EXACT


def _dtensor_outputs() -> tuple[bool, float, float]:
    reference, model, x = _mlp(outputs="dtensor")
    out = model(x)
    reference(x).pow(2).mean().backward()
    out.full_tensor().pow(2).mean().backward()
    by_whole = gradient_distance(model, reference)
    reference.zero_grad()
    model.zero_grad()
    reference(x).pow(2).mean().backward()
    model(x).pow(2).mean().full_tensor().backward()
    return isinstance(out, DTensor), by_whole, gradient_distance(model, reference)


def test_a_loss_outside_on_dtensor_outputs(pool: RankPool):
    for is_dtensor, by_whole, by_dtensor in pool.run(_dtensor_outputs):
        assert is_dtensor
        assert by_whole < EXACT
        assert by_dtensor < EXACT


def _refusals() -> dict[str, str]:
    _, model, x = _mlp()
    used = model(x).sum()
    used.backward(retain_graph=True)
    _, alike, _ = _mlp(constraints={})  # its parameters are whole, and so read as they are stored
    changed = alike(x).sum()
    with torch.no_grad():
        alike.down.weight.mul_(2)
    parameters = list(model.parameters())
    return {
        "again": _error_of(used.backward),
        "changed": _error_of(changed.backward),
        "twice": _error_of(lambda: torch.autograd.grad(model(x).sum(), parameters, create_graph=True)),
        "dtype": _error_of(lambda: model(x.float())),
        "rank": _error_of(lambda: model(x[None])),
    }


def test_what_cannot_be_done_says_so(pool: RankPool):
    for found in pool.run(_refusals):
        assert "retain_graph=True cannot keep" in found["again"]
        assert "changed after the forward" in found["changed"]
        assert "Second derivatives" in found["twice"]
        assert "torch.float32" in found["dtype"]
        assert "(1, 6, 8)" in found["rank"]


# A loss inside: its backward is captured alone, and other outputs are DTensors.


def _backward_from_logits() -> dict[str, Any]:
    reference, model, batch = _gpt2()
    out = model(**batch)
    found: dict[str, Any] = {"dtensor": isinstance(out.logits, DTensor), "logits": None, "past": out.past_key_values}
    found["logits"] = distance(out.logits, reference(**batch).logits)
    programs = [len(model._autopar.programs)]
    for step in range(2):
        for module in (reference, model):
            module.zero_grad()
            whole(module(**batch).logits).pow(2).mean().backward()
        found[f"from logits, {step}"] = gradient_distance(model, reference)
        programs.append(id(model._autopar.programs[0]))
    for module in (reference, model):
        module.zero_grad()
        out = module(**batch)
        (out.loss + whole(out.logits).square().mean()).backward()
    found["from both"] = gradient_distance(model, reference)
    found["compiled again"] = len(set(programs[1:])) - 1
    return found


def test_a_backward_from_an_output_that_was_not_captured_compiles_once(pool: RankPool):
    for found in pool.run(_backward_from_logits):
        assert found.pop("dtensor")
        assert found.pop("past") is None
        assert found.pop("compiled again") == 0
        assert {name: value for name, value in found.items() if value > 1e-6} == {}


def _local_batches() -> dict[str, float]:
    torch.manual_seed(0)
    batch = tokens(4)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][0, 2:] = -100  # rank 0 has fewer tokens, so that averages of averages would differ
    rank = dist.get_rank()
    mine = {k: v[2 * rank : 2 * rank + 2] for k, v in batch.items()}
    reference, model = pair(gpt2(n_layer=1).double(), mine, (2,), batch="local", constraints=SHARDED["gpt2"])
    outs = [reference(**batch), model(**mine)]
    for out in outs:
        out.loss.backward()
    return {"loss": distance(outs[1].loss, outs[0].loss), "gradients": gradient_distance(model, reference)}


def test_local_batches_give_the_loss_and_gradients_of_the_global_batch(pool: RankPool):
    for found in pool.run(_local_batches):
        assert found["loss"] < 1e-6
        assert found["gradients"] < 1e-6


def _local_batches_loss_outside() -> tuple[float, float]:
    torch.manual_seed(0)
    x = torch.randn(6, 8, dtype=torch.float64)
    rank = dist.get_rank()
    mine = x[3 * rank : 3 * rank + 3]
    reference, model = pair(Mlp().double(), (mine,), (2,), batch="local", constraints=SHARDED["mlp"])
    expected, out = reference(x), model(mine)
    expected.square().sum().backward()
    out.square().sum().backward()
    return distance(out, expected[3 * rank : 3 * rank + 3]), gradient_distance(model, reference)


def test_local_outputs_are_this_ranks_slice_and_their_losses_add_up(pool: RankPool):
    for outputs, gradients in pool.run(_local_batches_loss_outside):
        assert outputs < EXACT
        assert gradients < EXACT


# Randomness, modes and other batches.


def _dropped() -> list[list[Tensor]]:
    torch.manual_seed(dist.get_rank())  # ranks may be seeded differently, for their data; rank 0's parameters count
    x = torch.ones(6, 8)
    _, model = pair(Mlp(dropout=0.5), (x,), (2,), constraints=SHARDED["mlp"])
    runs = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed + dist.get_rank())
        runs.append([model(x).detach() for _ in range(2)])
    return runs


def test_dropout_differs_by_step_is_one_on_all_ranks_and_follows_manual_seed(pool: RankPool):
    one, two = pool.run(_dropped)
    for a, b in zip(one, two, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    first, again, other = one
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def _modes_and_batches() -> dict[str, Any]:
    torch.manual_seed(0)
    batch, small = images(8), images(3)
    doubled = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    reference, model = pair(resnet().double(), doubled, (2,))
    found: dict[str, Any] = {}
    sizes = []

    def compare(name: str, given: dict[str, Tensor], train: bool, grad: bool) -> None:
        given = {k: v.double() if v.is_floating_point() else v for k, v in given.items()}
        with torch.set_grad_enabled(grad):
            outs = [m.train(train)(**given) for m in (reference, model)]
        found[name] = max(distance(outs[1][key], outs[0][key]) for key in ("loss", "logits") if key in outs[0])
        found[f"{name} requires grad"] = float(outs[0].logits.requires_grad != outs[1].logits.requires_grad)
        sizes.append(len(model._autopar.programs))

    for _ in range(2):
        compare("train", batch, True, True)
        compare("evaluate", batch, False, False)
        compare("last batch", small, True, True)
        compare("without labels", {"pixel_values": small["pixel_values"]}, False, False)
    found["buffers"] = state_distance(model, reference)
    with torch.inference_mode():
        compare("inference mode", small, False, False)
    return {"sizes": sizes, **found}


def test_modes_and_other_batches_compile_once_each(pool: RankPool):
    for found in pool.run(_modes_and_batches):
        assert found.pop("sizes") == [1, 2, 3, 4, 4, 4, 4, 4, 5]
        assert {name: value for name, value in found.items() if value > 1e-6} == {}


class Partly(nn.Module):
    """A frozen layer, a parameter that nothing reads, and outputs of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.layer = nn.Linear(8, 7)
        self.unused = nn.Parameter(torch.ones(4, 4))

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Any]:
        out = self.layer(self.frozen(x)) * scale
        return {"out": out, "best": out.argmax(-1), "x": x, "rows": x.shape[0], "none": None, "fixed": out.detach()}


def _partly() -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(6, 8, dtype=torch.float64)
    reference, model = pair(Partly().double(), {"x": x}, (2,), constraints={"*.weight": "S0R"})
    for module in (reference, model):
        module(x)["out"].square().sum().backward()
    outs = [m(x, scale=2.0) for m in (reference, model)]
    tensors = ("out", "best", "x", "fixed")
    return {
        "gradients": gradient_distance(model, reference),
        "outputs": max(distance(outs[1][k], outs[0][k]) for k in tensors),
        "plain": [(o["rows"], o["none"]) for o in outs],
        "require grad": [[o[k].requires_grad for k in tensors] for o in outs],
        "cut": [n for n, p in model.named_parameters() if is_cut(p)],
    }


def test_frozen_and_unused_parameters_and_outputs_of_all_kinds(pool: RankPool):
    for found in pool.run(_partly):
        assert found["gradients"] < EXACT
        assert found["outputs"] < EXACT
        assert found["plain"] == [(6, None)] * 2
        assert found["require grad"][0] == found["require grad"][1]
        assert {"frozen.weight", "layer.weight"} <= set(found["cut"])


def _left_over() -> dict[str, int]:
    _, model, batch = _gpt2()
    model(**batch).loss.backward()  # the first step also fills caches
    model.zero_grad()
    gc.collect()
    before = _living()
    out = model(**batch)
    loss = out.loss
    during = _living() - before
    del out
    loss.backward()
    model.zero_grad()
    # gloo's threads let go of a collective's buffers a moment after it is waited for.
    patience = time.monotonic() + 10
    while (after := _living() - before) > 2 and time.monotonic() < patience:
        time.sleep(0.05)
    watched = weakref.ref(loss.grad_fn)
    del loss
    gc.collect()
    return {"during": during, "after": after, "nodes": int(watched() is not None)}


def _living() -> int:
    """Elements of all tensors that are alive."""
    tensors = (o for o in gc.get_objects() if type(o) is Tensor)
    return sum({t.data_ptr(): t.numel() for t in tensors if not t.is_meta and t.data_ptr()}.values())


def test_after_the_backward_nothing_of_the_step_is_alive(pool: RankPool):
    for found in pool.run(_left_over):
        assert found["during"] > 1000
        assert found["after"] <= 2
        assert found["nodes"] == 0


def _part_of_a_number() -> str:
    model = autopar.autoparallelize(
        seeded(_WithLogits), (torch.ones(4, 8),), mesh=(2,), constraints={"output:1": "S0R"}, time_limit=2
    )
    out = model(torch.arange(32.0).reshape(4, 8))[1].detach()
    whole = out.full_tensor()
    assert out.amax(0).full_tensor().sum().item() == whole.amax(0).sum().item()
    try:
        return str(out.mean().item())
    except AutoparError as error:
        return str(error)


class _WithLogits(Mlp):
    def forward(self, x: Any) -> Any:
        out = super().forward(x)
        return out.square().mean(), out


def test_a_number_of_a_cut_output_is_not_that_of_one_rank(pool: RankPool) -> None:
    for said in pool.run(_part_of_a_number):
        assert "item() of it" in said
        assert 'outputs="whole"' in said


class _Block(nn.Module):
    """Equal blocks, each of which leaves its weights; all of them add to one list."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.losses, self.weights = nn.Linear(8, 8), losses, None

    def forward(self, x: Tensor) -> Tensor:
        self.weights = self.linear(x).softmax(-1)
        self.losses.append(self.weights.square().sum())
        return x + self.weights


class _Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.blocks = nn.ModuleList(_Block(self.losses) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.losses.clear()
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _left_in_attributes() -> tuple[float, float, bool]:
    torch.manual_seed(0)
    x = torch.randn(6, 8, dtype=torch.float64)
    specs = {"blocks.*.linear.weight": "S0R", "output:self.blocks.2.weights": "S0R"}
    reference, model = pair(_Blocks().double(), (x,), (2,), constraints=specs, time_limit=2)
    model(x)
    cut = is_cut(model.blocks[2].weights)
    for _ in range(2):
        for module in (reference, model):
            module.zero_grad()
            (module(x) + sum(module.losses)).backward()
            assert len(module.losses) == 3
    value = distance(model.blocks[2].weights, reference.blocks[2].weights)
    return gradient_distance(model, reference), value, cut


def test_what_blocks_leave_in_attributes_is_there_and_has_gradients(pool: RankPool) -> None:
    for gradients, value, cut in pool.run(_left_in_attributes):
        assert gradients < EXACT
        assert value < EXACT
        assert cut
