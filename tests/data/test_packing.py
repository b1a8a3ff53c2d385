import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.data.packing import (
    document_lengths,
    encoder_decoder_row,
    join_until_fits,
    longest_example,
    place,
)
from ds_engine.data.samples import Sample


def ints(*values):
    return np.array(values, dtype=np.int64)


def join_slowly(lengths, costs, limits, dropped):
    """The same rule with all sums made anew for each join."""
    sizes, ends = list(lengths), list(dropped)

    def fits():
        return all(
            sum(side[size - end] for size, end in zip(sizes, ends, strict=True)) <= limit
            for side, limit in zip(costs, limits, strict=True)
        )

    while len(sizes) > 1 and not fits():
        at = min(range(len(sizes) - 1), key=lambda k: sizes[k] + sizes[k + 1])
        sizes[at : at + 2] = [sizes[at] + sizes[at + 1]]
        del ends[at]
    return sizes


def sample(tokens, starts, num_valid=None):
    return Sample(ints(*tokens), ints(*starts), len(tokens) if num_valid is None else num_valid)


def test_documents_of_a_piece():
    piece = sample([5, 6, 7, 8, 0, 0], [1, 3], num_valid=4)
    assert document_lengths(piece, isolate_documents=True).tolist() == [1, 2, 1]
    assert document_lengths(piece, isolate_documents=False).tolist() == [4]
    whole = sample([5, 6, 7], [0])
    assert document_lengths(whole, isolate_documents=True).tolist() == [3]
    for isolate in (True, False):
        empty = sample([0, 0], [], num_valid=0)
        assert document_lengths(empty, isolate_documents=isolate).tolist() == []


def test_what_fits_is_not_joined():
    costs = (np.arange(11) + 1)[None]
    assert join_until_fits(ints(3, 1, 4), costs, [11]).tolist() == [3, 1, 4]
    assert join_until_fits(ints(3, 1, 4), costs, [10]).tolist() == [4, 4]
    assert join_until_fits(ints(3, 1, 4), costs, [9]).tolist() == [8]
    assert join_until_fits(ints(), costs, [0]).tolist() == []


def test_the_shortest_neighbours_are_joined_and_the_first_of_equals():
    costs = (np.arange(50) + 2)[None]
    lengths = ints(9, 2, 2, 9, 2, 2, 9)
    assert join_until_fits(lengths, costs, [35 + 12]).tolist() == [9, 4, 9, 2, 2, 9]
    assert join_until_fits(lengths, costs, [35 + 10]).tolist() == [9, 4, 9, 4, 9]


def test_ids_dropped_at_an_end_cost_room_once_joined():
    costs = (np.arange(11) + 1)[None]
    # Apart 2+1 + 2+1 tokens; joined the first document's last id counts: 5+1.
    assert join_until_fits(ints(3, 3), costs, [6], dropped=ints(1, 1)).tolist() == [3, 3]
    assert join_until_fits(ints(3, 3), costs, [5], dropped=ints(1, 1)).tolist() == [6]


@given(
    st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=25),
    st.integers(0, 4),
    st.integers(0, 3),
    st.integers(0, 60),
)
@settings(max_examples=150, deadline=None)
def test_joining_follows_the_rule_and_loses_nothing(documents, extra, half, room):
    lengths = ints(*(size for size, _ in documents))
    dropped = ints(*(int(end) for _, end in documents))
    numbers = np.arange(int(lengths.sum()) + 1)
    costs = np.stack([numbers + extra, numbers // 2 + half])
    limits = [int(costs[0].max()) + room, int(costs[1].max()) + room // 2]
    joined = join_until_fits(lengths, costs, limits, dropped=dropped)
    assert joined.tolist() == join_slowly(lengths, costs, limits, dropped)
    ends = np.cumsum(joined)
    assert set(ends) <= set(np.cumsum(lengths)) and ends[-1] == lengths.sum()
    last = [int(dropped[np.cumsum(lengths).tolist().index(end)]) for end in ends]
    assert (costs[:, joined - last].sum(axis=1) <= limits).all()


def test_thousands_of_one_token_documents_join_in_time():
    costs = (np.arange(20_001) + 1)[None]
    began = time.perf_counter()
    joined = join_until_fits(np.ones(20_000, dtype=np.int64), costs, [20_001])
    assert time.perf_counter() - began < 2  # quadratic time would take a minute
    assert joined.tolist() == [20_000]


def test_longest_example_stops_at_the_first_that_does_not_fit():
    assert longest_example(np.array([[1, 2, 3, 4], [1, 1, 2, 2]]), [3, 9]) == 2
    assert longest_example(np.array([[1, 9, 3, 9]]), [3]) == 0
    assert longest_example(np.array([[4, 5]]), [3]) == -1


def test_examples_are_placed_with_padding_of_segment_minus_one():
    placed = place(ints(5, 6, 7, 8), ints(3, 1), 7, pad=9)
    assert placed.tokens.tolist() == [5, 6, 7, 8, 9, 9, 9]
    assert placed.positions.tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert placed.segments.tolist() == [0, 0, 0, 1, -1, -1, -1]
    full = place(ints(5, 6), ints(1, 1), 2, pad=9)
    assert full.positions.tolist() == [0, 0] and full.segments.tolist() == [0, 1]
    empty = place(ints(), ints(), 2, pad=9)
    assert empty.tokens.tolist() == [9, 9] and empty.positions.tolist() == [0, 1]
    assert empty.segments.tolist() == [-1, -1]
    assert all(array.dtype == np.int64 for array in (*placed, *full, *empty))


def test_placing_too_much_is_refused():
    with pytest.raises(ValueError, match="row of 2"):
        place(ints(1, 2, 3), ints(3), 2, pad=0)
    with pytest.raises(ValueError, match="3 tokens"):
        place(ints(1, 2, 3), ints(2), 4, pad=0)


def test_encoder_decoder_row():
    row = encoder_decoder_row(
        (ints(5, 6, 1, 1), ints(3, 1)),
        (ints(7, 1, 8, 9, 1), ints(2, 3)),
        encoder_length=6,
        decoder_length=7,
        pad=0,
        start=4,
    )
    tokens, positions, segments, decoder_tokens, decoder_positions, decoder_segments = row.inputs
    labels, mask = row.targets
    assert tokens.tolist() == [5, 6, 1, 1, 0, 0]
    assert positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert segments.tolist() == [0, 0, 0, 1, -1, -1]
    assert decoder_tokens.tolist() == [4, 7, 4, 8, 9, 0, 0]
    assert labels.tolist() == [7, 1, 8, 9, 1, 0, 0]
    assert decoder_positions.tolist() == [0, 1, 0, 1, 2, 0, 1]
    assert decoder_segments.tolist() == [0, 0, 1, 1, 1, -1, -1]
    assert mask.tolist() == [1, 1, 1, 1, 1, 0, 0] and mask.dtype == np.float32
