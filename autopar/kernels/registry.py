"""The table of kernels, and the source of each as one text that runs by itself."""

from __future__ import annotations

import ast
import importlib
import itertools
from collections.abc import Callable, Mapping
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
        name: of its launching function, and of the op that it implements.
        module: of ``autopar.kernels`` that holds it.
        configs: block sizes to be tried on the device; the first is taken where nothing was tried.
        size: of the arguments, those positions whose sizes the best configuration depends on.
    """

    name: str
    module: str
    configs: tuple[Config, ...]
    size: tuple[int, ...] = (0,)

    @property
    def launch(self) -> Callable[..., Any]:
        """The function that launches it; needs triton."""
        function: Callable[..., Any] = getattr(importlib.import_module(f"autopar.kernels.{self.module}"), self.name)
        return function


def _grid(**choices: tuple[int, ...]) -> tuple[Config, ...]:
    """Every combination, the first of each choice first."""
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
    """Python of one kernel: imports, the kernel, its launching function and what these call. It runs by itself."""
    kernel = KERNELS[name]
    text = (files("autopar.kernels") / f"{kernel.module}.py").read_text()
    tree = ast.parse(text)
    defined = {n: node for node in tree.body for n in _names(node)}
    needed, ahead = {name}, [name]
    while ahead:
        for used in ast.walk(defined[ahead.pop()]):
            if isinstance(used, ast.Name) and used.id in defined and used.id not in needed:
                needed.add(used.id)
                ahead.append(used.id)
    lines = text.splitlines()
    kept = [node for node in tree.body if isinstance(node, _IMPORT) or needed & set(_names(node))]
    head = f'"""Kernel {name} of autopar.\n\n{ast.get_docstring(tree) or ""}\n"""'
    parts = [(isinstance(n, _IMPORT), "\n".join(lines[_first(n) - 1 : n.end_lineno])) for n in kept]
    imports = "\n".join(p for is_import, p in parts if is_import)
    return "\n\n\n".join([f"{head}\n{imports}", *(p for is_import, p in parts if not is_import)]) + "\n"


def _names(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, ast.FunctionDef):
        return (node.name,)
    if isinstance(node, ast.Assign):
        return tuple(t.id for t in node.targets if isinstance(t, ast.Name))
    return ()


def _first(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
    return min([node.lineno, *(d.lineno for d in decorators)])
