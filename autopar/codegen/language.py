"""The language of emitted programs: check that a text is one.

The text of a plan may come from a file that anybody could change. Before it goes into a file that people run, it is
parsed, never executed, and rejected if it holds anything that ``emit`` does not write: tensors, torch's ops, functions
of ``spmd``.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from typing import Any

import torch

from autopar._torch import OpOverload
from autopar.codegen.expressions import FUNCTIONS, METHODS
from autopar.codegen.names import RESERVED
from autopar.errors import PlanError
from autopar.ops.registration import IMPLEMENTATIONS

TABLES = frozenset({"MESH", "INPUTS", "OUTPUTS", "TANGENTS", "GRADIENTS", "SUMS", "MICRO_BATCHES", "ONCE"})
IMPORTS = frozenset(
    {
        "import torch",
        "import torch.nn.functional as F",
        "import base64",
        "import zlib",
        "import autopar.ops",
        "from autopar import spmd",
    }
)
CALLED = frozenset(FUNCTIONS.values()) | {"torch.matmul", "torch.device", "F.linear", "F.pad", "float"}
CALLED |= {f"F.conv{kind}{n}d" for kind in ("", "_transpose") for n in (1, 2, 3)}
CALLED |= {
    f"spmd.{name}"
    for name in (
        "all_gather",
        "all_gather_bucket",
        "all_reduce",
        "all_reduce_bucket",
        "all_to_all",
        "arrived",
        "balanced_attention",
        "balanced_attention_backward",
        "choice",
        "collect",
        "device",
        "fetch",
        "gather_product",
        "length",
        "offload",
        "offset",
        "on_copies",
        "permute",
        "product_scatter",
        "reduce_scatter",
        "reduce_scatter_bucket",
        "ring_attention",
        "ring_attention_backward",
        "route",
        "section",
        "send",
        "shift",
        "slice_shard",
        "wait",
        "window",
    )
}
UNPACKED = frozenset(
    {
        "float",
        "torch.tensor",
        "torch.frombuffer",
        "bytearray",
        "zlib.decompress",
        "base64.b64decode",
    }
)
"""The functions that an entry of the table of constants may call."""

METHODS_CALLED = frozenset(METHODS.values()) | {"t", "flatten", "to", "reshape"}
OP = re.compile(r"(?:torch\.ops|aten)(?:\.\w+){2,3}")

PLAIN = (
    ast.Constant,
    ast.Tuple,
    ast.List,
    ast.Slice,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
    ast.expr_context,
    ast.keyword,
)


def check_text(source: str) -> ast.Module:
    """Parse the text of an emitted program.

    Raises:
        PlanError: if it is not one.
    """
    unreadable = next((c for c in source if not (c.isprintable() or c == "\n")), None)
    if unreadable is not None:
        raise _not_a_program(f"the character {unreadable!r}")
    try:
        tree = ast.parse(source)
        _Text(set()).module(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _not_a_program(f"{type(error).__name__}: {error!s:.120}") from None
    return tree


def _not_a_program(found: str) -> PlanError:
    return PlanError(
        "The text under 'source' in this plan is not what autopar emits.",
        found=found,
        hint="emit it again with autoparallelize(model, inputs, plan=plan).plan.emit(path); to run text that you "
        "edited, use autoparallelize(..., plan=plan, source=path).",
    )


class _Text:
    """Checks a module. ``ops`` collects the names bound to autopar's ops."""

    def __init__(self, ops: set[str]) -> None:
        self.ops = ops

    def module(self, tree: ast.Module) -> None:
        functions = [s.name for s in tree.body if isinstance(s, ast.FunctionDef)]
        if [name for name in functions if name != "once"][:2] != ["forward", "backward"]:
            raise _not_a_program("no functions forward and backward")
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef):
                self.function(statement)
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                self.imported(statement)
            elif isinstance(statement, ast.Assign):
                self.table(statement)
            elif not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
                raise _wrong(statement)

    def imported(self, statement: ast.Import | ast.ImportFrom) -> None:
        """Check an import: of the standard ones, or of a module with ops that this process has already imported."""
        text = ast.unparse(statement)
        known = isinstance(statement, ast.Import) and text == f"import {statement.names[0].name}"
        if text not in IMPORTS and not (known and text.removeprefix("import ") in sys.modules):
            raise _wrong(statement)

    def table(self, statement: ast.Assign) -> None:
        name = ast.unparse(statement.targets[0])
        value = ast.unparse(statement.value) if isinstance(statement.value, ast.Attribute) else ""
        if len(statement.targets) > 1:
            raise _wrong(statement)
        if f"autopar::{name}" in IMPLEMENTATIONS and value == f"torch.ops.autopar.{name}.default":
            self.ops.add(name)
        elif name == "CONSTANTS" and isinstance(statement.value, ast.Dict):
            inside = _Expression(set(), UNPACKED, frozenset({"reshape"}))
            for key, entry in zip(statement.value.keys, statement.value.values, strict=True):
                if not isinstance(key, ast.Constant):
                    raise _wrong(statement)
                inside.check(entry)
        elif name in TABLES:
            ast.literal_eval(statement.value)
        elif (name, value) != ("aten", "torch.ops.aten"):
            raise _wrong(statement)

    def function(self, function: ast.FunctionDef) -> None:
        signature = f"def {function.name}(rank, inputs):"
        first = ast.unparse(function).splitlines()[0]
        if first != signature or function.name not in ("forward", "backward", "accumulate", "once"):
            raise _wrong(function)
        names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        if names & (RESERVED | self.ops | TABLES):
            raise _not_a_program(
                f"{function.name} assigns to {', '.join(sorted(names & (RESERVED | self.ops | TABLES)))}"
            )
        inside = _Expression({*names, "rank", "inputs"}, CALLED | self.ops, METHODS_CALLED)
        for statement in function.body:
            if ast.unparse(statement) != "inputs.clear()":
                inside.statement(statement)


class _Expression:
    """Checks the statements of a function, or an entry of a table.

    Args:
        names: the variables.
        functions: dotted names of functions that may be called, besides ops of torch.
        methods: tensor methods that may be called.
    """

    def __init__(self, names: set[str], functions: frozenset[str], methods: frozenset[str]) -> None:
        self.names, self.functions, self.methods = names, functions, methods

    def statement(self, statement: ast.stmt) -> None:
        targets: list[ast.expr] = []
        if isinstance(statement, (ast.Assign, ast.Delete)):
            targets = statement.targets
        elif not isinstance(statement, (ast.Return, ast.Expr)):
            raise _wrong(statement)
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if not isinstance(each, ast.Name):
                    raise _wrong(statement)
        value = None if isinstance(statement, ast.Delete) else statement.value
        if isinstance(statement, ast.Expr) and not ast.unparse(statement).startswith("spmd.section("):
            raise _wrong(statement)
        if value is not None:
            self.check(value)

    def check(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self.call(node)
        elif isinstance(node, ast.Name):
            if node.id not in self.names:
                raise _wrong(node)
        elif isinstance(node, ast.Attribute):
            if not _is_value(ast.unparse(node)):
                raise _wrong(node)
        elif isinstance(node, (*PLAIN, ast.Subscript)):
            for child in ast.iter_child_nodes(node):
                self.check(child)
        else:
            raise _wrong(node)

    def call(self, node: ast.Call) -> None:
        function = node.func
        if _root(function) in ("torch", "aten", "F", "spmd", "zlib", "base64") or isinstance(function, ast.Name):
            name = ast.unparse(function)
            if name not in self.functions and not _is_op(name):
                raise _wrong(function)
        elif isinstance(function, ast.Attribute) and function.attr in self.methods:
            self.check(function.value)
        else:
            raise _wrong(function)
        for argument in (*node.args, *node.keywords):
            self.check(argument)


def _root(node: ast.expr) -> str:
    """Return the first part of a dotted name."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


@functools.cache
def _is_value(text: str) -> bool:
    """Whether a dotted name is a dtype, layout or memory format, an op, or the rank's device."""
    kinds = (torch.dtype, torch.layout, torch.memory_format)
    plain = re.fullmatch(r"torch\.[a-z]\w*", text) and isinstance(getattr(torch, text[6:], None), kinds)
    return bool(plain) or text == "rank.device" or _is_op(text)


@functools.cache
def _is_op(text: str) -> bool:
    """Whether a dotted name is a registered op. ``from_file`` is excluded, since it writes to disk."""
    found: Any = torch.ops if OP.fullmatch(text) else None
    for part in text.removeprefix("torch.ops.").split("."):
        found = getattr(found, part, None)
    return isinstance(found, OpOverload) and "from_file" not in text


def _wrong(node: ast.AST) -> PlanError:
    return _not_a_program(f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node):.100}")
