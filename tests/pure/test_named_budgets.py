"""Choices behind the budgets that errors have named: kept between runs, as long as there is a file that can be read."""

from __future__ import annotations

import pytest

from autopar.planner.search.named_budgets import MOST, keep, kept


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_choice_is_found_again_and_the_last_one_counts():
    assert kept("a") == ()
    keep("a", (0, 12, 3))
    keep("b", (1,))
    assert (kept("a"), kept("b")) == ((0, 12, 3), (1,))
    keep("a", (2, 2, 2))
    assert kept("a") == (2, 2, 2)


def test_the_oldest_go_first():
    for i in range(MOST + 1):
        keep(str(i), (i,))
    keep("1", (7,))
    keep("new", (8,))
    assert [kept(str(i)) for i in range(4)] == [(), (7,), (), (3,)]


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"a": "1 2"}', '[["a", 1, 2]]'])
def test_a_file_that_is_no_such_file_counts_as_empty(folder, text):
    folder.mkdir()
    (folder / "named-budgets.json").write_text(text)
    assert kept("a") == ()
    keep("a", (1, 2))
    assert kept("a") == (1, 2)


def test_a_folder_that_cannot_be_written_is_no_error(folder):
    folder.write_text("a file")
    keep("a", (1, 2))
    assert kept("a") == ()
