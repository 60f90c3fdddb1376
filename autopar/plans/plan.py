"""``Plan``: all decisions and predictions, immutable, with a canonical text form."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal, TypeVar

from autopar.errors import AutoparError, PlanError
from autopar.mesh import Mesh
from autopar.plans import figures
from autopar.plans.about import about
from autopar.plans.consistency import check_consistent
from autopar.plans.differences import differences
from autopar.plans.facts import facts_from
from autopar.plans.record import READABLE, PlanRecord
from autopar.plans.records import Activation, BaselineRecord, SearchRecord
from autopar.plans.sampling import LocalSampler
from autopar.plans.serial import program_from
from autopar.plans.table import table
from autopar.plans.typed import entries, require
from autopar.sharding import ShardingSpec

T = TypeVar("T")


@dataclass(frozen=True)
class Plan(PlanRecord):
    """A plan that can be explained, shown, saved and run. ``PlanRecord`` documents its fields."""

    _explain: Callable[[str], str] | None = field(default=None, repr=False, compare=False)

    def explain(self, name: str = "") -> str:
        """Return what each alternative spec of a tensor would cost and change elsewhere, and what the constraints cost.

        Args:
            name: a parameter, ``input:NAME``, ``output:NAME``, module or node; "" explains only the constraints.

        Raises:
            PlanError: if the plan was loaded from a file, which does not hold the problem, or ``name`` is not a string.
        """
        if not isinstance(name, str):
            raise PlanError(
                "explain() takes the name of a tensor in the plan.",
                found=repr(name)[:80],
                hint="give a key of plan.specs.",
            )
        if self._explain is None:
            said = about(self, name).replace("\n", "\n         ")
            raise PlanError(
                "This plan cannot be explained.",
                found="a loaded plan, without the problem that it solves" + (f"; {said}" if said else ""),
                hint="call autopar.plan again, and explain() on its result.",
            )
        said = about(self, name)
        return f"{said}\n\n{self._explain(name)}" if said else self._explain(name)

    def memory_figure(self) -> Any:
        """Draw memory over time as a ``matplotlib.figure.Figure``."""
        return figures.memory_figure(self)

    def timeline_figure(self) -> Any:
        """Draw what each stream does as a ``matplotlib.figure.Figure``."""
        return figures.timeline_figure(self)

    def diff(self, other: object) -> str:
        """Describe what differs between two plans: mesh, predictions, memory, collectives, specs, and what is kept.

        Raises:
            PlanError: if ``other`` is not a plan.
        """
        if not isinstance(other, Plan):
            hint = "load the other plan with Plan.load(path)."
            raise PlanError("A plan can only be compared with another plan.", found=repr(other)[:80], hint=hint)
        return differences(self, other)

    def sampler(
        self, dataset: Sized, *, shuffle: bool = True, seed: int = 0, drop_last: bool = True, rank: int | None = None
    ) -> LocalSampler:
        """Return a sampler of the samples that a rank reads, for a plan made with ``batch="local"``.

        Args:
            dataset: the whole data set, the same on every rank.
            shuffle, seed, drop_last: as in ``LocalSampler``.
            rank: by default that of this process, from the variable RANK that launchers set.

        Raises:
            PlanError: if the plan's batch is global, or it has no such rank.
        """
        batch = self.options.get("batch", "global")
        if batch != "local":
            raise PlanError(
                "Every rank of this plan reads the whole batch.",
                found=f"batch={batch!r}",
                hint='use an ordinary sampler with the same seed on every rank, or plan with batch="local".',
            )
        this = int(os.environ.get("RANK", "0")) if rank is None else rank
        return LocalSampler(dataset, this, self.mesh.size, shuffle=shuffle, seed=seed, drop_last=drop_last)

    def report(self, path: str | Path) -> None:
        """Write a report of mesh, model, memory, timeline, collectives and baselines: one HTML file that opens offline.

        Raises:
            PlanError: if the file cannot be written.
        """
        from autopar.plans.report import page

        write_text(path, page(self))

    def _repr_html_(self) -> str:
        """Show the table, and the report to unfold, in a notebook."""
        from autopar.plans.report import page

        text = escape(table(self))
        framed = f'<iframe srcdoc="{escape(page(self))}" style="width:100%;height:42rem;border:0"></iframe>'
        return f"<pre>{text}</pre><details><summary>report</summary>{framed}</details>"

    def emit(self, path: str | Path) -> Path:
        """Write the local program as a file that runs under torchrun with torch alone, with copies of what it calls.

        ``torchrun --nproc-per-node N step.py --state model.pt --batch batch.pt --out out.pt`` takes one step and writes
        outputs and gradients; without files it uses random values. The file holds the plan's Triton kernels, and eager
        code that runs instead on CPUs and where Triton is missing.

        Raises:
            PlanError: if the file cannot be written.
        """
        codegen = importlib.import_module("autopar.codegen.write")  # codegen knows plans, so plans do not import it
        write_text(path, codegen.text_of(self.source, Path(path).name, kernels=bool(self.kernels)))
        return Path(path)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, in the format of docs/reference/plan-format.md.

        Raises:
            PlanError: if the file cannot be written.
        """
        write_text(path, self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a saved plan.

        Raises:
            PlanError: if the file is missing, is not a plan, or has a newer version.
        """
        return Plan.from_json(read_text(path), str(path))

    @staticmethod
    def from_json(text: str, where: str = "text") -> Plan:
        """Read the plan that ``to_json`` wrote. Nothing in it is executed, and every field is checked."""
        data = read_json(text, where)
        if not isinstance(data, dict) or data.get("format") != "autopar-plan":
            raise _not_a_plan(where)
        if data.get("version") not in READABLE:
            raise PlanError(
                "The plan was saved by another version of autopar.",
                found=f"format version {data.get('version')!s:.40}; this one reads {' and '.join(map(str, READABLE))}",
                hint="plan again with this version, or install the version that saved the plan.",
            )
        plan = checked_read(lambda: _plan_from(data), where)
        if data.get("digest") != plan.digest:
            raise PlanError(
                "The plan's program does not match its digest.",
                found=f"{where}: digest {data.get('digest')!s:.40}; that of the program is {plan.digest}",
                hint=f'if you edited the program, write "digest": "{plan.digest}" into the file.',
            )
        checked_read(lambda: check_consistent(plan), where)
        return plan

    def __str__(self) -> str:
        """Return the table, in colour if standard output is a terminal and NO_COLOR is not set."""
        return table(self, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle only the JSON text: the explainer holds the whole problem, and stays in this process."""
        return Plan.from_json, (self.to_json(),)


def read_text(path: str | Path) -> str:
    """Return the text of a saved plan.

    Raises:
        PlanError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, TypeError, ValueError) as error:
        hint = "give the path of a saved plan."
        raise PlanError("The plan cannot be read.", found=f"{path!s:.200}: {error}", hint=hint) from None


def read_json(text: str, where: str) -> Any:
    """Return the data of a plan's text.

    Raises:
        PlanError: it is no JSON, or is ambiguous.
    """
    try:
        return json.loads(text, object_pairs_hook=_with_unique_keys, parse_constant=_constant)
    except (ValueError, TypeError, RecursionError) as error:
        raise _not_a_plan(f"{where}: {error}") from None


def write_text(path: str | Path, text: str) -> None:
    """Write a file.

    Raises:
        PlanError: it cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise PlanError(
            "The file cannot be written.", found=str(error), hint="check that the directory exists and is writable."
        ) from None


def _not_a_plan(found: str) -> PlanError:
    return PlanError("This is not an autopar plan.", found=found, hint="save a plan with plan.save(path).")


def checked_read(read: Callable[[], T], where: str) -> T:
    """Return what ``read`` makes of a plan's data; whatever it stumbles on is an error of the file."""
    try:
        return read()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, AutoparError) as error:
        found = f"{where}: {type(error).__name__} {error!s:.400}"
        raise PlanError("The plan is damaged.", found=found, hint="plan again.") from None


def _with_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object. Duplicate keys are an error, since parsers disagree on which one counts."""
    data = dict(pairs)
    if len(data) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r:.60} occurs twice")
    return data


def _constant(name: str) -> float:
    if name == "NaN":
        raise ValueError("NaN is not a valid figure")
    return float(name)


def _plan_from(data: Mapping[str, Any]) -> Plan:
    def activation(action: str, spec: str, size: int) -> Activation:
        return Activation(action, ShardingSpec.parse(spec), size)

    mesh, options = data["mesh"], data["options"]
    _check_options(options)
    plan = Plan(
        model=data["model"],
        graph_digest=data["graph_digest"],
        mesh=Mesh(tuple(entries(mesh["shape"])), tuple(entries(mesh["names"]))),
        cluster=data["cluster"],
        program=program_from(data["program"]),
        specs={k: ShardingSpec.parse(s) for k, s in data["specs"].items()},
        parameters=data["parameters"],
        activations={k: activation(*entries(a)) for k, a in data["activations"].items()},
        objective=data["objective"],
        lower_bound=data["lower_bound"],
        step_time=data["step_time"],
        peak_memory=data["peak_memory"],
        memory=data["memory"],
        source=data["source"],
        timings=data["timings"],
        kernels=data.get("kernels", {}),
        options=options,
        solver=data["solver"],
        notices=tuple(entries(data["notices"])),
        candidates=tuple((m, s) for m, s in map(entries, entries(data["candidates"]))),
        baselines=tuple(BaselineRecord(**b) for b in entries(data.get("baselines", []))),
        trace=tuple(SearchRecord(**r) for r in entries(data.get("trace", []))),
        host_memory=data.get("host_memory", 0),
        facts=facts_from(data["facts"]) if data.get("facts") is not None else None,
    )
    require(plan, Plan, "plan")
    return plan


_OPTIONS: Mapping[str, Any] = {
    "memory_budget_bytes": int | None,
    "batch": Literal["global", "local"],
    "outputs": Literal["auto", "whole", "dtensor"],
    "mixed_precision": str | None,
    "accumulation_steps": int,
    "constraints": Mapping[str, str],
}
"""The options that a run under the plan takes over, with their types."""


def _check_options(options: Mapping[str, Any]) -> None:
    for name, kind in _OPTIONS.items():
        if name in options:
            require(options[name], kind, f"options.{name}")
    if options.get("accumulation_steps", 1) < 1:
        raise ValueError("options.accumulation_steps: must be at least 1")
    data = options.get("dynamic_shapes")
    if data is None:
        return
    names = [name for name, *sizes in data["symbols"] if name.isidentifier() and _is_range(*sizes)]
    if len(set(names)) < len(data["symbols"]):
        raise ValueError("options.dynamic_shapes.symbols: each needs a name and three sizes")
    for name, dims in data["places"].items():
        if not all(d.isdecimal() and d.isascii() and s in names for d, s in dims.items()):
            raise ValueError(f"options.dynamic_shapes.places.{name:.60}: dims and symbols")
    for text in data.get("formulas", {}).values():
        read = text if isinstance(text, str) else tuple(entries(text))
        require(read, str | tuple[str, ...], "options.dynamic_shapes.formulas")


def _is_range(least: int, most: int, planned: int) -> bool:
    require((least, most, planned), tuple[int, int, int], "options.dynamic_shapes.symbols")
    return least <= planned <= most
