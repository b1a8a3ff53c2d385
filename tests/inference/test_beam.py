"""Beam search finds what transformers finds, its scores are true, and ranks agree."""

from __future__ import annotations

import math

import pytest
import torch

from ds_engine.errors import ConfigError, NumericsError
from ds_engine.inference.beam import Beam, BeamSettings
from ds_engine.inference.generate import generate, generate_beams, left_padded
from ds_engine.inference.sampling import GenerationSettings
from ds_engine.parallel.tensor_parallel import TensorParallel
from tests.inference.setups import NEW, PROMPTS, build, full_logits, limit
from tests.inference.test_tensor_parallel import _handle
from tests.inference.test_transformers import pair
from tests.worlds import run_world

SINGLE = TensorParallel.single()


def search(model, beams: BeamSettings, prompts=PROMPTS, tp=SINGLE, maximum=16, **changes):
    settings = GenerationSettings(**{"max_new_tokens": NEW, **changes})
    return generate_beams(model, prompts, settings, beams, tp, max_sequence_length=maximum)


def theirs(name, prompts, beams: BeamSettings, stop: int | None, penalty: float = 1.0):
    """Texts without the stop word, and scores."""
    tokens, _, segments, _ = left_padded(prompts, torch.device("cpu"))
    found = pair(name)[1].generate(
        tokens,
        attention_mask=(segments == 0).long(),
        max_new_tokens=NEW,
        do_sample=False,
        num_beams=beams.num_beams,
        length_penalty=beams.length_penalty,
        early_stopping=beams.early_stopping,
        repetition_penalty=penalty,
        pad_token_id=0 if stop is None else stop,
        eos_token_id=stop,
        return_dict_in_generate=True,
        output_scores=True,
    )
    texts = []
    for row in found.sequences[:, tokens.shape[1] :].tolist():
        texts.append(row[: row.index(stop)] if stop in row else row)
    return texts, found.sequences_scores.tolist()


def hold(found: list[Beam], expected) -> None:
    texts, scores = expected
    assert [beam.tokens for beam in found] == texts
    assert [beam.score for beam in found] == pytest.approx(scores, abs=2e-5)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("width", "length_penalty"), [(2, 0.0), (2, 1.0), (3, 1.0), (4, 1.7), (4, -0.5)]
)
def test_the_texts_and_scores_are_those_of_transformers(name, width, length_penalty):
    beams = BeamSettings(width, length_penalty)
    free = search(pair(name)[0], beams)
    hold(free, theirs(name, PROMPTS, beams, None))
    ended = 0
    for stop in {token for beam in free for token in beam.tokens[:3]}:
        for early in (False, True):
            beams = BeamSettings(width, length_penalty, early)
            found = search(pair(name)[0], beams, stop_ids=(stop,))
            hold(found, theirs(name, PROMPTS, beams, stop))
            ended += sum(len(beam.tokens) < NEW for beam in found)
    assert ended > 3, "too easy: nothing ends early"


def test_the_repetition_penalty_is_that_of_transformers():
    beams = BeamSettings(3)
    for prompt in PROMPTS:  # one by one: transformers counts padding as seen
        found = search(pair("gpt2")[0], beams, [prompt], repetition_penalty=1.4)
        hold(found, theirs("gpt2", [prompt], beams, None, 1.4))
    many = search(pair("gpt2")[0], beams, repetition_penalty=1.4)
    assert many[-1].tokens == found[0].tokens


def log_probability(model, prompt: list[int], words: list[int]) -> float:
    logits = full_logits(model, prompt + words)[len(prompt) - 1 : -1].double().log_softmax(-1)
    return float(logits.gather(-1, torch.tensor(words)[:, None]).sum())


@pytest.mark.parametrize("name", ["gpt", "window", "alibi", "multi_query"])
def test_a_score_is_the_log_probability_of_its_text(name):
    model = build(name)
    greedy = generate(
        model, PROMPTS, GenerationSettings(NEW), SINGLE, max_sequence_length=limit(name)
    )
    for width in (1, 4):
        found = search(model, BeamSettings(width, 0.0), maximum=limit(name))
        for prompt, beam in zip(PROMPTS, found, strict=True):
            true = log_probability(model, prompt, beam.tokens)
            assert beam.score == pytest.approx(true, abs=1e-4)
        if width == 1:
            assert [beam.tokens for beam in found] == greedy
    better = [
        beam.score - log_probability(model, prompt, words)
        for prompt, beam, words in zip(PROMPTS, found, greedy, strict=True)
    ]
    assert max(better) > 0.1, "too easy: greedy choice is as good"


def test_a_prompt_finds_the_same_with_and_without_neighbours():
    model = build("llama")
    together = search(model, BeamSettings(3), stop_ids=(7, 12), maximum=None)
    for prompt, beam in zip(PROMPTS, together, strict=True):
        (alone,) = search(model, BeamSettings(3), [prompt], stop_ids=(7, 12), maximum=None)
        assert alone.tokens == beam.tokens
        assert alone.score == pytest.approx(beam.score, abs=1e-5)


def test_words_beyond_the_limit_have_no_probability():
    model = build("gpt")
    found = search(model, BeamSettings(3, 0.0), vocab_limit=12)
    for prompt, beam in zip(PROMPTS, found, strict=True):
        assert max(beam.tokens) < 12
        logits = full_logits(model, prompt + beam.tokens)[len(prompt) - 1 : -1, :12]
        words = torch.tensor(beam.tokens)[:, None]
        true = float(logits.double().log_softmax(-1).gather(-1, words).sum())
        assert beam.score == pytest.approx(true, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "beams", "text"),
    [
        ({"temperature": 0.5}, BeamSettings(2), r"temperature = 0\.5 draws at random"),
        ({}, BeamSettings(31), r"num_beams = 31 .* compares 62 words a step, and there are 61"),
        ({"vocab_limit": 9, "stop_ids": (1, 2)}, BeamSettings(4), "compares 12 words"),
        ({"stop_ids": (61,)}, BeamSettings(2), "stop_ids holds 61"),
    ],
)
def test_settings_that_do_not_go_with_beams_are_refused(changes, beams, text):
    with pytest.raises(ConfigError, match=text):
        search(build("gpt"), beams, **changes)


def test_values_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="num_beams = 0"):
        BeamSettings(0)
    with pytest.raises(ConfigError, match="length_penalty = nan"):
        BeamSettings(2, math.nan)


def test_damaged_weights_and_no_prompt():
    model = build("gpt")
    assert search(model, BeamSettings(2), []) == []
    with torch.no_grad():
        next(model.parameters())[7] = float("nan")
    with pytest.raises(NumericsError, match="checkpoint"):
        search(model, BeamSettings(2))


def _body(rank, size, names):
    tp = _handle(size)
    wide = BeamSettings(3)
    return [
        search(build(name, tp), wide, tp=tp, maximum=limit(name), stop_ids=(7,), **changes)
        for name in names
        for changes in ({}, {"repetition_penalty": 1.3, "vocab_limit": 50})
    ]


@pytest.mark.parametrize(("size", "names"), [(2, ("gpt", "multi_query")), (4, ("llama",))])
def test_all_ranks_find_what_one_process_finds(size, names):
    alone = [
        search(build(name), BeamSettings(3), maximum=limit(name), stop_ids=(7,), **changes)
        for name in names
        for changes in ({}, {"repetition_penalty": 1.3, "vocab_limit": 50})
    ]
    ranks = run_world(size, _body, size, names)
    assert all(found == ranks[0] for found in ranks)
    for found, expected in zip(ranks[0], alone, strict=True):
        assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
        scores = [beam.score for beam in expected]
        assert [beam.score for beam in found] == pytest.approx(scores, abs=1e-5)


def _disagreeing_body(rank, size):
    """Each rank sees logits of its own."""
    tp = _handle(size)
    model = build("gpt", tp)
    generator = torch.Generator().manual_seed(rank)
    model.register_forward_hook(
        lambda _, args, logits: torch.randn(logits.shape, generator=generator)
    )
    found = search(model, BeamSettings(3), tp=tp, stop_ids=(3, 17, 40))
    errors = []
    for beams in (BeamSettings(2 + rank), BeamSettings(2, 1.0 + rank)):
        try:
            search(model, beams, tp=tp)
        except Exception as error:
            errors.append(str(error))
    return found, errors


def test_ranks_follow_rank_0_and_different_arguments_are_an_error():
    (first, problems), (second, others) = run_world(2, _disagreeing_body, 2)
    assert first == second
    assert any(beam.tokens for beam in first)
    assert problems == others
    assert len(problems) == 2
    assert all("different settings" in text for text in problems)
