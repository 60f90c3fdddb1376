"""Write an emitted program as a file that runs under torchrun without autopar."""

from __future__ import annotations

import ast
import math
from collections.abc import Set as AbstractSet

import autopar.ops  # noqa: F401  its implementations are copied
from autopar.codegen import standalone, standalone_pipeline
from autopar.codegen.bundle import bundled
from autopar.codegen.emit import REGISTERS
from autopar.codegen.expressions import docstring
from autopar.codegen.language import check_text
from autopar.pipelines.request import AXIS
from autopar.plans.pipeline import PipelinePlan


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
    own = {"import base64", "import zlib"} & {line.strip() for line in lines[: first.lineno]}
    own |= {"import torch.nn.functional as F"} if "F." in body else set()
    others = "".join(line for line in lines[: first.lineno] if REGISTERS in line and "autopar" not in line)
    return _file(f"{doc.rstrip()}\n{usage}", support, program, own, f"{others}\naten = torch.ops.aten\n\n")


def _file(doc: str, support: str, program: str, own: AbstractSet[str], first: str) -> str:
    """Return the text of a file.

    Args:
        support: imports and definitions of what the program calls.
        own: imports that the program itself needs.
        first: what follows the imports.
    """
    imports, definitions = support.split("\n" * 3, 1)
    plain, chosen = imports[: imports.index("\nfrom ")], imports[imports.index("\nfrom ") :]
    imports = "\n".join(sorted({*plain.splitlines(), *own})) + chosen
    return "\n".join(
        [
            docstring(doc),
            "\n# ruff: noqa\nfrom __future__ import annotations\n",
            f"{imports}\n{first}",
            program.rstrip(),
            "\n\n# Functions that the program calls.\n\n",
            definitions,
            '\n\nif __name__ == "__main__":\n    main(globals())\n',
        ]
    )


def pipeline_texts(plan: PipelinePlan, stem: str) -> dict[str, str]:
    """Return the text of each file of a pipeline by name: that which runs, called after ``stem``, and the stages'.

    Raises:
        PlanError: if ``emit`` does not write the source of a stage.
    """
    stages = [f"{stem}_stage{s}.py" for s in range(len(plan.stages))]
    texts = {
        n: text_of(each.source, n, kernels=bool(each.kernels)) for n, each in zip(stages, plan.stages, strict=True)
    }
    split = {s: f"{stem}_stage{s}_split.py" for s, source in enumerate(plan.split) if source}
    texts |= {name: text_of(plan.split[s], name) for s, name in split.items()}
    prologue = "" if plan.prologue is None else f"{stem}_prologue.py"
    if plan.prologue is not None:
        texts[prologue] = text_of(plan.prologue.source, prologue)
    order = plan.schedule.to_text().splitlines()
    program = "\n".join(
        [
            "# Shape and names of the mesh.",
            f"MESH = ({tuple(plan.mesh.shape)!r}, {tuple(plan.mesh.names)!r})",
            "# The files of the stages, and those of the backwards in two parts.",
            f"STAGES = {stages!r}",
            f"SPLIT = {split!r}",
            "# The file of what is computed of the whole batch before the first forward, if anything is.",
            f"PROLOGUE = {prologue!r}",
            "# How outputs and new values of buffers are put together over micro-batches.",
            f"OUTPUTS = {dict(plan.outputs)!r}",
            f"BUFFERS = {dict(plan.buffers)!r}",
            "# How often the schedule runs in a step.",
            f"CALLS = {int(plan.options.get('accumulation_steps', 1))}",
            f"# What each rank along {AXIS} runs, in order: stage, kind (see Kind) and micro-batch.",
            "SCHEDULE = (",
            *(f'    "{line}\\n"' for line in order),
            ")",
        ]
    )
    support, program = bundled(program, standalone_pipeline)
    usage = f"torchrun --nproc-per-node {plan.mesh.size} {stem}.py --state model.pt --batch batch.pt --out out.pt"
    doc = f"{plan.model} as a pipeline of {len(stages)} stages on mesh {plan.mesh}, plan {plan.digest}.\n\n"
    doc += f"It needs only torch, and the files of the stages beside it:\n\n    {usage}"
    return {f"{stem}.py": _file(doc, support, program, set(), "\n"), **texts}
