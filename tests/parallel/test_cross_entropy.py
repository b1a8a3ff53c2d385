"""The loss on a cut vocabulary equals torch's on whole logits, gradients included."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ds_engine.parallel.cross_entropy import (
    IGNORE_INDEX,
    LossOptions,
    linear_cross_entropy,
    vocab_parallel_cross_entropy,
)
from ds_engine.parallel.tensor_parallel import TensorParallel
from tests.parallel.ranks import close, draw, handle, smallest_chunks

HIDDEN, ROWS = 12, 150  # three chunks of at most 64 tokens


@dataclass(frozen=True)
class Case:
    """One loss; on four ranks the last ones hold little or nothing but padding."""

    words: int = 10
    padded: int = 16
    smoothing: float = 0.0
    z_loss: float = 0.0
    bias: bool = False
    ignored: float = 0.3
    counted: float | None = None  # of the tokens; the others weigh nothing and are left out

    @property
    def options(self) -> LossOptions:
        return LossOptions(self.words, self.smoothing, self.z_loss, self.counted is not None)

    def labels(self) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(self.words, (ROWS,), generator=generator)
        labels[:3] = torch.tensor([0, self.words - 1, self.words // 2])
        skip = torch.rand(ROWS, generator=generator) < self.ignored
        return labels.masked_fill(skip, IGNORE_INDEX)


CASES = [
    Case(),
    Case(words=16),
    Case(words=3, bias=True),
    Case(smoothing=0.1),
    Case(z_loss=1e-2),
    Case(words=5, smoothing=0.2, z_loss=1e-2, bias=True),
    Case(ignored=0.0, smoothing=0.3),
    Case(counted=0.5, words=5, smoothing=0.2, z_loss=1e-2, bias=True),
    Case(counted=0.0, bias=True),
]


def reference(logits: Tensor, labels: Tensor, case: Case) -> Tensor:
    """Per-token losses from whole logits (T, padded), by torch and the formula of z-loss."""
    real = logits[:, : case.words].float()
    loss = F.cross_entropy(
        real,
        labels,
        reduction="none",
        ignore_index=IGNORE_INDEX,
        label_smoothing=case.smoothing,
    )
    partition = torch.logsumexp(real, 1).square()
    return loss + case.z_loss * partition.where(labels != IGNORE_INDEX, 0.0)


def logits_body(rank: int, case: Case) -> None:
    tp = handle(rank)
    check_logits(case, tp)


def check_logits(case: Case, tp: TensorParallel) -> None:
    whole = (3 * draw(2, ROWS, case.padded)).requires_grad_()
    labels, up = case.labels(), draw(3, ROWS)
    expected = reference(whole, labels, case)
    expected.backward(up)
    mine = whole.detach().chunk(tp.size, 1)[tp.rank].clone().requires_grad_()
    before = mine.detach().clone()
    # Any leading shape, and the labels' shape comes back.
    loss = vocab_parallel_cross_entropy(
        mine.view(3, ROWS // 3, -1), labels.view(3, -1), case.options, tp
    )
    loss.backward(up.view(3, -1))
    close(loss, expected.detach().view(3, -1))
    close(mine.grad, whole.grad.chunk(tp.size, 1)[tp.rank])
    assert torch.equal(mine, before)  # the caller's logits are not overwritten


@pytest.mark.parametrize("case", CASES)
def test_from_logits(warm_world, case) -> None:
    check_logits(case, TensorParallel.single())
    for size in (2, 4):
        warm_world(size, logits_body, case)


def linear_body(rank: int, case: Case) -> None:
    check_linear(case, handle(rank))


def check_linear(case: Case, tp: TensorParallel, dtype: torch.dtype = torch.float32) -> None:
    x, weight, bias = draw(1, ROWS, HIDDEN), draw(2, case.padded, HIDDEN), draw(3, case.padded)
    full = [t.to(dtype).float().requires_grad_() for t in (x, weight, bias)]
    labels, scale = case.labels(), draw(4, ROWS).abs() / ROWS
    if case.counted is not None:
        scale = scale * (torch.arange(ROWS) < case.counted * ROWS)
    logits = F.linear(full[0], full[1], full[2] if case.bias else None)
    expected = torch.dot(reference(logits, labels, case), scale)
    (expected * 2.5).backward()

    def part(t: Tensor) -> Tensor:
        return t.detach().to(dtype).chunk(tp.size)[tp.rank].clone().requires_grad_()

    mine, mine_w, mine_b = full[0].detach().to(dtype).requires_grad_(), part(full[1]), part(full[2])
    with smallest_chunks():
        loss = linear_cross_entropy(
            mine.view(3, ROWS // 3, HIDDEN),
            mine_w,
            mine_b if case.bias else None,
            labels.view(3, -1),
            scale.view(3, -1),
            case.options,
            tp,
        )
    assert loss.dtype == torch.float32
    (loss * 2.5).backward()
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    close(loss, expected.detach(), tolerance)
    grad = mine.grad
    if tp.active:  # this rank's part of the sum
        grad = grad.clone()
        torch.distributed.all_reduce(grad)
    close(grad.float(), full[0].grad, tolerance)
    close(mine_w.grad.float(), full[1].grad.chunk(tp.size)[tp.rank], tolerance)
    if case.bias:
        close(mine_b.grad.float(), full[2].grad.chunk(tp.size)[tp.rank], tolerance)


@pytest.mark.parametrize("case", CASES)
def test_from_hidden_states(warm_world, case) -> None:
    check_linear(case, TensorParallel.single())
    for size in (2, 4):
        warm_world(size, linear_body, case)


@pytest.mark.parametrize("case", [CASES[0], CASES[5], CASES[7], CASES[8]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(case, dtype) -> None:
    check_linear(case, TensorParallel.single(), dtype)


def test_one_chunk_equals_many() -> None:
    case = Case(smoothing=0.1, bias=True)
    x, weight, bias = draw(1, ROWS, HIDDEN), draw(2, case.padded, HIDDEN), draw(3, case.padded)
    args = (x, weight, bias, case.labels(), torch.full((ROWS,), 1 / ROWS), case.options)
    whole = linear_cross_entropy(*args, TensorParallel.single())
    with smallest_chunks():
        close(linear_cross_entropy(*args, TensorParallel.single()), whole, 1e-6)


def nothing_body(rank: int) -> None:
    check_nothing(handle(rank))


def check_nothing(tp: TensorParallel) -> None:
    case = CASES[5]
    weight = draw(2, case.padded, HIDDEN).chunk(tp.size)[tp.rank].clone().requires_grad_()
    x = draw(1, ROWS, HIDDEN).requires_grad_()
    labels = torch.full((ROWS,), IGNORE_INDEX)
    scale = torch.ones(ROWS)
    loss = linear_cross_entropy(x, weight, None, labels, scale, case.options, tp)
    loss.backward()
    assert loss == 0
    assert not x.grad.any() and not weight.grad.any()
    logits = draw(3, ROWS, case.padded).chunk(tp.size, 1)[tp.rank].clone().requires_grad_()
    losses = vocab_parallel_cross_entropy(logits, labels, case.options, tp)
    losses.sum().backward()
    assert not losses.any() and not logits.grad.any()


def test_no_valid_token_means_zero_loss_and_zero_gradients(warm_world) -> None:
    check_nothing(TensorParallel.single())
    for size in (2, 4):
        warm_world(size, nothing_body)


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0, 9e9], [-1e4, -1e4, -1e4, 9e9]], requires_grad=True)
    loss = vocab_parallel_cross_entropy(
        logits, torch.tensor([1, 2]), LossOptions(3), TensorParallel.single()
    )
    close(loss, torch.tensor([2e4, torch.tensor(3.0).log()]))  # word 3 is padding
    loss.sum().backward()
    assert logits.grad.isfinite().all() and not logits.grad[:, 3].any()


def test_without_gradients_nothing_is_kept() -> None:
    case = CASES[1]
    with torch.no_grad():
        loss = linear_cross_entropy(
            draw(1, ROWS, HIDDEN),
            draw(2, case.padded, HIDDEN),
            None,
            case.labels(),
            torch.ones(ROWS),
            case.options,
            TensorParallel.single(),
        )
    assert not loss.requires_grad


def test_fp16_survives_loss_scaling_and_long_batches() -> None:
    """Weights of one over a million tokens, and DeepSpeed's first loss scale of 65536.

    Gradients must be scaled before they are rounded to float16: its smallest number is 6e-8.
    """
    case, count, scale = CASES[1], 1e6, 65536.0
    x, weight = draw(1, ROWS, HIDDEN).half(), draw(2, case.padded, HIDDEN).half()
    grads = []
    for dtype in (torch.float16, torch.float32):
        mine = [t.detach().to(dtype, copy=True).requires_grad_() for t in (x, weight)]
        token_weights = torch.full((ROWS,), 1 / count)
        loss = linear_cross_entropy(
            *mine, None, case.labels(), token_weights, case.options, TensorParallel.single()
        )
        (loss * scale).backward()
        grads.append([t.grad.float() for t in mine])
    for half, full in zip(*grads, strict=True):
        assert ((half - full).abs().max() / full.abs().max()) < 0.005


def test_bf16_keeps_the_exact_factor_from_behind() -> None:
    """A factor such as 1/3 must not be rounded to bfloat16 by itself: it would bias every step."""
    case = CASES[1]
    x, weight = draw(1, ROWS, HIDDEN).bfloat16(), draw(2, case.padded, HIDDEN).bfloat16()
    found = []
    for factor in (1.0, 1 / 3):
        mine = weight.clone().requires_grad_()
        loss = linear_cross_entropy(
            x,
            mine,
            None,
            case.labels(),
            torch.full((ROWS,), 1 / ROWS),
            case.options,
            TensorParallel.single(),
        )
        (loss * factor).backward()
        found.append(mine.grad.double())
    kept = found[0].abs() > 1e-4
    ratio = (found[1] / found[0])[kept].mean()
    assert abs(ratio * 3 - 1) < 5e-4
