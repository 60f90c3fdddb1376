"""A plan as data: all decisions and predictions, and what follows from them. Tables and reports read only this."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar.mesh import Mesh
from autopar.plans.facts import Facts, facts_to
from autopar.plans.formulas import read_formula
from autopar.plans.records import Activation, BaselineRecord, Collective, SearchRecord
from autopar.plans.serial import program_to
from autopar.program import Op, Program
from autopar.sharding import ShardingSpec

FORMAT_VERSION = 2
READABLE = (1, 2)
"""Versions that can be loaded. Plans of format 1 have no facts: they run and print, but their reports show less."""


@dataclass(frozen=True)
class PlanRecord:
    """How to train a model on a mesh. Seconds and bytes are predictions for one device of the cluster.

    Args:
        model: name of the model's class.
        graph_digest: digest of the captured graph that the plan belongs to.
        mesh: the arrangement of the ranks.
        cluster: name of the cluster.
        program: the local program: all ops with their strategies, and all redistributions, in order.
        specs: specs of parameters, buffers, inputs, outputs, module outputs and graph nodes, by name.
        parameters: bytes of each parameter on one device, by name.
        activations: what the backward reads of the forward, by node.
        objective: the solver's cost in seconds; no plan can cost less than ``lower_bound``.
        step_time: seconds of a step, from a simulation of its compute and communication streams.
        peak_memory: bytes on the fullest device; ``memory`` splits them by kind at that moment.
        host_memory: peak bytes that the host holds for a device: offloaded activations and optimizer state.
        source: the emitted local program.
        timings: seconds that planning took, by stage.
        options: the user's options.
        solver: the method, and sizes of the problem.
        notices: messages to the user.
        candidates: other meshes that were planned, with their step times.
        baselines: known ways to train in parallel, completed, priced and simulated like this plan: those that might
            have been better, or all with ``compare=True``.
        trace: what each phase of the search left.
        kernels: source of each Triton kernel that the program runs, by name.
        facts: the data behind the figures; None in plans of format 1.
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
    trace: tuple[SearchRecord, ...] = ()
    host_memory: int = 0
    facts: Facts | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """(objective - lower_bound) / objective; 0 for a free program."""
        return (self.objective - self.lower_bound) / self.objective if self.objective else 0.0

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """One record per launch in program order, including those inside ops."""
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
                Collective(s.kind, (named(op.reads[s.operand]),), s.axis, s.bytes, s.seconds, op.phase) for s in op.sent
            ]
        return tuple(found)

    @property
    def offloaded_optimizer(self) -> tuple[str, ...]:
        """FQNs of the parameters whose optimizer state lies on the host between optimizer steps."""
        return self.program.offloaded_optimizer

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: FLOPs of the step over what all devices could do in its time; 0 if unknown.

        Of causal attention it counts the pairs of rows that the mask leaves.
        """
        return self._utilization(self.facts.needed_flops) if self.facts else 0.0

    @property
    def mfu_of_all_pairs(self) -> float:
        """``mfu`` if the pairs that causal masks hide are counted too, as is usual where sequences are short."""
        return self._utilization(self.facts.flops) if self.facts else 0.0

    def _utilization(self, flops: float) -> float:
        could = self.step_time * self.mesh.size * self.facts.peak_flops_per_s if self.facts else 0.0
        return flops / could if could else 0.0

    @property
    def throughput(self) -> float:
        """Tokens per second, or samples per second if the inputs are not tokens; 0 if unknown."""
        done = (self.facts.tokens or self.facts.samples) if self.facts else 0
        return done / self.step_time if self.step_time else 0.0

    @property
    def budget(self) -> int:
        """Memory budget of each device in bytes: the user's, else the device's memory; 0 if unknown."""
        asked = self.options.get("memory_budget_bytes")
        return int(asked) if asked else self.facts.memory_bytes if self.facts else 0

    @cached_property
    def digest(self) -> str:
        """Hash of the decisions: two plans with the same digest run the same program."""
        text = json.dumps(program_to(replace_times(self.program)), sort_keys=True)
        return hashlib.sha256((self.graph_digest + text).encode()).hexdigest()[:16]

    @cached_property
    def symbolic(self) -> Mapping[str, Any]:
        """Formulas of a plan with ``dynamic_shapes``, as sympy expressions of the varying sizes; otherwise empty.

        ``flops`` of a step over all ranks, ``saved_bytes`` from forward to backward and ``communicated_bytes`` of the
        fullest rank, and the shape of each input and output.
        """
        data = self.options.get("dynamic_shapes") or {}
        if not data.get("formulas"):
            return {}
        names = [name for name, *_ in data["symbols"]]

        def read(text: Any) -> Any:
            return read_formula(text, names) if isinstance(text, str) else tuple(map(read, text))

        return {name: read(text) for name, text in data["formulas"].items()}

    def to_json(self) -> str:
        """Return the canonical text: equal plans have equal text."""
        return json.dumps(self._data(), indent=1)

    def _data(self) -> dict[str, Any]:
        return {
            "format": "autopar-plan",
            "version": FORMAT_VERSION,
            "digest": self.digest,
            "model": self.model,
            "graph_digest": self.graph_digest,
            "cluster": self.cluster,
            "mesh": {"shape": list(self.mesh.shape), "names": list(self.mesh.names)},
            "program": program_to(self.program),
            "specs": {k: str(s) for k, s in self.specs.items()},
            "parameters": dict(self.parameters),
            "activations": {k: [a.action, str(a.spec), a.bytes] for k, a in self.activations.items()},
            "objective": self.objective,
            "lower_bound": self.lower_bound,
            "step_time": self.step_time,
            "peak_memory": self.peak_memory,
            "memory": dict(self.memory),
            "source": self.source,
            "kernels": dict(self.kernels),
            "timings": dict(self.timings),
            "options": dict(self.options),
            "solver": dict(self.solver),
            "notices": list(self.notices),
            "candidates": [list(c) for c in self.candidates],
            "baselines": [asdict(b) for b in self.baselines],
            "trace": [asdict(r) for r in self.trace],
            "host_memory": self.host_memory,
            "facts": None if self.facts is None else facts_to(self.facts),
        }


def replace_times(program: Program) -> Program:
    """Return the program without predicted seconds, which are not decisions."""

    def timeless(op: Op) -> Op:
        return replace(op, seconds=0.0, launch_s=0.0, sent=tuple(replace(s, seconds=0.0) for s in op.sent))

    ops = tuple(map(timeless, program.ops))
    return replace(program, ops=ops, state_transfer_s=0.0, arrangement=None)
