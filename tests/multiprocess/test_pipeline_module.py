"""What a module is while it trains as a pipeline: its parameters, states, modes and errors."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError, MeshError, RankError
from autopar.pipelines.request import Pipeline
from autopar.training import Checkpointer, GradScaler, clip_grad_norm_
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import distance, gpt2, llama, pair, seeded, tokens, whole

pytestmark = pytest.mark.multiprocess
FLOAT = 1e-4
CLUSTER = "cpu-2"
PLAIN = Pipeline(micro_batches=4, schedule="1f1b")


def _pair(mesh: dict[str, int] | None = None, build: Any = gpt2, **options: Any) -> tuple[Any, Any, Any]:
    batch = seeded(tokens)
    options = {"pipeline": PLAIN, **options}
    reference, model = pair(seeded(build), batch, mesh or {"pp": 2}, cluster=CLUSTER, **options)
    return reference, model, batch


def _difference(model: nn.Module, reference: nn.Module, of: str = "") -> float:
    expected = dict(reference.named_parameters())
    if of == "grad":
        return max(distance(p.grad, expected[n].grad) for n, p in model.named_parameters())
    return max(distance(p, expected[n]) for n, p in model.named_parameters())


def _modes() -> dict[str, Any]:
    """Evaluation, another batch size, a batch that does not divide, and a changed module."""
    reference, model, batch = _pair(build=lambda: gpt2(attn_pdrop=0.1, resid_pdrop=0.1, embd_pdrop=0.1))
    found: dict[str, Any] = {}
    for module in (model, reference):
        module.eval()
    for name, rows in (("eval", 8), ("small", 4), ("odd", 3)):
        given = {k: t[:rows] for k, t in batch.items()}
        with torch.no_grad():
            out, expected = model(**given), reference(**given)
        assert type(out.logits).__name__ == "Whole"
        found[name] = max(distance(out.loss, expected.loss), distance(out.logits, expected.logits))
    with torch.no_grad():
        out, expected = (m(input_ids=batch["input_ids"]) for m in (model, reference))
    found["without labels"] = distance(out.logits, expected.logits)
    larger = seeded(lambda: tokens(16), 3)
    for module in (model, reference):
        module(**larger).loss.backward()
    found["larger"] = _difference(model, reference, "grad")
    try:
        model(**{k: t[:6] for k, t in batch.items()})
    except AutoparError as error:
        found["refused"] = str(error)
    return found


@pytest.mark.slow
def test_other_batches_and_modes_are_programs_of_their_own(pool: RankPool) -> None:
    for found in pool.run(_modes):
        assert "4" in found.pop("refused")
        assert {k: v for k, v in found.items() if not v < FLOAT} == {}


def _states(folder: str) -> dict[str, Any]:
    """States: whole dicts, parameters of other stages, an optimizer made before, checkpoints of DCP."""
    torch.manual_seed(0)
    batch = seeded(tokens)
    model = seeded(gpt2)
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for optimizer, module in zip(optimizers, (model, reference), strict=True):
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    warnings.simplefilter("ignore")
    model = autopar.autoparallelize(model, batch, mesh={"pp": 2}, cluster=CLUSTER, pipeline=PLAIN)
    found: dict[str, Any] = {}
    for optimizer, module in zip(optimizers, (model, reference), strict=True):
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found["optimizer"] = _difference(model, reference)
    steps = sum(len(g["params"]) for g in optimizers[0].param_groups)
    assert steps == len(list(model.parameters())) < len(list(reference.parameters()))
    missing = next(n for n in dict(reference.named_parameters()) if n not in dict(model.named_parameters()))
    try:
        model.get_parameter(missing)
    except AutoparError as error:
        found["elsewhere"] = str(error)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    fresh = seeded(gpt2, 5)
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    fresh.load_state_dict(state["model"])
    found["one process"] = _difference(fresh, reference)
    other = seeded(gpt2, 6)
    model.load_state_dict(other.state_dict())
    found["whole dict"] = _difference(model, other)
    data = autopar.autoparallelize(seeded(gpt2, 7), batch, mesh={"dp": 2}, cluster=CLUSTER)
    state = {"model": data.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    found["without a pipeline"] = _difference(data, reference)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    found["again"] = _difference(model, reference)
    model.save_pretrained(f"{folder}/pretrained")
    dist.barrier()
    found["pretrained"] = _difference(type(fresh).from_pretrained(f"{folder}/pretrained"), reference)
    return found


def test_states_are_those_of_this_rank(pool: RankPool, tmp_path: Path) -> None:
    for found in pool.run(_states, str(tmp_path)):
        assert "belongs to another stage" in found.pop("elsewhere")
        assert {k: v for k, v in found.items() if not v < FLOAT} == {}


def _resized(folder: str, stages: int) -> dict[str, float]:
    """Save from four stages of one rank; load into two of two."""
    reference, model, _ = _pair({"pp": stages, "dp": 4 // stages}, build=lambda: gpt2(n_layer=4))
    if stages == 4:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
        return {}
    model.load_state_dict(seeded(lambda: gpt2(n_layer=4), 9).state_dict())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    return {"loaded": _difference(model, reference)}


@pytest.mark.slow
def test_a_checkpoint_loads_into_another_number_of_stages(four: RankPool, tmp_path: Path) -> None:
    four.run(_resized, str(tmp_path), 4)
    for found in four.run(_resized, str(tmp_path), 2):
        assert found["loaded"] == 0.0


def _resumed(folder: str, mesh: dict[str, int], pipeline: Pipeline | None) -> dict[str, Any]:
    """Save a pipeline after a step, load it into a fresh model, and take the next step with both."""
    reference, model, batch = _pair()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for optimizer, module in zip(optimizers, (model, reference), strict=True):
        module(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpointer = Checkpointer(folder)
    checkpointer.save(1, model, optimizers[0], wait=True)
    plan = checkpointer.plan()
    assert plan is not None and plan.digest == model.plan.digest
    _, fresh, _ = _pair(mesh, build=lambda: seeded(gpt2, 5), pipeline=pipeline)
    optimizers[0] = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    resumed = checkpointer.load(fresh, optimizers[0])
    assert resumed is not None and resumed.step == 1
    found: dict[str, Any] = {"loaded": _difference(fresh, reference)}
    for optimizer, module in zip(optimizers, (fresh, reference), strict=True):
        module(**batch).loss.backward()
        optimizer.step()
    return {**found, "next": _difference(fresh, reference)}


@pytest.mark.parametrize(
    ("mesh", "pipeline"),
    [
        ({"pp": 2}, PLAIN),
        pytest.param({"pp": 2}, Pipeline(micro_batches=2, split=["transformer.ln_f"]), marks=pytest.mark.slow),
        pytest.param({"dp": 2}, None, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_resumed(pool: RankPool, tmp_path: Path, mesh: dict[str, int], pipeline: Pipeline | None) -> None:
    for found in pool.run(_resumed, str(tmp_path), mesh, pipeline):
        assert {k: v for k, v in found.items() if not v < FLOAT} == {}


def _accumulated(two_phase: bool) -> dict[str, Any]:
    """Two steps of three calls with losses weighted differently, an incomplete cycle, a step too early."""
    pipeline = Pipeline(micro_batches=2, schedule="1f1b", two_phase=two_phase)
    reference, model, _ = _pair(pipeline=pipeline, accumulation_steps=3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    batches = [seeded(tokens, i) for i in range(9)]
    found: dict[str, Any] = {"early": 0}
    for i, batch in enumerate(batches[:6]):
        for module in (model, reference):
            (module(**batch).loss * (0.2 + 0.1 * i)).backward()
        if i % 3 < 2:
            found["early"] += sum(p.grad is not None for p in model.parameters())
        else:
            found[f"gradients {i}"] = _difference(model, reference, "grad")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for module in (model, reference):
        for batch in batches[6:8]:
            module(**batch).loss.backward()
    with contextlib.suppress(AutoparError):
        optimizers[0].step()
        found["stepped"] = 1.0
    assert model.deliver_gradients() == 2
    found["incomplete"] = _difference(model, reference, "grad")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("two_phase", [False, True])
def test_accumulation_over_calls(pool: RankPool, two_phase: bool) -> None:
    for found in pool.run(_accumulated, two_phase):
        assert {k: v for k, v in found.items() if not v < FLOAT} == {}


def _chosen(pipeline: Any) -> dict[str, Any]:
    """A pipeline of a job that gives no mesh."""
    batch = seeded(tokens)
    reference, model = pair(seeded(gpt2), batch, None, cluster=CLUSTER, pipeline=pipeline)
    for module in (model, reference):
        module(**batch).loss.backward()
    return {"mesh": str(model.plan.mesh), "gradients": _difference(model, reference, "grad")}


def test_a_job_without_a_mesh_trains_as_the_pipeline_that_it_asks_for(pool: RankPool) -> None:
    for found in pool.run(_chosen, 2):
        assert found["mesh"] == "(pp=2)" and found["gradients"] < FLOAT


def test_stages_that_the_ranks_do_not_divide_are_refused(pool: RankPool) -> None:
    with pytest.raises(MeshError, match="No pipeline of 3 stages was found for 2 ranks"):
        pool.run(_chosen, 3)


class Chain(nn.Module):
    """Layers of which the first and the last share a weight, as in a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"logits": x, "loss": x.square().mean()}


def _left_behind(mesh: dict[str, int], two_phase: bool, small: bool) -> dict[str, bool]:
    """Whether gradients and inputs of calls live on, while no cycle is collected."""
    plain: dict[str, Any] = {"pipeline": None} if "pp" not in mesh else {}
    whole: dict[str, Any] = {"outputs": "whole"} if two_phase else {}
    if small:
        batch: dict[str, torch.Tensor] = seeded(lambda: {"x": torch.randn(8, 6)})
        _, model = pair(seeded(Chain), batch, mesh, cluster=CLUSTER, **{"pipeline": PLAIN, **plain, **whole})
    else:
        _, model, batch = _pair(mesh, **plain, **whole)
    refs: dict[str, list[weakref.ref[Any]]] = {"gradients": [], "inputs": []}
    gc.collect()
    gc.disable()
    try:
        for trains in (True, True, False):
            given = {k: t.clone() for k, t in batch.items()}
            refs["inputs"] += [weakref.ref(t) for t in given.values()]
            with torch.set_grad_enabled(trains):
                out = model(**given)
            if trains:
                loss = out["logits"].square().mean() if two_phase else out["loss"]
                loss.backward()
                refs["gradients"] += [weakref.ref(p.grad._local_tensor) for p in model.parameters()]
                model.zero_grad()
                assert _gone(refs["gradients"]), "held by the loss"
        model(**{k: t.clone() for k, t in batch.items()})
        del given, out, loss
        return {name: not _gone(found) for name, found in refs.items()}
    finally:
        gc.enable()


def _gone(refs: list[weakref.ref[Any]]) -> bool:
    """Whether nothing is left; gloo's threads let go of what they have sent a moment after it has arrived."""
    until = time.monotonic() + 5.0
    while any(ref() is not None for ref in refs):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("small", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mesh", [{"pp": 2}, {"dp": 2}], ids=str)
@pytest.mark.parametrize("two_phase", [False, True])
def test_nothing_of_a_step_lives_on(pool: RankPool, mesh: dict[str, int], two_phase: bool, small: bool) -> None:
    assert pool.run(_left_behind, mesh, two_phase, small) == [{"gradients": False, "inputs": False}] * 2


class Changing(nn.Module):
    """Reads a buffer that the same call changes, from what it computes or not."""

    def __init__(self, statistic: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.statistic = statistic
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out = x * self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.5).add_(x.var(0) * 5.0 if self.statistic else 2.0)
        return {"loss": out.square().mean()}


def _changing(case: str) -> dict[str, float]:
    torch.manual_seed(0)
    model, x = Changing(case == "statistic"), torch.randn(8, 6)
    asked = Pipeline(micro_batches=4, schedule="1f1b", two_phase=case == "two phases")
    reference, model = pair(model, {"x": x}, {"pp": 2}, cluster=CLUSTER, pipeline=asked)
    for module in (model, reference):
        module.train(case != "eval")
    model(x=x)["loss"].backward()
    parts = x.chunk(4) if case == "statistic" else [x]
    for part in parts:
        (reference(x=part)["loss"] / len(parts)).backward()
    found = {"gradients": _difference(model, reference, "grad")}
    for name, buffer in model.named_buffers():
        found[name] = distance(buffer, reference.get_buffer(name))
    return found


@pytest.mark.parametrize("case", ["statistic", "two phases", "eval"])
def test_a_backward_reads_buffers_as_its_forward_did(pool: RankPool, case: str) -> None:
    for found in pool.run(_changing, case):
        assert {k: v for k, v in found.items() if not v < FLOAT} == {}


class Features(Changing):
    """Returns the loss and what it is computed from."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        out = x * self.scale.clone()
        with torch.no_grad():
            self.scale.mul_(0.5).add_(x.var(0) * 5.0 if self.statistic else 2.0)
        return {"loss": out.square().mean(), "out": out}


def _from_another_output(statistic: bool) -> dict[str, float]:
    torch.manual_seed(0)
    reference, model = Features(statistic), None
    x, found = torch.randn(8, 6), dict[str, float]()
    asked = Pipeline(micro_batches=4, schedule="1f1b")
    reference, model = pair(reference, {"x": x}, {"pp": 2}, cluster=CLUSTER, pipeline=asked, outputs="whole")
    for step in range(2):
        made = model(x=x)
        (whole(made["loss"]) + whole(made["out"]).square().mean()).backward()
        parts = x.chunk(4) if statistic else [x]
        for part in parts:
            expected = reference(x=part)
            ((expected["loss"] + expected["out"].square().mean()) / len(parts)).backward()
        found[f"gradients {step}"] = _difference(model, reference, "grad")
        for name, buffer in model.named_buffers():
            found[f"{name} {step}"] = distance(buffer, reference.get_buffer(name))
        for module in (model, reference):
            module.zero_grad()
    return found


@pytest.mark.parametrize("statistic", [False, True])
def test_a_backward_that_was_not_captured_reads_buffers_as_its_forward_did(pool: RankPool, statistic: bool) -> None:
    for found in pool.run(_from_another_output, statistic):
        assert {k: v for k, v in found.items() if not v < FLOAT} == {}


def _input_changed(two_phase: bool) -> str:
    """Change an input before the backward, which a call that has run its backwards allows."""
    x = torch.randn(8, 6)
    asked = Pipeline(micro_batches=4, schedule="1f1b", two_phase=two_phase)
    _, model = pair(seeded(lambda: Changing(statistic=False)), {"x": x}, {"pp": 2}, cluster=CLUSTER, pipeline=asked)
    loss = model(x=x)["loss"]
    x.zero_()
    try:
        loss.backward()
    except AutoparError as error:
        model(x=x)["loss"].backward()
        return str(error)
    return ""


@pytest.mark.parametrize("two_phase", [False, True])
def test_an_input_that_changes_before_the_backward_is_an_error_on_all_ranks(pool: RankPool, two_phase: bool) -> None:
    for text in pool.run(_input_changed, two_phase):
        assert ("changed after the forward" in text) == two_phase


def _frozen_later() -> str:
    _, model, batch = _pair()
    model(**batch)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("h.0" not in name)
    try:
        model(**batch)
    except RankError as error:
        return str(error)
    return ""


def test_a_parameter_that_is_frozen_later_is_named(pool: RankPool) -> None:
    for text in pool.run(_frozen_later, timeout=60.0):
        assert "transformer.h.0.attn" in text
        assert "before the model is made parallel" in text


class Recurring(nn.Module):
    """Calls a layer twice, and computes outside of its layers."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.a, self.b, self.case = nn.Linear(16, 16), nn.Linear(16, 16), case
        self.c, self.d = (nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in (self.a, self.b, self.c, *[self.b] * (self.case == "twice")):
            x = torch.tanh(layer(x))
        loss = self.d(x).square().mean()
        if self.case == "outside":
            loss = loss + 1e-2 * torch.stack([p.square().sum() for p in self.parameters()]).sum()
        return {"loss": loss}


def _recut(case: str) -> float:
    torch.manual_seed(0)
    model, x = Recurring(case), torch.randn(8, 16)
    reference, model = pair(model, {"x": x}, {"pp": 2}, cluster=CLUSTER, pipeline=PLAIN)
    for module in (model, reference):
        module(x=x[:4])["loss"].backward()
    return _difference(model, reference, "grad")


@pytest.mark.parametrize("case", ["twice", "outside"])
def test_another_batch_is_cut_as_the_first(pool: RankPool, case: str) -> None:
    for difference in pool.run(_recut, case, timeout=60.0):
        assert difference < FLOAT


def _norms() -> dict[str, float]:
    reference, model, batch = _pair()
    for module in (model, reference):
        module(**batch).loss.backward()
    norms = [float(clip_grad_norm_(m.parameters(), 0.1)) for m in (model, reference)]
    plain = float(torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e9))
    largest = [float(torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9, float("inf"))) for m in (model, reference)]
    return {
        "ours": abs(norms[0] - norms[1]),
        "clipped": abs(plain - 0.1),
        "largest": abs(largest[0] - largest[1]),
        "gradients": _difference(model, reference, "grad"),
    }


@pytest.mark.slow
def test_norms_are_those_of_all_stages(pool: RankPool) -> None:
    for found in pool.run(_norms):
        assert {k: v for k, v in found.items() if not v < FLOAT} == {}


def _norms_of_a_frozen_stage() -> dict[str, float]:
    """A rank whose stage is frozen takes part in the norm, though there is a copy of the model."""
    model = seeded(llama)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name or "layers.1" in name)
    split = Pipeline(micro_batches=4, split=["model.layers.1"])
    reference, model, batch = _pair(build=lambda: model, pipeline=split)
    average = copy.deepcopy(model)
    for module in (model, reference):
        module(**batch).loss.backward()
    norms = [float(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)) for m in (model, reference)]
    return {"norm": abs(norms[0] - norms[1]), "average": _difference(average, reference)}


def test_a_rank_without_gradients_takes_part_in_norms(pool: RankPool) -> None:
    for found in pool.run(_norms_of_a_frozen_stage):
        assert {k: v for k, v in found.items() if not v < FLOAT} == {}


def _overflow() -> dict[str, Any]:
    """An overflow in the first stage makes every rank's scaler skip the step."""
    _, model, batch = _pair(mixed_precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    scales, moved = [], []
    for _ in range(2):
        before = [whole(p).detach().clone() for p in model.parameters()]
        scaler.scale(model(**batch).loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(any(not torch.equal(whole(p), b) for p, b in zip(model.parameters(), before, strict=True)))
    return {"scales": scales, "moved": moved}


@pytest.mark.slow
def test_scalers_agree_on_an_overflow(pool: RankPool) -> None:
    found = pool.run(_overflow)
    # The first call does not know the scale yet, so it computes with one, and nothing overflows.
    assert found[0]["scales"] == found[1]["scales"] == [2.0**40, 2.0**39]
    assert [f["moved"] for f in found] == [[True, False]] * 2


def _scaled_beside_a_frozen_stage() -> float:
    model = seeded(llama)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lm_head" in name or "layers.1" in name)
    split = Pipeline(micro_batches=4, split=["model.layers.1"])
    _, model, batch = _pair(build=lambda: model, pipeline=split, mixed_precision="fp16")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = GradScaler("cpu", init_scale=2.0**40)
    for _ in range(2):
        scaler.scale(model(**batch).loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return float(scaler.get_scale())


def test_a_rank_without_gradients_shares_the_scale(pool: RankPool) -> None:
    assert pool.run(_scaled_beside_a_frozen_stage, timeout=60.0) == [2.0**39] * 2


def _failing(mesh: dict[str, int], rank: int) -> dict[str, str]:
    """One rank fails in the third of its forwards."""
    cut = {"input:*": "S0R"} if "dp" in mesh else None
    _, model, batch = _pair(mesh, constraints=cut)
    stages = next(iter(model._autopar.variants.values()))[0].executable.stages
    if dist.get_rank() == rank:
        program = next(iter(stages.values())).program
        plain, calls = program.forward, [0]

        def forward(at: Any, inputs: Any) -> Any:
            calls[0] += 1
            if calls[0] == 3:
                raise ValueError("broken on purpose")
            return plain(at, inputs)

        object.__setattr__(program, "forward", forward)
    try:
        model(**batch)
    except (RankError, ValueError) as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return {"kind": type(error).__name__, "text": f"{error} {notes}"}
    return {"kind": "nothing"}


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "rank"), [({"pp": 2, "dp": 2}, 3), ({"pp": 4}, 1)])
def test_an_error_on_one_rank_stops_all(mesh: dict[str, int], rank: int) -> None:
    ranks = RankPool(4)
    try:
        found = ranks.run(_failing, mesh, rank)
    finally:
        ranks.close()
    assert [f["kind"] for f in found] == ["ValueError" if r == rank else "RankError" for r in range(4)]
    for each in found:
        assert f"rank {rank}" in each["text"]
        assert "F2" in each["text"]


def _meta() -> dict[str, float]:
    """Weights of a model on the meta device do not depend on the stages."""
    torch.manual_seed(3)
    with torch.device("meta"):
        models = [gpt2(), gpt2()]
    warnings.simplefilter("ignore")
    batch = seeded(tokens)
    torch.manual_seed(4)
    model = autopar.autoparallelize(models[0], batch, mesh={"pp": 2}, cluster=CLUSTER, pipeline=PLAIN)
    torch.manual_seed(4)
    other = autopar.autoparallelize(models[1], batch, mesh={"dp": 2}, cluster=CLUSTER)
    wholes = {n: whole(p) for n, p in other.named_parameters()}
    return {"weights": max(distance(p, wholes[n]) for n, p in model.named_parameters())}


@pytest.mark.slow
def test_initial_weights_do_not_depend_on_the_stages(pool: RankPool) -> None:
    for found in pool.run(_meta):
        assert found["weights"] == 0.0


def _compiled() -> dict[str, float]:
    reference, model, batch = _pair(backend="inductor", pipeline=Pipeline(micro_batches=2, schedule="zb"))
    for module in (model, reference):
        module(**batch).loss.backward()
    return {"gradients": _difference(model, reference, "grad")}


@pytest.mark.slow
def test_programs_are_compiled(pool: RankPool) -> None:
    for found in pool.run(_compiled, timeout=300.0):
        assert found["gradients"] < FLOAT


def _local_batches() -> dict[str, float]:
    """Each rank of a stage reads its own rows; ranks along the pipeline read the same."""
    batch = seeded(tokens)
    place = dist.get_rank() % 2
    own = {k: t[place * 4 : place * 4 + 4] for k, t in batch.items()}
    reference, model = pair(
        seeded(gpt2), own, {"pp": 2, "dp": 2}, cluster=CLUSTER, batch="local", pipeline=Pipeline(micro_batches=2)
    )
    loss, expected = model(**own).loss, reference(**batch).loss
    loss.backward()
    expected.backward()
    found = {"loss": distance(loss, expected), "gradients": _difference(model, reference, "grad")}
    with torch.no_grad():
        logits = model(**own).logits
        found["logits"] = distance(logits, reference(**own).logits)
    return found


@pytest.mark.slow
def test_batches_of_its_own_on_each_rank_of_a_stage(four: RankPool) -> None:
    for found in four.run(_local_batches):
        assert {k: v for k, v in found.items() if not v < FLOAT} == {}


def test_dtensors_are_those_of_the_stage(pool: RankPool) -> None:
    for names, meshes in pool.run(_placed):
        assert meshes == {1}
        assert names > 0


def _placed() -> tuple[int, set[int]]:
    _, model, _ = _pair()
    held = [p for p in model.parameters() if isinstance(p, DTensor)]
    return len(held), {p.device_mesh.size() for p in held}
