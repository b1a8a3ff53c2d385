"""Attention: packed documents are alone, kernels agree, nobody sees the future."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.errors import ConfigError
from models.common import backends
from models.common.backends import AttentionDropout, attend, choose_backend
from models.common.definition import PlanOptions
from models.common.masks import document_mask, document_offsets
from models.config import GPTConfig
from tests.models.configs import BASE, CONFIGS, LENGTH, with_backend
from tests.models.tiny import (
    difference,
    gradients_of,
    inputs_of,
    our_model,
    random_tokens,
    randomise,
)

TOLERANCE = 2e-6
PACKED = torch.tensor([[0] * 7 + [1] * 13, [0] * 12 + [1] * 8])


def model_of(config: GPTConfig, **options):
    return randomise(our_model(config, PlanOptions(**options)), 3)


def loss_and_gradients(model, tokens, segments):
    labels = tokens.roll(-1, 1)
    weights = torch.full(tokens.shape, 1.0 / tokens.numel())
    loss = model(inputs_of(tokens, segments), (labels, weights))
    loss.backward()
    return loss.detach(), gradients_of(model)


@pytest.mark.parametrize("backend", ["sdpa", "reference", "auto"])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_documents_do_not_see_each_other(name, backend) -> None:
    model = model_of(with_backend(CONFIGS[name], backend))
    tokens = random_tokens(61, 2, LENGTH, 5)
    with torch.no_grad():
        packed = model(inputs_of(tokens, PACKED))
        for row, segments in zip(range(2), PACKED, strict=True):
            for document in (0, 1):
                chosen = segments == document
                alone = model(inputs_of(tokens[row : row + 1, chosen]))
                assert difference(packed[row, chosen], alone[0]) < TOLERANCE


@pytest.mark.parametrize("name", CONFIGS)
def test_without_isolation_a_row_is_one_document(name) -> None:
    model = model_of(CONFIGS[name], isolate_documents=False)
    tokens = random_tokens(61, 2, LENGTH, 6)
    whole = inputs_of(tokens)
    with torch.no_grad():
        marked = model((whole[0], whole[1], PACKED, whole[3]))
        assert torch.equal(marked, model(whole))


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_agree(name, isolate) -> None:
    """Values and gradients; dropout is off in evaluation, whatever the kernel."""
    tokens = random_tokens(61, 2, LENGTH, 7)
    results = {}
    for backend in ("reference", "sdpa"):
        config = with_backend(CONFIGS[name], backend, dropout=0.3)
        model = model_of(config, isolate_documents=isolate)
        results[backend] = loss_and_gradients(model, tokens, PACKED)
    loss, gradients = results["sdpa"]
    expected_loss, expected = results["reference"]
    assert difference(loss, expected_loss) < TOLERANCE
    worst = {n: difference(gradients[n], expected[n]) for n in expected if expected[n].any()}
    # Keys' biases shift all scores of a query alike: their true gradient is zero, ours is rounding.
    worst = {n: d for n, d in worst.items() if expected[n].abs().max() > 1e-6}
    assert max(worst.values()) < 1e-5, worst
    assert len(worst) > len(expected) / 2


@pytest.mark.parametrize("name", CONFIGS)
def test_later_tokens_change_nothing_before_them(name) -> None:
    model = model_of(CONFIGS[name])
    tokens = random_tokens(61, 2, LENGTH, 8)
    changed = tokens.clone()
    changed[:, 11:] = (changed[:, 11:] + 1) % 61
    with torch.no_grad():
        before, after = model(inputs_of(tokens)), model(inputs_of(changed))
    assert torch.equal(before[:, :11], after[:, :11])
    assert not torch.equal(before[:, 11], after[:, 11])


@pytest.mark.parametrize("window", [1, 4, LENGTH, 10**6])
def test_window_reaches_exactly_its_length(window) -> None:
    """One layer: a token changes the outputs of the next ``window - 1`` positions and no more."""
    config = replace(BASE, num_layers=1)
    model = model_of(replace(config, attention=replace(BASE.attention, sliding_window=window)))
    tokens = random_tokens(61, 1, LENGTH, 9)
    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 61
    with torch.no_grad():
        moved = (model(inputs_of(tokens)) != model(inputs_of(changed)))[0].any(-1)
    assert moved.nonzero().flatten().tolist() == list(range(3, min(3 + window, LENGTH)))


@pytest.mark.parametrize("name", ["learned", "rotary-gqa", "alibi"])
def test_half_precision_kernels_agree(name) -> None:
    tokens = random_tokens(61, 2, LENGTH, 10)
    logits = []
    for backend in ("reference", "sdpa"):
        config = with_backend(CONFIGS[name], backend)
        model = model_of(config, dtype=torch.bfloat16).to(torch.bfloat16)
        with torch.no_grad():
            logits.append(model(inputs_of(tokens, PACKED)).float())
    assert difference(*logits) < 0.03


def gpu_tensor(dtype: torch.dtype) -> SimpleNamespace:
    """What the choice of a kernel looks at, without a GPU."""
    device = torch.device("cuda", 0)
    return SimpleNamespace(is_cuda=True, device=device, dtype=dtype, shape=(1, LENGTH, 4, 8))


@pytest.mark.parametrize(
    ("capability", "dtype", "chosen"),
    [
        ((7, 5), torch.float16, "sdpa"),
        ((8, 0), torch.bfloat16, "flash"),
        ((9, 0), torch.bfloat16, "flash"),
        ((9, 0), torch.float32, "sdpa"),
    ],
)
def test_auto_takes_flash_where_it_runs(monkeypatch, capability, dtype, chosen) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    mask = document_mask(PACKED, PACKED, isolate=True)
    query = gpu_tensor(dtype)
    assert choose_backend("auto", query, mask, dropout=False) == "sdpa"  # no document offsets
    mask = replace(mask, documents=document_offsets(PACKED, isolate=True))
    assert choose_backend("auto", query, mask, dropout=False) == chosen


@pytest.mark.parametrize(
    ("installed", "capability", "dtype", "message"),
    [
        (False, (9, 0), torch.bfloat16, "flash-attn cannot be imported"),
        (True, (7, 5), torch.bfloat16, "compute capability 8 or higher"),
        (True, (9, 0), torch.float32, "not in torch.float32"),
        (True, (9, 0), torch.bfloat16, "no generation cache"),
    ],
)
def test_flash_says_why_it_cannot_run(monkeypatch, installed, capability, dtype, message) -> None:
    module = SimpleNamespace(flash_attn_varlen_func=None) if installed else None
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    mask = document_mask(PACKED, PACKED, isolate=True)
    with pytest.raises(ConfigError, match=message) as caught:
        backends._flash(*[gpu_tensor(dtype)] * 3, mask, 1.0)
    assert 'use "auto" or "sdpa"' in str(caught.value)


def test_a_model_with_flash_on_a_cpu_ends_with_a_word(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    flash = with_backend(BASE, "flash")
    tokens = inputs_of(random_tokens(61, 2, LENGTH, 12))
    with pytest.raises(ConfigError, match=r'attention\.backend = "flash" cannot be used'):
        model_of(flash)(tokens)
    with torch.no_grad():
        assert torch.equal(model_of(flash.portable())(tokens), model_of(BASE)(tokens))


SEGMENTS = st.lists(st.integers(1, 5), min_size=1, max_size=5)


@given(SEGMENTS, st.one_of(st.none(), st.integers(1, 8)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_mask_is_the_rule(lengths, window, isolate) -> None:
    segments = torch.tensor([[i for i, n in enumerate(lengths) for _ in range(n)]])
    mask = document_mask(segments, segments, isolate=isolate, window=window)
    total = segments.shape[1]
    dense = mask.additive(torch.float32, total, total)[0, 0]
    for query in range(total):
        for key in range(total):
            allowed = key <= query and (window is None or query - key < window)
            allowed &= not isolate or bool(segments[0, query] == segments[0, key])
            assert (dense[query, key] == 0) == allowed


@given(st.lists(SEGMENTS, min_size=1, max_size=3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_document_offsets_cut_the_flat_batch(rows, isolate) -> None:
    """The form that the variable-length kernel takes; adjacent rows never join."""
    total = max(map(sum, rows))
    rows = [[*row, total - sum(row)] if sum(row) < total else row for row in rows]
    segments = torch.tensor([[i for i, n in enumerate(row) for _ in range(n)] for row in rows])
    offsets, longest = document_offsets(segments, isolate=isolate)
    lengths = [n for row in rows for n in row] if isolate else [total] * len(rows)
    assert offsets.diff().tolist() == lengths
    assert longest == max(lengths) and offsets.dtype == torch.int32


def test_attention_dropout_keeps_the_mean() -> None:
    """Over many samples, each with a mask of its own, the output's mean is the plain output."""
    samples = 2000
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": 4, "key": 2, "value": 2}
    one = {name: torch.randn(1, 5, n, 8, generator=generator) for name, n in shapes.items()}
    mask = document_mask(torch.zeros(1, 5).long(), torch.zeros(1, 5).long(), isolate=True)
    options = {"mask": mask, "scale": 0.3, "backend": "auto"}
    plain = attend(**one, **options, dropout=None)
    dropout = AttentionDropout(0.2, 3, 0, torch.arange(samples))
    many = {name: t.expand(samples, -1, -1, -1) for name, t in one.items()}
    dropped = attend(**many, **options, dropout=dropout)
    assert not torch.equal(dropped[0], dropped[1])
    error = (dropped.mean(0) - plain[0]).abs()
    assert (error < 5 * dropped.std(0) * samples**-0.5 + 1e-6).all()


def test_training_without_dropout_is_evaluation() -> None:
    model = model_of(BASE)
    tokens = inputs_of(random_tokens(61, 2, LENGTH, 11))
    with torch.no_grad():
        assert torch.equal(model(tokens), model.train()(tokens))
