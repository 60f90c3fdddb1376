"""Pipeline schedules: their orders, how long they take and what they hold; and where a model is cut for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import PlanError
from autopar.pipelines import partition
from autopar.pipelines.actions import Action, Schedule
from autopar.pipelines.listed import listed
from autopar.pipelines.makespan import Costs, bound, in_flight, peak_bytes, simulate
from autopar.pipelines.orders import (
    SCHEDULES,
    folded,
    gpipe,
    interleaved,
    looped,
    one_f_one_b,
    schedule,
    zero_bubble,
    zero_bubble_v,
)
from autopar.pipelines.partition import balanced, best_cuts, partition_uniform

SIZES = [(p, m) for p in (1, 2, 3, 4, 5, 8) for m in (1, 2, 3, 4, 7, 8, 16)]


def rows(made: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in made.order]


def even(stages: int, forward: float = 1.0, send: float = 0.0) -> Costs:
    """F, I and W of equal seconds, and all of the first stage's backward as W; a micro-batch holds 1 byte a stage."""
    f = (forward,) * stages
    i, w = (0.0, *f[1:]), (2 * forward, *f[1:])
    return Costs(f, i, w, (send,) * (stages - 1), held=(1.0,) * stages, kept=(1.0,) * stages)


def named(p: int, m: int) -> list[Schedule]:
    made = [gpipe(p, m), one_f_one_b(p, m), zero_bubble(p, m), zero_bubble_v(p, m)]
    return made + ([interleaved(p, m, 2), interleaved(p, m, 3)] if m % p == 0 else [])


seconds = st.integers(0, 9).map(float)


@st.composite
def pipelines(draw) -> tuple[Costs, tuple[int, ...], int]:
    """Costs of up to 6 stages in any places on up to 3 ranks, and a number of micro-batches."""
    ranks = draw(st.integers(1, 3))
    others = draw(st.lists(st.integers(0, ranks - 1), max_size=3))
    rank_of = tuple(draw(st.permutations([*range(ranks), *others])))
    stages = len(rank_of)

    def several(of: st.SearchStrategy[float], number: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(of, min_size=number, max_size=number)))

    held = several(st.integers(1, 9).map(float), stages)
    costs = Costs(
        several(seconds, stages),
        (0.0, *several(seconds, stages - 1)),
        several(seconds, stages),
        several(seconds, stages - 1),
        held,
        tuple(draw(st.integers(0, int(most))) for most in held),
        several(seconds, stages),
        several(seconds, ranks),
    )
    return costs, rank_of, draw(st.integers(1, 5))


@st.composite
def random_schedules(draw) -> tuple[Costs, Schedule]:
    """A pipeline whose ranks take, again and again, any action that can begin."""
    costs, rank_of, m = draw(pipelines())
    split = [draw(st.booleans()) for _ in rank_of]
    left = {
        Action(kind, stage, j)
        for stage in range(len(rank_of))
        for j in range(m)
        for kind in ("FIW" if split[stage] else "FB")
    }
    order: list[list[Action]] = [[] for _ in range(max(rank_of) + 1)]
    while left:
        blocked = {Action("F", a.stage + 1, a.micro_batch) for a in left if a.kind == "F"}
        blocked |= {Action(kind, a.stage, a.micro_batch) for a in left if a.kind == "F" for kind in "BIW"}
        blocked |= {Action(kind, a.stage - 1, a.micro_batch) for a in left if a.kind in "BI" for kind in "BI"}
        blocked |= {Action("W", a.stage, a.micro_batch) for a in left if a.kind == "I"}
        action = draw(st.sampled_from(sorted(left - blocked)))
        left.remove(action)
        order[rank_of[action.stage]].append(action)
    return costs, Schedule("random", tuple(map(tuple, order)), rank_of, m)


# Actions and their text


@pytest.mark.parametrize("text", ["2F0", "1I3", "0B1", "3W2", "10F127"])
def test_an_action_is_written_as_stage_kind_and_micro_batch(text: str):
    assert str(Action.parse(text)) == text


def test_the_parts_of_an_action():
    assert Action.parse(" 2F13 ") == Action("F", 2, 13)


@pytest.mark.parametrize("text", ["F0", "2F", "2X0", "2SEND_F0", "-1F0", ""])
def test_another_text_is_no_action(text: str):
    with pytest.raises(PlanError, match="no action of a pipeline"):
        Action.parse(text)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_a_schedule_is_the_same_after_it_was_written_and_read(p: int, m: int):
    for made in named(p, m):
        assert Schedule.from_text(made.to_text(), made.name) == made


def test_empty_cells_are_waits_and_merged_actions_follow_each_other():
    read = Schedule.from_text("0F0,0F1,,(0B0;0B1)OVERLAP_F_B\n,1F0,1B0,1F1,1B1,\n")
    assert rows(read) == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert (read.rank_of, read.micro_batches, read.split) == ((0, 1), 2, False)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("0F0,0B0\n1F0\n", "runs 1B0 never"),
        ("0F0,0B0,0B0\n1F0,1B0\n", "runs 0B0 more than once"),
        ("0F0,0B0\n1F0,1I0,1W0,1B0\n", "runs 1B0 beside 1I0"),
        ("0F0,0B0\n1F0,1I0\n", "runs 1W0 never"),
        ("0F0,0B0\n1F0,1W0\n", "runs 1B0 never"),
        ("0F0,0B0,1F0\n1B0\n", "on rank 0"),
        ("0F0,0B0\n1B0,1F0\n", "never comes to its end"),
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "never comes to its end"),
        ("0F0,0B0\n2F0,2B0\n", "leaves out a stage"),
        ("", "leaves out a stage"),
    ],
)
def test_a_schedule_that_cannot_run_is_an_error(text: str, what: str):
    with pytest.raises(PlanError, match=what):
        Schedule.from_text(text)


def test_a_deadlock_says_what_each_rank_waits_for():
    with pytest.raises(PlanError) as error:
        simulate(Schedule("own", ((Action.parse("0B0"),), (Action.parse("1F0"),)), (0, 1), 1), even(2))
    assert error.value.found == "rank 0 cannot run 0B0 before 0F0; rank 1 cannot run 1F0 before 0F0"


def test_an_action_of_no_stage_or_micro_batch_is_an_error():
    made = one_f_one_b(2, 2)
    with pytest.raises(PlanError, match="does not need"):
        Schedule("own", made.order, made.rank_of, 1).check()


# Orders


def test_1f1b_of_four_stages_and_eight_micro_batches():
    assert rows(one_f_one_b(4, 8)) == [
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7",
        "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7",
    ]


def test_1f1b_of_fewer_micro_batches_than_stages():
    assert rows(one_f_one_b(4, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1"]


def test_gpipe_of_two_stages_and_three_micro_batches():
    assert rows(gpipe(2, 3)) == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_ranks_that_do_not_split_backwards_hold_no_more(p: int, m: int):
    for made in named(p, m):
        whole = made.with_whole_backwards(range(0, p, 2))
        whole.check()
        assert not any(a.kind in "IW" for row in whole.order[::2] for a in row)
        assert whole.order[1::2] == made.order[1::2]
        costs = even(made.stages)
        assert all(a <= b for a, b in zip(peak_bytes(whole, costs), peak_bytes(made, costs), strict=True))
        assert simulate(whole, costs).seconds >= simulate(made, costs).seconds - 1e-9


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_what_follows_the_last_backward_is_in_no_other_ranks_way_once_it_is_split(p: int, m: int):
    for made in (gpipe(p, m), one_f_one_b(p, m)):
        split = made.with_last_backwards_split()
        split.check()
        assert [a for row in split.order for a in row if a.kind in "IW"] == [
            Action(kind, stage, m - 1) for stage in range(1, p) for kind in "IW"
        ]
        costs = even(p)
        assert simulate(split, costs).seconds <= simulate(made, costs).seconds + 1e-9
        delivering = replace(costs, last_backward=(100.0,) * p)
        in_turn, at_once = (simulate(each, delivering).seconds for each in (made, split))
        assert in_turn - simulate(made, costs).seconds >= 100.0 * p - 1e-9
        assert at_once - simulate(split, costs).seconds <= 100.0 + 1e-9
    split = zero_bubble_v(p, m)
    assert split.with_last_backwards_split() is split


def test_zb_h1_of_three_stages_and_four_micro_batches_does_not_split_the_first_stage():
    assert rows(zero_bubble(3, 4)) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    ]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_all_named_orders_come_to_their_end(p: int, m: int):
    for made in named(p, m):
        made.check()


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_how_many_micro_batches_are_in_flight(p: int, m: int):
    assert in_flight(gpipe(p, m)) == (m,) * p
    assert in_flight(one_f_one_b(p, m)) == tuple(min(p - s, m) for s in range(p))
    assert max(in_flight(zero_bubble(p, m))) == min(p, m)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m % p == 0])
def test_what_an_interleaved_rank_holds_in_chunks(p: int, m: int, chunks: int):
    held = peak_bytes(interleaved(p, m, chunks), even(p * chunks))
    assert held == tuple(min((chunks - 1) * p + 2 * (p - s - 1) + 1, chunks * m) for s in range(p))


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p])
def test_zbv_holds_as_many_chunks_as_1f1b_on_its_first_rank(p: int, m: int):
    assert max(peak_bytes(zero_bubble_v(p, m), even(2 * p))) == 2 * p


def test_interleaved_needs_a_multiple_of_the_ranks():
    with pytest.raises(PlanError, match="multiple of its ranks") as error:
        interleaved(4, 10, 2)
    assert error.value.hint == "take 8 or 12 micro-batches"
    with pytest.raises(PlanError, match="take 4 micro-batches"):
        interleaved(4, 3, 2)


def test_where_the_stages_are():
    assert looped(3, 2) == interleaved(3, 3, 2).rank_of == (0, 1, 2, 0, 1, 2)
    assert folded(3) == zero_bubble_v(3, 3).rank_of == (0, 1, 2, 2, 1, 0)
    assert folded(2, 3) == (0, 1, 1, 0, 0, 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_name_makes_a_schedule_where_it_says_its_stages_are(name: str):
    family = SCHEDULES[name]
    chunks = 2 if 2 in family.chunks else 1
    made = schedule(name, 4, 8, chunks, even(4 * chunks))
    made.check()
    assert made.name == name
    assert made.rank_of == family.rank_of(4, chunks)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("own", 4, 8), "no pipeline schedule of this name"),
        (("1f1b", 4, 8, 2), "take 1, or another schedule"),
        (("zbv", 4, 8, 1), "take 2, or another schedule"),
        (("interleaved", 4, 8, 0), "take 1 or more"),
        (("gpipe", 0, 8), "needs ranks"),
        (("gpipe", 4, 0), "needs micro-batches"),
        (("listed", 4, 8), "made for the costs"),
    ],
)
def test_a_schedule_that_does_not_exist_is_an_error(arguments: tuple, what: str):
    with pytest.raises(PlanError, match=what):
        schedule(*arguments)


# Seconds


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_the_makespan_of_gpipe_and_1f1b(make: Callable[[int, int], Schedule], p: int, m: int):
    timeline = simulate(make(p, m), even(p))
    assert timeline.seconds == (m + p - 1) * 3
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))


def test_the_bubble_of_1f1b_of_four_stages_and_eight_micro_batches():
    assert simulate(one_f_one_b(4, 8), even(4)).bubble == pytest.approx(3 / 11)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_chunks_divide_the_bubble_of_an_interleaved_pipeline(p: int, m: int, chunks: int):
    waits = simulate(interleaved(p, m, chunks), even(p * chunks, 1 / chunks)).seconds - 3 * m
    assert waits == pytest.approx((p - 1) * 3 / chunks)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_zb_h1_leaves_a_third_of_the_bubble(p: int, m: int):
    assert simulate(zero_bubble(p, m), even(p)).seconds - 3 * m == p - 1


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_the_last_rank_of_zbv_waits_for_its_first_forward_alone(p: int, m: int):
    made = zero_bubble_v(p, m)
    timeline = simulate(made, even(2 * p))
    last = [timeline.ends[action] for row in made.order for action in row[-1:]]
    assert timeline.seconds == max(last) == 6 * m + p - 1
    first = [timeline.starts[row[0]] for row in made.order]
    assert [end - start for start, end in zip(first, last, strict=True)] == [6.0 * m] * p


@pytest.mark.parametrize(
    ("made", "costs", "expected"),
    [
        (one_f_one_b(4, 8), even(4, send=0.02), 33.32),
        (interleaved(4, 8, 2), even(8, 0.5, send=0.02), 28.78),
        (zero_bubble(4, 8), even(4, send=0.02), 27.24),
        (zero_bubble_v(4, 8), even(8, 0.5, send=0.02), 25.76),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_seconds_with_messages(made: Schedule, costs: Costs, expected: float):
    assert simulate(made, costs).seconds == pytest.approx(expected)


def test_messages_on_one_rank_take_no_time():
    costs = Costs((1.0, 1.0), (0.0, 1.0), (2.0, 1.0), send=(5.0,))
    text = "0F0,1F0,1B0,0B0\n"
    assert simulate(Schedule.from_text(text), costs).seconds == 6
    assert simulate(one_f_one_b(2, 1), costs).seconds == 16


def test_the_last_backward_and_what_follows_it():
    costs = Costs((1.0, 1.0), (0.0, 1.0), (2.0, 1.0), last_backward=(10.0, 0.5), tail=(0.0, 100.0))
    timeline = simulate(one_f_one_b(2, 2), costs)
    assert timeline.ends[Action.parse("1B1")] == 7.5
    assert timeline.ends[Action.parse("0B1")] == 7.5 + 12
    assert timeline.seconds == 107.5
    assert timeline.busy == (16, 106.5)


def test_what_micro_batches_share_is_made_while_their_first_input_is_under_way():
    costs = Costs((4.0, 1.0), (0.0, 1.0), (2.0, 1.0), first_forward=(3.0, 5.0))
    timeline = simulate(one_f_one_b(2, 2), costs)
    assert timeline.ends[Action.parse("0F0")] == 7
    assert (timeline.starts[Action.parse("1F0")], timeline.ends[Action.parse("1F0")]) == (2, 8)
    assert timeline.busy[1] == 5 + 2 * 3


@given(random_schedules())
@settings(max_examples=200, deadline=None)
def test_seconds_are_those_of_the_longest_path(case: tuple[Costs, Schedule]):
    costs, made = case
    timeline = simulate(made, costs)
    last = {made.rank_of[a.stage]: a for row in made.order for a in row}
    final = {a.stage: a for row in made.order for a in row if a.kind in "BW"}
    before = {b: a for row in made.order for a, b in itertools.pairwise(row)}
    backward = {(a.stage, a.micro_batch): a for row in made.order for a in row if a.kind in "BI"}

    @cache
    def end(action: Action) -> float:
        kind, stage, j = action
        feeds = [(end(before[action]), 0.0)] if action in before else []
        if kind == "F" and stage:
            feeds.append((end(Action("F", stage - 1, j)), stage - 1))
        if kind in "BI" and stage + 1 < made.stages:
            feeds.append((end(backward[stage + 1, j]), stage))
        arrives = 0.0
        for number, (done, seam) in enumerate(feeds):
            sent = number > 0 or action not in before
            crosses = sent and made.rank_of[seam] != made.rank_of[seam + 1]
            arrives = max(arrives, done + (costs.send[seam] if crosses else 0.0))
        takes = {"F": costs.forward[stage], "I": costs.backward_input[stage], "W": costs.backward_weight[stage]}
        takes["B"] = takes["I"] + takes["W"]
        return arrives + takes[kind] + (costs.last_backward[stage] if final[stage] == action else 0.0)

    assert timeline.seconds == max(end(action) + costs.tail[rank] for rank, action in last.items())


@given(random_schedules())
@settings(max_examples=300, deadline=None)
def test_no_schedule_is_shorter_than_the_bound(case: tuple[Costs, Schedule]):
    costs, made = case
    assert bound(costs, made.rank_of, made.micro_batches) <= simulate(made, costs).seconds


def test_the_bound_of_even_stages():
    assert bound(even(4), looped(4), 8) == 3 * 8 + 3
    assert bound(even(8, 0.5, send=0.02), folded(4), 8) == pytest.approx(24 + 3 * 0.5 + 3 * 0.02)


def test_what_is_kept_between_i_and_w_counts():
    made = Schedule.from_text("0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    assert peak_bytes(made, Costs((1, 1), (0, 1), (1, 1), held=(3, 10), kept=(0, 4))) == (6, 14)
    assert in_flight(made) == (2, 2)


@pytest.mark.parametrize(
    "change",
    [dict(send=(1.0,) * 4), dict(held=(1.0,)), dict(held=(1.0,) * 4, kept=(2.0,) * 4), dict(backward_input=(1.0,))],
)
def test_costs_that_contradict_each_other_are_an_error(change: dict):
    with pytest.raises(PlanError):
        Costs(**(dict(forward=(1.0,) * 4, backward_input=(0.0,) * 4, backward_weight=(1.0,) * 4) | change))


@pytest.mark.parametrize("costs", [even(3), Costs((1.0,) * 4, (0.0,) * 4, (1.0,) * 4, tail=(1.0,) * 3)])
def test_costs_of_another_pipeline_are_an_error(costs: Costs):
    with pytest.raises(PlanError, match="of another pipeline"):
        simulate(one_f_one_b(4, 8), costs)


# Listed orders


@given(pipelines(), st.sampled_from([None, True, False]), st.floats(1, 4))
@settings(max_examples=150, deadline=None)
def test_a_listed_order_comes_to_its_end_under_its_caps(case: tuple, split: bool | None, room: float):
    costs, rank_of, m = case
    least = [sum(h for h, at in zip(costs.held, rank_of, strict=True) if at == r) for r in range(max(rank_of) + 1)]
    caps = [room * each for each in least]
    made = listed(costs, rank_of, m, caps, split=split)
    made.check()
    assert all(held <= cap + 1e-6 for held, cap in zip(peak_bytes(made, costs), caps, strict=True))
    if split is not None:
        assert made.split == (split and len(rank_of) > 1)
    assert not any(action.stage == 0 and action.kind == "I" for row in made.order for action in row)


def test_no_room_for_one_micro_batch_is_an_error():
    with pytest.raises(PlanError, match="Rank 1 of the pipeline has no room"):
        listed(even(4), folded(2), 4, [2, 1.5])


@pytest.mark.parametrize(("p", "m"), [(4, 8), (4, 16), (8, 16)])
def test_with_twice_the_memory_of_1f1b_a_listed_order_of_even_stages_meets_the_bound(p: int, m: int):
    costs = even(p, send=0.2)
    made = listed(costs, looped(p), m, [2 * p] * p)
    assert simulate(made, costs).seconds == pytest.approx(bound(costs, looped(p), m), rel=0.005)


@pytest.mark.parametrize("uneven", [(1, 1, 1, 1), (1, 1, 1, 1.4), (1, 1.3, 1, 1), (0.8, 1.2, 0.9, 1.1)])
@pytest.mark.parametrize("m", [4, 8, 24])
def test_in_the_memory_of_zb_h1_a_listed_order_is_no_longer(uneven: tuple[float, ...], m: int):
    f, i, w = ([each * part for each in uneven] for part in (6.8, 8.1, 5.2))
    costs = Costs(tuple(f), (0.0, *i[1:]), (i[0] + w[0], *w[1:]), (0.3,) * 3, held=(1.0,) * 4, kept=(0.82,) * 4)
    other = zero_bubble(4, m)
    caps = [max(peak_bytes(other, costs))] * 4
    assert simulate(listed(costs, looped(4), m, caps), costs).seconds <= simulate(other, costs).seconds + 1e-9


def test_whole_backwards_are_kept_where_splitting_wins_nothing():
    assert not listed(even(1), (0,), 4).split
    assert not listed(Costs((1.0, 0.0), (0.0, 0.0), (1.0, 0.0)), (0, 1), 4).split


# Cuts


@pytest.mark.parametrize(
    ("n", "parts", "chunks", "expected"),
    [
        (16, 4, 2, [[(0, 2), (8, 10)], [(2, 4), (10, 12)], [(4, 6), (12, 14)], [(6, 8), (14, 16)]]),
        (48, 2, 1, [[(0, 24)], [(24, 48)]]),
        (10, 4, 1, [[(0, 2)], [(2, 4)], [(4, 7)], [(7, 10)]]),
        (10, 4, 2, [[(0, 1), (5, 6)], [(1, 2), (6, 7)], [(2, 3), (7, 8)], [(3, 5), (8, 10)]]),
        (2, 3, 1, [[(0, 0)], [(0, 1)], [(1, 2)]]),
    ],
)
def test_layers_that_ranks_have(n: int, parts: int, chunks: int, expected: list):
    assert partition_uniform(n, parts, chunks) == expected


def test_layers_that_no_number_of_chunks_divides_are_an_error():
    with pytest.raises(PlanError, match="cannot be cut into equal chunks"):
        partition_uniform(16, 4, 3)


@st.composite
def chains(draw) -> dict:
    """Up to 9 blocks, up to 4 parts, at some positions."""
    blocks = draw(st.integers(1, 9))
    allowed = draw(st.none() | st.sets(st.integers(1, 9)))
    places = len((allowed or set()) & set(range(1, blocks))) if allowed is not None else blocks - 1
    parts = draw(st.integers(1, min(4, places + 1)))
    costs = draw(st.lists(seconds, min_size=blocks, max_size=blocks))
    return dict(costs=costs, parts=parts, allowed=allowed)


def all_keys(costs, parts, allowed, rank_of=None) -> dict[tuple, tuple[float, float]]:
    blocks = len(costs)
    positions = range(1, blocks) if allowed is None else sorted(allowed & set(range(1, blocks)))
    ranks = list(range(parts)) if rank_of is None else rank_of
    keys = {}
    for cut in itertools.combinations(positions, parts - 1):
        ranges = tuple(zip((0, *cut), (*cut, blocks), strict=True))
        loads = [0.0] * (max(ranks) + 1)
        for part, (start, end) in enumerate(ranges):
            loads[ranks[part]] += sum(costs[start:end])
        keys[ranges] = (max(loads), sum(load**2 for load in loads))
    return keys


@given(chains(), st.integers(1, 5))
@settings(max_examples=300, deadline=None)
def test_best_cuts_are_those_of_trying_all(chain: dict, k: int):
    keys = all_keys(**chain)
    found = best_cuts(**chain, k=k)
    assert len(set(found)) == len(found)
    assert [keys[cut] for cut in found] == sorted(keys.values())[:k]
    assert balanced(**chain) == found[0]


@given(chains(), st.data())
@settings(max_examples=150, deadline=None)
def test_best_cuts_where_ranks_have_several_parts_are_those_of_trying_all(chain: dict, data):
    ranks = st.integers(0, max(0, chain["parts"] - 2))
    rank_of = data.draw(st.lists(ranks, min_size=chain["parts"], max_size=chain["parts"]))
    keys = all_keys(**chain, rank_of=rank_of)
    found = best_cuts(**chain, k=3, rank_of=rank_of)
    assert [keys[cut] for cut in found] == sorted(keys.values())[:3]


@pytest.mark.parametrize("place", [looped, folded])
def test_where_there_are_too_many_cuts_to_try_all_blocks_are_still_spread_evenly(place: Callable):
    costs = [2.0, *[1.0] * 60, 3.0]
    keys = {cut: max_load(costs, cut, place(4, 2)) for cut in best_cuts(costs, 8, 4, rank_of=place(4, 2))}
    assert len(keys) == 4
    assert min(keys.values()) == 17  # of 65 in all


@pytest.mark.parametrize("place", [looped, folded])
def test_equal_blocks_are_spread_evenly_over_the_parts_of_a_rank(place: Callable):
    cut = balanced([1.0] * 64, 32, rank_of=place(8, 4))
    assert {end - start for start, end in cut} == {2}


def max_load(costs, cut, rank_of) -> float:
    return max(sum(sum(costs[a:b]) for (a, b), at in zip(cut, rank_of, strict=True) if at == r) for r in set(rank_of))


@given(chains(), st.data())
@settings(max_examples=100, deadline=None)
def test_moves_find_no_worse_a_cut_than_the_most_even_parts(chain: dict, data):
    ranks = st.integers(0, max(0, chain["parts"] - 2))
    rank_of = data.draw(st.lists(ranks, min_size=chain["parts"], max_size=chain["parts"]))
    keys = all_keys(**chain, rank_of=rank_of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(partition, "FEW_CUTS", 0)
        found = best_cuts(**chain, k=2, rank_of=rank_of)
    assert keys[found[0]] <= keys[balanced(**chain)]


def test_more_stages_than_places_to_cut_are_an_error():
    with pytest.raises(PlanError, match="take 3 stages or fewer"):
        balanced([1.0] * 8, 4, allowed={2, 4})
