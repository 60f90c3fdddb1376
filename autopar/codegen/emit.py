"""Emit readable Python of a local program: what each rank runs, in order, and when it frees each tensor."""

from __future__ import annotations

import ast
import base64
import operator
import re
import textwrap
import zlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, fx

from autopar import spmd
from autopar._torch import OpOverload, defining_module
from autopar.codegen.expressions import docstring, expression, inlined, literal, printable, quoted
from autopar.codegen.names import Names, name_nodes
from autopar.garbage import collected_later
from autopar.ir import TensorMeta
from autopar.mesh import Mesh
from autopar.program import LocalTensor, Op, Sent
from autopar.sharding import ShardingSpec
from autopar.sharding.strategy import ring_axes
from autopar.spmd import Lowered

WIDTH = 120
"""Longest line of an emitted program, in characters."""
REGISTERS = "# registers"
"""Comment that marks the import of a module that registers ops."""

NON_BREAKING = "\0"
"""A non-breaking space for wrapping lines."""

LITERAL = 4096
"""Most elements of a constant that is written as numbers. Larger ones are packed."""
PACKED = 1 << 15
"""Most characters of a packed constant. Longer ones are left out."""
PACKED = 1 << 15


@collected_later()
def emit(
    lowered: Lowered,
    mesh: Mesh,
    header: Sequence[str],
    constants: Mapping[str, Tensor] | None = None,
    micro_batches: int = 1,
) -> str:
    """Return the program as a Python module with ``forward(rank, inputs)`` and ``backward(rank, inputs)``.

    With gradient accumulation, ``accumulate(rank, inputs)`` is the backward of all micro-batches but the last. Each
    function takes its inputs as a list and empties it, so that every tensor is freed after its last use. Tables at the
    end describe inputs and results.
    """
    ops = sorted({name for module in _modules(lowered) for name in _own_ops(module.graph)})
    names = name_nodes(lowered, ops)
    printer = _Printer(names, mesh)
    results = [output.name for output, _ in lowered.results]
    tables = _tables(lowered, mesh, constants or {}, micro_batches)
    unpacking = "import base64\nimport zlib\n\n" if "base64" in tables else ""
    parts = []
    if lowered.once is not None:
        parts.append(printer.function("once", lowered.once.graph, [], ""))
    parts.append(printer.function("forward", lowered.forward.graph, results, "kept for the backward"))
    parts.append(printer.function("backward", lowered.backward.graph, [], ""))
    if lowered.accumulate is not None:
        parts.append(printer.function("accumulate", lowered.accumulate.graph, [], ""))
    functional = any(" F." in part for part in parts)
    head = docstring("\n".join(header)) + "\n\n" + unpacking + _prelude(ops, lowered, functional=functional)
    return "\n\n\n".join([head, *parts, tables]) + "\n"


def _modules(lowered: Lowered) -> list[fx.GraphModule]:
    return [m for m in (lowered.once, lowered.forward, lowered.backward, lowered.accumulate) if m is not None]


def _own_ops(graph: fx.Graph) -> Iterable[str]:
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and node.target.namespace == "autopar":
            yield str(node.target).split(".")[1]


def _prelude(ops: Sequence[str], lowered: Lowered, *, functional: bool) -> str:
    calls = [n for module in _modules(lowered) for n in module.graph.nodes if n.op == "call_function"]
    lines = ["import torch"] + (["import torch.nn.functional as F"] if functional else [])
    lines += ["", *_imports_of_others({o for n in calls for o in (n.target, *n.args[:1]) if isinstance(o, OpOverload)})]
    lines += [*(["import autopar.ops  # registers the ops below"] if ops else []), "from autopar import spmd", ""]
    lines += ["aten = torch.ops.aten", *(f"{op} = torch.ops.autopar.{op}.default" for op in ops)]
    return "\n".join(lines)


def _imports_of_others(ops: Iterable[OpOverload]) -> list[str]:
    """Return imports of the modules that register custom ops of libraries and users."""
    registered = {(module, str(op)) for op in ops if (module := defining_module(op))}
    return [f"import {module}  {REGISTERS} torch.ops.{op}" for module, op in sorted(registered)]


def _tables(lowered: Lowered, mesh: Mesh, constants: Mapping[str, Tensor], micro_batches: int) -> str:
    """Return the tables that describe inputs and results by position, for callers of the program."""

    def described(tensor: TensorMeta, spec: ShardingSpec) -> str:
        return f"{quoted(tensor.dtype)}, {literal(tuple(tensor.shape), {})}, {quoted(str(spec))}"

    def rows(ends: Iterable[tuple[str, str, ShardingSpec]], nodes: Sequence[fx.Node]) -> str:
        made = [
            f"    ({quoted(kind)}, {quoted(name)}, {described(node.meta['tensor'].meta, spec)}),"
            for (kind, name, spec), node in zip(ends, nodes, strict=True)
        ]
        return "\n".join(["[", *made, "]"]) if made else "[]"

    forward, backward = lowered.forward.graph, lowered.backward.graph
    fed = [n for n in forward.nodes if n.op == "placeholder" and n.target != "rank"][: len(lowered.inputs)]
    back = [n for n in backward.nodes if n.op == "placeholder" and n.target != "rank"]
    results, gradients = (list(g.output_node().args[0]) for g in (forward, backward))  # type: ignore[arg-type]
    taken = (*lowered.tangents, *lowered.accumulators)
    tables = [
        ("INPUTS", [(i.kind, i.name, s) for i, s in lowered.inputs], fed),
        ("OUTPUTS", [(o.kind, o.name, s) for o, s in lowered.results], results[: len(lowered.results)]),
        ("TANGENTS", [(i.kind, i.name, s) for i, s in taken], back[len(lowered.saved) :]),
        ("GRADIENTS", [(o.kind, o.name, s) for o, s in lowered.gradients], gradients),
    ]
    lines = ["# Kind, name, dtype, global shape and spec of each input and result, by position."]
    lines.append(f"MESH = ({literal(tuple(mesh.shape), {})}, {literal(tuple(mesh.names), {})})")
    lines += [f"{title} = {rows(ends, nodes)}" for title, ends, nodes in tables]  # type: ignore[arg-type]
    if lowered.accumulate is not None:
        lines += ["# Results of accumulate, and micro-batches per step; the last one runs backward instead."]
        lines += ["SUMS = [", *(f"    ({quoted(o.kind)}, {quoted(o.name)})," for o, _ in lowered.accumulated), "]"]
        lines.append(f"MICRO_BATCHES = {micro_batches}")
    if lowered.once is not None:
        once = [n for n in lowered.once.graph.nodes if n.op == "placeholder" and n.target != "rank"]
        lines += ["# Inputs of once, whose results forward takes after its own inputs."]
        lines.append(f"ONCE = {rows([(i.kind, i.name, s) for i, s in lowered.once_inputs], once)}")
    used = {i.name for i, _ in lowered.inputs if i.kind in ("constant", "buffer")}
    written = (_constant(name, tensor) for name, tensor in sorted(constants.items()) if name in used)
    values = [text for text in written if text]
    return "\n".join([*lines, *(["CONSTANTS = {", *values, "}"] if values else ["CONSTANTS = {}"])])


def _constant(name: str, tensor: Tensor) -> str:
    """Return an entry of the table of constants; "" for a tensor that would dwarf the program."""
    if tensor.numel() > LITERAL:
        return _packed(name, tensor)
    plain = re.sub(r"\b(nan|inf)\b", r"float('\1')", repr(tensor.flatten().tolist()))
    flat = textwrap.wrap(plain, WIDTH - 8)
    shape = f".reshape({tuple(tensor.shape)})" if tensor.ndim != 1 else ""
    values = "\n".join(f"        {line}" for line in flat)
    return f"    {quoted(name)}: torch.tensor(\n{values},\n        dtype={tensor.dtype},\n    ){shape},"


def _packed(name: str, tensor: Tensor) -> str:
    """Return an entry with compressed bytes, which are short for tensors such as masks; "" if they are too long."""
    if tensor.nbytes > 1000 * PACKED:  # zlib compresses a run to a thousandth at best
        return ""
    flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    letters = base64.b64encode(zlib.compress(flat.numpy().tobytes(), 9)).decode()
    if len(letters) > PACKED:
        return ""
    lines = "\n".join(f'        "{part}"' for part in textwrap.wrap(letters, WIDTH - 12))
    unpacked = f"torch.frombuffer(bytearray(zlib.decompress(base64.b64decode(\n{lines}\n    )))"
    return f"    {quoted(name)}: {unpacked}, dtype={tensor.dtype}).reshape({tuple(tensor.shape)}),"


def results_of(
    module: fx.GraphModule, mesh: Mesh, coordinate: tuple[int, ...]
) -> list[tuple[str, tuple[int, ...], str] | None]:
    """Return name, local shape and dtype of each result on a rank; None for results on the host."""
    made: list[tuple[str, tuple[int, ...], str] | None] = []
    for node in module.graph.output_node().args[0]:  # type: ignore[union-attr]
        tensor: LocalTensor = node.meta["tensor"]  # type: ignore[union-attr]
        shape = tensor.meta.local_shape(tensor.spec, mesh, coordinate)
        made.append(None if tensor.host else (tensor.name, shape, tensor.meta.dtype))
    return made


class _Printer:
    """Prints the functions of one program."""

    def __init__(self, names: Names, mesh: Mesh) -> None:
        self.names, self.mesh = names.of, mesh
        self.described: dict[tuple[TensorMeta, ShardingSpec, bool], str] = {}

    def function(self, name: str, graph: fx.Graph, results: Sequence[str], rest: str) -> str:
        inputs = [n for n in graph.nodes if n.op == "placeholder" and n.target != "rank"]
        lines = [f"def {name}(rank, inputs):"]
        if inputs:
            unpacked = "".join(f"\n        {self.names[n]},{self._comment(n)}" for n in inputs)
            lines += [f"    ({unpacked}\n    ) = inputs", "    inputs.clear()"]
        last = _last_uses(graph)
        section, skipped = "", set[fx.Node]()
        for node in graph.nodes:
            if node.op == "output":
                lines += ['    spmd.section("")'] if section else []
                lines += self._return(node, len(results), rest)
            if node.op != "call_function" or node in skipped or node.target is spmd.device:
                continue
            section = _section(node, section, lines, everywhere=name in ("once", "forward"))
            if inlined(node):
                last.setdefault(node.next, []).extend(d for d in last.pop(node, ()) if d is not node)
                continue
            items = _unpacked(node)
            made = [item for item in items if item is not None]
            skipped.update(made)
            lines += self._assignment(node, items)
            dead = [d for n in (node, *made) for d in last.get(n, ()) if not (inlined(d) or (d is node and items))]
            if dead:
                lines.append(self._deletion(dead))
        return "\n".join(lines)

    def _return(self, node: fx.Node, results: int, rest: str) -> list[str]:
        values = [self.names[a] for a in node.args[0]]  # type: ignore[union-attr, index]
        if not values:
            return ["    return ()"]
        lines = [f"        {name}," for name in values]
        if rest and len(lines) > results:
            lines.insert(results, f"        # {rest}:")
        return ["    return (", *lines, "    )"]

    def _deletion(self, dead: Sequence[fx.Node]) -> str:
        line = f"    del {', '.join(self.names[d] for d in dead)}"
        if len(line) <= WIDTH:
            return line
        names = _wrapped(f"{', '.join(self.names[d] for d in dead)},")
        return "\n".join(["    del (", *names, "    )"])

    def _assignment(self, node: fx.Node, items: Sequence[fx.Node | None]) -> list[str]:
        left = ", ".join(self.names[n] if n is not None else "_" for n in items) if items else self.names[node]
        if len(items) == 1:
            left += ","
        right = expression(node, self.names)
        comments = [c for c in (self._description(n) for n in (items or [node]) if n is not None) if c]
        if len(comments) > 1 and len(set(comments)) == 1:
            comments = [f"{comments[0]} each"]
        comments += [f"Triton kernel {k}" for k in self._kernels(node) if items]
        comments += self._shared(node)
        comment = f"  # {printable('; '.join(comments))}" if comments else ""
        line = f"    {left} = {right}{comment}"
        return [line] if len(line) <= WIDTH else [*_comment_lines(comment), *_wrapped_assignment(left, right)]

    def _kernels(self, node: fx.Node) -> tuple[str, ...]:
        op = node.meta.get("op")
        return op.kernels[:1] if isinstance(op, Op) and not op.exchanges else ()

    def _shared(self, node: fx.Node) -> list[str]:
        """Describe what ranks send each other to share the work of a call: rows that they lend, or blocks on a ring."""
        op = node.meta.get("op")
        if not isinstance(op, Op) or node.target is operator.getitem:
            return []
        if op.strategy is not None and ring_axes(op.strategy):
            blocks = next(s for s in op.sent if s.operand)
            moved = sum(s.bytes for s in op.sent) - blocks.bytes
            seconds = _microseconds(sum(s.seconds for s in op.sent))
            said = f"passes {blocks.bytes:,} bytes over {self._where(blocks.axis)}"
            return [f"{said}, reorders {moved:,}, {seconds}" if moved else f"{said}, {seconds}"]
        if op.loan is None:
            return []
        there, back = op.sent
        seconds = _microseconds(there.seconds + back.seconds)
        return [f"lends {there.bytes:,} bytes over {self._where(there.axis)}, {back.bytes:,} return, {seconds}"]

    def _comment(self, node: fx.Node) -> str:
        said = self._description(node)
        return f"  # {printable(said)}" if said else ""

    def _description(self, node: fx.Node) -> str:
        """Describe a node: local shape and spec of its result, or bytes and seconds of what it sends."""
        tensor, op = node.meta.get("tensor"), node.meta.get("op")
        if isinstance(sent := node.meta.get("sent"), Sent):
            return f"{sent.bytes:,} bytes over {self._where(sent.axis)}, {_microseconds(sent.seconds)}"
        if isinstance(local := node.meta.get("local"), TensorMeta):
            return f"{local.dtype}[{', '.join(map(str, local.shape))}]"
        if not isinstance(op, Op) or node.target is operator.getitem:
            return self._tensor(tensor) if isinstance(tensor, LocalTensor) else ""
        if op.exchanges and op.step is not None:
            several = f"{len(op.writes)} tensors, " if len(op.writes) > 1 else ""
            several += f"{op.step.kind} overlapped with its product, " if op.kind == "decomposed" else ""
            return f"{several}{op.wire_bytes:,} bytes over {self._where(op.step.axis)}, {_microseconds(op.seconds)}"
        if op.is_transfer:
            return f"{op.writes[0].bytes:,} bytes, {_microseconds(op.seconds)}"
        by = f", Triton kernel {op.kernels[0]}" if op.kernels else ""
        return f"{self._tensor(tensor)}{by}" if isinstance(tensor, LocalTensor) else ""

    def _where(self, axis: int) -> str:
        if axis < 0:
            return "the mesh"
        name = self.mesh.names[axis]
        return f"axis {axis}" if name == str(axis) else f'axis {axis} "{name}"'

    def _tensor(self, tensor: LocalTensor) -> str:
        key = tensor.meta, tensor.spec, tensor.host
        if key not in self.described:
            self.described[key] = self._shape(tensor)
        return self.described[key]

    def _shape(self, tensor: LocalTensor) -> str:
        spec, whole = tensor.spec, tensor.meta.shape
        shape = ", ".join(map(str, spec.local_shape(whole, self.mesh, (0,) * self.mesh.ndim)))
        said = f"{tensor.meta.dtype}[{shape}]"
        if any(spec.dims):
            said += f" {spec} of [{', '.join(map(str, whole))}]"
        elif spec.partial:
            said += f" {spec}"
        return said + (" on the host" if tensor.host else "")


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds >= 0.05e-6 else "under 0.1 us"


def _wrapped_assignment(left: str, right: str) -> list[str]:
    """Return an assignment, split over as many lines as it takes."""
    line = f"    {left} = {right}"
    if len(line) <= WIDTH:
        return [line]
    head, _, arguments = right.partition("(")
    is_call = _is_call(right, head)
    if is_call and (len(left) + len(head) < WIDTH - 8 or ("," in left and len(head) < WIDTH - 16)):
        lines = [f"    {left} = {head}(", *_wrapped(arguments[:-1]), "    )"]
    elif is_call and len(right) > WIDTH - 8:
        inner = (f"    {line}" for line in _wrapped(arguments[:-1], WIDTH - 12))
        lines = [f"    {left} = (", f"        {head}(", *inner, "        )", "    )"]
    else:
        lines = [f"    {left} = (", *_wrapped(right), "    )"]
    if len(lines[0]) > WIDTH and "," in left:
        rest = lines[0].removeprefix(f"    {left}")
        lines = ["    (", *_wrapped(f"{left.removesuffix(',')},"), f"    ){rest}", *lines[1:]]
    return lines


def _is_call(text: str, head: str) -> bool:
    """Whether ``text`` is a single call of ``head``, up to its last bracket."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*", head) or not text.endswith(")"):
        return False
    if "'" in text or '"' in text:  # brackets inside strings do not count
        call = ast.parse(text, mode="eval").body
        return isinstance(call, ast.Call) and ast.unparse(call.func) == head
    depth = 0
    for bracket in re.finditer(r"[()]", text):
        depth += 1 if bracket.group() == "(" else -1
        if depth == 0:
            return bracket.end() == len(text)
    return False


def _wrapped(text: str, width: int = WIDTH - 8) -> list[str]:
    if len(text) <= width:
        return [f"        {text.strip()}"]
    made = textwrap.wrap(_with_bound_lists(text), width, break_long_words=False, break_on_hyphens=False)
    return [f"        {line.replace(NON_BREAKING, ' ')}" for line in made]


def _comment_lines(comment: str) -> list[str]:
    """Return a comment as separate lines."""
    said = comment.removeprefix("  # ")
    if said and len(said) <= WIDTH - 6:
        return [f"    # {said}"]
    bound = _with_bound_lists(said).replace(" of ", f"{NON_BREAKING}of{NON_BREAKING}")
    lines = textwrap.wrap(bound, WIDTH - 6, break_long_words=False)
    return [f"    # {line.replace(NON_BREAKING, ' ')}" for line in lines]


def _with_bound_lists(text: str) -> str:
    """Return ``text`` with non-breaking spaces in short lists."""
    return re.sub(r"[\[(][^\[\]()]{0,60}[\])]", lambda found: found.group().replace(" ", NON_BREAKING), text)


def _unpacked(node: fx.Node) -> list[fx.Node | None]:
    """Return the reads of an op's results if all of them directly follow it, to print them as one assignment.

    None stands for a result that the op was not asked for.
    """
    read = list[fx.Node]()
    following = node.next
    while following.target is operator.getitem and following.args[0] is node:
        read.append(following)
        following = following.next
    if not read or set(read) != set(node.users):
        return []
    schema = getattr(node.target, "_schema", None)
    returns = len(schema.returns) if schema is not None else 0
    op = node.meta.get("op")
    written = len(op.writes) if isinstance(op, Op) else 0
    made = node.meta.get("results", returns if returns > 1 else written)
    at = {n.args[1]: n for n in read}
    return [at.get(i) for i in range(made)] if len(at) == len(read) in (made, written) else []


def _section(node: fx.Node, current: str, lines: list[str], *, everywhere: bool) -> str:
    """Begin the section of ``node``, and return it. Sums that autograd adds to the backward belong to no module."""
    module = str(node.meta.get("module", current))
    if not (module or everywhere):
        return current
    if module != current:
        lines += ["", f"    spmd.section({quoted(module)})"]
    return module


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """Return what can be freed after each node. A value that is never read is freed at once."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
        if node.op in ("call_function", "placeholder"):
            last.setdefault(node, node)
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node, end in last.items():
        if node.target not in ("rank", spmd.device):
            # An unused placeholder is freed with the first op, since ``del`` cannot stand inside the unpacking.
            dead.setdefault(end, []).append(node)
    first = next(n for n in graph.nodes if n.op != "placeholder" and n.target is not spmd.device)
    for node in [n for n in dead if n.op == "placeholder"]:
        dead.setdefault(first, []).extend(dead.pop(node))
    return dead
