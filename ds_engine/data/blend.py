"""Weighted blends: which data set sample ``i`` comes from, in O(log K) for any ``i``, without a
table.

Method. The data sets are the leaves of a binary tree. A node of weight ``w`` with a left child of
weight ``l`` sends ``floor(n*l/w + 1/2)`` of its first ``n`` samples to the left and the rest to the
right: a two-way split that is never more than 1/2 from the ideal. Following sample ``i`` from the
root to a leaf gives its data set and its number there. Weights are exact integers, so counts never
drift.

Bound. A rounding of at most 1/2 at node ``v`` is passed on to leaf ``k`` in the proportion
``w_k/w_v``, so

    |count_k(n) - n*w_k| <= 1/2 * (sum over the nodes v from below the root to leaf k of w_k/w_v)

for every prefix ``n``. Of all trees over up to eight data sets the one with the smallest bound is
taken; of more, the lightest are first joined in pairs as in Huffman's code until eight are left.
For three data sets or fewer the bound is below 1; in a Huffman tree weights along a path grow at
least like Fibonacci numbers, so it is at most 1.68 for any number of any weights. ``Blend.bound``
gives it for the weights at hand; what is really met is smaller (1.2 over 10,000 prefixes of 60
random blends of up to 12). A method that stays within 1 for any weights is known (Tijdeman 1980),
but only as a walk from sample 0, which a run that resumes at sample 10**9 cannot afford. Merging by
ideal times ``(j + 1/2)/w_k`` can be looked up too, but lags by 25 samples for one source of one
half beside a hundred of 0.005.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ds_engine.errors import DataError

_SEARCHED = 8  # 3**8 / 2 splits a try, a few milliseconds
_LARGEST_SUM = 3.36  # sum of 1/Fibonacci: the largest sum of w_k/w_v in a Huffman tree
_TRIES = 10  # halvings of the range of that sum


@dataclass(frozen=True, slots=True)
class _Node:
    """A leaf (``source`` >= 0) or a split; ``weight`` is exact."""

    weight: int
    source: int = -1
    left: "_Node | None" = None
    right: "_Node | None" = None

    def children(self) -> tuple["_Node", "_Node"] | None:
        if self.left is None or self.right is None:
            return None
        return self.left, self.right

    def count_left(self, count: int) -> int:
        assert self.left is not None
        return (2 * count * self.left.weight + self.weight) // (2 * self.weight)


class Blend:
    """The order in which samples are taken from weighted data sets; a pure function of the weights.

    Attributes:
        weights: the weights as given, divided by their sum.
        bound: no prefix's count of any data set is further than this from its exact share.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """Build the tree.

        Args:
            weights: one per data set, relative to each other; 0 means never.

        Raises:
            DataError: no positive weight, or one that is negative or not finite.
        """
        for number, weight in enumerate(weights):
            if not (math.isfinite(weight) and weight >= 0):
                raise DataError(
                    f"weight {number} of the blend is {weight}; use a number of 0 or more"
                )
        exact = [Fraction(weight) for weight in weights]
        total = sum(exact)
        if not total:
            raise DataError(
                f"the blend weights {list(weights)} are all 0; give one a positive weight"
            )
        self.weights = tuple(float(weight / total) for weight in exact)
        scale = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        self._total = sum(whole)
        leaves = [_Node(weight, source) for source, weight in enumerate(whole) if weight]
        self._root = _best_tree(_join_lightest(leaves), self._total)
        self.bound = max(self._bounds(self._root, 0.0), default=0.0)

    def __getitem__(self, index: int) -> tuple[int, int]:
        """Return (data set, number of the sample within it) of sample ``index``."""
        if index < 0:
            raise IndexError(f"sample {index}: samples are numbered from 0")
        node = self._root
        while (children := node.children()) is not None:
            before = node.count_left(index)
            if node.count_left(index + 1) > before:
                node, index = children[0], before
            else:
                node, index = children[1], index - before
        return node.source, index

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first ``samples`` samples come from each data set."""
        counts = [0] * len(self.weights)
        pending = [(self._root, samples)]
        while pending:
            node, count = pending.pop()
            if (children := node.children()) is None:
                counts[node.source] = count
            else:
                left = node.count_left(count)
                pending += [(children[0], left), (children[1], count - left)]
        return counts

    def _bounds(self, node: _Node, above: float) -> list[float]:
        """Return the bound of each leaf; ``above`` is the sum of 1/w_v over the nodes above."""
        here = above if node is self._root else above + self._total / node.weight
        if (children := node.children()) is None:
            return [here * node.weight / self._total / 2]
        return self._bounds(children[0], here) + self._bounds(children[1], here)


def _joined(left: _Node, right: _Node) -> _Node:
    return _Node(left.weight + right.weight, -1, left, right)


def _join_lightest(nodes: list[_Node]) -> list[_Node]:
    heap = [(node.weight, order, node) for order, node in enumerate(nodes)]
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > _SEARCHED:
        joined = _joined(heapq.heappop(heap)[2], heapq.heappop(heap)[2])
        heapq.heappush(heap, (joined.weight, order, joined))
        order += 1
    return [node for _, _, node in sorted(heap, key=lambda entry: entry[1])]


def _best_tree(nodes: list[_Node], total: int) -> _Node:
    """Return the tree over ``nodes`` with the smallest bound, to about 0.001."""
    low, high = 1.0, _LARGEST_SUM
    best, _ = _tree_within(nodes, total, high)
    for _ in range(_TRIES):
        middle = (low + high) / 2
        tree, fits = _tree_within(nodes, total, middle)
        if fits:
            best, high = tree, middle
        else:
            low = middle
    return best


def _tree_within(nodes: list[_Node], total: int, limit: float) -> tuple[_Node, bool]:
    """Return a tree in which no leaf's sum of w_k/w_v exceeds ``limit``, and whether there is one.

    The margin of a node is the largest A such that w_k * (A + sum of 1/w_v inside it) <= ``limit``
    for each of its leaves: what the limit leaves for the nodes above. It depends only on the
    margins of the two children, so the best tree of a subset of ``nodes`` joins best trees of two
    parts.
    """
    best: dict[int, tuple[float, _Node]] = {
        1 << number: (_margin(node, total, limit), node) for number, node in enumerate(nodes)
    }
    everything = (1 << len(nodes)) - 1
    for subset in range(1, everything + 1):
        lowest = subset & -subset
        part = (subset - 1) & subset
        chosen: tuple[float, int] | None = None
        while part:
            if part & lowest:
                margin = min(best[part][0], best[subset ^ part][0])
                if chosen is None or margin > chosen[0]:
                    chosen = (margin, part)
            part = (part - 1) & subset
        if chosen is not None:
            node = _joined(best[chosen[1]][1], best[subset ^ chosen[1]][1])
            above = 0.0 if subset == everything else total / node.weight
            best[subset] = (chosen[0] - above, node)
    return best[everything][1], best[everything][0] >= 0


def _margin(node: _Node, total: int, limit: float) -> float:
    if (children := node.children()) is None:
        return (limit - 1) * (total / node.weight)
    inside = min(_margin(child, total, limit) for child in children)
    return inside - total / node.weight
