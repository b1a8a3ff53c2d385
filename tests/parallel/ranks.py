"""What bodies on live ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from ds_engine.parallel.parameter import spec_of
from ds_engine.parallel.tensor_parallel import TensorParallel


def handle(rank: int, *, sequence: bool = False) -> TensorParallel:
    """The whole world as one tensor-parallel group."""
    return TensorParallel(dist.group.WORLD, rank, dist.get_world_size(), sequence)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def set_full(parameter: Tensor, full: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(spec_of(parameter).take(full))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@contextmanager
def smallest_chunks() -> Iterator[None]:
    """Make ``linear_cross_entropy`` walk in its smallest steps (64 tokens)."""
    from unittest import mock

    from ds_engine.parallel import cross_entropy

    with mock.patch.object(cross_entropy, "CHUNK_BYTES", 1):
        yield
