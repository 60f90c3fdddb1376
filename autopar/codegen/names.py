"""Name the variables of an emitted program after the user's module paths."""

from __future__ import annotations

import builtins
import keyword
import operator
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar._torch import OpOverload
from autopar.ir import Input, Output
from autopar.program import LocalTensor, Op
from autopar.spmd import Lowered

STEPS = {
    "all_gather": "gathered",
    "reduce_scatter": "scattered",
    "all_reduce": "reduced",
    "all_to_all": "moved",
    "permute": "permuted",
    "slice": "sliced",
}
"""Suffix that each step of a redistribution adds to the name of its source."""

_MOVED = re.compile(rf"(_(partial|shard|{'|'.join(STEPS.values())})(_\d+)?)+$")
_SUM_MOVED = re.compile(_MOVED.pattern.replace("partial", "sum|partial"))

NORM, OF_NORM = ("", "mean", "rstd"), ("input", "weight", "bias")
PARTS = {
    **dict.fromkeys(("native_layer_norm", "native_group_norm", "native_batch_norm"), NORM),
    **dict.fromkeys(("layer_norm_of_moments", "group_norm_of_moments"), NORM),
    "rms_norm_of_moments": ("", "rstd"),
    **dict.fromkeys(("native_layer_norm_backward", "native_group_norm_backward"), OF_NORM),
    **dict.fromkeys(("layer_norm_backward_of_sums", "group_norm_backward_of_sums"), OF_NORM),
    "rms_norm_backward_of_sums": OF_NORM[:2],
    "linear_nll": ("", "lse"),
    "linear_nll_backward": OF_NORM,
    **dict.fromkeys(("var_mean", "batch_var_mean", "var_mean_of_moments"), ("var", "mean")),
    "std_mean": ("std", "mean"),
    "native_batch_norm_legit_functional": ("", "mean", "rstd", "running_mean", "running_var"),
    "native_batch_norm_backward": OF_NORM,
    "convolution_backward": OF_NORM,
    "attention": ("", "lse"),
    "attention_backward": ("query", "key", "value"),
    "max_pool2d_with_indices": ("", "indices"),
    "batch_norm_backward_reduce": ("sum", "weighted_sum"),
    "softmax_statistics": ("most", "total"),
    "add_norm": (),
    "norm_backward": (),
}
"""Names of the results of ops with several, if the schema does not name them."""

FUSED = {
    "total": "sum",
    "out": "",
    "mean": "mean",
    "rstd": "rstd",
    "wide": "float",
    "hat": "normalized",
    "input_gradient": "input",
    "weight_gradient": "weight",
    "bias_gradient": "bias",
}
"""Names of the results of fused ops, which are requested by role."""

OPERANDS = {
    "attention": ("query", "key", "value"),
    "batch_norm": ("", "", "", "mean", "rstd"),
    "nll": ("", "lse"),
    "sumexp": ("", "largest"),
}
"""Names of an op's operands."""

SHORTENED = {
    "balanced_attention": "attention",
    "balanced_attention_backward": "attention_backward",
    "ring_attention": "attention",
    "ring_attention_backward": "attention_backward",
    "linear_of_transposed": "linear",
    "add_": "add",
    "mul_": "mul",
    "relu_": "relu",
    "contract": "product",
    "batch_norm_backward_input": "input",
    "experts_mm": "product",
    "routed_mm": "product",
    "_to_copy": "cast",
    "threshold_backward": "relu",
    "split_with_sizes": "split",
}
LAUNCHED = "_launched"
"""Suffix of the handle of a collective or transfer, after the name of its result."""

RESERVED = frozenset({"rank", "inputs", "once", "forward", "backward", "spmd", "torch", "aten", "F", *dir(builtins)})


@dataclass
class Names:
    """The Python name of each node. Saved tensors have the same name in forward and backward.

    Args:
        of: name of each node.
        several: for an op with several results, the common prefix of their names.
        shared: name of each program tensor that crosses from forward to backward.
        results: shape of the result of each module without submodules.
        root: first part of most parameters' names, which is left out.
    """

    of: dict[fx.Node, str] = field(default_factory=dict)
    several: dict[fx.Node, str] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    results: dict[str, tuple[int, ...]] = field(default_factory=dict)
    root: str = ""
    _short: dict[str, str] = field(default_factory=dict)

    def short(self, path: str) -> str:
        """Shorten a path: ``transformer.h.0.attn.c_attn`` becomes ``h0_attn_c_attn``."""
        if path not in self._short:
            self._short[path] = self._shortened(path)
        return self._short[path]

    def _shortened(self, path: str) -> str:
        parts = path.split(".")
        if len(parts) > 1 and parts[0] == self.root and not parts[1].isdigit():
            parts = parts[1:]
        joined = ""
        for part in parts:
            joined += part if part.isdigit() or not joined else f"_{part}"
        return identifier(joined)


def identifier(text: str) -> str:
    """Return a Python name like ``text``."""
    name = re.sub(r"\W+", "_", text).strip("_") or "value"
    return f"layer{name}" if name[0].isdigit() else name


def name_nodes(lowered: Lowered, reserved: Iterable[str]) -> Names:
    """Name every node of both graphs.

    Args:
        reserved: names that are already used in the program's module.
    """
    names = Names(root=_root(meaning.name for meaning, _ in lowered.inputs if meaning.kind == "parameter"))
    meanings = [meaning for meaning, _ in lowered.inputs]
    names.results |= _results_of_leaves(lowered.forward.graph)
    made = zip(_results(lowered.forward.graph), lowered.results, strict=False)
    ends = {n: o for n, (o, _) in made if o.kind == "mutation" or (o.kind == "output" and not n.meta.get("module"))}
    taken = dict.fromkeys([*RESERVED, *reserved], 0)
    if lowered.once is not None:
        _name_graph(lowered.once.graph, names, [m for m, _ in lowered.once_inputs], dict(taken), "")
        names.shared |= {tensor.name: names.of[node] for node, tensor in _tensors(lowered.once.graph)}
    _name_graph(lowered.forward.graph, names, [*meanings, *(None for _ in lowered.held)], dict(taken), "", ends)
    for node, tensor in _tensors(lowered.forward.graph):
        names.shared.setdefault(tensor.name, names.of[node])
    fed = [None] * len(lowered.saved) + [m for m, _ in (*lowered.tangents, *lowered.accumulators)]
    for module, results in ((lowered.backward, lowered.gradients), (lowered.accumulate, lowered.accumulated)):
        if module is not None:
            finals = {node: output for node, (output, _) in zip(_results(module.graph), results, strict=True)}
            _name_graph(module.graph, names, fed, dict(taken), "d_", finals)
    return names


def _root(parameters: Iterable[str]) -> str:
    """Return the first part of most parameters' names: the model's attribute for its trunk, which says little."""
    found = Counter(name.split(".")[0] for name in parameters if name.count("."))
    top = found.most_common(1)
    return top[0][0] if top and top[0][1] > 1 and top[0][1] * 3 > found.total() * 2 else ""


def _results(graph: fx.Graph) -> tuple[fx.Node, ...]:
    return tuple(graph.output_node().args[0])  # type: ignore[arg-type]


def _tensors(graph: fx.Graph) -> Iterable[tuple[fx.Node, LocalTensor]]:
    for node in graph.nodes:
        if isinstance(node.meta.get("tensor"), LocalTensor) and not _is_launch(node):
            yield node, node.meta["tensor"]


def _is_launch(node: fx.Node) -> bool:
    op = node.meta.get("op")
    return isinstance(op, Op) and (op.is_collective or op.is_transfer) and node.target is not operator.getitem


def _name_graph(
    graph: fx.Graph,
    names: Names,
    meanings: Sequence[Input | None],
    taken: dict[str, int],
    prefix: str,
    finals: Mapping[fx.Node, Output] | None = None,
) -> None:
    last = {} if prefix else _last_of_modules(graph)
    fed = iter(meanings)
    for node, output in (finals or {}).items():
        if node.op == "call_function" and not _is_launch(node):
            _name_final(node, output, names, taken, prefix)
    for node in graph.nodes:
        if node.op == "output" or node.target == "rank":
            continue
        if node.op == "placeholder":
            wanted = _of_input(node, next(fed), names)
        elif node in names.of:
            continue
        elif "launches" in node.meta:  # an exchange inside an op
            module = names.short(str(node.meta["module"])) if node.meta.get("module") else ""
            names.of[node] = _free_name(f"{module}_{node.meta['launches']}".lstrip("_"), taken) + LAUNCHED
            continue
        elif _is_launch(node):
            names.of[node] = _free_name(_of_launch(node, names), taken) + LAUNCHED
            continue
        elif _is_arrival(node):
            names.of[node] = names.of[node.args[0]].removesuffix(LAUNCHED)
            continue
        else:
            wanted = _of_call(node, names, last, prefix)
        if node.users and all(user.target is operator.getitem for user in node.users):
            names.several[node] = wanted
            wanted += "_parts"
        names.of[node] = _free_name(wanted, taken)


def _name_final(node: fx.Node, output: Output, names: Names, taken: dict[str, int], prefix: str) -> None:
    """Name a result, and the tensor that it is redistributed from, after the model's name for it."""
    adds = {"accumulator": "sum_", "mutation": "new_"}.get(output.kind, "")
    wanted = f"{adds}{prefix}{names.short(output.name.removeprefix('input:'))}"
    if output.kind == "output" and output.name.isdigit():
        wanted = f"output{output.name}"
    source = node
    while (before := _redistributed_from(source)) is not None:
        source = before
    if source is node or source in names.of or source.op != "call_function":
        names.of[node] = _free_name(wanted, taken)
        return
    tensor = source.meta.get("tensor")
    partial = isinstance(tensor, LocalTensor) and bool(tensor.spec.partial)
    names.of[node] = _free_name(wanted, taken)
    names.of[source] = _free_name(f"{names.of[node]}_{'partial' if partial else 'shard'}", taken)


def _redistributed_from(node: fx.Node) -> fx.Node | None:
    """Return the source if ``node`` is the result of a redistribution step, else None."""
    at = 0
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and _is_arrival(node.args[0]):
        node, at = node.args[0], node.args[1]  # type: ignore[assignment]
    launch = node.args[0] if _is_arrival(node) else node
    op = launch.meta.get("op") if isinstance(launch, fx.Node) else None
    if not isinstance(launch, fx.Node) or not isinstance(op, Op) or op.kind != "redistribute":
        return None
    taken: Any = launch.args[1]
    found = taken[at] if op.bucket else taken
    return found if isinstance(found, fx.Node) else None


def _of_input(node: fx.Node, meaning: Input | None, names: Names) -> str:
    if meaning is None:
        return names.shared[node.meta["tensor"].name]
    if meaning.kind == "tangent":
        return f"d_output{meaning.name}" if meaning.name.isdigit() else f"d_{identifier(meaning.name)}"
    if meaning.kind == "received":
        return f"received_{identifier(meaning.name)}"
    if meaning.kind == "accumulator":
        return f"sum_before_d_{names.short(meaning.name)}"
    return names.short(meaning.name)


def _of_call(node: fx.Node, names: Names, last: Mapping[fx.Node, str], prefix: str) -> str:
    op = node.meta.get("op")
    source = _source(node)
    if isinstance(op, Op) and op.kind == "redistribute":
        return _redistributed(op, names, source)
    base = names.short(str(node.meta["module"])) if node.meta.get("module") else ""
    tensor = node.meta.get("tensor")
    partial = "_partial" if isinstance(tensor, LocalTensor) and tensor.spec.partial else ""
    if node.target is operator.getitem and source is not None:
        return _of_part(node, source, names) + partial
    if node in last:
        return f"{prefix}{names.short(last[node])}{partial}"
    if prefix and not base and (module := _whose_gradient(node, names.results)):
        return f"{prefix}{names.short(module)}{partial}"
    kind = _kind_of_gradient(node) if prefix else _role(node) or _kind(node)
    if base and "norm" in kind and PARTS.get(kind, ())[:1] == ("",):
        kind = ""  # the result of a norm module is named after the module alone
    if base and kind in ("batch_var_mean", "var_mean_of_moments"):
        kind = ""
    if kind == "add" and prefix and not base and source is not None:
        # Autograd adds the gradients of a tensor that several modules read; the sum is named after the first.
        return f"{_SUM_MOVED.sub('', names.of[source])}_sum{partial}"
    again = "_again" if isinstance(op, Op) and op.name.endswith("_again") else ""
    return prefix + "_".join(part for part in (base, kind) if part) + again + partial


def _source(node: fx.Node) -> fx.Node | None:
    """Return the first operand of a call."""
    return next((a for a in node.all_input_nodes if a.target != "rank"), None)


def _is_arrival(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") in ("wait", "arrived")


def _of_launch(node: fx.Node, names: Names) -> str:
    """Return the name of the result of a collective or transfer."""
    op, source = node.meta["op"], _source(node)
    if op.bucket:
        return f"bucket_{STEPS[op.step.kind]}"
    if not op.is_transfer:
        return _redistributed(op, names, source)
    assert source is not None
    return f"{names.of[source]}_on_host" if op.kind == "offload" else names.of[source].removesuffix("_on_host")


def _of_part(node: fx.Node, source: fx.Node, names: Names) -> str:
    index = node.args[1]
    assert isinstance(index, int)
    whole = names.several.get(source, names.of[source])
    wanted: Any = source.kwargs.get("results")
    parts = tuple(FUSED[name] for name in wanted) if wanted else _parts(source)
    if _is_arrival(source):
        launch: Any = source.args[0]
        return _redistributed(launch.meta["op"], names, launch.args[1][index])
    part = parts[index] if index < len(parts) else str(index)
    return f"{whole}_{part}" if part else whole


def _parts(node: fx.Node) -> tuple[str, ...]:
    kind = _kind(node)
    if kind in PARTS or not isinstance(node.target, OpOverload):
        return PARTS.get(kind, ())
    returns = node.target._schema.returns
    return tuple(r.name for r in returns) if all(r.name for r in returns) else ()


def _redistributed(op: Op, names: Names, source: fx.Node | None) -> str:
    assert op.step is not None
    base = names.of[source] if source is not None else op.node
    return f"{_MOVED.sub('', base).rstrip('_')}_{STEPS.get(op.step.kind, op.step.kind)}"


def _kind(node: fx.Node) -> str:
    text = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    return identifier(SHORTENED.get(text, text))


def _kind_of_gradient(node: fx.Node) -> str:
    """Name the result of a backward op: gradient of a module's input or weight, else after the op."""
    kind = _kind(node)
    if kind == "gradient_of_weight":
        return "weight"
    if kind in ("linear", "matmul", "relu", "dropout") and node.meta.get("module"):
        return "input"
    return "" if kind in PARTS else kind.removesuffix("_backward")


def _role(node: fx.Node) -> str:
    """Return the name of a node's role as an operand of an op in ``OPERANDS``, or ""."""
    for reader, read in _readers(node):
        roles = OPERANDS.get(_kind(reader), ())
        operands = [a for a in reader.args if getattr(a, "target", None) != "rank"]
        at = next((i for i, a in enumerate(operands) if a is read), len(roles))
        if at < len(roles) and roles[at]:
            return roles[at]
    return ""


def _whose_gradient(node: fx.Node, results: Mapping[str, tuple[int, ...]]) -> str:
    """Return the module whose backward starts from the result of this node, which lies outside the module."""
    tensor = node.meta.get("tensor")
    for reader, _ in _readers(node):
        module = str(reader.meta.get("module", ""))
        if isinstance(tensor, LocalTensor) and results.get(module) == tensor.meta.shape:
            return module
    return ""


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the ops that compute with a node's value, even after redistributions, and the node that each reads."""
    for user in node.users:
        op = user.meta.get("op")
        if _is_arrival(user) or (isinstance(op, Op) and op.kind == "redistribute" and not op.bucket):
            yield from _readers(user)
        else:
            yield user, node


def _results_of_leaves(graph: fx.Graph) -> dict[str, tuple[int, ...]]:
    last = _last_of_modules(graph)
    inner = {m.rpartition(".")[0] for m in last.values()}
    tensors = {module: node.meta.get("tensor") for node, module in last.items() if module not in inner}
    return {module: t.meta.shape for module, t in tensors.items() if isinstance(t, LocalTensor)}


def _last_of_modules(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the result of each module, its last op."""
    last: dict[str, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "call_function" and node.meta.get("module"):
            last[str(node.meta["module"])] = node
    return {node: module for module, node in last.items()}


def _free_name(wanted: str, taken: dict[str, int]) -> str:
    """Return ``wanted``, with the next free number if it is taken.

    ``taken`` holds the last number of each name; 0 for reserved words.
    """
    last = taken.get(wanted, 0 if keyword.iskeyword(wanted) else None)
    name, count = wanted if last is None else f"{wanted}_", 1
    if last:
        name, count = f"{wanted}_{last + 1}", last + 1
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    taken[wanted] = count
    taken.setdefault(name, 1)
    return name
