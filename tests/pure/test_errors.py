"""Deliberate errors have three parts, survive pickling between ranks, and share one base."""

from __future__ import annotations

import copy
import pickle

import pytest

from autopar import errors
from autopar.errors import AutoparError

KINDS = sorted(
    (e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, AutoparError)), key=lambda e: e.__name__
)


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_has_three_parts(kind: type[AutoparError]) -> None:
    error = kind("The mesh has 8 ranks.", found="world size 4", hint="start 8 processes.")
    assert str(error) == "The mesh has 8 ranks.\n  found: world size 4\n  hint:  start 8 processes."
    assert (error.what, error.found, error.hint) == ("The mesh has 8 ranks.", "world size 4", "start 8 processes.")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("through", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_travels(kind: type[AutoparError], through: object) -> None:
    error = kind("what", found="found", hint="hint")
    assert callable(through)
    other = through(error)
    assert type(other) is kind
    assert str(other) == str(error)
    assert (other.what, other.found, other.hint) == (error.what, error.found, error.hint)


def test_parts_that_are_missing_leave_no_line() -> None:
    assert str(AutoparError("only this")) == "only this"
    assert "hint" not in str(AutoparError("what", found="that"))


def test_every_kind_says_what_it_is_for() -> None:
    assert len(KINDS) > 8
    assert all(kind.__doc__ for kind in KINDS)
