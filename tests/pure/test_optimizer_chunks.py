"""What the device holds while an optimizer steps whose state the host keeps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.cost_models import largest_chunk_bytes, optimizer_chunk_bytes, optimizer_steps_alone
from autopar.cost_models.chunks import MOST_BYTES

sizes = st.integers(0, 2 * MOST_BYTES)
parameters = st.lists(st.tuples(sizes, st.floats(0, 5)), max_size=12).map(lambda ps: [(n, int(n * r)) for n, r in ps])


def chunks(sizes: list[tuple[int, int]], most: int) -> list[int]:
    """State of what steps together: parameters in order, a new chunk before the one that would be too much."""
    held, found = 0, [0]
    for size, own in sizes:
        if held and held + size > most:
            held = 0
            found.append(0)
        held += size
        found[-1] += own
    return found


@given(parameters, st.randoms(use_true_random=False))
def test_no_chunk_is_larger_in_whatever_order_parameters_step(sizes, random) -> None:
    bound = largest_chunk_bytes(sizes)
    most = optimizer_chunk_bytes(sum(n for n, _ in sizes))
    for _ in range(5):
        random.shuffle(sizes)
        assert max(chunks(sizes, most)) <= bound
    assert bound <= sum(own for _, own in sizes)


def test_what_is_alike_steps_in_at_least_eight_parts() -> None:
    assert largest_chunk_bytes([(100, 300)] * 80) == 3000
    assert largest_chunk_bytes([(2**24, 2**25)] * 80) == 2**26
    assert largest_chunk_bytes([(2**30, 2**31), (8, 16)]) == 2**31
    assert largest_chunk_bytes([]) == 0


def test_optimizers_that_treat_parameters_alone() -> None:
    assert all(map(optimizer_steps_alone, ("adamw", "adam amsgrad", "sgd momentum", "rmsprop", "nadam", "radam")))
    assert not any(map(optimizer_steps_alone, ("muon", "adafactor", "lion", "adamw8bit", 8, 2.5)))
