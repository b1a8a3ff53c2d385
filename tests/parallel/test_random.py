"""Dropout masks: the right share, independent of each other, equal in every layout."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.parallel.random import Dropout, keep_mask, row_keys
from models.common.backends import AttentionDropout

SAMPLES = torch.tensor([7, 8, 1_000_003, 2**40 + 5])


def mask(
    probability: float = 0.3,
    *,
    seed: int = 1,
    site: str = "layers.0.mlp",
    samples: torch.Tensor = SAMPLES,
    length: int = 64,
    width: int = 128,
    first: int = 0,
) -> torch.Tensor:
    """Kept elements, as floats."""
    dropout = Dropout(probability, seed, site)
    out = dropout(torch.ones(len(samples), length, width), samples, first)
    kept = out != 0
    assert torch.allclose(out[kept], torch.tensor(1 / (1 - probability)))
    return kept.float()


@pytest.mark.parametrize("probability", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_share_of_dropped_elements(probability) -> None:
    kept = mask(probability, samples=torch.arange(16), length=128)
    sigma = (probability * (1 - probability) / kept.numel()) ** 0.5
    assert abs(1 - kept.mean() - probability) < 5 * sigma
    for dims in ((0, 1), (0, 2), (1, 2)):  # of each channel, position and sample
        share = 1 - kept.mean(dims)
        count = kept.numel() / share.numel()
        assert (share - probability).abs().max() < 6 * (probability / count) ** 0.5


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """In standard deviations of what independent masks would give."""
    a, b = a.flatten() - a.mean(), b.flatten() - b.mean()
    return float((a * b).mean() / (a.std() * b.std()) * a.numel() ** 0.5)


def test_masks_are_independent() -> None:
    base = mask(length=128)
    pairs = {
        "next position": (base[:, :-1], base[:, 1:]),
        "next channel": (base[..., :-1], base[..., 1:]),
        "far channel": (base[..., :64], base[..., 64:]),
        "far position": (base[:, :64], base[:, 64:]),
        "next sample": (base[0], base[1]),
        "diagonal": (base[:, :-1, :-1], base[:, 1:, 1:]),
        "site": (base, mask(length=128, site="layers.1.mlp")),
        "block": (base, mask(length=128, site="layers.0.attention")),
        "seed": (base, mask(length=128, seed=2)),
        "sample far away": (base, mask(length=128, samples=SAMPLES + 2**32)),
    }
    worst = {name: correlation(*pair) for name, pair in pairs.items()}
    assert max(map(abs, worst.values())) < 5, worst


def test_rows_do_not_repeat() -> None:
    kept = mask(0.5, samples=torch.arange(64), length=64, width=64).reshape(-1, 64).bool()
    bits = (kept.long() << torch.arange(64)).sum(1)
    assert len(set(bits.tolist())) == len(bits)


def test_neighbouring_keys_do_not_swap_neighbouring_channels() -> None:
    """Keys and channels are joined by an exclusive or: unmixed, one row would permute another."""
    rows = torch.arange(1024, dtype=torch.int32)
    kept = keep_mask(rows, 64, 0.5).float()
    for shift in (1, 2, 4):
        channels = torch.arange(8, 56)
        swapped = kept[(rows ^ shift).long()][:, ((channels + 1) ^ shift) - 1]
        assert abs(correlation(kept[:, channels], swapped)) < 5


@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 4]),
    st.floats(0.05, 0.95),
    st.integers(0, 2**31),
)
@settings(max_examples=25, deadline=None)
def test_any_split_gives_the_same_mask(sequence, micro, probability, seed) -> None:
    """Sequence shards and micro-batches see parts of one mask."""
    options = {"seed": seed, "width": 24}
    whole = mask(probability, length=16, **options)
    part = 16 // sequence
    rows = [
        torch.cat(
            [
                mask(probability, samples=samples, length=part, first=i * part, **options)
                for i in range(sequence)
            ],
            1,
        )
        for samples in SAMPLES.split(len(SAMPLES) // micro)
    ]
    assert torch.equal(torch.cat(rows), whole)


def test_column_shards_are_parts_of_the_mask() -> None:
    rows = row_keys(5, torch.arange(10)[:, None], torch.arange(6)[None, :])
    whole = keep_mask(rows, 32, 0.4)
    parts = [keep_mask(rows, 8, 0.4, first_column=8 * i) for i in range(4)]
    assert torch.equal(torch.cat(parts, -1), whole)


def test_attention_probabilities_of_head_shards() -> None:
    samples = torch.tensor([3, 9])
    probabilities = torch.rand(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    whole = AttentionDropout(0.3, 11, 0, samples)(probabilities)
    parts = [
        AttentionDropout(0.3, 11, first, samples)(probabilities[:, first : first + 2])
        for first in range(0, 8, 2)
    ]
    assert torch.equal(torch.cat(parts, 1), whole)
    # During generation the last queries of a longer row are the same queries.
    last = AttentionDropout(0.3, 11, 0, samples)(probabilities[:, :, -1:])
    assert torch.equal(last, whole[:, :, -1:])


def test_recomputation_gives_the_same_mask_and_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    dropout = Dropout(0.4, 1, "site")
    x = torch.ones(4, 8, 16, requires_grad=True)
    grads = []
    for recompute in (False, True):
        x.grad = None
        if recompute:
            y = checkpoint(dropout, x, SAMPLES, use_reentrant=False, preserve_rng_state=False)
        else:
            y = dropout(x, SAMPLES)
        y.square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    assert torch.equal(grads[0] != 0, dropout(x, SAMPLES) != 0)


def test_gradient_is_the_masked_one() -> None:
    dropout = Dropout(0.25, 1, "site")
    x = torch.randn(4, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: dropout(t, SAMPLES), (x,))


def test_nothing_happens_in_evaluation_or_at_zero() -> None:
    x = torch.randn(4, 3, 5)
    assert Dropout(0.0, 1, "site")(x, SAMPLES) is x
    assert Dropout(0.5, 1, "site").eval()(x, SAMPLES) is x


def test_torch_random_state_is_not_touched() -> None:
    before = torch.get_rng_state()
    mask()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_type(dtype) -> None:
    out = Dropout(0.5, 1, "site")(torch.ones(4, 8, 16, dtype=dtype), SAMPLES)
    assert out.dtype == dtype and set(out.unique().tolist()) == {0.0, 2.0}
