"""Laws of the streams, on programs of any shape."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.ir import TensorMeta
from autopar.planner.schedule.timeline import simulate_streams
from autopar.program import LocalTensor, Op, Program
from autopar.sharding import ShardingSpec, Step

META, SPEC = TensorMeta((4,), "float32"), ShardingSpec.parse("R")


def op(name, seconds, reads=(), *, kind="compute", phase="forward"):
    step = Step("all_reduce", 0) if kind == "redistribute" else None
    return Op(name, kind, name, tuple(reads), (LocalTensor(name, META, SPEC, 16),), phase, step=step, seconds=seconds)


KINDS = st.sampled_from(["compute", "redistribute", "offload", "fetch"])
"""Offloads and fetches stand for a copy in either direction, whatever they read."""


@st.composite
def programs(draw):
    made: list[Op] = []
    turn = draw(st.integers(0, 12))
    for i in range(draw(st.integers(1, 12))):
        reads = draw(st.lists(st.sampled_from([o.name for o in made]), max_size=2, unique=True)) if made else []
        seconds = draw(st.floats(0, 10))
        phase = "forward" if i < turn else "backward"
        made.append(op(f"t{i}", seconds, reads, kind=draw(KINDS), phase=phase))
    return Program(tuple(made), ())


overlaps = st.floats(0, 1)


@given(programs(), overlaps)
def test_a_step_takes_as_long_as_each_stream_at_least_and_as_all_at_most(program, overlap):
    t = simulate_streams(program, overlap)
    assert max(t.compute_s, t.communication_s, t.transfer_s) <= t.seconds * (1 + 1e-9)
    assert t.seconds <= (t.compute_s + t.communication_s + t.transfer_s) * (1 + 1e-9)


@given(programs(), overlaps, st.data())
def test_an_op_that_takes_longer_never_makes_the_step_shorter(program, overlap, data):
    at = data.draw(st.integers(0, len(program.ops) - 1))
    more = data.draw(st.floats(0, 10))
    slower = replace(program.ops[at], seconds=program.ops[at].seconds + more)
    after = replace(program, ops=(*program.ops[:at], slower, *program.ops[at + 1 :]))
    before_s, after_s = (simulate_streams(p, overlap).seconds for p in (program, after))
    assert before_s <= after_s + 1e-9
    assert after_s <= before_s + more + 1e-9 or overlap < 1


@given(programs(), overlaps, overlaps)
def test_more_overlap_never_takes_longer(program, a, b):
    less, more = sorted((a, b))
    assert simulate_streams(program, more).seconds <= simulate_streams(program, less).seconds + 1e-9


@given(programs())
def test_without_overlap_the_streams_take_turns(program):
    program = replace(program, ops=tuple(replace(o, kind="compute") if o.is_transfer else o for o in program.ops))
    t = simulate_streams(program, 0.0)
    assert t.seconds == pytest.approx(t.compute_s + t.communication_s)


@given(programs(), overlaps)
def test_every_op_runs_once_after_what_it_reads_and_alone_on_its_stream(program, overlap):
    t = simulate_streams(program, overlap)
    end = {i.op: i.end_s for i in t.intervals}
    begin = {i.op: i.start_s for i in t.intervals}
    assert len(t.intervals) == len(program.ops) == len(end)
    for o in program.ops:
        assert all(end[r] <= begin[o.name] + 1e-9 for r in o.reads)
    for stream in ("compute", "communication", "host"):
        ordered = [i for i in t.intervals if i.stream == stream]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in zip(ordered, ordered[1:], strict=False))


def test_a_collective_runs_beside_what_is_computed_until_its_first_reader():
    program = Program((op("a", 1), op("g", 3, "a", kind="redistribute"), op("b", 2), op("c", 1, "g")), ())
    assert simulate_streams(program).seconds == 1 + 3 + 1
    assert simulate_streams(program, 0.0).seconds == 1 + 3 + 2 + 1
    assert simulate_streams(program, 0.5).seconds == pytest.approx(1 + 2 * 1.5 + 1 + 1)


def test_a_collective_that_reads_another_is_launched_once_that_one_is_done_and_the_program_waits_for_it():
    program = Program((op("g", 3, kind="redistribute"), op("h", 2, "g", kind="redistribute"), op("b", 2)), ())
    assert simulate_streams(program).seconds == 3 + 2


@pytest.mark.parametrize(
    ("step", "seconds"),
    [(Step("all_reduce", 1), 3), (Step("all_reduce", 0), 3 + 2), (Step("permute", 1, 0, axes=(1, 0)), 3 + 2)],
    ids=str,
)
def test_collectives_run_beside_each_other_unless_they_share_links(step, seconds):
    """A permute over two axes sends over the links between nodes, as what runs over the outer axis alone does."""
    other = replace(op("h", 2, kind="redistribute"), step=step)
    assert simulate_streams(Program((op("g", 3, kind="redistribute"), other), ())).seconds == seconds


def test_what_is_under_way_when_the_forward_ends_is_waited_for():
    program = Program((op("g", 3, kind="redistribute"), op("b", 2, phase="backward")), ())
    assert simulate_streams(program).seconds == 3 + 2


def test_copies_run_one_after_the_other_beside_what_is_computed_and_communicated():
    program = Program(
        (
            op("a", 1),
            op("x", 3, "a", kind="offload"),
            op("y", 3, kind="offload"),
            op("g", 4, kind="redistribute"),
            op("b", 6),
            op("c", 1, ["g", "y"]),
        ),
        (),
    )
    assert simulate_streams(program).seconds == 1 + 6 + 1
    assert simulate_streams(program).transfer_s == 6


def test_a_wait_stands_still_until_the_copy_is_done_while_collectives_go_on():
    wait = Op("w", "wait", "a", ("a", "x"), (), "forward")
    program = Program(
        (
            op("a", 1),
            op("x", 3, "a", kind="offload"),
            op("g", 2, kind="redistribute"),
            op("b", 1),
            wait,
            op("c", 1, "g"),
        ),
        (),
    )
    assert simulate_streams(program).seconds == 1 + 3 + 1
