"""A GPT training loop as one would write it by hand in PyTorch: what engines are measured against.

Pre-norm, learned positions, tied weights, GELU, biases, SDPA, ``F.cross_entropy``, gradient
clipping, fused AdamW. In bf16 the weights and activations are bf16 and the optimizer keeps float32
masters, as DeepSpeed does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Layers, hidden width, heads, sequence, batch, words."""

    layers: int = 6
    hidden: int = 384
    heads: int = 6
    sequence: int = 256
    batch: int = 8
    vocab: int = 8192


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        h = sizes.hidden
        self.heads = sizes.heads
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        b, s, h = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, s, 3, self.heads, h // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, s, h))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class BareGPT(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.vocab, sizes.hidden)
        self.positions = nn.Embedding(sizes.sequence, sizes.hidden)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        index = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.words(tokens) + self.positions(index)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


class BareLoop:
    """One ``step(tokens, labels)`` = forward, backward, clip, update."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.model = BareGPT(sizes).to(dtype)
        self.parameters = list(self.model.parameters())
        self.low = dtype != torch.float32
        self.masters = (
            [p.detach().float().requires_grad_() for p in self.parameters]
            if self.low
            else self.parameters
        )
        decayed = [p for p in self.masters if p.ndim > 1]
        rest = [p for p in self.masters if p.ndim <= 1]
        groups = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, tokens: Tensor, labels: Tensor) -> float:
        loss = self.model(tokens, labels)
        loss.backward()
        if self.low:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        if self.low:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        for parameter in self.parameters:
            parameter.grad = None
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())
