"""Initial values that do not depend on the layout: same seed, same model, at any degree.

A parameter's full value is defined by (seed, canonical name). It is drawn in blocks of
``BLOCK_ROWS`` along the dimension that is cut, each block from its own generator, so a rank draws
only the blocks that it holds a part of and never the full matrix. Drawing is on the CPU, so a
model is the same on every accelerator.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from ds_engine.parallel.parameter import spec_of

BLOCK_ROWS = 256


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from any mixture of numbers and names; stable over runs and machines."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _draw_block(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


@torch.no_grad()
def initialize(parameter: Tensor, name: str, seed: int) -> None:
    """Fill ``parameter`` in place with its part of the full value that (seed, name) defines.

    Args:
        parameter: made by ``make_parameter``.
        name: canonical name in the model, equal in all layouts.
        seed: the run's seed.
    """
    spec = spec_of(parameter)
    if spec.init.kind == "constant":
        parameter.fill_(spec.init.value)
        return
    dim = spec.dim or 0
    rest = tuple(n for d, n in enumerate(spec.full_shape) if d != dim)
    rows = parameter.movedim(dim, 0)
    for full_start, local_start, length in spec.spans():
        full_end = full_start + length
        for block in range(full_start // BLOCK_ROWS, -(-full_end // BLOCK_ROWS)):
            first = block * BLOCK_ROWS
            values = _draw_block((BLOCK_ROWS, *rest), derive_seed(seed, name, block))
            lo, hi = max(first, full_start), min(first + BLOCK_ROWS, full_end)
            at = local_start + lo - full_start
            rows[at : at + hi - lo] = values[lo - first : hi - first].mul_(spec.init.std)
    if spec.valid is not None:  # padded vocabulary rows stay zero: they never win and never move
        keep = spec.valid - next(spec.spans())[0]
        parameter[max(keep, 0) :].zero_()
