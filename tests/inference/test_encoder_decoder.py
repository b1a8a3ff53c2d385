"""Texts of an encoder-decoder: cached equals recomputed, ours equals transformers, ranks agree."""

from __future__ import annotations

import pytest
import torch

from ds_engine.errors import ConfigError, DataError, DsEngineError
from ds_engine.inference.beam import BeamSettings
from ds_engine.inference.encoder_decoder import generate_beams_from, generate_from, right_padded
from ds_engine.inference.sampling import GenerationSettings
from ds_engine.parallel.tensor_parallel import TensorParallel
from tests.inference import setups_t5
from tests.inference.setups_t5 import CONFIGS, SOURCES, TABLE, build, greedy_by_recomputation
from tests.inference.test_tensor_parallel import _handle
from tests.worlds import run_world

NEW = 8
SINGLE = TensorParallel.single()
# Greedy, drawn, drawn among some with a penalty.
CHOICES = ({}, {"temperature": 1.0, "seed": 4}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9})


def limits(name):
    size = TABLE if CONFIGS[name].position.type == "learned" else None
    return {"start_id": 0, "max_source_length": size, "max_target_length": size}


def write(name, sources=SOURCES, model=None, tp=SINGLE, **changes):
    settings = GenerationSettings(**{"max_new_tokens": NEW, **changes})
    return generate_from(model or build(name), sources, settings, tp, **limits(name))


def search(name, beams, sources=SOURCES, model=None, tp=SINGLE, **changes):
    settings = GenerationSettings(**{"max_new_tokens": NEW, **changes})
    return generate_beams_from(model or build(name), sources, settings, beams, tp, **limits(name))


@pytest.mark.parametrize("name", CONFIGS)
def test_cached_texts_equal_reading_everything_again(name):
    model = build(name).train()  # dropout must not act
    expected = [greedy_by_recomputation(build(name), source, NEW) for source in SOURCES]
    assert len({tuple(row) for row in expected}) > 1, "too easy: the source does not matter"
    assert max(len(set(row)) for row in expected) > 2, "too easy: the model repeats itself"
    assert write(name, model=model) == expected
    assert all(module.training for module in model.modules())
    for source, words in zip(SOURCES, expected, strict=True):
        assert write(name, [source]) == [words]


def test_the_source_is_read_once():
    model, lengths = build("t5"), []
    model.register_forward_pre_hook(
        lambda _, args: lengths.append((args[0][0].shape[1], args[0][3].shape[1]))
    )
    write("t5", model=model)
    assert lengths == [(7, 1)] + [(0, 1)] * (NEW - 1)


def test_a_stop_word_ends_its_row_and_changes_no_other():
    model = build("t5")
    free = write("t5", model=model)
    stop = free[0][2]
    expected = [row[: row.index(stop)] if stop in row else row for row in free]
    assert write("t5", model=model, stop_ids=(stop,)) == expected
    drawn = write("t5", model=model, temperature=1.0, seed=2)
    assert drawn != free
    assert write("t5", SOURCES[:2], model, temperature=1.0, seed=2) == drawn[:2]


def _theirs(name, sources, stop, **changes):
    tokens, _, segments = right_padded(sources, torch.device("cpu"))
    found = setups_t5.theirs(name).generate(
        tokens,
        attention_mask=(segments == 0).long(),
        max_new_tokens=NEW,
        do_sample=False,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=stop,
        return_dict_in_generate=True,
        output_scores=True,
        **changes,
    )
    texts = [row[1:] for row in found.sequences.tolist()]
    texts = [row[: row.index(stop)] if stop in row else row for row in texts]
    scores = found.sequences_scores.tolist() if "num_beams" in changes else None
    return texts, scores


@pytest.mark.parametrize("name", ["t5", "t5_v1_1"])
def test_greedy_texts_are_those_of_transformers(name):
    free = write(name)
    assert _theirs(name, SOURCES, None) == (free, None)
    stop = free[0][1]
    assert _theirs(name, SOURCES, stop)[0] == write(name, stop_ids=(stop,))
    penalised = write(name, repetition_penalty=1.5)
    assert penalised != free
    assert _theirs(name, SOURCES, None, repetition_penalty=1.5)[0] == penalised


@pytest.mark.parametrize("name", ["t5", "t5_v1_1"])
@pytest.mark.parametrize(("width", "length_penalty"), [(2, 1.0), (3, 0.0), (4, 1.6)])
def test_beams_are_those_of_transformers(name, width, length_penalty):
    free = search(name, BeamSettings(width, length_penalty))
    ended = 0
    for stop in {None, *(token for beam in free for token in beam.tokens[:2])}:
        for early in (False, True):
            beams = BeamSettings(width, length_penalty, early)
            stops = () if stop is None else (stop,)
            texts, scores = _theirs(
                name,
                SOURCES,
                stop,
                num_beams=width,
                length_penalty=length_penalty,
                early_stopping=early,
            )
            found = search(name, beams, stop_ids=stops)
            assert [beam.tokens for beam in found] == texts
            assert [beam.score for beam in found] == pytest.approx(scores, abs=2e-5)
            ended += sum(len(beam.tokens) < NEW for beam in found)
    assert ended > 1, "too easy: nothing ends early"


@pytest.mark.parametrize(
    ("name", "sources", "changes", "kind", "text"),
    [
        ("learned", [[1] * 17], {}, ConfigError, "prompt 0 has 17 tokens, more than the 16"),
        ("learned", [[1]], {"max_new_tokens": 17}, ConfigError, "at most 16"),
        ("t5", [[1], []], {}, DataError, "prompt 1 is empty"),
        ("t5", [[61]], {}, DataError, "vocab_size = 61"),
        ("t5", [[1]], {"stop_ids": (61,)}, ConfigError, "stop_ids holds 61"),
    ],
)
def test_what_cannot_be_written_is_refused(name, sources, changes, kind, text):
    with pytest.raises(kind, match=text):
        write(name, sources, **changes)
    with pytest.raises(kind, match=text):
        search(name, BeamSettings(2), sources, **changes)


def test_a_start_that_is_no_word_is_refused_and_no_source_is_no_work():
    settings = GenerationSettings(NEW)
    with pytest.raises(ConfigError, match="start id 61 is no word"):
        generate_from(
            build("t5"),
            SOURCES,
            settings,
            SINGLE,
            start_id=61,
            max_source_length=None,
            max_target_length=None,
        )
    assert write("t5", []) == []
    assert search("t5", BeamSettings(2), []) == []


def test_right_padding_is_a_document_of_its_own():
    tokens, positions, segments = right_padded([[5, 6, 7], [9]], torch.device("cpu"))
    assert tokens.tolist() == [[5, 6, 7], [9, 0, 0]]
    assert positions.tolist() == [[0, 1, 2], [0, 0, 1]]
    assert segments.tolist() == [[0, 0, 0], [0, -1, -1]]


def _all(names, tp):
    texts = [write(name, tp=tp, model=build(name, tp), **c) for name in names for c in CHOICES]
    beams = [
        search(name, BeamSettings(3), tp=tp, model=build(name, tp), stop_ids=(1,)) for name in names
    ]
    return texts, beams


def _body(rank, size, names):
    tp = _handle(size)
    problem = ""
    try:
        write(names[0], [[1 + rank]], tp=tp, model=build(names[0], tp))
    except DsEngineError as error:
        problem = str(error)
    return *_all(names, tp), problem


@pytest.mark.parametrize(("size", "names"), [(2, ("t5", "learned")), (4, ("t5_v1_1",))])
def test_all_ranks_write_what_one_process_writes(size, names):
    texts, beams = _all(names, SINGLE)
    ranks = run_world(size, _body, size, names)
    for found_texts, found_beams, problem in ranks:
        assert found_texts == texts
        assert found_beams == ranks[0][1]
        assert "asked to continue different prompts" in problem
    for found, expected in zip(ranks[0][1], beams, strict=True):
        assert [beam.tokens for beam in found] == [beam.tokens for beam in expected]
        scores = [beam.score for beam in expected]
        assert [beam.score for beam in found] == pytest.approx(scores, abs=1e-5)
