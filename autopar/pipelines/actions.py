"""What a pipeline runs, as data: actions, and the order of them on every rank."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple, cast

from autopar.errors import PlanError

Kind = Literal["F", "B", "I", "W"]
"""Forward; whole backward; backward of the inputs; backward of the weights, which nothing waits for."""

Joined = Literal["sum", "concatenate", "same"]
"""How a result of the whole batch follows from those of its micro-batches: their sum, their concatenation along dim 0,
or any of them."""

_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_MERGED = re.compile(r"\((.*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """What a rank does without a break: one kind of work of one stage for one micro-batch. Its text is ``2F0``."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action of ``2F0``: stage, kind, micro-batch. Anything else is a PlanError."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise PlanError(
                "This is no action of a pipeline.",
                found=repr(text),
                hint="write stage, kind and micro-batch, such as 2F0; the kinds are F, B, I and W",
            )
        stage, kind, micro_batch = match.groups()
        return cls(cast(Kind, kind), int(stage), int(micro_batch))


@dataclass(frozen=True)
class Schedule:
    """The actions of one training step, in the order in which each rank runs them.

    A rank runs its next action as soon as what that reads has arrived. F of a stage reads F of the stage before; B and
    I read the stage's own F and the B or I of the stage behind; W reads the stage's own I.

    Args:
        name: for people.
        order: actions by rank.
        rank_of: of each stage.
        micro_batches: into how many the batch is cut.
    """

    name: str
    order: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]
    micro_batches: int

    @property
    def ranks(self) -> int:
        return len(self.order)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @property
    def split(self) -> bool:
        """Whether any backward is split into that of the inputs and that of the weights."""
        return any(action.kind == "I" for action in chain.from_iterable(self.order))

    @property
    def last_backwards(self) -> dict[int, Action]:
        """The last B or W of each stage, in its rank's order."""
        return {action.stage: action for row in self.order for action in row if action.kind in "BW"}

    def with_whole_backwards(self, ranks: Collection[int]) -> Schedule:
        """The schedule where these ranks do not split their backwards: they hold less, and others wait longer."""
        if not ranks:
            return self
        whole = [
            tuple(a._replace(kind="B") if a.kind == "I" else a for a in row if a.kind != "W") if rank in ranks else row
            for rank, row in enumerate(self.order)
        ]
        return replace(self, order=tuple(whole))

    def with_last_backwards_split(self) -> Schedule:
        """The schedule where the last backward of every stage but the first gives its gradient away before the
        gradients of its weights, and what is done with them once for all micro-batches."""
        apart = {action for stage, action in self.last_backwards.items() if action.kind == "B" and stage}
        order = (chain.from_iterable(_in_two(a) if a in apart else (a,) for a in row) for row in self.order)
        return replace(self, order=tuple(map(tuple, order))) if apart else self

    def to_text(self) -> str:
        """One line of comma-separated actions for each rank, as torch.distributed.pipelining reads them."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.order)

    @classmethod
    def from_text(cls, text: str, name: str = "given") -> Schedule:
        """The schedule of such lines, checked. Empty cells are waits, which are not written down here; of merged
        actions, ``(0F1;3B0)OVERLAP_F_B``, one follows the other."""
        order = tuple(tuple(chain.from_iterable(map(_actions, row))) for row in csv.reader(io.StringIO(text)))
        rank_of = {action.stage: rank for rank, row in enumerate(order) for action in row}
        if set(rank_of) != set(range(len(rank_of))) or not rank_of:
            raise PlanError(
                "The pipeline schedule leaves out a stage.",
                found=f"actions of the stages {', '.join(map(str, sorted(rank_of))) or 'none'}",
                hint="number the stages from 0 without a gap",
            )
        micro_batches = 1 + max(action.micro_batch for action in chain.from_iterable(order))
        schedule = cls(name, order, tuple(rank_of[stage] for stage in range(len(rank_of))), micro_batches)
        schedule.check()
        return schedule

    def check(self) -> None:
        """Raise a PlanError unless every rank has all actions of its stages once and the order comes to its end."""
        for rank, row in enumerate(self.order):
            for action in row:
                if not 0 <= action.stage < self.stages or not 0 <= action.micro_batch < self.micro_batches:
                    raise self._error(
                        f"has an action {action} that it does not need",
                        found=f"stages 0 to {self.stages - 1}, micro-batches 0 to {self.micro_batches - 1}",
                        hint="leave it out",
                    )
                if self.rank_of[action.stage] != rank:
                    raise self._error(
                        f"runs {action} on rank {rank}",
                        found=f"stage {action.stage} on rank {self.rank_of[action.stage]}",
                        hint="run all actions of a stage on one rank",
                    )
        self._check_counts(Counter(chain.from_iterable(self.order)))
        self.topological  # noqa: B018

    def _check_counts(self, counts: Counter[Action]) -> None:
        for stage, rank in enumerate(self.rank_of):
            for micro_batch in range(self.micro_batches):
                whole, inputs = Action("B", stage, micro_batch), Action("I", stage, micro_batch)
                backward = (inputs, Action("W", stage, micro_batch)) if counts[inputs] else (whole,)
                once = (Action("F", stage, micro_batch), *backward)
                for action in once:
                    if counts[action] != 1:
                        raise self._error(
                            f"runs {action} {'never' if not counts[action] else 'more than once'}",
                            found=f"{counts[action]} of them on rank {rank}",
                            hint="run each forward once, and each backward once: as B, or as I and W",
                        )
                for kind in ("B", "W"):
                    action = Action(kind, stage, micro_batch)
                    if counts[action] and action not in once:
                        raise self._error(
                            f"runs {action} beside {backward[0]}",
                            found=f"both on rank {rank}",
                            hint="run each backward once: as B, or as I and W",
                        )

    @cached_property
    def topological(self) -> tuple[Action, ...]:
        """All actions, each after those that it waits for and after its rank's earlier ones.

        A PlanError names what each rank waits for where the order never comes to its end.
        """
        done: set[Action] = set()
        position = [0] * self.ranks
        waiting: dict[Action, list[int]] = {}
        runnable = list(range(self.ranks))
        result: list[Action] = []
        while runnable:
            rank = runnable.pop()
            row = self.order[rank]
            while position[rank] < len(row):
                action = row[position[rank]]
                missing = next((event for event in self._waits_for(action) if event not in done), None)
                if missing is not None:
                    waiting.setdefault(missing, []).append(rank)
                    break
                position[rank] += 1
                result.append(action)
                event = _event(action)
                if event is not None:
                    done.add(event)
                    runnable += waiting.pop(event, [])
        stuck = [
            f"rank {rank} cannot run {self.order[rank][position[rank]]} before {event}"
            for event, ranks in waiting.items()
            for rank in ranks
        ]
        if stuck:
            raise self._error(
                "never comes to its end",
                found="; ".join(sorted(stuck)),
                hint="move what the others wait for to the front",
            )
        return tuple(result)

    def _waits_for(self, action: Action) -> Iterator[Action]:
        """The events, see ``_event``, without which an action cannot begin."""
        kind, stage, micro_batch = action
        if kind == "F":
            if stage > 0:
                yield Action("F", stage - 1, micro_batch)
        elif kind == "W":
            yield Action("I", stage, micro_batch)
        else:
            yield Action("F", stage, micro_batch)
            if stage + 1 < self.stages:
                yield Action("I", stage + 1, micro_batch)

    def _error(self, what: str, *, found: str, hint: str) -> PlanError:
        return PlanError(f"The pipeline schedule {self.name!r} {what}.", found=found, hint=hint)


def _in_two(backward: Action) -> tuple[Action, Action]:
    return backward._replace(kind="I"), backward._replace(kind="W")


def _event(action: Action) -> Action | None:
    """What others wait for once an action is done: the gradient of the inputs is I, whether B or I made it."""
    if action.kind == "W":
        return None
    return Action("I", action.stage, action.micro_batch) if action.kind == "B" else action


def _actions(cell: str) -> Iterator[Action]:
    merged = _MERGED.fullmatch(cell.strip())
    for text in merged[1].split(";") if merged else [cell]:
        if text.strip():
            yield Action.parse(text)
