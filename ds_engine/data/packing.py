"""Several examples in one row: cutting a piece of text into examples, and laying them into arrays.

A row starts from ``L`` raw tokens of the stream of documents. Each document in it (or the part of
one that lies in it) is an example of its own, but examples cost more room than their tokens: an
end-of-sequence id, sentinels, classification tokens. Where many short documents meet, the row would
overflow. ``join_until_fits`` then makes one example of neighbouring documents, so that no token is
ever lost; in the last resort the row is a single example, for which ``L`` was chosen.

Shapes: ``L`` raw tokens, ``S`` (encoder's) sequence length, ``T`` decoder's sequence length,
``K`` examples in a row, ``N`` tokens of them all.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ds_engine.data.objective import Row
from ds_engine.data.samples import Sample

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_MOST_SLACK = 8
_SLACK_SHARE = 16


class Placed(NamedTuple):
    """Examples laid one after another into a row; all ``(S,)`` int64.

    Attributes:
        tokens: ids; the padding id behind the last example.
        positions: position within the example; counted from 0 in the padding too.
        segments: number of the example; -1 in the padding.
    """

    tokens: IntArray
    positions: IntArray
    segments: IntArray


def document_lengths(sample: Sample, *, isolate_documents: bool) -> IntArray:
    """Return (K,) tokens of each document within a sample, in order; all of them at least 1.

    Args:
        sample: a piece of the stream. Its padding is left out.
        isolate_documents: False: the whole piece counts as one document.
    """
    if not sample.num_valid:
        return np.zeros(0, dtype=np.int64)
    if not isolate_documents:
        return np.array([sample.num_valid], dtype=np.int64)
    inner = sample.starts[(sample.starts > 0) & (sample.starts < sample.num_valid)]
    return np.diff(np.concatenate(([0], inner, [sample.num_valid])))


def slack(length: int) -> int:
    """Return how much room of a row of ``length`` is kept for having more than one example in it.

    Raw tokens are counted as if they were one example; each further document costs an
    end-of-sequence id and perhaps a sentinel more. 8 tokens hold three to eight documents more;
    short rows keep a sixteenth. With less room documents would often be joined, with more the rows
    would carry padding.
    """
    return min(_MOST_SLACK, length // _SLACK_SHARE)


def longest_example(costs: IntArray, limits: Sequence[int]) -> int:
    """Return the largest ``L`` such that one example of ``n`` tokens fits for every ``n <= L``.

    Args:
        costs: (sides, M) room that an example of ``n`` tokens takes on each side of a row; ``M``
            must be so large that the last one does not fit.
        limits: room on each side.

    Returns:
        ``L``; -1 if not even an example without a token fits.
    """
    fits = (costs <= np.array(limits)[:, None]).all(axis=0)
    return int(np.argmin(fits)) - 1


def join_until_fits(
    lengths: IntArray, costs: IntArray, limits: Sequence[int], *, dropped: IntArray | None = None
) -> IntArray:
    """Join neighbouring documents until all examples together fit into the row.

    The two neighbours that are shortest together are joined first (the leftmost of equals): the
    fewest tokens then see another document. Takes O(K log K).

    Args:
        lengths: (K,) raw tokens of each document.
        costs: (sides, L+1) room that an example of ``n`` tokens takes on each side.
        limits: room on each side. One example of all tokens must fit.
        dropped: (K,) raw tokens at each document's end that cost nothing where an example ends
            there (an end-of-document id that the objective replaces by its own); None: none.

    Returns:
        Raw tokens of each example: sums of runs of ``lengths``.
    """
    if dropped is None:
        dropped = np.zeros_like(lengths)
    room = costs[:, lengths - dropped].sum(axis=1)
    if len(lengths) < 2 or bool((room <= limits).all()):
        return lengths
    table = costs.T.tolist()
    sizes, ends = lengths.tolist(), dropped.tolist()
    following = list(range(1, len(sizes) + 1))
    previous = list(range(-1, len(sizes) - 1))
    alive = [True] * len(sizes)
    over = [int(used) - limit for used, limit in zip(room, limits, strict=True)]
    heap = [(sizes[at] + sizes[at + 1], at, at + 1) for at in range(len(sizes) - 1)]
    heapq.heapify(heap)
    while heap and max(over) > 0:
        joint, left, right = heapq.heappop(heap)
        # Entries of documents that were joined since are left behind in the heap: drop them here.
        if not (alive[left] and alive[right]) or joint != sizes[left] + sizes[right]:
            continue
        before = (table[sizes[left] - ends[left]], table[sizes[right] - ends[right]])
        sizes[left], ends[left], alive[right] = joint, ends[right], False
        after = table[joint - ends[left]]
        over = [o + n - a - b for o, n, a, b in zip(over, after, *before, strict=True)]
        following[left] = following[right]
        if following[left] < len(sizes):
            previous[following[left]] = left
            heapq.heappush(heap, (joint + sizes[following[left]], left, following[left]))
        if previous[left] >= 0:
            heapq.heappush(heap, (joint + sizes[previous[left]], previous[left], left))
    return np.array([size for size, kept in zip(sizes, alive, strict=True) if kept], np.int64)


def place(tokens: IntArray, lengths: IntArray, size: int, *, pad: int) -> Placed:
    """Lay examples into a row.

    Args:
        tokens: (N,) ids of all examples, one after another.
        lengths: (K,) tokens of each example.
        size: ``S``.
        pad: id of the padding.

    Raises:
        ValueError: the examples do not fit, or ``lengths`` do not add up to ``N``.
    """
    used = len(tokens)
    if used > size or int(lengths.sum()) != used:
        raise ValueError(f"{used} tokens in examples of {lengths.tolist()} for a row of {size}")
    out = np.full(size, pad, dtype=np.int64)
    out[:used] = tokens
    segments = np.full(size, -1, dtype=np.int64)
    segments[:used] = np.repeat(np.arange(len(lengths)), lengths)
    begins = np.append(np.cumsum(lengths) - lengths, used)  # segment -1 picks the padding's
    positions = np.arange(size, dtype=np.int64)
    positions -= begins[segments]
    return Placed(out, positions, segments)


def encoder_decoder_row(
    inputs: tuple[IntArray, IntArray],
    targets: tuple[IntArray, IntArray],
    *,
    encoder_length: int,
    decoder_length: int,
    pad: int,
    start: int,
) -> Row:
    """Return the row of an encoder-decoder model.

    Args:
        inputs: (N,) ids of all examples' inputs and (K,) tokens of each.
        targets: the same of the targets, which are the labels.
        encoder_length: ``S``.
        decoder_length: ``T``.
        pad: id of the padding.
        start: first id that the decoder reads in each example.

    Returns:
        Inputs ``(tokens, positions, segments)`` of the encoder (S,) and of the decoder (T,), whose
        tokens are the labels of the example shifted by one behind ``start``; targets ``(labels,
        loss_mask)`` (T,). Example ``k`` has segment ``k`` on both sides.
    """
    encoder = place(*inputs, encoder_length, pad=pad)
    labels, positions, segments = place(*targets, decoder_length, pad=pad)
    real = segments >= 0
    decoder_tokens = np.full(decoder_length, pad, dtype=np.int64)
    decoder_tokens[1:][real[1:]] = labels[:-1][real[1:]]
    decoder_tokens[real & (positions == 0)] = start
    return Row((*encoder, decoder_tokens, positions, segments), (labels, real.astype(np.float32)))
