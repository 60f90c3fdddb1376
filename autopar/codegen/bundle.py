"""Copy the parts of autopar that a program calls into source that needs only torch.

Starting from the names that a program uses, definitions are followed through autopar's modules and copied verbatim,
each after what it needs when it is defined. Names of other modules keep their imports. If two definitions share a name,
one is renamed.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

from autopar.kernels import KERNELS, alone
from autopar.kernels.registry import factory
from autopar.ops.registration import IMPLEMENTATIONS

PACKAGE = "autopar"
ABSENT = {"enabled": "def {name}(*tensors, **options):\n    return False"}
"""Stand-ins for functions of ``autopar.kernels`` if a plan runs no kernels: eager code runs instead."""


@dataclass
class Bundle:
    """The definitions collected so far.

    Args:
        definitions: source of each, in an order in which they can run.
        imports: import lines for other modules.
        names: name of each (module, name) in the bundle.
        taken: names that are in use.
        kernels: whether to copy Triton kernels.
    """

    definitions: list[str] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    kernels: bool = False

    def add(self, module: ModuleType, name: str) -> str:
        """Copy the definition of ``name`` with everything it needs, and return its name in the bundle."""
        key = (module.__name__, name)
        if key in self.names:
            return self.names[key]
        if module.__name__ == "autopar.kernels":
            if not self.kernels:
                return self._stand_in(key)
            self.names[key] = self.add(alone, name)
            return self.names[key]
        statement = _statements(module).get(name)
        if statement is None:
            raise KeyError(f"{module.__name__} does not define {name}")
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            return self._imported(statement, name, key)
        self.names[key] = self._free_name(name, module)
        self.definitions.append(self.rewritten(statement, module, {name: self.names[key]}))
        return self.names[key]

    def _stand_in(self, key: tuple[str, str]) -> str:
        name = self.names[key] = f"kernel_{key[1]}"
        text = ABSENT.get(key[1], "def {name}(*tensors, **options):\n    raise NotImplementedError")
        self.definitions.append(text.format(name=name))
        return name

    def _free_name(self, name: str, module: ModuleType) -> str:
        candidates = [name, f"{module.__name__.rsplit('.', 1)[1].strip('_')}_{name.lstrip('_')}"]
        found = next((c for c in candidates if c not in self.taken), f"{candidates[1]}_{len(self.taken)}")
        self.taken.add(found)
        return found

    def _imported(self, statement: ast.Import | ast.ImportFrom, name: str, key: tuple[str, str]) -> str:
        if isinstance(statement, ast.ImportFrom):
            origin = next(a for a in statement.names if (a.asname or a.name) == name)
            source = statement.module or ""
            if source.split(".")[0] == PACKAGE:
                return self.add(sys.modules[source], origin.name)
            as_name = f" as {origin.asname}" if origin.asname else ""
            self.imports.add(f"from {source} import {origin.name}{as_name}")
        else:
            origin = next(a for a in statement.names if (a.asname or a.name.split(".")[0]) == name)
            self.imports.add(f"import {origin.name}" + (f" as {origin.asname}" if origin.asname else ""))
        self.names[key] = name
        self.taken.add(name)
        return name

    def rewritten(self, statement: ast.stmt, module: ModuleType, own: Mapping[str, str]) -> str:
        """Return the text of a statement of ``module`` with autopar's names as they are in the bundle.

        Args:
            own: new names of what the statement itself defines.
        """
        changes: list[tuple[Any, str | None]] = [(n, self._reference(n, module)) for n in _global_names(statement)]
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) and own.get(statement.name) != statement.name:
            changes.append((statement, own[statement.name]))
        targets = (n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            changes += [(n, own[n.id]) for n in targets if own.get(n.id, n.id) != n.id]
        return _replaced(statement, _source(module), changes)

    def _reference(self, node: ast.Name | ast.Attribute, module: ModuleType) -> str | None:
        """Return the bundle's name of a global name, an attribute of one of autopar's modules, or one of its ops."""
        if _is_own_op(node):
            function = IMPLEMENTATIONS[f"autopar::{node.attr}"]  # type: ignore[union-attr]
            return self.add(sys.modules[function.__module__], function.__name__)
        name = node.id if isinstance(node, ast.Name) else node.value.id  # type: ignore[attr-defined]
        statement = _statements(module).get(name)
        if statement is None:
            return None  # a builtin
        value = vars(module).get(name)
        if isinstance(value, ModuleType) and value.__name__.split(".")[0] == PACKAGE:
            return self.add(value, node.attr) if isinstance(node, ast.Attribute) else None
        return self.add(module, name) if isinstance(node, ast.Name) else self._of_value(node, module, name)

    def _of_value(self, node: ast.Attribute, module: ModuleType, name: str) -> str:
        return f"{self.add(module, name)}.{node.attr}"

    def add_kernels(self) -> None:
        """Copy the kernels that the collected definitions launch."""
        run = self.names.get((alone.__name__, "run"))
        launched = {n for d in self.definitions for n in re.findall(rf'\b{run}\(\s*"(\w+)"', d)} if run else set()
        by_module: dict[str, list[str]] = {}
        for name in sorted(launched):
            by_module.setdefault(KERNELS[name].module, []).append(name)
        if not by_module:
            return
        self.imports |= {"import functools", "import torch"}
        self.definitions += [factory(module, names) for module, names in sorted(by_module.items())]
        rows = []
        for module, names in sorted(by_module.items()):
            for name in names:
                configs = [f"        {config!r}," for config in KERNELS[name].configs]
                rows += [f'    "{name}": ({module}_kernels, (', *configs, f"    ), {KERNELS[name].size!r}),"]
        self.definitions.append("\n".join([f"{self.add(alone, 'TABLE')}.update({{", *rows, "})"]))

    def text(self) -> str:
        """Return the imports and definitions."""
        future = "from __future__ import annotations"
        plain = sorted(line for line in self.imports if line.startswith("import") and line != future)
        chosen = sorted(line.split(" import ") for line in self.imports if line.startswith("from") and line != future)
        names = {module: ", ".join(n for m, n in chosen if m == module) for module, _ in chosen}
        lines = [*plain, *(f"{module} import {found}" for module, found in names.items())]
        return "\n".join(lines) + "\n\n\n" + "\n\n\n".join(self.definitions)


def bundled(program: str, entry: ModuleType, *, kernels: bool = False) -> tuple[str, str]:
    """Return (imports and definitions, program) of an emitted program that needs only torch.

    Args:
        program: functions and tables that call ``spmd`` and custom ops by name, without imports.
        entry: a module whose function ``main`` runs the program.
        kernels: whether to copy Triton kernels; without them eager code runs.
    """
    bundle = Bundle(taken={"forward", "backward", "accumulate", "inputs", "rank"}, kernels=kernels)
    tree = ast.parse(program)
    defined = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    bundle.taken |= defined
    spmd = sys.modules["autopar.spmd"]
    pieces, position = [], 0
    offsets = _line_offsets(program)
    for start, end, text in sorted(_calls(tree, bundle, spmd, defined, offsets)):
        pieces += [program[position:start], text]
        position = end
    bundle.add(entry, "main")
    bundle.add_kernels()
    return bundle.text(), "".join([*pieces, program[position:]])


def _calls(
    tree: ast.Module, bundle: Bundle, spmd: ModuleType, defined: set[str], offsets: list[int]
) -> Iterator[tuple[int, int, str]]:
    """Yield (start, end, new name) of everything in a program that refers to autopar."""
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "spmd":
            name = bundle.add(spmd, node.attr)
        elif isinstance(node, ast.Name) and node.id not in defined and f"autopar::{node.id}" in IMPLEMENTATIONS:
            function = IMPLEMENTATIONS[f"autopar::{node.id}"]
            name = bundle.add(sys.modules[function.__module__], function.__name__)
        if name is not None and isinstance(node, ast.expr):
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start = offsets[node.lineno - 1] + node.col_offset
            yield start, offsets[node.end_lineno - 1] + node.end_col_offset, name


@cache
def _source(module: ModuleType) -> str:
    return inspect.getsource(module)


@cache
def _statements(module: ModuleType) -> Mapping[str, ast.stmt]:
    """Return the statement that defines each name of a module."""
    found: dict[str, ast.stmt] = {}
    for statement in _unguarded(ast.parse(_source(module)).body):
        for name in _defined(statement):
            found[name] = statement
    return found


def _unguarded(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements, including those under ``if TYPE_CHECKING`` and in ``try``."""
    for statement in body:
        if isinstance(statement, (ast.If, ast.Try)):
            yield from _unguarded(statement.body)
        else:
            yield statement


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, ast.Import):
        return [a.asname or a.name.split(".")[0] for a in statement.names]
    if isinstance(statement, ast.ImportFrom):
        return [a.asname or a.name for a in statement.names]
    targets: list[Any] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]


def _global_names(statement: ast.stmt) -> list[Any]:
    """Return the names in a statement that are not bound inside it, and attributes read from such names."""
    found: list[Any] = []
    _collect(statement, frozenset(), found)
    return found


def _is_own_op(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.ops.autopar"


def _collect(node: ast.AST, bound: frozenset[str], found: list[Any]) -> None:
    if _is_own_op(node):
        found.append(node)
        return
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        if node.value.id not in bound:
            found.append(node)
        return
    if isinstance(node, ast.Name):
        if isinstance(node.ctx, ast.Load) and node.id not in bound:
            found.append(node)
        return
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        inside = bound | _locals(node)
        outer = [*getattr(node, "decorator_list", []), *node.args.defaults, *filter(None, node.args.kw_defaults)]
        for part in outer:
            _collect(part, bound, found)
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg) and argument.annotation is not None:
                _collect(argument.annotation, bound, found)
        if isinstance(node, ast.FunctionDef) and node.returns is not None:
            _collect(node.returns, bound, found)
        for part in node.body if isinstance(node.body, list) else [node.body]:
            _collect(part, inside, found)
        return
    if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        stored = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        bound = bound | stored
    for child in ast.iter_child_nodes(node):
        _collect(child, bound, found)


def _locals(function: ast.FunctionDef | ast.Lambda) -> frozenset[str]:
    """Return the parameters, and the names that the body assigns, imports or defines."""
    names = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    for part in function.body if isinstance(function.body, list) else []:
        for node in ast.walk(part):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names |= {(a.asname or a.name).split(".")[0] for a in node.names}
    return frozenset(names)


def _line_offsets(text: str) -> list[int]:
    offsets = [0]
    for line in text.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    return offsets


def _replaced(statement: Any, text: str, changes: list[tuple[Any, str | None]]) -> str:
    """Return the source of a statement, including decorators, with names replaced."""
    offsets = _line_offsets(text)
    decorators = getattr(statement, "decorator_list", [])
    first = min([statement.lineno, *(d.lineno for d in decorators)])
    assert statement.end_lineno is not None
    begin, end = offsets[first - 1], offsets[statement.end_lineno]
    spans = []
    for node, name in changes:
        if name is None:
            continue
        if node is statement:  # a function or class, whose own name changes
            at = text.index(node.name, offsets[node.lineno - 1])
            spans.append((at, at + len(node.name), name))
        else:
            start = offsets[node.lineno - 1] + node.col_offset
            spans.append((start, offsets[node.end_lineno - 1] + node.end_col_offset, name))
    pieces, position = [], begin
    for start, stop, name in sorted(spans):
        pieces += [text[position:start], name]
        position = stop
    return "".join([*pieces, text[position:end]]).rstrip()
