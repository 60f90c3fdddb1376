"""``Plan``: every decision and every prediction, immutable, with a canonical text form."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sized
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Literal, TypeVar

from autopar.errors import AutoparError, PlanError
from autopar.mesh import Mesh
from autopar.plans import figures
from autopar.plans.about import about
from autopar.plans.consistency import check_consistent
from autopar.plans.differences import differences
from autopar.plans.facts import Facts, facts_from, facts_to
from autopar.plans.formulas import read_formula
from autopar.plans.records import Action, Activation, BaselineRecord, Collective
from autopar.plans.sampling import LocalSampler
from autopar.plans.serial import program_from, program_to
from autopar.plans.table import table
from autopar.plans.typed import entries, require
from autopar.program import Op, Program
from autopar.sharding import ShardingSpec

T = TypeVar("T")

FORMAT_VERSION = 2
READABLE = (1, 2)
"""Format 1 has no facts, so its plans run and print, and their reports show less."""


@dataclass(frozen=True)
class Plan:
    """How a model is trained on a mesh. Seconds and bytes are predictions for one device of the cluster.

    Args:
        model: name of the model's class.
        graph_digest: of the captured program that the plan belongs to.
        mesh: the ranks' arrangement.
        cluster: its name.
        program: the local program: every op's strategy, every redistribution, in order.
        specs: of parameters, buffers, inputs, outputs, modules' outputs and graph nodes, by name.
        activations: what the backward reads of the forward, by node.
        objective: seconds of the solver's cost; ``lower_bound`` is what no plan can beat.
        step_time: seconds of a step, by simulating its compute and communication streams.
        peak_memory: bytes on the fullest device; ``memory`` is what they are at that moment.
        host_memory: the most bytes that a device's host holds for it: offloaded activations and optimizer state.
        source: the emitted local program.
        timings: seconds that planning took, by stage.
        options: as given by the user.
        solver: method and sizes of the problem.
        notices: what the user should know.
        candidates: other meshes that were planned, with their step times.
        baselines: known ways to train in parallel, completed, priced and simulated as this plan was: those that might
            have been better, or all with ``compare=True``.
        kernels: source of each Triton kernel that the program runs on its devices, by name.
        facts: what the figures were computed from; None in plans that were saved by format 1.
    """

    model: str
    graph_digest: str
    mesh: Mesh
    cluster: str
    program: Program
    specs: Mapping[str, ShardingSpec]
    parameters: Mapping[str, int]
    activations: Mapping[str, Activation]
    objective: float
    lower_bound: float
    step_time: float
    peak_memory: int
    memory: Mapping[str, int]
    source: str
    timings: Mapping[str, float]
    options: Mapping[str, Any] = field(default_factory=dict)
    solver: Mapping[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    candidates: tuple[tuple[str, float], ...] = ()
    baselines: tuple[BaselineRecord, ...] = ()
    host_memory: int = 0
    facts: Facts | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    _explain: Callable[[str], str] | None = field(default=None, repr=False, compare=False)

    @property
    def gap(self) -> float:
        """(objective - lower_bound) / objective; 0 for a free program."""
        return (self.objective - self.lower_bound) / self.objective if self.objective else 0.0

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """One record for each launch, in the order of the program, those inside of ops too."""
        known = self.facts.names if self.facts else {}

        def named(tensor: str) -> str:
            value = tensor.split("|", maxsplit=1)[0]
            return known.get(value, value)

        found = []
        for op in self.program.ops:
            if op.step is not None and op.exchanges:
                tensors = tuple(map(named, op.reads))
                seconds = op.step_s or op.seconds
                found.append(Collective(op.step.kind, tensors, op.step.axis, op.wire_bytes, seconds, op.phase))
            found += [
                Collective(s.kind, (named(op.reads[s.operand]),), s.axis, s.bytes, s.seconds, op.phase)
                for s in op.sent
            ]
        return tuple(found)

    @property
    def offloaded_optimizer(self) -> tuple[str, ...]:
        """FQNs of the parameters whose optimizer state the host keeps between the optimizer's steps."""
        return self.program.offloaded_optimizer

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: FLOPs of the step over what all devices could do meanwhile; 0 where not known."""
        could = self.step_time * self.mesh.size * self.facts.peak_flops_per_s if self.facts else 0.0
        return self.facts.flops / could if self.facts and could else 0.0

    @property
    def throughput(self) -> float:
        """Tokens a second, or samples where the inputs are no tokens; 0 where not known."""
        done = (self.facts.tokens or self.facts.samples) if self.facts else 0
        return done / self.step_time if self.step_time else 0.0

    @property
    def budget(self) -> int:
        """Bytes that the plan had to fit on each device: those asked for, else the device's memory; 0 if not known."""
        asked = self.options.get("memory_budget_bytes")
        return int(asked) if asked else self.facts.memory_bytes if self.facts else 0

    @cached_property
    def digest(self) -> str:
        """A hash of the decisions: two plans with one digest run the same program."""
        text = json.dumps(program_to(replace_times(self.program)), sort_keys=True)
        return hashlib.sha256((self.graph_digest + text).encode()).hexdigest()[:16]

    @cached_property
    def symbolic(self) -> Mapping[str, Any]:
        """With ``dynamic_shapes`` formulas in sympy of the sizes that vary: ``flops`` of a step of all ranks; of the
        fullest rank ``saved_bytes`` from forward to backward and ``communicated_bytes``; the shape of each input and
        output. Empty otherwise.
        """
        data = self.options.get("dynamic_shapes") or {}
        if not data.get("formulas"):
            return {}
        names = [name for name, *_ in data["symbols"]]

        def read(text: Any) -> Any:
            return read_formula(text, names) if isinstance(text, str) else tuple(map(read, text))

        return {name: read(text) for name, text in data["formulas"].items()}

    def explain(self, name: str = "") -> str:
        """What each alternative spec of a tensor would have cost and forced elsewhere, and what the constraints cost.

        Args:
            name: of a parameter, ``input:`` or ``output:``, module or node; without it only the constraints.

        Raises:
            PlanError: the plan was loaded from a file, without the problem that it solved; ``name`` is no text.
        """
        if not isinstance(name, str):
            raise PlanError(
                "A plan explains what it is given a name of.", found=repr(name)[:80], hint="give one of plan.specs."
            )
        if self._explain is None:
            said = about(self, name).replace("\n", "\n         ")
            raise PlanError(
                "This plan cannot be asked why.",
                found="a plan without the problem that it came from" + (f"; {said}" if said else ""),
                hint="call autopar.plan again and explain its result.",
            )
        said = about(self, name)
        return f"{said}\n\n{self._explain(name)}" if said else self._explain(name)

    def memory_figure(self) -> Any:
        """Memory over time as a ``matplotlib.figure.Figure``."""
        return figures.memory_figure(self)

    def timeline_figure(self) -> Any:
        """What each stream does as a ``matplotlib.figure.Figure``."""
        return figures.timeline_figure(self)

    def diff(self, other: object) -> str:
        """What differs between two plans: mesh, predictions, memory, collectives, specs, and what is kept.

        Raises:
            PlanError: ``other`` is no plan.
        """
        if not isinstance(other, Plan):
            hint = "load the other one: Plan.load(path)."
            raise PlanError("A plan is compared with another plan.", found=repr(other)[:80], hint=hint)
        return differences(self, other)

    def sampler(
        self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True, rank: int | None = None
    ) -> LocalSampler:
        """The samples of ``dataset`` that a rank reads when the plan was made with ``batch="local"``.

        Args:
            dataset: the whole of it, the same on every rank.
            shuffle, seed, drop_last: as ``LocalSampler``.
            rank: None is this process's, from the variable RANK that launchers set.

        Raises:
            PlanError: the plan's batch is global, or it has no such rank.
        """
        batch = self.options.get("batch", "global")
        if batch != "local":
            raise PlanError(
                "Every rank of this plan reads the whole batch.",
                found=f"batch={batch!r}",
                hint='use one ordinary sampler, seeded alike on every rank, or plan with batch="local".',
            )
        this = int(os.environ.get("RANK", "0")) if rank is None else rank
        return LocalSampler(dataset, this, self.mesh.size, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def report(self, path: str | Path) -> None:
        """Write the plan as one HTML file that opens offline: mesh, model, memory, timeline, collectives, baselines.

        Raises:
            PlanError: the file cannot be written.
        """
        from autopar.plans.report import page

        _write(path, page(self))

    def _repr_html_(self) -> str:
        """What a notebook shows: the table, and the report to unfold."""
        from autopar.plans.report import page

        text = escape(table(self))
        framed = f'<iframe srcdoc="{escape(page(self))}" style="width:100%;height:42rem;border:0"></iframe>'
        return f"<pre>{text}</pre><details><summary>report</summary>{framed}</details>"

    def emit(self, path: str | Path) -> Path:
        """Write the local program as a file that runs under torchrun with torch alone: what it calls is copied into it.

        ``torchrun --nproc-per-node N step.py --state model.pt --batch batch.pt --out out.pt`` takes one step and writes
        outputs and gradients; without files it takes random values. Triton kernels of the plan are in it; where there
        is no triton, and on CPUs, the eager code beside them runs.

        Raises:
            PlanError: the file cannot be written.
        """
        codegen = importlib.import_module("autopar.codegen.write")  # codegen knows plans, so plans do not import it
        _write(path, codegen.text_of(self.source, Path(path).name, kernels=bool(self.kernels)))
        return Path(path)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; docs/reference/plan-format.md describes it.

        Raises:
            PlanError: the file cannot be written.
        """
        _write(path, self.to_json())

    def to_json(self) -> str:
        """The canonical text: equal plans have equal text."""
        return json.dumps(self._data(), indent=1)

    def _data(self) -> dict[str, Any]:
        return {
            "format": "autopar-plan", "version": FORMAT_VERSION, "digest": self.digest,
            "model": self.model, "graph_digest": self.graph_digest, "cluster": self.cluster,
            "mesh": {"shape": list(self.mesh.shape), "names": list(self.mesh.names)},
            "program": program_to(self.program),
            "specs": {k: str(s) for k, s in self.specs.items()},
            "parameters": dict(self.parameters),
            "activations": {k: [a.action, str(a.spec), a.bytes] for k, a in self.activations.items()},
            "objective": self.objective, "lower_bound": self.lower_bound, "step_time": self.step_time,
            "peak_memory": self.peak_memory, "memory": dict(self.memory), "source": self.source,
            "kernels": dict(self.kernels),
            "timings": dict(self.timings), "options": dict(self.options), "solver": dict(self.solver),
            "notices": list(self.notices), "candidates": [list(c) for c in self.candidates],
            "baselines": [asdict(b) for b in self.baselines], "host_memory": self.host_memory,
            "facts": None if self.facts is None else facts_to(self.facts),
        }  # fmt: skip

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a saved plan.

        Raises:
            PlanError: the file is missing, is no plan, or is of a newer version.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, TypeError, ValueError) as error:
            hint = "give the path of a saved plan."
            raise PlanError("The plan cannot be read.", found=f"{path!s:.200}: {error}", hint=hint) from None
        return Plan.from_json(text, str(path))

    @staticmethod
    def from_json(text: str, where: str = "text") -> Plan:
        """The plan that ``to_json`` wrote. All of it is data: nothing in it is executed, and every field is checked."""
        try:
            data = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_constant)
        except (ValueError, TypeError, RecursionError) as error:
            raise _no_plan(f"{where}: {error}") from None
        if not isinstance(data, dict) or data.get("format") != "autopar-plan":
            raise _no_plan(where)
        if data.get("version") not in READABLE:
            raise PlanError(
                "The plan was saved by another version of autopar.",
                found=f"format version {data.get('version')!s:.40}, "
                f"this one reads {' and '.join(map(str, READABLE))}",
                hint="plan again with this version, or install the one that saved it.",
            )
        plan = _undamaged(lambda: _plan_from(data), where)
        if data.get("digest") != plan.digest:
            raise PlanError(
                "The plan's program is not the one that its digest names.",
                found=f"{where}: digest {data.get('digest')!s:.40}, of the program it is {plan.digest}",
                hint=f'to run the program as it was edited, write "digest": "{plan.digest}" in the file.',
            )
        _undamaged(lambda: check_consistent(plan), where)
        return plan

    def __str__(self) -> str:
        """A table; with colours where standard output is a terminal and NO_COLOR is not set."""
        return table(self, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)

    def __reduce__(self) -> tuple[object, ...]:
        """As its text: what explains a plan holds the whole problem, and stays here."""
        return Plan.from_json, (self.to_json(),)


def _write(path: str | Path, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError("The file cannot be written.", found=str(error), hint="is there such a folder?") from None


def _no_plan(found: str) -> PlanError:
    return PlanError("This is no autopar plan.", found=found, hint="save one with plan.save(path).")


def replace_times(program: Program) -> Program:
    """The program without predicted seconds, which are no decision."""
    def timeless(op: Op) -> Op:
        return replace(op, seconds=0.0, launch_s=0.0, sent=tuple(replace(s, seconds=0.0) for s in op.sent))

    ops = tuple(map(timeless, program.ops))
    return replace(program, ops=ops, state_transfer_s=0.0, arrangement=None)


def _undamaged(read: Callable[[], T], where: str) -> T:
    try:
        return read()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, AutoparError) as error:
        found = f"{where}: {type(error).__name__} {error!s:.400}"
        raise PlanError("The plan is damaged.", found=found, hint="plan again.") from None


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; of two equal keys readers take one or the other."""
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r:.60} occurs twice")
    return data


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is no figure")
    return float(name)


def _plan_from(data: Mapping[str, Any]) -> Plan:
    def activation(action: Action, spec: str, size: int) -> Activation:
        return Activation(action, ShardingSpec.parse(spec), size)

    mesh, options = data["mesh"], data["options"]
    _check_options(options)
    plan = Plan(
        model=data["model"], graph_digest=data["graph_digest"],
        mesh=Mesh(tuple(entries(mesh["shape"])), tuple(entries(mesh["names"]))),
        cluster=data["cluster"], program=program_from(data["program"]),
        specs={k: ShardingSpec.parse(s) for k, s in data["specs"].items()},
        parameters=data["parameters"],
        activations={k: activation(*entries(a)) for k, a in data["activations"].items()},
        objective=data["objective"], lower_bound=data["lower_bound"], step_time=data["step_time"],
        peak_memory=data["peak_memory"], memory=data["memory"], source=data["source"], timings=data["timings"],
        kernels=data.get("kernels", {}),
        options=options, solver=data["solver"], notices=tuple(entries(data["notices"])),
        candidates=tuple((m, s) for m, s in map(entries, entries(data["candidates"]))),
        baselines=tuple(BaselineRecord(**b) for b in entries(data.get("baselines", []))),
        host_memory=data.get("host_memory", 0),
        facts=facts_from(data["facts"]) if data.get("facts") is not None else None,
    )  # fmt: skip
    require(plan, Plan, "plan")
    return plan


_OPTIONS: Mapping[str, Any] = {
    "memory_budget_bytes": int | None, "batch": Literal["global", "local"],
    "outputs": Literal["auto", "whole", "dtensor"], "mixed_precision": str | None,
    "accumulation_steps": int, "constraints": Mapping[str, str],
}  # fmt: skip
"""Those that a run under the plan takes over."""


def _check_options(options: Mapping[str, Any]) -> None:
    for name, kind in _OPTIONS.items():
        if name in options:
            require(options[name], kind, f"options.{name}")
    if options.get("accumulation_steps", 1) < 1:
        raise ValueError("options.accumulation_steps: no micro-batch")
    data = options.get("dynamic_shapes")
    if data is None:
        return
    names = [name for name, *sizes in data["symbols"] if name.isidentifier() and _is_range(*sizes)]
    if len(set(names)) < len(data["symbols"]):
        raise ValueError("options.dynamic_shapes.symbols: a name and three sizes each")
    for name, dims in data["places"].items():
        if not all(d.isdecimal() and d.isascii() and s in names for d, s in dims.items()):
            raise ValueError(f"options.dynamic_shapes.places.{name:.60}: dims and symbols")
    for text in data.get("formulas", {}).values():
        read = text if isinstance(text, str) else tuple(entries(text))
        require(read, str | tuple[str, ...], "options.dynamic_shapes.formulas")


def _is_range(least: int, most: int, planned: int) -> bool:
    require((least, most, planned), tuple[int, int, int], "options.dynamic_shapes.symbols")
    return least <= planned <= most
