"""Guesses for masked words: those of the logits, in any batch and tensor layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_engine.errors import ConfigError, DataError, DsEngineError, NumericsError
from ds_engine.inference.fill_mask import fill_mask
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel
from models.bert import build_plan
from models.bert_config import BertConfig
from models.common.definition import PlanOptions
from models.sections import AttentionConfig, MLPConfig
from tests.inference.test_tensor_parallel import _handle
from tests.worlds import run_world

SINGLE = TensorParallel.single()
MASK, WORDS = 4, 61
ROWS = [[2, 7, MASK, 9, MASK, 11, 3], [2, MASK, 3], [2, 5, 21, 33, MASK, 3]]
BERT = BertConfig(
    vocab_size=WORDS,
    num_layers=2,
    hidden_size=32,
    max_sequence_length=16,
    attention=AttentionConfig(num_heads=4),
    mlp=MLPConfig(intermediate_size=64),
    hidden_dropout=0.2,
    init_std=0.3,
)
CONFIGS = {
    "bert": BERT,
    "roberta": replace(BERT, sentence_head=False, num_token_types=1, tie_embeddings=False),
    "pre_norm": replace(BERT, norm_first=True),
}


def build(name, tp=SINGLE):
    return SequentialModel(build_plan(CONFIGS[name], tp, PlanOptions(seed=3)))


def fill(model, rows=ROWS, tp=SINGLE, **changes):
    wanted = {"mask_id": MASK, "top_k": 4, "max_sequence_length": 16, **changes}
    return fill_mask(model, rows, tp, **wanted)


@torch.no_grad()
def by_hand(model, row, words=WORDS):
    """Probabilities (masks, V) of one row without padding."""
    tokens = torch.tensor([row])
    zeros, positions = torch.zeros_like(tokens), torch.arange(len(row))[None]
    logits = model.eval()((tokens, positions, zeros, zeros, torch.zeros(1).long()))
    return logits[0, tokens[0] == MASK, :words].double().softmax(-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_guesses_are_the_likeliest_words_of_each_masked_place(name):
    model = build(name)
    found = fill(model)
    assert all(module.training for module in model.modules())
    assert [len(row) for row in found] == [2, 1, 1]
    for row, guesses in zip(ROWS, found, strict=True):
        values, words = by_hand(model, row).topk(4)
        for place, value, word in zip(guesses, values.tolist(), words.tolist(), strict=True):
            assert [guess.token for guess in place] == word
            assert [guess.probability for guess in place] == pytest.approx(value, abs=1e-6)


def test_words_beyond_the_limit_are_not_guessed_and_all_words_can_be():
    model = build("bert")
    found = fill(model, vocab_limit=20, top_k=100)
    for row, guesses in zip(ROWS, found, strict=True):
        for place, expected in zip(guesses, by_hand(model, row, 20), strict=True):
            assert sorted(guess.token for guess in place) == list(range(20))
            assert sum(guess.probability for guess in place) == pytest.approx(1)
            assert place[0].probability == pytest.approx(float(expected.max()), abs=1e-6)
    assert len(fill(model, top_k=100)[0][0]) == WORDS
    assert fill(model, []) == []


@pytest.mark.parametrize(
    ("rows", "changes", "kind", "text"),
    [
        ([[2, 3]], {}, DataError, "prompt 0 holds no masked word"),
        ([[MASK], []], {}, DataError, "prompt 1 is empty"),
        ([[MASK, 61]], {}, DataError, "vocab_size = 61"),
        ([[MASK] * 17], {}, ConfigError, "17 tokens, more than model.max_sequence_length = 16"),
        ([[MASK]], {"top_k": 0}, ConfigError, "top_k = 0"),
    ],
)
def test_what_cannot_be_filled_is_refused(rows, changes, kind, text):
    with pytest.raises(kind, match=text):
        fill(build("bert"), rows, **changes)


def test_damaged_weights_are_an_error():
    model = build("bert")
    with torch.no_grad():
        next(model.parameters())[7] = float("nan")
    with pytest.raises(NumericsError, match="checkpoint"):
        fill(model)


def _body(rank, size):
    tp, found = _handle(size), []
    for name in CONFIGS:
        found.append(fill(build(name, tp), tp=tp))
    problems = []
    for handle, rows in ((tp, [[MASK, rank]]), (_handle(size, sequence=True), ROWS)):
        try:
            fill(build("bert", handle), rows, handle)
        except DsEngineError as error:
            problems.append(str(error))
    return found, problems


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_guess_what_one_process_guesses(size):
    alone = [fill(build(name)) for name in CONFIGS]
    ranks = run_world(size, _body, size)
    assert all(answer == ranks[0] for answer in ranks)
    found, (different, sequence) = ranks[0]
    assert "asked to continue different prompts" in different
    assert "parallel.sequence = true cannot fill masks" in sequence
    for ours, expected in zip(found, alone, strict=True):
        flat = [guess for row in ours for place in row for guess in place]
        wanted = [guess for row in expected for place in row for guess in place]
        assert [guess.token for guess in flat] == [guess.token for guess in wanted]
        values = [guess.probability for guess in wanted]
        assert [guess.probability for guess in flat] == pytest.approx(values, abs=1e-5)
