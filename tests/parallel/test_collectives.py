"""Collectives and their gradients, on live ranks, against the same thing computed in one place."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ds_engine.parallel import collectives as c
from ds_engine.parallel.tensor_parallel import TensorParallel
from tests.parallel.ranks import close, draw, handle


def apply(function, x: Tensor, grad: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Result of ``function`` and the gradient that it sends back."""
    x = x.detach().clone().requires_grad_()
    y = function(x, tp)
    y.backward(grad)
    return y.detach(), x.grad


def pairs_body(rank: int, batch: int, part: int, width: int, seed: int, half: bool) -> None:
    """Every function forwards and backwards; all ranks' data are known to each."""
    size = dist.get_world_size()
    tp = handle(rank)
    dtype = torch.bfloat16 if half else torch.float32
    tolerance = 0.05 if half else 1e-5

    def every(base: int, length: int, columns: int) -> list[Tensor]:
        return [draw(seed + base + r, batch, length, columns, dtype=dtype) for r in range(size)]

    def shard(x: Tensor, dim: int) -> Tensor:
        return x.chunk(size, dim)[rank]

    def total(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).float().sum(0).to(dtype)

    long, long_grads = every(0, part * size, width), every(100, part * size, width)
    short, short_grads = every(200, part, width), every(300, part, width)
    wide_grads = every(400, part, width * size)
    joined, joined_grads = torch.cat(short, 1), torch.cat(short_grads, 1)
    same = long[0]
    cases = {
        c.copy_to: (same, long_grads[rank], same, total(long_grads)),
        c.sum_gradient: (same, long_grads[rank], same, total(long_grads)),
        c.reduce_from: (long[rank], long_grads[0], total(long), long_grads[0]),
        c.gather_sequence: (short[rank], long_grads[rank], joined, shard(total(long_grads), 1)),
        c.reduce_scatter_sequence: (
            long[rank],
            short_grads[rank],
            shard(total(long), 1),
            joined_grads,
        ),
        c.scatter_sequence: (same, short_grads[rank], shard(same, 1), joined_grads),
        c.gather_last: (short[rank], wide_grads[0], torch.cat(short, 2), shard(wide_grads[0], 2)),
    }
    for function, (x, grad, expected, expected_grad) in cases.items():
        y, sent = apply(function, x, grad, tp)
        close(y, expected, tolerance)
        close(sent, expected_grad, tolerance)
        assert y.dtype == dtype and sent.dtype == dtype
        # Memory layout is the caller's business.
        turned = x.transpose(0, 1).contiguous().transpose(0, 1)
        close(apply(function, turned, grad, tp)[0], expected, tolerance)

    # The pairs are each other's gradients, literally.
    partners = [
        (c.copy_to, c.reduce_from, long, long_grads),
        (c.gather_sequence, c.reduce_scatter_sequence, short, long_grads),
        (c.reduce_scatter_sequence, c.gather_sequence, long, short_grads),
    ]
    for function, partner, xs, grads in partners:
        _, sent = apply(function, xs[rank], grads[rank], tp)
        close(sent, partner(grads[rank], tp), tolerance)

    before = long[rank].clone()
    c.all_reduce(long[rank], tp)
    assert torch.equal(long[rank], before)


@pytest.mark.parametrize("size", [2, 3])
def test_forward_and_backward(warm_world, size) -> None:
    dims = st.integers(1, 4)

    @given(dims, dims, dims, st.integers(0, 10**6), st.booleans())
    @settings(
        max_examples=10,
        deadline=None,
        # A failure costs a world: finding a smaller one would take minutes.
        phases=[Phase.explicit, Phase.generate],
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    def check(batch, part, width, seed, half) -> None:
        warm_world(size, pairs_body, batch, part, width, seed, half)

    check()


def test_one_rank_communicates_nothing() -> None:
    x = torch.randn(2, 4, 6, requires_grad=True)
    tp = TensorParallel.single()
    for name in ("copy_to", "reduce_from", "gather_sequence", "reduce_scatter_sequence"):
        assert getattr(c, name)(x, tp) is x
    for name in ("scatter_sequence", "gather_last", "sum_gradient", "enter", "leave"):
        assert getattr(c, name)(x, tp) is x


def uneven_body(rank: int) -> list[str]:
    tp = handle(rank)
    errors = []
    for function in (c.scatter_sequence, c.reduce_scatter_sequence):
        try:
            function(torch.ones(1, 5, 2), tp)
        except (ValueError, RuntimeError) as error:
            errors.append(type(error).__name__)
    return errors


def test_sequence_that_cannot_be_cut_is_never_shortened_silently(warm_world) -> None:
    assert all(len(errors) == 2 for errors in warm_world(2, uneven_body))


def enter_leave_body(rank: int) -> None:
    size = dist.get_world_size()
    for sequence in (False, True):
        tp = handle(rank, sequence=sequence)
        x = draw(1, 2, 3 * size, 4)
        mine = x.chunk(size, 1)[rank] if sequence else x
        close(c.enter(mine, tp), x)
        close(c.leave(x, tp), mine * size)
        weight = torch.ones(3, requires_grad=True)
        c.local_weight(weight, tp).sum().backward()
        close(weight.grad, torch.full((3,), float(size if sequence else 1)))


def test_regions_follow_sequence_parallelism(warm_world) -> None:
    warm_world(2, enter_leave_body)
