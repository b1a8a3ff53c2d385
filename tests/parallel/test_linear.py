"""Linear layers, norms and the embedding on live ranks equal one process, gradients included."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ds_engine.parallel import linear
from ds_engine.parallel.collectives import scatter_sequence
from ds_engine.parallel.embedding import VocabParallelEmbedding
from ds_engine.parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_parallel,
)
from ds_engine.parallel.norm import make_norm
from ds_engine.parallel.parameter import make_parameter, normal, spec_of
from ds_engine.parallel.tensor_parallel import TensorParallel
from tests.parallel.ranks import close, draw, handle, set_full

BATCH, LENGTH, IN, OUT = 2, 12, 8, 24
INIT = normal(0.1)
LAYOUTS = [(2, False), (2, True), (4, False), (4, True)]


def part(x: Tensor, rank: int, dim: int) -> Tensor:
    return x.chunk(dist.get_world_size(), dim)[rank]


def column_body(rank: int, sequence: bool, bias: bool, blocks: tuple[int, ...]) -> None:
    tp = handle(rank, sequence=sequence)
    layer = ColumnParallelLinear(IN, OUT, tp, bias=bias, init=INIT, blocks=blocks)
    x, weight, offset = draw(1, BATCH, LENGTH, IN), draw(2, OUT, IN), draw(3, OUT)
    up = draw(4, BATCH, LENGTH, OUT)
    full = [x.clone().requires_grad_(), weight.requires_grad_(), offset.requires_grad_()]
    expected = F.linear(full[0], full[1], full[2] if bias else None)
    expected.backward(up)

    set_full(layer.weight, weight.detach())
    if layer.bias is not None:
        set_full(layer.bias, offset.detach())
    spec = spec_of(layer.weight)
    columns = torch.cat([torch.arange(f, f + n) for f, _, n in spec.spans()])
    mine = (part(x, rank, 1) if sequence else x).clone().requires_grad_()
    y = layer(mine)
    y.backward(up[..., columns])
    close(y, expected.detach()[..., columns])
    close(mine.grad, part(full[0].grad, rank, 1) if sequence else full[0].grad)
    close(layer.weight.grad, spec.take(full[1].grad))
    if layer.bias is not None:
        close(layer.bias.grad, spec_of(layer.bias).take(full[2].grad))


@pytest.mark.parametrize(("size", "sequence"), LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("blocks", [(), (8, 8, 8), (16, 8)])
def test_column_parallel(warm_world, size, sequence, bias, blocks) -> None:
    warm_world(size, column_body, sequence, bias, blocks)


def row_body(rank: int, sequence: bool, bias: bool) -> None:
    tp = handle(rank, sequence=sequence)
    layer = RowParallelLinear(OUT, IN, tp, bias=bias, init=INIT)
    x, weight, offset = draw(1, BATCH, LENGTH, OUT), draw(2, IN, OUT), draw(3, IN)
    up = draw(4, BATCH, LENGTH, IN)
    full = [x.clone().requires_grad_(), weight.requires_grad_(), offset.requires_grad_()]
    expected = F.linear(full[0], full[1], full[2] if bias else None)
    expected.backward(up)

    set_full(layer.weight, weight.detach())
    if layer.bias is not None:
        set_full(layer.bias, offset.detach())
    mine = part(x, rank, 2).clone().requires_grad_()
    y = layer(mine)
    y.backward(part(up, rank, 1) if sequence else up)
    close(y, part(expected.detach(), rank, 1) if sequence else expected.detach())
    close(mine.grad, part(full[0].grad, rank, 2))
    close(layer.weight.grad, spec_of(layer.weight).take(full[1].grad))
    if layer.bias is not None:  # whole on each rank, and the same there
        close(layer.bias.grad, full[2].grad)


@pytest.mark.parametrize(("size", "sequence"), LAYOUTS)
@pytest.mark.parametrize("bias", [True, False])
def test_row_parallel(warm_world, size, sequence, bias) -> None:
    warm_world(size, row_body, sequence, bias)


def shared_body(rank: int, sequence: bool) -> int:
    """Two weights (the second without bias) on one input; number of gathers."""
    tp = handle(rank, sequence=sequence)
    x, ups = draw(1, BATCH, LENGTH, IN), [draw(4, BATCH, LENGTH, 16), draw(5, BATCH, LENGTH, 8)]
    weights = [draw(2, 16, IN).requires_grad_(), draw(3, 8, IN).requires_grad_()]
    bias = draw(6, 16).requires_grad_()
    whole = x.clone().requires_grad_()
    outputs = [F.linear(whole, weights[0], bias), F.linear(whole, weights[1])]
    torch.autograd.backward(outputs, ups)

    local = [make_parameter((n, IN), tp, INIT, dim=0) for n in (16, 8)]
    local_bias = make_parameter((16,), tp, INIT, dim=0)
    for parameter, full in zip([*local, local_bias], [*weights, bias], strict=True):
        set_full(parameter, full.detach())
    mine = (part(x, rank, 1) if sequence else x).clone().requires_grad_()
    with mock.patch.object(linear, "all_gather", wraps=linear.all_gather) as gather:
        found = column_parallel(mine, tp, (local[0], local_bias), (local[1], None))
    torch.autograd.backward(found, [part(up, rank, 2) for up in ups])
    for y, expected in zip(found, outputs, strict=True):
        close(y, part(expected.detach(), rank, 2))
    close(mine.grad, part(whole.grad, rank, 1) if sequence else whole.grad)
    for parameter, full in zip([*local, local_bias], [*weights, bias], strict=True):
        close(parameter.grad, part(full.grad, rank, 0))
    return gather.call_count


@pytest.mark.parametrize(("size", "sequence"), LAYOUTS)
def test_weights_share_one_gather(warm_world, size, sequence) -> None:
    assert warm_world(size, shared_body, sequence) == [int(sequence)] * size


def norm_body(rank: int, kind: str, sequence: bool) -> None:
    tp = handle(rank, sequence=sequence)
    norm, single = make_norm(kind, IN, 1e-5, tp), make_norm(kind, IN, 1e-5, TensorParallel.single())
    for seed, (mine, whole) in enumerate(zip(norm.parameters(), single.parameters(), strict=True)):
        set_full(mine, draw(seed, IN))
        set_full(whole, draw(seed, IN))
    x, up = draw(7, BATCH, LENGTH, IN).requires_grad_(), draw(8, BATCH, LENGTH, IN)
    expected = single(x)
    expected.backward(up)
    mine = x.detach().clone().requires_grad_()
    y = norm(scatter_sequence(mine, tp) if sequence else mine)
    y.backward(part(up, rank, 1) if sequence else up)
    close(y, part(expected.detach(), rank, 1) if sequence else expected.detach())
    close(mine.grad, x.grad)
    for a, b in zip(norm.parameters(), single.parameters(), strict=True):
        close(a.grad, b.grad)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms(warm_world, kind, sequence) -> None:
    warm_world(2, norm_body, kind, sequence)


def embedding_body(rank: int, sequence: bool, words: int, padded: int) -> None:
    tp = handle(rank, sequence=sequence)
    table = draw(1, padded, IN)
    table[words:] = 0
    tokens = torch.randint(words, (BATCH, LENGTH), generator=torch.Generator().manual_seed(2))
    tokens[0, 0], tokens[1, 1] = 0, words - 1
    up = draw(3, BATCH, LENGTH, IN)
    table.requires_grad_()
    expected = F.embedding(tokens, table)
    expected.backward(up)
    layer = VocabParallelEmbedding(words, padded, IN, tp, INIT)
    set_full(layer.weight, table.detach())
    y = layer(tokens)
    y.backward(part(up, rank, 1) if sequence else up)
    close(y, part(expected.detach(), rank, 1) if sequence else expected.detach())
    close(layer.weight.grad, spec_of(layer.weight).take(table.grad))


@pytest.mark.parametrize(("size", "sequence"), LAYOUTS)
@pytest.mark.parametrize(("words", "padded"), [(16, 16), (9, 16), (3, 16)])
def test_embedding(warm_world, size, sequence, words, padded) -> None:
    warm_world(size, embedding_body, sequence, words, padded)


def test_sizes_that_cannot_be_cut_are_named() -> None:
    tp = TensorParallel(None, 0, 4)
    with pytest.raises(ValueError, match="6 output features"):
        ColumnParallelLinear(8, 14, tp, bias=True, init=INIT, blocks=(8, 6))
    with pytest.raises(ValueError, match="10 input features"):
        RowParallelLinear(10, 8, tp, bias=True, init=INIT)
