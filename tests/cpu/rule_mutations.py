"""Wrong rules that differ from a rule by one plausible mistake."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from autopar.strategies import Rule, find_rule, parse
from autopar.strategies import registry as table
from tests.cpu.rule_simulation import Sample


def mutants(case: Sample) -> Iterator[tuple[str, Rule]]:
    """Yield pairs of a mistake's description and the wrong rule, which is written for this sample alone."""
    rule = find_rule(case.node)
    assert rule is not None
    text = rule.notation if isinstance(rule.notation, str) else rule.notation(case.node, case.metas)
    linear = rule.linear if isinstance(rule.linear, tuple) else rule.linear(case.node, case.metas)
    exact = replace(rule, notation=text, linear=linear)
    for what, changed in _texts(text):
        yield what, replace(exact, notation=changed)
    if parse(text).inputs and rule.reduction == "sum":
        yield "a maximum instead of a sum", replace(exact, reduction="max", linear=())
    if rule.reduction != "sum":
        yield "a sum instead of a maximum", replace(exact, reduction="sum")
    operands = range(len(case.operands))
    for chosen in [*((i,) for i in operands), *itertools.combinations(operands, 2)]:
        if chosen not in linear and rule.reduction == "sum":
            yield f"linear in operands {chosen}", replace(exact, linear=(*linear, chosen))


def _texts(text: str) -> Iterator[tuple[str, str]]:
    equation = parse(text)
    left, right = text.split("->")
    results = right.split(",")
    for name in sorted(equation.fixed):
        opened = re.sub(rf"\[({re.escape(name)}(=\d+)?)\]", r"\1", text)
        yield f"{name} is no longer whole", opened
    read = {f for t in equation.inputs for d in t.dims for f in d.factors}
    for index, term in enumerate(equation.outputs):
        own = [f for d in term.dims for f in d.factors]
        ellipsis = {"..."} if any(t.ellipsis is not None for t in equation.inputs) and term.ellipsis is None else set()
        for lost in sorted((read | ellipsis) - set(own) - equation.fixed - term.independent):
            claimed = f"{results[index]} {lost}" if "/" in results[index] else f"{results[index]} / {lost}"
            yield f"result {index} is not a sum over {lost}", _joined(left, results, index, claimed)
        if term.independent:
            yield f"result {index} is a sum", _joined(left, results, index, results[index].split("/")[0])
        for f in sorted(set(own) & read - equation.fixed):
            cut_loose = re.sub(rf"(?<!\w){re.escape(f)}(?!\w)", "loose", results[index])
            yield f"{f} of result {index} is another factor", _joined(left, results, index, cut_loose)
        for f, g in itertools.combinations([d.factors[0] for d in term.dims if len(d.factors) == 1], 2):
            swapped = re.sub(rf"(?<!\w)({f}|{g})(?!\w)", lambda m, f=f, g=g: g if m[1] == f else f, results[index])
            yield f"{f} and {g} change places in result {index}", _joined(left, results, index, swapped)


def _joined(left: str, results: list[str], index: int, changed: str) -> str:
    return f"{left}->{','.join([*results[:index], changed, *results[index + 1 :]])}"


@contextmanager
def in_place(rule: Rule) -> Iterator[None]:
    """Put the wrong rule into the table for the length of the context."""
    original = table.registered()[rule.op]
    _register(rule)
    try:
        yield
    finally:
        _register(original)


def _register(rule: Rule) -> None:
    fields = {k: v for k, v in vars(rule).items() if k not in ("op", "notation")}
    table.rule(rule.op, rule.notation, override=True, **fields)
