"""Cross-entropy over a vocabulary that is cut over the group; full logits are never gathered.

``linear_cross_entropy`` fuses the output projection with the loss and walks over the tokens in
chunks: a chunk's logits live only until its gradients are known, so memory does not grow with
tokens x vocabulary, and nothing is computed twice.

For one token with logits z, label t, smoothing e over V words and z-loss weight q:

    loss = (1 - e) (lse - z_t) + e (lse - mean z) + q lse^2        lse = log sum exp z
    d loss / d z = p (1 + 2 q lse) - (1 - e) [t] - e / V           p = softmax z

(label smoothing: Szegedy et al. 2016; z-loss: PaLM, Chowdhery et al. 2022.)

Legend: ``T`` tokens, ``H`` hidden, ``V`` words, ``V_T`` this rank's words (padding included).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_engine.parallel.tensor_parallel import TensorParallel

IGNORE_INDEX = -100
CHUNK_BYTES = 96 * 1024 * 1024


@dataclass(frozen=True)
class LossOptions:
    """What the loss of one token is.

    Attributes:
        vocab_size: number of real words; padded ones never get probability.
        label_smoothing: share of the target spread evenly over all words, in [0, 1).
        z_loss: weight of the squared log-partition.
        sparse: few tokens count (masked words): only their logits are computed.
    """

    vocab_size: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    sparse: bool = False

    def for_mode(self, *, training: bool) -> LossOptions:
        """Evaluation measures the cross-entropy alone, whatever training adds to it."""
        return self if training else replace(self, label_smoothing=0.0, z_loss=0.0)


def _reduce(x: Tensor, tp: TensorParallel, op: Any = dist.ReduceOp.SUM) -> Tensor:
    if tp.active:
        dist.all_reduce(x, op=op, group=tp.group)
    return x


def _loss_and_gradient(
    logits: Tensor, labels: Tensor, options: LossOptions, tp: TensorParallel, *, gradient: bool
) -> tuple[Tensor, Tensor]:
    """Per-token losses (T,) and, when asked, d loss / d logits written over ``logits`` (T, V_T).

    Args:
        logits: (T, V_T) float32; overwritten.
        labels: (T,) words in [0, vocab_size), or IGNORE_INDEX (loss and gradient 0).
    """
    first = tp.rank * logits.shape[1]
    real = min(max(options.vocab_size - first, 0), logits.shape[1])
    logits[:, real:] = -torch.inf
    peak = _reduce(logits.amax(1), tp, dist.ReduceOp.MAX)
    valid = labels != IGNORE_INDEX
    local = labels - first
    mine = valid & (local >= 0) & (local < real)
    index = torch.where(mine, local, 0)[:, None]
    logits -= peak[:, None]
    target = logits.gather(1, index).squeeze(1).where(mine, 0.0)
    smoothing = options.label_smoothing
    sums = [target, logits[:, :real].sum(1)] if smoothing else [target]
    total = logits.exp_().sum(1)
    # One reduction for all sums keeps the latency of a chunk at two small messages.
    packed = _reduce(torch.stack([total, *sums]), tp)
    total, target = packed[0], packed[1]
    log_total = total.log()
    loss = log_total - target
    if smoothing:
        loss += smoothing * (target - packed[2] / options.vocab_size)
    lse = log_total + peak
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    loss = loss.where(valid, 0.0)
    if gradient:
        scale = valid / total
        if options.z_loss:
            scale = scale * (1 + 2 * options.z_loss * lse)
        logits *= scale[:, None]
        hit = mine.to(logits.dtype) * (1 - smoothing)
        logits.scatter_add_(1, index, -hit[:, None])
        if smoothing:
            logits[:, :real] -= (valid * (smoothing / options.vocab_size))[:, None]
    return loss, logits


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, options: LossOptions, tp: TensorParallel
    ) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1]).to(torch.float32, copy=True)
        loss, grad = _loss_and_gradient(
            flat, labels.reshape(-1), options, tp, gradient=ctx.needs_input_grad[0]
        )
        ctx.save_for_backward(grad.to(logits.dtype) if ctx.needs_input_grad[0] else None)
        ctx.shape = logits.shape
        return loss.reshape(labels.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (saved,) = ctx.saved_tensors
        return (saved * grad.reshape(-1, 1)).reshape(ctx.shape).to(saved.dtype), None, None, None


def vocab_parallel_cross_entropy(
    logits: Tensor, labels: Tensor, options: LossOptions, tp: TensorParallel
) -> Tensor:
    """Losses of the shape of ``labels`` from this rank's logits (..., V_T); float32."""
    return _VocabParallelCrossEntropy.apply(logits, labels, options, tp)


def _chunk_rows(columns: int) -> int:
    return max(64, CHUNK_BYTES // (4 * columns))


class _Gradients:
    """Sums the chunks' contributions to the gradients of input, weight and bias.

    In low precision the sum over several chunks is float32 and rounded once, at the end. float16
    cannot hold gradients of the size 1 / tokens (its smallest number is 6e-8): they are kept at the
    size of one token's, divided by ``unit``, until the loss scale arrives in the backward pass.
    """

    def __init__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, weights: Tensor, *, several: bool
    ) -> None:
        self.x, self.weight = x, weight
        half = weight.dtype == torch.float16 and weights.numel() > 0
        self.unit = weights.abs().amax().clamp(min=1e-30) if half else weights.new_ones(())
        self.scales = weights / self.unit if half else weights
        self.low = half or (weight.dtype != torch.float32 and several)
        self.of_x = torch.empty_like(x)
        self.of_weight = torch.zeros_like(weight, dtype=torch.float32 if self.low else None)
        self.of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)

    def add(self, part: slice, grad: Tensor) -> None:
        """Add a chunk: the tokens ``part`` with d loss / d logits (T, V_T) float32."""
        grad *= self.scales[part, None]
        if self.of_bias is not None:
            self.of_bias += grad.sum(0)
        grad = grad.to(self.weight.dtype)
        torch.mm(grad, self.weight, out=self.of_x[part])
        if self.low:
            self.of_weight += torch.mm(grad.t(), self.x[part])
        else:
            self.of_weight.addmm_(grad.t(), self.x[part])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        token_weights: Tensor,
        options: LossOptions,
        tp: TensorParallel,
    ) -> Tensor:
        gradient = any(ctx.needs_input_grad[:3])
        every = hidden.reshape(-1, hidden.shape[-1])
        x, labels, token_weights = every, labels.reshape(-1), token_weights.reshape(-1).float()
        counted = token_weights.nonzero().squeeze(1) if options.sparse else None
        if counted is not None:
            x, labels, token_weights = x[counted], labels[counted], token_weights[counted]
        rows = _chunk_rows(weight.shape[0])
        chunks = range(0, x.shape[0], rows)
        sums = None
        if gradient:
            sums = _Gradients(x, weight, bias, token_weights, several=len(chunks) > 1)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in chunks:
            part = slice(start, start + rows)
            logits = torch.mm(x[part], weight.t())
            if bias is not None:
                logits += bias
            loss, grad = _loss_and_gradient(
                logits.float(), labels[part], options, tp, gradient=gradient
            )
            total += torch.dot(loss, token_weights[part])
            if sums is not None:
                sums.add(part, grad)
        if sums is not None:
            of_x = sums.of_x
            if counted is not None:
                of_x = torch.zeros_like(every).index_copy_(0, counted, of_x)
            of_x = of_x.view_as(hidden)
            ctx.save_for_backward(of_x, sums.of_weight, sums.of_bias, sums.unit)
            ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *saved, unit = ctx.saved_tensors
        factor = grad * unit  # in float32: rounded to bfloat16 it would bias the whole gradient
        # Reading a number is free on a CPU and saves a pass over the weight's gradient.
        same = factor.device.type == "cpu" and float(factor) == 1.0
        grads = [
            None if g is None else (g if same else g.float() * factor).to(dtype)
            for g, dtype in zip(saved, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    token_weights: Tensor,
    options: LossOptions,
    tp: TensorParallel,
) -> Tensor:
    """Weighted sum over tokens of the cross-entropy of ``hidden @ weight.T + bias``.

    Args:
        hidden: (..., H), whole on each rank (its gradient is this rank's part: the caller's
            ``copy_to`` or ``gather_sequence`` sums it).
        weight: (V_T, H) this rank's words; bias: (V_T,) or None.
        labels: (...) int64, IGNORE_INDEX allowed.
        token_weights: (...) float32, for example the loss mask over the number of valid tokens.

    Returns:
        A float32 scalar, equal on all ranks.
    """
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, token_weights, options, tp)
