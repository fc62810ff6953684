"""Where prompts are cut: nowhere else than a state is to be kept, never after a single token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic.runtime.prefill import SHORTEST, SPACING, marks, next_cut


def pieces(done: int, places: list[int], total: int, limit: int) -> list[int]:
    ends: list[int] = []
    while done < total:
        ends.append(next_cut(done, places, total, limit))
        assert ends[-1] > done
        done = ends[-1]
    return ends


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_no_piece_is_longer_than_the_limit_or_a_single_token(data):
    total = data.draw(st.integers(2, 9000))
    boundaries = sorted(data.draw(st.sets(st.integers(1, total - 1), max_size=30)))
    places = marks(boundaries, total)
    done = data.draw(st.integers(0, total - 2))
    limit = data.draw(st.sampled_from([3, 128, 1024]))
    ends = pieces(done, places, total, limit)
    assert ends[-1] == total
    sizes = [end - start for start, end in zip([done, *ends], ends, strict=False)]
    assert all(SHORTEST <= size <= limit for size in sizes)
    assert {place for place in places if place >= done + SHORTEST} <= set(ends)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_states_are_kept_at_the_last_boundary_and_at_some_before(data):
    total = data.draw(st.integers(4, 20000))
    boundaries = sorted(data.draw(st.sets(st.integers(1, total - 1), min_size=1, max_size=40)))
    found = marks(boundaries, total)
    usable = [place for place in boundaries if SHORTEST <= place <= total - SHORTEST]
    assert found[-1:] == usable[-1:]
    assert set(found) <= set(usable)
    assert all(later - earlier >= SPACING for earlier, later in zip([0, *found[:-1]], found[:-1], strict=False))


def test_without_boundaries_it_is_kept_near_the_end():
    assert marks([], 500) == [498]
    assert marks([], 3) == []


def test_a_single_token_is_a_piece_only_where_there_is_no_other():
    assert pieces(0, [1], 1, 1024) == [1]
    assert pieces(0, [], 1025, 1024) == [1023, 1025]
    assert pieces(0, [2], 4, 1024) == [2, 4]


@pytest.mark.parametrize("boundaries", [[1], [9], [1, 9]])
def test_boundaries_too_near_the_ends_are_none(boundaries):
    assert marks(boundaries, 10) == []
