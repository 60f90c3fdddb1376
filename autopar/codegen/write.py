"""Write an emitted program as a file that runs under torchrun without autopar."""

from __future__ import annotations

import ast
import math

import autopar.ops  # noqa: F401  its implementations are copied
from autopar.codegen import standalone
from autopar.codegen.bundle import bundled
from autopar.codegen.emit import REGISTERS
from autopar.codegen.expressions import docstring
from autopar.codegen.language import check_text


def text_of(source: str, name: str, *, kernels: bool = False) -> str:
    """Return the text of a file called ``name``: the program ``source`` with everything that it calls.

    Args:
        kernels: whether to include Triton kernels.

    Raises:
        PlanError: if ``emit`` does not write such a source.
    """
    tree = check_text(source)
    first = next(s for s in tree.body if isinstance(s, ast.FunctionDef))
    lines = source.splitlines(keepends=True)
    doc = ast.get_docstring(tree, clean=False) or ""
    (mesh,) = (s.value for s in tree.body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "MESH")
    processes = math.prod(ast.literal_eval(mesh)[0])
    usage = (
        "\nIt needs only torch:\n\n"
        f"    torchrun --nproc-per-node {processes} {name} --state model.pt --batch batch.pt --out out.pt"
    )
    body = "".join(lines[first.lineno - 1 :])
    support, program = bundled(body, standalone, kernels=kernels)
    imports, definitions = support.split("\n" * 3, 1)
    own = {"import base64", "import zlib"} & {line.strip() for line in lines[: first.lineno]}
    own |= {"import torch.nn.functional as F"} if "F." in body else set()
    plain, chosen = imports[: imports.index("\nfrom ")], imports[imports.index("\nfrom ") :]
    imports = "\n".join(sorted({*plain.splitlines(), *own})) + chosen
    others = "".join(line for line in lines[: first.lineno] if REGISTERS in line and "autopar" not in line)
    return "\n".join(
        [
            docstring(f"{doc.rstrip()}\n{usage}"),
            "\n# ruff: noqa\nfrom __future__ import annotations\n",
            f"{imports}\n{others}\naten = torch.ops.aten\n\n",
            program.rstrip(),
            "\n\n# Functions that the program calls.\n\n",
            definitions,
            '\n\nif __name__ == "__main__":\n    main(globals())\n',
        ]
    )
