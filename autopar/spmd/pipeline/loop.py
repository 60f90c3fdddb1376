"""Runs the actions of a schedule on this rank.

Each action waits for the messages that it reads, of which those of the next action are under way by then; runs a
program of its stage; and sends what that made. Receive buffers are made when a receive is posted, and sent tensors live
until they are known to have arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.ir import Input, Output
from autopar.pipelines.actions import Action, Joined
from autopar.pipelines.messages import read_by, sent_by
from autopar.sharding import ShardingSpec
from autopar.spmd.lowered import Key, key_of
from autopar.spmd.pipeline.links import Mailbox
from autopar.spmd.pipeline.stage import StagePrograms
from autopar.spmd.ranks import ProcessRank, at_micro_batch


def joined(values: Sequence[Tensor], how: Joined) -> Tensor:
    """Return the result of the whole batch from those of its micro-batches, in order."""
    if how == "same" or len(values) == 1:
        return values[-1]
    return torch.stack(list(values)).sum(0) if how == "sum" else torch.cat(list(values))


class Feed(Protocol):
    """What the loop asks of a call."""

    def operand(self, stage: StagePrograms, meaning: Input, spec: ShardingSpec, micro_batch: int) -> Tensor:
        """Return the local value of a forward input that does not come from another stage."""
        ...

    def tangent(self, stage: StagePrograms, meaning: Input, spec: ShardingSpec, micro_batch: int) -> Tensor:
        """Return the local tangent of an output of the model."""
        ...

    def zeros(self, stage: StagePrograms, at: int) -> Tensor:
        """Return an accumulator of the stage before anything is added to it."""
        ...

    def keep(self, stage: StagePrograms, micro_batch: int, results: Sequence[Any]) -> None:
        """Keep outputs and new values of buffers among the results of a forward."""
        ...


@dataclass
class Loop:
    """The state of one step on this rank.

    Args:
        stages: those of this rank, by number.
        sums: accumulated gradients by key.
        delivers: whether the last backward of each stage delivers gradients, or adds to the sums like the others.
        saved: what each forward keeps for its backward, by stage and micro-batch.
        kept: what the first part of a backward keeps for the second.
        held: what the micro-batches of a stage share, by stage.
        gradients: this rank's part of what was delivered, by parameter.
        most_saved: the most micro-batches that any stage held at once.
    """

    stages: dict[int, StagePrograms]
    count: int
    rank: ProcessRank
    micro_batches: int
    feed: Feed
    sums: dict[Key, Tensor] = field(default_factory=dict)
    delivers: bool = True
    saved: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    kept: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    held: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    most_saved: int = 0

    def run(
        self, actions: Sequence[Action], mail: Mailbox, began: Callable[[Action], None], *, saves: bool = True
    ) -> None:
        """Run actions in order.

        Args:
            began: called before each action.
            saves: whether forwards keep what their backwards need.
        """
        for at, action in enumerate(actions):
            began(action)
            self.step(actions, at, mail, saves=saves)
        mail.finish()

    def step(self, actions: Sequence[Action], at: int, mail: Mailbox, *, saves: bool = True) -> None:
        """Run the action at a position, with the message that the next one reads on its way."""
        for each in actions[at : at + 2]:
            reads = read_by(each, self.count)
            if reads is not None:
                mail.post(reads)
        if actions[at].kind == "F":
            self._held(self.stages[actions[at].stage])
        reads, sends = read_by(actions[at], self.count), sent_by(actions[at], self.count)
        taken = mail.take(reads) if reads is not None else []
        made = self.act(actions[at], taken, saves=saves)
        if sends is not None:
            mail.send(sends, made)

    def act(self, action: Action, taken: list[Tensor], *, saves: bool = True) -> list[Tensor]:
        """Run an action with the tensors of the message that it reads. Return those of the message that it sends."""
        stage = self.stages[action.stage]
        if action.kind == "F":
            return self._forward(stage, action.micro_batch, taken, saves=saves)
        if action.kind == "B" or (stage.parts is None and action.kind == ("I" if stage.returns else "W")):
            return self._backward(stage, action.micro_batch, taken)
        if stage.parts is None:
            if action.kind == "I" and taken:  # a stage that returns nothing does everything in the second part
                self.kept[stage.number, action.micro_batch] = [*taken]
            return []
        if action.kind == "I":
            return self._first_part(stage, action.micro_batch, taken)
        self._second_part(stage, stage.parts.gradients, stage.parts.accumulated, action.micro_batch)
        return []

    def _forward(self, stage: StagePrograms, i: int, taken: list[Tensor], *, saves: bool) -> list[Tensor]:
        received = dict(zip(stage.receives, taken, strict=True))
        taken.clear()
        program = stage.program
        fed = [
            received.pop(m.name) if m.kind == "received" else self.feed.operand(stage, m, s, i)
            for m, s in program.inputs
        ]
        fed += self._held(stage)
        made = (program.forward if saves else program.inference)(at_micro_batch(self.rank, i), fed)
        n = len(program.results)
        if saves:
            self.saved[stage.number, i] = list(made[n:])
            self.most_saved = max(self.most_saved, len(self.saved))
        self.feed.keep(stage, i, made[:n])
        return [made[at] for at in stage.sent_at]

    def _held(self, stage: StagePrograms) -> tuple[Any, ...]:
        """Return what the micro-batches of a stage share, made while the message of its first forward is under way."""
        program = stage.program
        if program.once is None:
            return ()
        if stage.number not in self.held:
            fed = [self.feed.operand(stage, m, s, 0) for m, s in program.once_inputs]
            self.held[stage.number] = tuple(program.once(self.rank, fed))
        return self.held[stage.number]

    def _tangents(self, stage: StagePrograms, i: int, taken: list[Tensor]) -> list[Tensor]:
        taken = taken or self.kept.pop((stage.number, i), [])
        came = dict(zip(stage.takes, taken, strict=True))
        taken.clear()
        return [
            came.pop(m.name) if m.name in came else self.feed.tangent(stage, m, s, i) for m, s in stage.program.tangents
        ]

    def _last(self, stage: StagePrograms) -> bool:
        """Count a backward of a stage, and return whether it is to deliver gradients."""
        self.done[stage.number] = self.done.get(stage.number, 0) + 1
        return self.delivers and self.done[stage.number] == self.micro_batches

    def _taken_sums(self, stage: StagePrograms) -> list[Tensor]:
        keys = [key_of(*each) for each in stage.program.accumulators]
        return [self.sums.pop(k) if k in self.sums else self.feed.zeros(stage, i) for i, k in enumerate(keys)]

    def _backward(self, stage: StagePrograms, i: int, taken: list[Tensor]) -> list[Tensor]:
        program = stage.program
        feeds = [*self.saved.pop((stage.number, i)), *self._tangents(stage, i, taken), *self._taken_sums(stage)]
        ends: Sequence[Output]
        if self._last(stage) or program.accumulate is None:
            ends = [o for o, _, _ in program.gradients]
            made = program.backward(at_micro_batch(self.rank, i), feeds)
        else:
            ends, made = program.accumulated, program.accumulate(at_micro_batch(self.rank, i), feeds)
        return self._results(stage, dict(zip([(o.kind, o.name) for o in ends], made, strict=True)))

    def _first_part(self, stage: StagePrograms, i: int, taken: list[Tensor]) -> list[Tensor]:
        assert stage.parts is not None
        feeds = [*self.saved.pop((stage.number, i)), *self._tangents(stage, i, taken)]
        made = stage.parts.first(at_micro_batch(self.rank, i), feeds)
        back = [o for o, _, _ in stage.program.gradients if o.name.startswith("input:")]
        self.kept[stage.number, i] = list(made[len(back) :])
        return self._results(stage, {("gradient", o.name): t for o, t in zip(back, made, strict=False)})

    def _second_part(self, stage: StagePrograms, gradients: Any, accumulated: Any, i: int) -> None:
        assert stage.parts is not None
        feeds = [*self.kept.pop((stage.number, i)), *self._taken_sums(stage)]
        if self._last(stage) or stage.parts.accumulate is None:
            ends, made = gradients, stage.parts.second(at_micro_batch(self.rank, i), feeds)
        else:
            ends, made = accumulated, stage.parts.accumulate(at_micro_batch(self.rank, i), feeds)
        self._results(stage, dict(zip([(o.kind, o.name) for o in ends], made, strict=True)))

    def _results(self, stage: StagePrograms, made: dict[tuple[str, str], Tensor]) -> list[Tensor]:
        """Store what a backward made, and return the gradients that go back."""
        for meaning, spec, meta in stage.program.accumulators:
            if ("accumulator", meaning.name) in made:
                self.sums[key_of(meaning, spec, meta)] = made["accumulator", meaning.name]
        for (kind, name), tensor in made.items():
            if kind == "gradient" and not name.startswith("input:"):
                held = self.gradients.get(name)
                self.gradients[name] = tensor if held is None else held + tensor
        return [made["gradient", f"input:{name}"] for name in stage.returns if ("gradient", f"input:{name}") in made]
