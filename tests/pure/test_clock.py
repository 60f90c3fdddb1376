"""The clock of searches counts work: any machine searches alike, however busy; the limit on the wall holds as well."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Thread

import pytest

from autopar import settings
from autopar.solver import clock
from autopar.solver.clock import (
    PRICES_S,
    counted,
    keep_back,
    late_after,
    limited,
    now,
    on_the_wall,
    tick,
    tick_up_to,
    until_the_limit,
)

KIND = "simplex step"
A_SECOND = 1 / PRICES_S[KIND]


class Machine:
    """A wall clock; ``pace``: seconds of counted work in one on it."""

    def __init__(self) -> None:
        self.wall_s = 100.0

    def work(self, seconds: float, pace: float = 1.0) -> None:
        self.wall_s += seconds / pace
        tick(KIND, seconds * A_SECOND)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    made = Machine()
    monkeypatch.setattr(clock.time, "monotonic", lambda: made.wall_s)
    return made


def test_machines_of_any_pace_have_the_same_time(machine: Machine) -> None:
    spent = {}
    for pace in (10.0, 1.0, 0.5):
        with limited(60.0):
            machine.work(10.0, pace)
            spent[pace] = now()
    assert spent[10.0] == spent[1.0] == spent[0.5] == pytest.approx(10.0)


@pytest.mark.parametrize("pace", [1.0, 0.5, 0.1])
def test_the_limit_is_one_on_the_wall(machine: Machine, pace: float) -> None:
    with limited(60.0):
        machine.work(59.0 * pace, pace)
        assert now() == pytest.approx(59.0 * pace)
        machine.work(1.001 * pace, pace)
        assert now() == pytest.approx(60.0, rel=1e-3)


def test_work_ends_a_search_on_a_fast_machine_too(machine: Machine) -> None:
    with limited(60.0):
        machine.work(60.0, 10.0)
        assert now() == pytest.approx(60.0)


def test_on_a_slow_machine_the_search_ends_in_time_for_what_follows(machine: Machine) -> None:
    ends = {}
    for pace in (2.0, 1.0, 0.5, 0.25):
        with limited(60.0):
            keep_back(6.0)
            while now() < 60.0 - 6.0:
                machine.work(0.25 * min(pace, 1.0), pace)
            ends[pace] = clock._here.race.gone() if clock._here.race else 0.0
    assert ends == pytest.approx({2.0: 27.0, 1.0: 54.0, 0.5: 48.0, 0.25: 48.0}, abs=1.0)


def test_it_never_goes_back(machine: Machine) -> None:
    with limited(10.0):
        seen = [now()]
        for pace in (0.1, 1.0, 0.2, 1.0, 0.05):
            machine.work(1.0, pace)
            seen.append(now())
    assert seen == sorted(seen)


def test_a_limit_within_another_is_part_of_it(machine: Machine) -> None:
    with limited(60.0):
        machine.work(2.0)
        with limited(1.0):
            machine.work(5.0)
            assert counted() == pytest.approx(7.0)
        assert now() == pytest.approx(7.0)
    assert counted() == 0.0


def test_who_works_in_another_thread_counts_for_the_one_that_asked(machine: Machine) -> None:
    with limited(60.0):
        late = late_after(2.0, KIND, A_SECOND)
        answers: list[bool] = []
        thread = Thread(target=lambda: answers.extend(late() for _ in range(4)))
        thread.start()
        thread.join()
        assert answers == [False, False, True, True]
        assert counted() == pytest.approx(4.0)


def test_work_that_is_told_at_the_end_counts_once(machine: Machine) -> None:
    with limited(60.0):
        began = counted()
        tick(KIND, 2 * A_SECOND)
        tick_up_to(began, KIND, 5 * A_SECOND)
        assert counted() == pytest.approx(5.0)
        tick_up_to(began, KIND, 3 * A_SECOND)
        assert counted() == pytest.approx(5.0)


def test_what_others_solve_has_as_long_as_they_need_at_this_pace(machine: Machine) -> None:
    assert on_the_wall(3.0) == 3.0
    with limited(60.0):
        machine.work(5.0, 0.5)
        assert on_the_wall(3.0) == pytest.approx(6.0)
        assert on_the_wall(40.0) == pytest.approx(50.0)  # what is left of the limit
    with limited(1e4):
        machine.work(1.0, 0.1)
        assert on_the_wall(3.0) == pytest.approx(3.0 * settings.SLOWEST)


def test_what_looks_at_this_clock_itself_has_what_is_left(machine: Machine) -> None:
    assert until_the_limit(3.0) == 3.0
    with limited(60.0):
        machine.work(5.0, 0.5)
        assert until_the_limit(3.0) == pytest.approx(50.0)
