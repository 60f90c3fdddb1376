"""What steers the search and its solver stands in one module, each setting with what chose it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

AUTOPAR = Path(__file__).parents[2] / "autopar"
SEARCHING = sorted([*(AUTOPAR / "solver").rglob("*.py"), *(AUTOPAR / "planner" / "search").rglob("*.py")])

ROUNDINGS = {"EQUAL", "FEASIBILITY_TOLERANCE", "OBJECTIVE_SCALE", "ROUNDING", "USAGE_SCALE", "USAGE_TOLERANCE", "USED"}
STAND_INS = {"AGES_S", "ALL", "BARRED", "HOST_TIME", "LEAST_PRICE", "MOST_SLACK", "_FORBIDDEN"}
PRICES_OF_WORK = {
    "A_LOOK",
    "ELSEWHERE",
    "ENTRIES",
    "EVENT",
    "EVENT_ENTRIES",
    "EVENT_OF_TREE",
    "FREE_RATE",
    "ITERATION",
    "PRESOLVING",
    "RATE",
    "ROOT",
    "STEP",
}
IN_ERRORS = {"KINDS_NAMED", "LAYER_SHARE"}
FIRST_VALUES = {"hiding_parts"}


def is_number(value: ast.expr) -> bool:
    try:
        return isinstance(eval(compile(ast.Expression(value), "", "eval"), {}), int | float)
    except NameError:
        return False


def numbers(path: Path) -> Iterator[str]:
    """The names of a module's numbers, and of its classes' fields that are not 0 at first."""
    module = ast.parse(path.read_text())
    for field in (each for kind in module.body if isinstance(kind, ast.ClassDef) for each in kind.body):
        value = field.value if isinstance(field, ast.AnnAssign) else None
        if value is not None and is_number(value) and ast.unparse(value) not in ("0", "0.0", "True", "False"):
            yield ast.unparse(field.target)
    for statement in module.body:
        if isinstance(statement, ast.Assign):
            (target,), value = statement.targets, statement.value
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                pairs = list(zip(target.elts, value.elts, strict=True))
            else:
                pairs = [(target, value)]
            yield from (ast.unparse(name) for name, each in pairs if is_number(each))


def test_no_module_of_the_search_or_solver_has_a_setting_of_its_own() -> None:
    found = {name for path in SEARCHING for name in numbers(path)}
    known = ROUNDINGS | STAND_INS | PRICES_OF_WORK | IN_ERRORS | FIRST_VALUES
    assert found - known == set(), "these belong to autopar/settings.py, or steer nothing"
    assert known - found == set(), "these are no more"


def test_every_setting_says_what_chose_it() -> None:
    body = ast.parse((AUTOPAR / "settings.py").read_text()).body
    settings = [i for i, statement in enumerate(body) if isinstance(statement, ast.Assign)]
    assert settings
    for i in settings:
        said = body[i + 1] if i + 1 < len(body) else None
        assert isinstance(said, ast.Expr), ast.unparse(body[i])
        assert isinstance(said.value, ast.Constant), ast.unparse(body[i])


def test_every_setting_is_used() -> None:
    used = {
        node.attr
        for path in AUTOPAR.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "settings"
    } | {"TRAINING_STEPS"}
    assert set(numbers(AUTOPAR / "settings.py")) - used == set()
