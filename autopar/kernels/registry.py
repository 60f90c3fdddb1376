"""The table of kernels, and the standalone source of each."""

from __future__ import annotations

import ast
import importlib
import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

Config = Mapping[str, int]
_IMPORT = (ast.Import, ast.ImportFrom)


@dataclass(frozen=True)
class Kernel:
    """One kernel.

    Args:
        name: name of its launching function, and of the op that it implements.
        module: the module of ``autopar.kernels`` that holds it.
        configs: block sizes to try on the device. Without a measurement the first is used.
        size: positions of the arguments whose sizes the best configuration depends on.
    """

    name: str
    module: str
    configs: tuple[Config, ...]
    size: tuple[int, ...] = (0,)

    @property
    def launch(self) -> Callable[..., Any]:
        """The function that launches it. Needs triton."""
        function: Callable[..., Any] = getattr(importlib.import_module(f"autopar.kernels.{self.module}"), self.name)
        return function


def _grid(**choices: tuple[int, ...]) -> tuple[Config, ...]:
    """Return every combination, starting with the first of each choice."""
    return tuple(dict(zip(choices, each, strict=True)) for each in itertools.product(*choices.values()))


_WARPS = (8, 4, 16)
_TILES = tuple({"I": i, "J": j} for i, j in ((32, 64), (1, 1024), (16, 128), (64, 64), (8, 256), (1, 4096)))

KERNELS: Mapping[str, Kernel] = {
    k.name: k
    for k in (
        Kernel("pack", "copies", _TILES),
        Kernel("unpack", "copies", _TILES),
        Kernel("lookup", "embedding", _grid(ROWS=(4, 1, 16), COLUMNS=(512, 1024, 256)), (0, 1)),
        Kernel("lookup_backward", "embedding", _grid(COLUMNS=(512, 1024, 256, 2048)), (0,)),
        Kernel("statistics", "cross_entropy", _grid(BLOCK=(4096, 8192, 2048), num_warps=_WARPS)),
        Kernel("sumexp", "cross_entropy", _grid(BLOCK=(4096, 8192, 2048), num_warps=_WARPS)),
        Kernel("nll", "cross_entropy", _grid(BLOCK=(256, 128, 512))),
        Kernel("nll_backward", "cross_entropy", _grid(BLOCK=(4096, 2048, 8192), num_warps=_WARPS), (1,)),
        Kernel("add_norm", "norms", _grid(num_warps=_WARPS)),
        Kernel("norm_backward", "norms", _grid(GROUPS=(256, 132, 512), num_warps=_WARPS)),
    )
}


@cache
def source(name: str) -> str:
    """Return standalone Python of one kernel: imports, the kernel, its launching function and what these call."""
    module = KERNELS[name].module
    text, tree = _parsed(module)
    head = f'"""Kernel {name} of autopar.\n\n{ast.get_docstring(tree) or ""}\n"""'
    imports = "\n".join(_text(text, node) for node in tree.body if isinstance(node, _IMPORT))
    return "\n\n\n".join([f"{head}\n{imports}", *_definitions(module, [name])]) + "\n"


def factory(module: str, names: Sequence[str]) -> str:
    """Return Python of a function that defines kernels of one module on its first call, and returns them by name."""
    said = (ast.get_docstring(_parsed(module)[1]) or "").splitlines()[0]
    lines = [
        "@functools.cache",
        f"def {module}_kernels():",
        f'    """{said}"""',
        "    global triton, tl",
        "    import triton",
        "    import triton.language as tl",
        "",
    ]
    body = textwrap.indent("\n\n".join(_definitions(module, names)), "    ")
    named = ", ".join(f'"{n}": {n}' for n in names)
    return "\n".join([*lines, body, "", f"    return {{{named}}}"])


@cache
def _parsed(module: str) -> tuple[str, ast.Module]:
    text = (files("autopar.kernels") / f"{module}.py").read_text()
    return text, ast.parse(text)


def _definitions(module: str, names: Sequence[str]) -> list[str]:
    """Return the source of functions of a module and of everything in it that they call, in module order."""
    text, tree = _parsed(module)
    defined = {n: node for node in tree.body for n in _names(node)}
    needed, ahead = set(names), list(names)
    while ahead:
        for used in ast.walk(defined[ahead.pop()]):
            if isinstance(used, ast.Name) and used.id in defined and used.id not in needed:
                needed.add(used.id)
                ahead.append(used.id)
    return [_text(text, node) for node in tree.body if needed & set(_names(node))]


def _text(text: str, node: ast.stmt) -> str:
    return "\n".join(text.splitlines()[_first(node) - 1 : node.end_lineno])


def _names(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef):
        return (node.name,)
    if isinstance(node, ast.Assign):
        return tuple(t.id for t in node.targets if isinstance(t, ast.Name))
    return ()


def _first(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return min([node.lineno, *(d.lineno for d in decorators)])
