"""torch.distributed.pipelining drives the programs of stages, and gets what one process gets.

Its runtime and its table of actions are private, so this is the only place that knows them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as theirs

from autopar.ir import Input
from autopar.pipelines.request import Pipeline
from autopar.runtime.tables import tables
from autopar.sharding import ShardingSpec
from autopar.spmd.pipeline.loop import Loop
from autopar.spmd.pipeline.stage import StagePrograms
from tests.multiprocess.pool import RankPool
from tests.multiprocess.training_models import distance, llama, pair, seeded, tokens

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
FLOAT = 1e-4
MICRO_BATCHES, ROWS = 4, 8

OURS = {
    theirs.FORWARD: "F",
    theirs.FULL_BACKWARD: "B",
    theirs.BACKWARD_INPUT: "I",
    theirs.BACKWARD_WEIGHT: "W",
}


class Placeholder(nn.Module):
    """Stands for a stage's module, which nothing calls."""

    def forward(self, *args: Tensor) -> Tensor:
        raise AssertionError("the programs of the stage run instead")


class Feed:
    """What the loop asks for, from a model and a batch."""

    def __init__(self, model: Any, batch: dict[str, Tensor], ahead: dict[str, Tensor]) -> None:
        self.model, self.batch, self.ahead = model, batch, ahead
        self.constants = next(iter(model._autopar.variants.values()))[0].constants
        self.losses: dict[int, Tensor] = {}

    def operand(self, stage: StagePrograms, meaning: Input, spec: ShardingSpec, micro_batch: int) -> Tensor:
        if meaning.kind in ("parameter", "buffer"):
            found = tables(self.model).tensor(meaning.name)
            return found.to_local() if hasattr(found, "to_local") else found
        if meaning.name in self.ahead:
            return self.ahead[meaning.name]
        if meaning.kind == "constant":
            return self.constants[meaning.name]
        if meaning.kind == "seed":
            return torch.zeros((), dtype=torch.int64)
        rows = ROWS // MICRO_BATCHES
        return self.batch[meaning.name][micro_batch * rows : (micro_batch + 1) * rows]

    def tangent(self, stage: StagePrograms, meaning: Input, spec: ShardingSpec, micro_batch: int) -> Tensor:
        return torch.ones(())

    def zeros(self, stage: StagePrograms, at: int) -> Tensor:
        _, _, meta = stage.program.accumulators[at]
        return torch.zeros(meta.shape, dtype=getattr(torch, meta.dtype))

    def keep(self, stage: StagePrograms, micro_batch: int, results: Any) -> None:
        for at in stage.outputs_at:
            if stage.program.results[at][0].name == "loss":
                self.losses[micro_batch] = results[at]


def _driven(schedule: str) -> dict[str, float]:  # noqa: PLR0915  their protocol is one long conversation
    """Let torch's runtime run the actions of our schedule with the programs of a parallel model."""
    batch = seeded(lambda: tokens(ROWS))
    pipeline = Pipeline(
        micro_batches=MICRO_BATCHES, schedule=schedule, split="uniform", chunks=2 if schedule == "zbv" else 1
    )
    reference, model = pair(
        seeded(lambda: llama(num_hidden_layers=4)), batch, {"pp": 2}, cluster="cpu-2", pipeline=pipeline
    )
    state: Any = model._autopar
    program: Any = next(iter(state.variants.values()))[0].executable
    expected = model(**batch).loss.detach()  # also runs what is computed ahead
    labelled = (batch["labels"][:, 1:] != -100).sum()
    ahead = {
        i.name: labelled for s in program.stages.values() for i, _ in s.program.inputs if i.name.startswith("ahead:")
    }
    feed = Feed(model, batch, ahead)
    count = len(program.schedule.rank_of)
    loop = Loop(program.stages, count, state.rank, MICRO_BATCHES, feed)
    hidden = torch.empty(ROWS // MICRO_BATCHES, 8, 32, requires_grad=True)
    scalar = torch.empty((), requires_grad=True)
    stages = [
        PipelineStage(
            Placeholder(),
            s,
            count,
            torch.device("cpu"),
            input_args=(hidden if s else batch["input_ids"][: ROWS // MICRO_BATCHES],),
            output_args=(hidden if s < count - 1 else scalar,),
            input_grads=(hidden.detach(),) if s else None,
            output_grads=(hidden.detach(),) if s < count - 1 else None,
        )
        for s in program.stages
    ]
    runtime = theirs._PipelineScheduleRuntime(
        stages, MICRO_BATCHES, loss_fn=lambda out, _: out, backward_requires_autograd=False
    )
    kinds = {ours: kind for kind, ours in OURS.items()}
    order = {
        rank: [theirs._Action(a.stage, kinds[a.kind], a.micro_batch) for a in row]
        for rank, row in enumerate(program.schedule.order)
    }
    runtime.pipeline_order = order
    runtime._prepare_schedule_with_comms(order)

    def act(action: Any, context: Any) -> None:
        from autopar.pipelines.actions import Action

        owner = context.schedule_ref
        known = {stage.stage_index: stage for stage in owner._stages}
        s, i, kind = action.stage_index, action.microbatch_index, OURS[action.computation_type]
        stage, taken = known[s], []
        if kind == "F" and s:
            if s - 1 not in known:
                theirs._wait_batch_p2p(owner.fwd_recv_ops.pop((s, i)))
            taken = [stage._retrieve_recv_activations(i)[0].detach()]
        if kind in "BI" and s < count - 1:
            if s + 1 not in known:
                theirs._wait_batch_p2p(owner.bwd_recv_ops.pop((s, i)))
            taken = [stage._retrieve_recv_grads(i)[0]]
        with torch.no_grad():
            made = loop.act(Action(kind, s, i), taken)
        if kind == "F":
            out = made[0] if made else feed.losses[i]
            stage.fwd_cache[i] = ((out,), [])
            if not made:
                owner._internal_losses.append(out)
            elif s + 1 in known:
                known[s + 1].set_local_fwd_input(out, i)
        elif kind in "BI":
            stage.bwd_cache[i] = tuple(made) if made else (None,)
            stage.fwd_cache.pop(i)
            if s - 1 in known:
                known[s - 1].set_local_bwd_input(stage.get_local_bwd_output(i), i)

    for kind in OURS:
        runtime.register_custom_function(kind, act)
    for kind in (theirs.UNSHARD, theirs.RESHARD, theirs.REDUCE_GRAD):
        runtime.register_custom_function(kind, lambda action, context: None)
    last = count - 1 in program.stages
    losses: list[Tensor] = []
    with torch.no_grad():
        first = (batch["input_ids"],) if 0 in program.stages else ()
        runtime.step(*first, return_outputs=False, **({"target": batch["labels"], "losses": losses} if last else {}))
    wanted = reference(**batch).loss
    wanted.backward()
    gradients = dict(reference.named_parameters())
    found = {"ours": distance(expected, wanted)}
    if last:
        found["loss"] = distance(torch.stack(list(feed.losses.values())).sum(), wanted)
    found["gradients"] = max(distance(g, gradients[n].grad) for n, g in loop.gradients.items())
    assert loop.gradients.keys() == dict(model.named_parameters()).keys()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zb", "zbv"])
def test_torchs_runtime_drives_the_stages(pool: RankPool, schedule: str) -> None:
    for found in pool.run(_driven, schedule):
        assert {k: v for k, v in found.items() if not v < FLOAT} == {}
