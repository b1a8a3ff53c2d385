"""What a parameter is in the whole model: its full shape, how it is cut, how it starts.

The description lives on the parameter (``spec_of``), so initialisation, checkpoints, conversion
and the equality proof all derive layouts from the layers themselves and nothing is typed twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ds_engine.parallel.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class Init:
    """How a parameter starts: ``normal`` with ``std``, or a ``constant`` of ``value``."""

    kind: str
    std: float = 0.0
    value: float = 0.0


def normal(std: float) -> Init:
    """Gaussian with mean 0."""
    return Init("normal", std=std)


ZEROS = Init("constant", value=0.0)
ONES = Init("constant", value=1.0)


@dataclass(frozen=True)
class ParameterSpec:
    """Place of a local parameter in the full one.

    Attributes:
        full_shape: shape in a single process (vocabulary padding included).
        dim: the dimension that is cut, or None for a parameter that every rank holds whole.
        blocks: lengths along ``dim`` of matrices fused into one (Q, K, V or gate, up); each is cut
            by itself, so that a rank's shard holds its part of every block.
        rank, size: this rank's place in the tensor-parallel group.
        init: starting values.
        valid: number of leading entries of dim 0 that mean something (vocabulary without padding).
    """

    full_shape: tuple[int, ...]
    dim: int | None
    rank: int
    size: int
    init: Init
    blocks: tuple[int, ...] = field(default=())
    valid: int | None = None

    @property
    def sharded(self) -> bool:
        """Whether ranks hold different parts."""
        return self.dim is not None and self.size > 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on this rank."""
        shape = list(self.full_shape)
        if self.dim is not None:
            shape[self.dim] //= self.size
        return tuple(shape)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start in full, start in local, length) along ``dim`` for each block."""
        if self.dim is None:
            yield 0, 0, self.full_shape[0] if self.full_shape else 1
            return
        full = local = 0
        for block in self.blocks or (self.full_shape[self.dim],):
            part = block // self.size
            yield full + self.rank * part, local, part
            full += block
            local += part

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of a full tensor."""
        if self.dim is None:
            return full
        return torch.cat([full.narrow(self.dim, f, n) for f, _, n in self.spans()], self.dim)

    def fit(self, full: Tensor) -> Tensor:
        """``take`` from a tensor that may lack the padded rows of the vocabulary, zeros then."""
        missing = self.full_shape[0] - full.shape[0]
        if missing:
            full = torch.cat([full, full.new_zeros(missing, *full.shape[1:])])
        return self.take(full)

    def place(self, local: Tensor, full: Tensor) -> None:
        """Write this rank's part into a full tensor."""
        if self.dim is None:
            full.copy_(local)
            return
        for f, at, n in self.spans():
            full.narrow(self.dim, f, n).copy_(local.narrow(self.dim, at, n))


def make_parameter(
    full_shape: tuple[int, ...],
    tp: TensorParallel,
    init: Init,
    *,
    dim: int | None = None,
    blocks: tuple[int, ...] = (),
    valid: int | None = None,
) -> nn.Parameter:
    """This rank's uninitialised part of a parameter; values come from ``init.initialize``."""
    spec = ParameterSpec(full_shape, dim, tp.rank, tp.size, init, blocks, valid)
    parameter = nn.Parameter(torch.empty(spec.local_shape))
    describe(parameter, spec)
    return parameter


def describe(parameter: nn.Parameter, spec: ParameterSpec) -> None:
    """Attach ``spec``; also the mark by which DeepSpeed counts a shard in the global norm."""
    parameter.spec = spec  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = spec.sharded  # type: ignore[attr-defined]


def spec_of(parameter: Tensor) -> ParameterSpec:
    """The description of a parameter made by ``make_parameter``."""
    spec = getattr(parameter, "spec", None)
    if not isinstance(spec, ParameterSpec):
        raise TypeError("this parameter was not made by ds_engine.parallel.make_parameter")
    return spec
