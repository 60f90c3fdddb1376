"""``PipelinePlan``: the plans of all stages, the order in which ranks run them, and predictions for the whole step."""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.pipelines.actions import Joined, Schedule
from autopar.pipelines.makespan import Costs, Timeline, in_flight, simulate
from autopar.pipelines.request import AXIS
from autopar.plans.pipeline_table import pipeline_differences, pipeline_table
from autopar.plans.plan import Plan, checked_read, read_json, read_text, write_text
from autopar.plans.records import Collective
from autopar.plans.typed import entries, require

FORMAT = "autopar-pipeline"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class PipelinePlan:
    """How a model trains as a pipeline. Seconds and bytes are predictions; stages are numbered from the input.

    Args:
        model: name of the model's class.
        graph_digest: digest of the captured graph of the whole batch.
        mesh: the arrangement of all ranks, with the axis ``pp``.
        cluster: name of the cluster.
        stages: the plan of each stage, on the mesh without ``pp``, for one micro-batch; its peak memory counts the
            micro-batches in flight.
        blocks: what each stage begins with: module paths.
        starts: the first block of each stage.
        schedule: what each rank along ``pp`` runs, in order.
        costs: seconds and bytes of each stage.
        prologue: the plan of what is computed of the whole batch's inputs before the first forward; None if nothing is.
        outputs: how outputs are put together over micro-batches, by name.
        buffers: the same for new values of buffers; None where each micro-batch reads what the one before it wrote.
        split: the source of each stage's backward in two parts; "" where the schedule runs it in one.
        tied: names of the parameters that several stages hold, with these stages.
        step_time: seconds of a step.
        lower_bound: seconds that no pipeline of these ranks and micro-batches can beat.
        peaks: peak bytes of a device of each rank along ``pp``.
        options: the user's options.
        notices: messages to the user.
        candidates: other pipelines that were considered: description and seconds.
        timings: seconds that planning took, by stage of planning.
    """

    model: str
    graph_digest: str
    mesh: Mesh
    cluster: str
    stages: tuple[Plan, ...]
    blocks: tuple[str, ...]
    starts: tuple[int, ...]
    schedule: Schedule
    costs: Costs
    prologue: Plan | None
    outputs: Mapping[str, Joined]
    buffers: Mapping[str, Joined | None]
    split: tuple[str, ...]
    tied: Mapping[str, tuple[int, ...]]
    step_time: float
    lower_bound: float
    peaks: tuple[int, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    candidates: tuple[tuple[str, float], ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict)

    @property
    def micro_batches(self) -> int:
        return self.schedule.micro_batches

    @property
    def ranks(self) -> int:
        """Number of ranks along ``pp``."""
        return self.schedule.ranks

    @property
    def stage_mesh(self) -> Mesh:
        """The mesh of each stage."""
        return self.mesh.without(AXIS)

    @property
    def peak_memory(self) -> int:
        """Peak bytes of the fullest device."""
        return max(self.peaks)

    @property
    def gap(self) -> float:
        """(step_time - lower_bound) / step_time."""
        return (self.step_time - self.lower_bound) / self.step_time if self.step_time else 0.0

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every launch of a collective for one micro-batch, stage by stage."""
        return tuple(c for stage in self.stages for c in stage.collectives)

    @cached_property
    def timeline(self) -> Timeline:
        """The predicted step: when each action begins and ends."""
        return simulate(self.schedule, self.costs)

    @property
    def bubble(self) -> float:
        """Share of the step in which ranks wait for each other."""
        return self.timeline.bubble

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The most micro-batches that each stage holds between their forward and their backward."""
        return in_flight(self.schedule)

    @cached_property
    def digest(self) -> str:
        """Hash of the decisions: two plans with the same digest run the same programs in the same order."""
        parts = [self.graph_digest, self.schedule.to_text(), str(self.mesh), str(self.starts)]
        parts += [stage.digest for stage in self.stages]
        parts += [self.prologue.digest] if self.prologue else []
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank along ``pp`` holds."""
        return tuple(s for s, r in enumerate(self.schedule.rank_of) if r == rank)

    def explain(self, name: str = "", stage: int = 0) -> str:
        """``Plan.explain`` of a stage."""
        return self.stages[stage].explain(name)

    def to_json(self) -> str:
        """Return the canonical text: equal plans have equal text."""
        return json.dumps(self._data(), indent=1)

    def _data(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "digest": self.digest,
            "model": self.model,
            "graph_digest": self.graph_digest,
            "cluster": self.cluster,
            "mesh": {"shape": list(self.mesh.shape), "names": list(self.mesh.names)},
            "blocks": list(self.blocks),
            "starts": list(self.starts),
            "schedule": {"name": self.schedule.name, "order": self.schedule.to_text()},
            "costs": asdict(self.costs),
            "outputs": dict(self.outputs),
            "buffers": dict(self.buffers),
            "split": list(self.split),
            "tied": {name: list(stages) for name, stages in self.tied.items()},
            "step_time": self.step_time,
            "lower_bound": self.lower_bound,
            "peaks": list(self.peaks),
            "options": dict(self.options),
            "notices": list(self.notices),
            "candidates": [list(c) for c in self.candidates],
            "timings": dict(self.timings),
            "prologue": None if self.prologue is None else json.loads(self.prologue.to_json()),
            "stages": [json.loads(stage.to_json()) for stage in self.stages],
        }

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        Raises:
            PlanError: if the file cannot be written.
        """
        write_text(path, self.to_json())

    def report(self, path: str | Path) -> None:
        """Write a report of the step, the stages and the pipelines considered: one HTML file that opens offline.

        Raises:
            PlanError: if the file cannot be written.
        """
        from autopar.plans.report.pipeline import pipeline_page

        write_text(path, pipeline_page(self, self.digest))

    def _repr_html_(self) -> str:
        """Show the table, and the report to unfold, in a notebook."""
        from autopar.plans.report.pipeline import pipeline_page

        framed = (
            f'<iframe srcdoc="{escape(pipeline_page(self, self.digest))}" style="width:100%;height:42rem"></iframe>'
        )
        return f"<pre>{escape(pipeline_table(self))}</pre><details><summary>report</summary>{framed}</details>"

    def emit(self, path: str | Path) -> Path:
        """Write a program for each stage, and at ``path`` the one that runs them under torchrun with torch alone.

        ``step.py`` reads ``step_stage0.py``, ``step_stage1.py`` and so on, which it needs beside it, and takes the
        arguments that ``Plan.emit`` describes.

        Raises:
            PlanError: if a file cannot be written.
        """
        codegen = importlib.import_module("autopar.codegen.write")  # codegen knows plans, so plans do not import it
        for name, text in codegen.pipeline_texts(self, Path(path).stem).items():
            write_text(Path(path).with_name(name), text)
        return Path(path)

    def diff(self, other: object) -> str:
        """Describe what differs between two plans of pipelines: predictions, schedule, cut, and each stage's plan.

        Raises:
            PlanError: if ``other`` is not the plan of a pipeline.
        """
        if not isinstance(other, PipelinePlan):
            hint = "load the other plan with autopar.PipelinePlan.load(path)."
            raise PlanError("A pipeline can only be compared with another pipeline.", found=repr(other)[:80], hint=hint)
        if self.digest == other.digest:
            return "The pipelines run the same programs in the same order."
        return pipeline_differences(self, other)

    @staticmethod
    def load(path: str | Path) -> PipelinePlan:
        """Read a saved plan of a pipeline.

        Raises:
            PlanError: if the file is missing, is not such a plan, or has a newer version.
        """
        found = load_plan(path)
        if not isinstance(found, PipelinePlan):
            raise PlanError(
                "This is not the plan of a pipeline.", found=f"{path!s:.200}", hint="load it with autopar.Plan.load."
            )
        return found

    def __str__(self) -> str:
        return pipeline_table(self, colour=sys.stdout.isatty())

    def __reduce__(self) -> tuple[object, ...]:
        return plan_from_json, (self.to_json(),)


def load_plan(path: str | Path) -> Plan | PipelinePlan:
    """Read a saved plan of either kind.

    Raises:
        PlanError: if the file is missing, is not a plan, or has a newer version.
    """
    return plan_from_json(read_text(path), str(path))


def plan_from_json(text: str, where: str = "text") -> Plan | PipelinePlan:
    """Read what ``to_json`` of a plan of either kind wrote. Nothing in it is executed, and every field is checked."""
    data = read_json(text, where)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        return Plan.from_json(text, where)
    if data.get("version") != FORMAT_VERSION:
        raise PlanError(
            "The plan was saved by another version of autopar.",
            found=f"format version {data.get('version')!s:.40}; this one reads {FORMAT_VERSION}",
            hint="plan again with this version, or install the version that saved the plan.",
        )
    plan = checked_read(lambda: _from_data(data), where)
    if data.get("digest") != plan.digest:
        raise PlanError(
            "The plan's programs do not match its digest.",
            found=f"{where}: digest {data.get('digest')!s:.40}; that of the programs is {plan.digest}",
            hint="plan again.",
        )
    return plan


def _from_data(data: Mapping[str, Any]) -> PipelinePlan:
    mesh, made = data["mesh"], data["schedule"]
    schedule = Schedule.from_text(made["order"], made["name"])
    whole = Mesh(tuple(entries(mesh["shape"])), tuple(entries(mesh["names"])))
    costs = Costs(**{k: tuple(entries(v)) for k, v in data["costs"].items()})

    def stage(each: Any) -> Plan:
        return replace(Plan.from_json(json.dumps(each)), mesh=whole.without(AXIS))

    plan = PipelinePlan(
        model=data["model"],
        graph_digest=data["graph_digest"],
        mesh=whole,
        cluster=data["cluster"],
        stages=tuple(map(stage, entries(data["stages"]))),
        blocks=tuple(entries(data["blocks"])),
        starts=tuple(entries(data["starts"])),
        schedule=schedule,
        costs=costs,
        prologue=None if data["prologue"] is None else stage(data["prologue"]),
        outputs=data["outputs"],
        buffers=data["buffers"],
        split=tuple(entries(data["split"])),
        tied={name: tuple(entries(stages)) for name, stages in data["tied"].items()},
        step_time=data["step_time"],
        lower_bound=data["lower_bound"],
        peaks=tuple(entries(data["peaks"])),
        options=data["options"],
        notices=tuple(entries(data["notices"])),
        candidates=tuple((text, s) for text, s in map(entries, entries(data["candidates"]))),
        timings=data["timings"],
    )
    for name, kind in (("step_time", float), ("lower_bound", float), ("split", tuple[str, ...])):
        require(getattr(plan, name), kind, name)
    if not plan.schedule.stages == len(plan.stages) == len(plan.starts) == len(plan.split):
        raise ValueError("stages: as many as the schedule has")
    if list(plan.starts) != sorted(set(plan.starts)) or plan.starts[0] != 0 or plan.starts[-1] >= len(plan.blocks):
        raise ValueError("starts: ascending numbers of blocks")
    return plan
