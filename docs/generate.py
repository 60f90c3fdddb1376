"""Generate the reference pages of rules, errors and the command line. `python docs/generate.py` writes them."""

from __future__ import annotations

import ast
import io
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


def rules_page() -> str:
    from autopar.strategies import rules  # noqa: F401  it registers them
    from autopar.strategies.registry import registered

    lines = [
        "# All rules",
        "",
        "Each rule names a factor for each dim. Dims in brackets are never cut, and factors that the result lacks are",
        "summed. An op without a rule runs whole on every rank, with a warning that shows the line to add.",
        "",
        "| op | rule |",
        "|---|---|",
    ]
    lines += [f"| `{op}` | {_cell(_notation(found))} |" for op, found in sorted(registered().items())]
    return "\n".join(lines) + "\n"


def _notation(rule: Any) -> str:
    """Return a rule's line, or the name of the function that writes the rule for each call."""
    text = rule.notation
    if isinstance(text, str):
        return text
    name = getattr(text, "__name__", "") or getattr(getattr(text, "func", None), "__name__", "a function")
    return f"depends on the arguments: {name.strip('_')}"


def _cell(text: str) -> str:
    return " ".join(f"`{line}`" for line in text.replace("|", "\\|").splitlines())


def errors_page() -> str:
    from autopar import errors

    lines = [
        "# All errors",
        "",
        "Every error that autopar raises on purpose is an `AutoparError` and has three parts: what is wrong, what was",
        "`found:`, and a `hint:` about what to do. Braces stand for values that the message fills in.",
        "",
    ]
    found: dict[str, set[tuple[str, str]]] = {}
    for kind, what, hint in raised():
        found.setdefault(kind, set()).add((what, hint))
    for kind in sorted(k for k in vars(errors) if k.endswith("Error")):
        lines += [f"## {kind}", "", (getattr(errors, kind).__doc__ or "").split("\n\n")[0].strip(), ""]
        if kind in found:
            lines += ["| what is wrong | hint |", "|---|---|"]
            lines += [f"| {_plain(what)} | {_plain(hint)} |" for what, hint in sorted(found[kind])]
            lines.append("")
    return "\n".join(lines)


def raised() -> Iterator[tuple[str, str, str]]:
    """Yield the kind, the first part and the hint of every error that the code raises."""
    kinds = _kinds()
    for file in sorted((ROOT / "autopar").rglob("*.py")):
        calls = (n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call) and n.args)
        for node in calls:
            if isinstance(node.func, ast.Name) and node.func.id in kinds:
                hint = next((_text(k.value) for k in node.keywords if k.arg == "hint"), "")
                if what := _text(node.args[0]):
                    yield node.func.id, what, hint


def _kinds() -> set[str]:
    from autopar import errors

    return {k for k in vars(errors) if k.endswith("Error")}


def _text(node: ast.AST) -> str:
    """Return the text of a string expression, with the code of each interpolated value in braces."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v) if isinstance(v, ast.Constant) else _hole(v) for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return ""


def _hole(node: ast.AST) -> str:
    assert isinstance(node, ast.FormattedValue)
    return "{" + ast.unparse(node.value) + "}"


def _plain(text: str) -> str:
    """Escape a text so that Markdown shows it unchanged."""
    for mark in "\\|*_`[]<$":
        text = text.replace(mark, "&lt;" if mark == "<" else f"\\{mark}")
    return " ".join(text.split())


def cli_page() -> str:
    from autopar.cli import COMMANDS, main

    lines = ["# Command line", "", "The output of `--help` of `autopar` and of each of its commands.", ""]

    for command in ("", *COMMANDS):
        out = io.StringIO()
        with redirect_stdout(out), suppress(SystemExit):
            main([*([command] if command else []), "--help"])
        lines += [f"## autopar {command}".rstrip(), "", "```text", out.getvalue().rstrip(), "```", ""]
    return "\n".join(lines)


PAGES = {"rules.md": rules_page, "errors.md": errors_page, "cli.md": cli_page}


def write(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        text = page()
        file = folder / name
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    write(ROOT / "docs" / "reference")
