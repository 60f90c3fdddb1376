"""Load an emitted program as functions whose errors name the user's module."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from autopar.codegen.standalone import FUNCTIONS, annotate, failed_at
from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.ops.registration import IMPLEMENTATIONS


def load(source: str, name: str = "autopar_program", graph: Graph | None = None) -> dict[str, Any]:
    """Execute an emitted module and return its namespace. Debuggers and tracebacks show its lines.

    Args:
        name: its name in tracebacks, or the path of the file that holds it.
        graph: the captured program, whose nodes know lines of the model.

    Raises:
        PlanError: if it is not Python, fails, or lacks a function.
    """
    filename = name if Path(name).suffix == ".py" else f"<{name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    module = ModuleType(f"autopar_program_{Path(name).stem}")
    module.__file__ = filename
    sys.modules[module.__name__] = module  # dataclasses look up their module
    namespace = vars(module)
    try:
        exec(compile(source, filename, "exec"), namespace)  # noqa: S102  this is the user's own program
    except SyntaxError as error:
        raise _unusable(f"{filename}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        line, _ = failed_at(error, filename, source)
        raise _unusable(f"{filename}, line {line}: {type(error).__name__}: {error}") from error
    for needed in FUNCTIONS[:2]:
        if not callable(namespace.get(needed)):
            raise _unusable(f"{filename} has no function {needed}(rank, inputs)")
    namespace = dict(namespace)
    for function in FUNCTIONS:
        if function in namespace:
            namespace[function] = _naming_module_in_errors(namespace[function], filename, source, graph)
    return namespace


def read_edited(path: str | Path) -> str:
    """Read the text of an edited program.

    Raises:
        PlanError: if there is no such file.
    """
    try:
        return Path(path).read_text()
    except OSError as error:
        hint = "write the file with plan.emit(path), or write plan.source to it."
        raise PlanError("The program cannot be read.", found=str(error), hint=hint) from None


def refuse_own_ops(source: str, path: str | Path) -> None:
    """Raise if a program defines autopar's ops, as a file of ``plan.emit`` does: a compiler does not know them as ops.

    Raises:
        PlanError: if the program defines any.
    """
    implementing = {(f.__name__, tuple(inspect.signature(f).parameters)): name for name, f in IMPLEMENTATIONS.items()}
    try:
        body = ast.parse(source).body
    except SyntaxError:
        return  # loading it reports the error
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    looks = [(f.name, tuple(a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs))) for f in functions]
    found = [look for look in looks if look in implementing]
    if found:
        raise PlanError(
            "This program brings its own ops, which Inductor cannot compile.",
            found=f"{path} defines {found[0][0]}, which is {implementing[found[0]]}",
            hint='write plan.source to a file and edit that, or use backend="eager".',
        )


def checked(
    function: Callable[..., tuple[Any, ...]], name: str, expected: Sequence[tuple[str, tuple[int, ...], str] | None]
) -> Callable[..., tuple[Any, ...]]:
    """Wrap ``function`` of an edited program to check that it returns what the plan's program returns.

    Args:
        expected: name, local shape and dtype of each result; None for results that are not device tensors.

    Raises:
        PlanError: if it returns something else.
    """

    @functools.wraps(function)
    def run(rank: Any, inputs: list[Any]) -> tuple[Any, ...]:
        made = function(rank, inputs)
        if not isinstance(made, (tuple, list)) or len(made) != len(expected):
            count = len(made) if isinstance(made, (tuple, list)) else type(made).__name__
            raise _wrong(name, f"{count} results instead of {len(expected)}")
        for position, (value, wanted) in enumerate(zip(made, expected, strict=True)):
            if wanted is None:
                continue
            if not isinstance(value, Tensor):
                raise _wrong(name, f"result {position}, {wanted[0]}: {type(value).__name__} instead of a tensor")
            found = (tuple(value.shape), str(value.dtype).removeprefix("torch."))
            if found != wanted[1:]:
                said = " instead of ".join(f"{dtype}{list(shape)}" for shape, dtype in (found, wanted[1:]))
                raise _wrong(name, f"result {position}, {wanted[0]}: {said}")
        return tuple(made)

    return run


def _naming_module_in_errors(
    function: Callable[..., tuple[Any, ...]], filename: str, source: str, graph: Graph | None
) -> Callable[..., tuple[Any, ...]]:
    """Wrap ``function`` to add the user's module to its errors."""

    @functools.wraps(function)
    def run(rank: Any, inputs: list[Any]) -> tuple[Any, ...]:
        try:
            return function(rank, inputs)
        except Exception as error:
            _explain(error, filename, source, graph)
            raise

    return run


def _explain(error: Exception, filename: str, source: str, graph: Graph | None) -> None:
    line, module = failed_at(error, filename, source)
    lines = {node.module: node.source for node in reversed(graph.nodes) if node.source} if graph else {}
    place = f"{module!r} of the model" if module else "the model's own forward"
    note = f"This is line {line} of the local program, {place}"
    note += f", {lines[module]}" if lines.get(module) else ""
    annotate(error, note)


def _unusable(found: str) -> PlanError:
    return PlanError(
        "The local program cannot be used.",
        found=found,
        hint="start again from plan.source, and change only the bodies of its functions.",
    )


def _wrong(function: str, found: str) -> PlanError:
    return PlanError(
        f"The edited {function} does not return what the plan's program returns.",
        found=found,
        hint="keep the order, shapes and dtypes of the results, which the comments in plan.source show.",
    )
