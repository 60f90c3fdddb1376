"""Convert a local program to JSON data, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from autopar.ir import Output, TensorMeta, Value
from autopar.plans.typed import entries
from autopar.program import Arrangement, LocalTensor, Op, Program, Sent
from autopar.sharding import Halo, Loan, ShardingSpec, Step, Strategy


def program_to(program: Program) -> dict[str, Any]:
    return {
        "ops": [_op_to(op) for op in program.ops],
        "results": [[o.kind, o.name, o.value.node, o.value.index, tensor] for o, tensor in program.results],
        "offloaded_optimizer": list(program.offloaded_optimizer),
        "state_transfer_s": program.state_transfer_s,
        "arrangement": None if program.arrangement is None else asdict(program.arrangement),
        **({"once": list(program.once)} if program.once else {}),
    }


def program_from(data: Mapping[str, Any]) -> Program:
    results = tuple(
        (Output(Value(node, index), kind, name), tensor)
        for kind, name, node, index, tensor in map(entries, entries(data["results"]))
    )
    away, seconds = tuple(entries(data.get("offloaded_optimizer", []))), data.get("state_transfer_s", 0.0)
    arranged = data.get("arrangement")
    arrangement = None if arranged is None else Arrangement(**arranged)
    once = tuple(entries(data.get("once", [])))
    return Program(tuple(_op_from(op) for op in entries(data["ops"])), results, away, seconds, arrangement, once)


def _op_to(op: Op) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": op.name,
        "kind": op.kind,
        "node": op.node,
        "reads": list(op.reads),
        "phase": op.phase,
        "writes": [_tensor_to(t) for t in op.writes],
        "seconds": op.seconds,
    }
    if op.strategy is not None:
        s = op.strategy
        data["strategy"] = {
            "inputs": [str(i) for i in s.inputs],
            "outputs": [None if o is None else str(o) for o in s.outputs],
            "axes": list(s.axes),
            "work": s.work,
        }
    if op.step is not None:
        data |= {"step": _step_to(op.step), "wire_bytes": op.wire_bytes, "launch_s": op.launch_s}
    if op.bucket:
        data["bucket"] = [_step_to(t) for t in op.bucket]
    data |= {flag: True for flag in ("alias", "in_place") if getattr(op, flag)}
    if op.operand >= 0:
        data["operand"] = op.operand
    if op.kind == "decomposed":
        data["step_s"] = op.step_s
    if op.kernels:
        data["kernels"] = list(op.kernels)
    if op.halos:
        data["halos"] = [
            [h.operand, h.dim, h.axis, [list(w) for w in h.windows], h.before, h.after, h.n, str(h.fill)]
            for h in op.halos
        ]
    if op.sent:
        data["sent"] = [[s.kind, s.operand, s.axis, s.bytes, s.seconds] for s in op.sent]
    if op.form:
        data["form"] = op.form
    if op.loan is not None:
        data["loan"] = [op.loan.n, list(op.loan.axes), list(op.loan.lent)]
    return data


def _step_to(t: Step) -> dict[str, Any]:
    return {
        "kind": t.kind,
        "axis": t.axis,
        "dim": t.dim,
        "to_dim": t.to_dim,
        "reduction": t.reduction,
        "axes": list(t.axes),
    }


def _step_from(data: Mapping[str, Any]) -> Step:
    return Step(**{**data, "axes": tuple(entries(data["axes"]))})


def _tensor_to(t: LocalTensor) -> list[Any]:
    routed = f" routed {' '.join(map(str, (t.meta.routed, *t.meta.choices)))}" if t.meta.routed else ""
    dtype = f"{t.meta.dtype}{routed}"
    data = [t.name, list(t.meta.shape), dtype, str(t.spec), t.bytes]
    return [*data, True] if t.host else data


def _meta_from(shape: Any, dtype: str) -> TensorMeta:
    name, _, routed = dtype.partition(" routed ")
    lead, *choices = map(int, routed.split() or ["0"])
    return TensorMeta(tuple(entries(shape)), name, lead, tuple(choices))


def _op_from(data: Mapping[str, Any]) -> Op:
    strategy = step = None
    if "strategy" in data:
        s = data["strategy"]
        outputs = tuple(None if o is None else ShardingSpec.parse(o) for o in entries(s["outputs"]))
        inputs = tuple(map(ShardingSpec.parse, entries(s["inputs"])))
        strategy = Strategy(inputs, outputs, tuple(entries(s["axes"])), s["work"])
    if "step" in data:
        step = _step_from(data["step"])
    writes = tuple(
        LocalTensor(name, _meta_from(shape, dtype), ShardingSpec.parse(spec), size, *host)
        for name, shape, dtype, spec, size, *host in map(entries, entries(data["writes"]))
    )
    return Op(
        data["name"],
        data["kind"],
        data["node"],
        tuple(entries(data["reads"])),
        writes,
        data["phase"],
        strategy,
        step,
        data["seconds"],
        data.get("wire_bytes", 0),
        data.get("alias", False),
        data.get("launch_s", 0.0),
        tuple(map(_step_from, entries(data.get("bucket", [])))),
        data.get("step_s", 0.0),
        data.get("operand", -1),
        tuple(entries(data.get("kernels", []))),
        data.get("in_place", False),
        tuple(map(_halo_from, entries(data.get("halos", [])))),
        tuple(Sent(*s) for s in map(entries, entries(data.get("sent", [])))),
        _loan_from(*entries(data["loan"])) if "loan" in data else None,
        data.get("form", "offload" if data["kind"] in ("offload", "fetch") else ""),
    )


def _loan_from(n: Any, axes: Sequence[Any], lent: Sequence[Any]) -> Loan:
    return Loan(n, tuple(entries(axes)), tuple(entries(lent)))


def _halo_from(data: Sequence[Any]) -> Halo:
    operand, dim, axis, windows, before, after, n, fill = data
    return Halo(operand, dim, axis, tuple((a, b) for a, b in entries(windows)), before, after, n, float(fill))
