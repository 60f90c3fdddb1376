"""The clock of searches is processor time: a busy machine plans as an idle one does; the limit holds all the same."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from autopar.solver import clock
from autopar.solver.clock import SLOWEST, elsewhere, limited, now, on_the_wall, until_the_limit


class Machine:
    """A wall clock, and a processor that works for us a share of the time."""

    def __init__(self) -> None:
        self.wall_s = 100.0
        self.worked_s = 7.0

    def work(self, seconds: float, share: float = 1.0) -> None:
        self.worked_s += seconds
        self.wall_s += seconds / share


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(clock.time, "monotonic", lambda: made.wall_s)
    monkeypatch.setattr(clock.time, "thread_time", lambda: made.worked_s)
    return made


def test_a_busy_machine_has_the_same_time(machine: Machine) -> None:
    spent = {}
    for share in (1.0, 0.5):
        with limited(60.0):
            began = now()
            machine.work(10.0, share)
            spent[share] = now() - began
    assert spent[1.0] == spent[0.5] == pytest.approx(10.0)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_the_limit_is_one_on_the_wall(machine: Machine, share: float) -> None:
    with limited(60.0):
        began = now()
        machine.work(59.0 * share, share)
        assert now() - began < 60.0
        machine.work(1.0 * share, share)
        assert now() - began == pytest.approx(60.0)


def test_it_never_goes_back(machine: Machine) -> None:
    with limited(10.0):
        seen = [now()]
        for share in (0.1, 1.0, 0.2, 1.0, 0.05):
            machine.work(1.0, share)
            seen.append(now())
    assert seen == sorted(seen)


def test_a_limit_within_another_is_part_of_it(machine: Machine) -> None:
    with limited(60.0):
        began = now()
        with limited(1.0):
            machine.work(5.0, 0.5)
            assert now() - began == pytest.approx(5.0)
        assert now() - began == pytest.approx(5.0)


def test_what_others_solve_has_as_long_as_they_need_at_this_pace(machine: Machine) -> None:
    assert on_the_wall(3.0) == 3.0
    with limited(60.0):
        machine.work(5.0, 0.5)
        assert on_the_wall(3.0) == pytest.approx(6.0)
        assert on_the_wall(40.0) == pytest.approx(50.0)  # what is left of the limit
    with limited(1e4):
        machine.work(1.0, 0.1)
        assert on_the_wall(3.0) == pytest.approx(3.0 * SLOWEST)


def test_what_looks_at_this_clock_itself_has_what_is_left(machine: Machine) -> None:
    assert until_the_limit(3.0) == 3.0
    with limited(60.0):
        machine.work(5.0, 0.5)
        assert until_the_limit(3.0) == pytest.approx(50.0)


def test_what_other_programs_work_for_us_counts() -> None:
    with limited(1e6):
        began = now()
        with elsewhere():
            subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
        busy = now() - began
    with limited(1e6):
        began = now()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        assert now() - began < busy / 2
