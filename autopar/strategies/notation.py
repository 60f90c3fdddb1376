"""The notation of sharding rules: a named factor for each dim of each operand and result.

``"m k, k n -> m n"`` describes matrix multiplication. Terms are separated by commas; the dims of a term are

=============  =====================================================================================
``name``       a factor; a mesh axis may cut it
``[name]``     a factor that is never cut
``{name}``     a factor that may be cut, but whose ranks then exchange summaries: see ``strategies.combine``
``(a b)``      one dim that is the row-major product of several factors; a factor of it can be cut evenly
               if those before it have been cut down to one element
``1``          a dim of one element
``...``        any number of leading dims, aligned from the right, broadcast; ``[...]`` is never cut
``name'``      a dim of another length that is tied to factor ``name``: both are cut, or neither
=============  =====================================================================================

``-`` is a scalar, and ``name=4`` states a size that no dim shows by itself. A factor without an output term is a
reduction: cutting it leaves the output partial. An output term may end in ``/ a b``: it does not depend on these
factors, so it is whole and not partial if they are cut. A factor that only outputs have is created by the op.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from autopar.errors import RuleError
from autopar.ir import TensorMeta

_TOKEN = re.compile(r"\s*(\.\.\.|[A-Za-z_]\w*'?(?:=\d+)?|1(?!\w)|[\[\]{}()/])")
_HINT = 'write one term per operand, as in "m k, k n -> m n".'


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a term: its factors in row-major order, () for a dim of one element."""

    factors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Term:
    """One operand or result. ``ellipsis`` is the position of ``...`` among ``dims``, if any.

    ``independent`` holds the factors after ``/``: the result is whole if they are cut.
    """

    dims: tuple[Dim, ...]
    ellipsis: int | None = None
    independent: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Equation:
    """A parsed rule.

    Args:
        fixed: factors that are never cut.
        stated: sizes given by ``name=4``.
        combined: factors whose ranks exchange summaries if they are cut.
    """

    text: str
    inputs: tuple[Term, ...]
    outputs: tuple[Term, ...]
    fixed: frozenset[str]
    stated: tuple[tuple[str, int], ...]
    combined: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Bound:
    """An equation bound to shapes.

    Args:
        sizes: size of each factor, in order of appearance.
        inputs: for each dim of each operand, its factors; () if the dim broadcasts.
        outputs: the same for each result; None if it is absent.
        whole: for each result, the factors that it lacks without being partial over them.
        cuttable: the factors that a mesh axis may take, in order of appearance.
        tied: the lengths of the other dims that are cut together with a factor.
        combined: the factors whose ranks exchange summaries if they are cut.
    """

    sizes: Mapping[str, int]
    inputs: tuple[tuple[tuple[str, ...], ...], ...]
    outputs: tuple[tuple[tuple[str, ...], ...] | None, ...]
    whole: tuple[frozenset[str], ...]
    cuttable: tuple[str, ...]
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    combined: frozenset[str] = frozenset()


@lru_cache(maxsize=65536)
def parse(text: str) -> Equation:
    """Parse a rule's notation.

    Raises:
        RuleError: if the text is not a rule.
    """
    left, arrow, right = text.partition("->")
    if not arrow or "->" in right:
        raise RuleError("A rule needs exactly one arrow, between operands and results.", found=repr(text), hint=_HINT)
    reader = _Reader(text)
    inputs = tuple(map(reader.term, left.split(","))) if left.strip() else ()
    outputs = tuple(map(reader.term, right.split(","))) if right.strip() else ()
    stated = tuple(sorted(reader.stated.items()))
    equation = Equation(text, inputs, outputs, frozenset(reader.fixed), stated, frozenset(reader.combined))
    _check_names(equation)
    return equation


class _Reader:
    """Reads terms one by one, and collects what holds for the whole rule: fixed factors and stated sizes."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.fixed: set[str] = set()
        self.combined: set[str] = set()
        self.stated: dict[str, int] = {}

    def term(self, text: str) -> Term:
        head, slash, tail = text.partition("/")
        head = "" if head.strip() == "-" else head
        dims: list[Dim] = []
        ellipsis = None
        tokens = list(self.tokens(head))
        while tokens:
            token = tokens.pop(0)
            if token == "...":
                if ellipsis is not None:
                    raise self.error("A term has at most one '...'.")
                ellipsis = len(dims)
            elif token == "[" and tokens[:1] == ["..."]:
                self.expect(tokens, "...", "]")
                ellipsis = len(dims)
                self.fixed.add("...")
            elif token == "(":
                dims.append(Dim(tuple(self.group(tokens))))
            elif token == "1":
                dims.append(Dim(()))
            else:
                dims.append(Dim((self.factor(token, tokens),)))
        return Term(tuple(dims), ellipsis, frozenset(self.tokens(tail)) if slash else frozenset())

    def group(self, tokens: list[str]) -> Iterator[str]:
        while tokens and tokens[0] != ")":
            token = tokens.pop(0)
            yield self.factor(token, tokens)
        self.expect(tokens, ")")

    def factor(self, token: str, tokens: list[str]) -> str:
        closing = {"[": "]", "{": "}"}.get(token)
        bracketed = token == "["
        if closing:
            token = tokens.pop(0) if tokens else ""
            self.expect(tokens, closing)
        name, _, size = token.partition("=")
        if not name.removesuffix("'").isidentifier() or re.fullmatch(r"P\d+", name):
            raise self.error(f"{token or 'the end'!r} is not a factor's name.")
        if closing:
            (self.fixed if bracketed else self.combined).add(name)
        if size and self.stated.setdefault(name, int(size)) != int(size):
            raise self.error(f"Factor {name!r} is given two sizes.")
        return name

    def expect(self, tokens: list[str], *wanted: str) -> None:
        for token in wanted:
            if not tokens or tokens.pop(0) != token:
                raise self.error(f"{token!r} is missing.")

    def tokens(self, text: str) -> Iterator[str]:
        at, text = 0, text.rstrip()
        while at < len(text):
            match = _TOKEN.match(text, at)
            if not match:
                raise self.error(f"{text[at:].strip()!r} cannot be read.")
            yield match[1]
            at = match.end()

    def error(self, what: str) -> RuleError:
        return RuleError(f"This is not a sharding rule. {what}", found=repr(self.text), hint=_HINT)


def _check_names(equation: Equation) -> None:
    for term in (*equation.inputs, *equation.outputs):
        names = [f for d in term.dims for f in d.factors]
        if len(set(names)) != len(names):
            raise RuleError(
                "A factor occurs twice in a term.", found=repr(equation.text), hint="give each dim its own name."
            )


@lru_cache(maxsize=65536)
def bind(equation: Equation, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta | None, ...]) -> Bound:
    """Bind an equation to the shapes of a node's operands and results.

    Raises:
        RuleError: if the number of operands, results or dims differs, or sizes of a factor contradict each other.
    """
    for what, terms, metas in (("operands", equation.inputs, inputs), ("results", equation.outputs, outputs)):
        if len(terms) != len(metas):
            raise RuleError(
                f"The rule has {len(terms)} {what}, but the op has {len(metas)}.",
                found=f"{equation.text!r} for {_shapes(inputs)} -> {_shapes(outputs)}",
                hint="write one term for each tensor, and none for absent operands.",
            )
    pairs = [*zip(equation.inputs, inputs, strict=True), *zip(equation.outputs, outputs, strict=True)]
    fitted = [None if meta is None else _dims(term, meta.shape, equation) for term, meta in pairs]
    shapes = [() if meta is None else meta.shape for _, meta in pairs]
    try:
        sizes = _sizes(
            dict(equation.stated),
            [(d, n) for f, s in zip(fitted, shapes, strict=True) if f is not None for d, n in zip(f, s, strict=True)],
        )
    except _MisfitError as misfit:
        raise RuleError(
            f"The rule does not fit the shapes: {misfit}",
            found=f"{equation.text!r} for {_shapes(inputs)} -> {_shapes(outputs)}",
            hint="dims with the same factor need the same size; a dim of one element broadcasts.",
        ) from None
    cut = [
        None if f is None else tuple(() if n == 1 else tuple(map(_leader, d)) for d, n in zip(f, s, strict=True))
        for f, s in zip(fitted, shapes, strict=True)
    ]
    tied: dict[str, tuple[int, ...]] = {}
    for follower, n in sizes.items():
        if follower != _leader(follower):
            tied[_leader(follower)] = (*tied.get(_leader(follower), ()), n)
    fixed = {f for f in sizes if f in equation.fixed or (f.startswith(".") and "..." in equation.fixed)}
    split = len(inputs)
    return Bound(
        sizes,
        tuple(c for c in cut[:split] if c is not None),
        tuple(cut[split:]),
        tuple(t.independent for t in equation.outputs),
        tuple(f for f, n in sizes.items() if min(n, *tied.get(f, (n,))) > 1 and f not in fixed and f == _leader(f)),
        tied,
        equation.combined,
    )


def _leader(factor: str) -> str:
    return factor.removesuffix("'")


class _MisfitError(Exception):
    pass


def _shapes(metas: Sequence[TensorMeta | None]) -> str:
    return ", ".join("none" if m is None else str(list(m.shape)) for m in metas) or "nothing"


def _dims(term: Term, shape: tuple[int, ...], equation: Equation) -> tuple[tuple[str, ...], ...]:
    """Return the factors of each dim, with ``...`` expanded to factors ``.2 .1 .0``, counted from the right."""
    dims = [d.factors for d in term.dims]
    extra = len(shape) - len(dims)
    if (extra and term.ellipsis is None) or extra < 0:
        raise RuleError(
            f"A term of {len(dims)} dims describes a tensor of {len(shape)}.",
            found=f"{equation.text!r}, shape {list(shape)}",
            hint="write one factor per dim, or '...' for any number of dims.",
        )
    at = term.ellipsis if term.ellipsis is not None else 0
    return (*dims[:at], *((f".{i}",) for i in reversed(range(extra))), *dims[at:])


def _sizes(sizes: dict[str, int], uses: Sequence[tuple[tuple[str, ...], int]]) -> dict[str, int]:
    """Return the sizes of all factors in order of appearance, solving plain dims, then groups with one unknown."""
    stated = dict(sizes)
    known: dict[str, int] = {f: stated.get(f, 0) for factors, _ in uses for f in factors}
    groups = []
    for factors, n in uses:
        if len(factors) > 1:
            groups.append((factors, n))
        elif not factors:
            if n != 1:
                raise _MisfitError(f"a dim written 1 has {n} elements.")
        elif n != 1 or not known[factors[0]]:
            if known[factors[0]] not in (0, 1, n):
                raise _MisfitError(f"factor {factors[0]!r} has {known[factors[0]]} and {n} elements.")
            known[factors[0]] = n
    # Each round solves at least one group, unless no further one can be solved.
    for _ in groups:
        for factors, n in groups:
            unknown = [f for f in factors if not known[f]]
            rest = math.prod(known[f] for f in factors if known[f])
            if len(unknown) == 1 and n % rest == 0 and n > 1:
                known[unknown[0]] = n // rest
    for factors, n in groups:
        if n > 1 and math.prod(known[f] for f in factors) != n:
            raise _MisfitError(
                f"({' '.join(factors)}) has {n} elements, but its factors have {[known[f] for f in factors]}."
            )
    return {f: n or 1 for f, n in known.items()}
