"""What a run may be trained for: the objective's own rules, and those with model and lengths."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.config.load import read_run
from ds_engine.config.objective import (
    OBJECTIVE_KEYS,
    ObjectiveConfig,
    default_decoder_length,
    span_corruption_lengths,
)
from ds_engine.config.reader import problems_of, read_dataclass
from ds_engine.errors import ConfigError
from launch.check import check_files, check_run
from launch.check_objective import FAMILY_OBJECTIVES, resolve_objective
from models.registry import FAMILIES, read_model
from tests.config.samples import family_run


def changed(family: str, changes: dict) -> dict:
    raw = family_run(family)
    for path, value in changes.items():
        *sections, key = path.split(".")
        target = raw
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = value
    return raw


def checked(family: str, changes: dict | None = None):
    return check_run(read_run(changed(family, changes or {})), 4, "--world-size")


def read(**keys) -> ObjectiveConfig:
    return read_dataclass(ObjectiveConfig, keys, "data.objective")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"type": "span_corruptoin"}, 'did you mean "span_corruption"'),
        ({"noise_density": 1.0}, "must be above 0 and below 1"),
        ({"noise_density": 0.0}, "must be above 0 and below 1"),
        ({"mean_span_length": 0.5}, "must be at least 1"),
        ({"mask_probability": 0.0}, "must be above 0 and at most 1"),
        ({"mask_token_share": 0.8, "random_token_share": 0.3}, "are more than 1 together"),
        ({"max_ngram": 0}, "must be at least 1"),
        ({"type": "causal_lm", "noise_density": 0.2}, "type = causal_lm does not read it"),
        ({"type": "causal_lm", "special_tokens": {"eos": "</s>"}}, "special_tokens is set but"),
        ({"type": "masked_lm", "mean_span_length": 2.0}, "mean_span_length is set but"),
        ({"type": "masked_lm", "truncate": True}, "truncate is set but"),
        ({"type": "prefix_lm", "noise_density": 0.2}, "noise_density is set but"),
        ({"type": "span_corruption", "denoisers": [{}]}, "denoisers is set but"),
        ({"type": "text_to_text", "sentence": "next_sentence"}, "sentence is set but"),
        ({"special_tokens": {"sentinels": "<extra>"}}, "must hold {} once"),
        ({"special_tokens": {"bos": "<s>"}}, "bos is not a known key"),
        ({"type": "ul2", "denoisers": [{"weight": 0}]}, "denoisers.0.weight = 0 must be above 0"),
        (
            {"type": "ul2", "denoisers": [{"type": "prefix", "mean_span_length": 8.0}]},
            "denoisers.0.mean_span_length has no effect with",
        ),
    ],
)
def test_inconsistent_objectives_are_refused(keys, message) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**keys)
    assert message in str(caught.value)


def test_shares_that_add_up_to_one_are_read_whatever_their_rounding() -> None:
    for random in (0.1, 0.2, 0.3):
        read(type="masked_lm", mask_token_share=1 - random, random_token_share=random)


def test_ul2_is_by_default_the_mixture_of_its_paper() -> None:
    assert len(read(type="ul2").mixture) == 7
    assert len(read(type="ul2", denoisers=[{"weight": 2.0}]).mixture) == 1
    assert [each.type for each in read(type="ul2").mixture].count("prefix") == 1


def test_every_key_belongs_to_a_type_and_every_type_to_a_family() -> None:
    names = {name for keys in OBJECTIVE_KEYS.values() for name in keys}
    assert names | {"type", "special_tokens"} == {
        field.name for field in dataclasses.fields(ObjectiveConfig)
    }
    types = [name for known in FAMILY_OBJECTIVES.values() for name in known]
    assert sorted(types) == sorted(OBJECTIVE_KEYS)
    assert set(FAMILY_OBJECTIVES) == set(FAMILIES)


@given(
    st.integers(1, 700), st.sampled_from([0.05, 0.15, 0.5, 0.9]), st.sampled_from([1.0, 3.0, 8.0])
)
def test_the_default_decoder_holds_the_target_of_every_text_that_fits(source, density, mean):
    objective = ObjectiveConfig("span_corruption", density, mean)
    length = default_decoder_length(objective, source)
    assert length % 8 == 0
    needed = [
        target
        for raw in range(1, 12 * source + 12)
        for tokens, target in [span_corruption_lengths(raw, density, mean)]
        if tokens <= source
    ]
    assert max(needed, default=1) <= length < max(needed, default=1) + 8


def test_the_lengths_of_t5() -> None:
    assert span_corruption_lengths(568, 0.15, 3.0) == (512, 114)
    assert default_decoder_length(ObjectiveConfig("span_corruption"), 512) == 120
    assert default_decoder_length(ObjectiveConfig("text_to_text"), 512) is None


@pytest.mark.parametrize(
    ("family", "changes", "kind", "length"),
    [
        ("gpt", {}, "causal_lm", None),
        ("t5", {}, "span_corruption", 32),
        ("t5", {"data.decoder_sequence_length": 50}, "span_corruption", 50),
        (
            "t5",
            {"data.objective": {"type": "text_to_text"}, "data.decoder_sequence_length": 9},
            "text_to_text",
            9,
        ),
        ("bert", {}, "masked_lm", None),
        ("bert", {"model.num_labels": 3}, "classification", None),
    ],
)
def test_the_resolved_run_says_what_auto_means(family, changes, kind, length) -> None:
    resolved = checked(family, changes)
    data = resolved.run.data
    assert (data.objective.type, data.decoder_sequence_length) == (kind, length)
    assert resolve_objective(read_run(changed(family, changes)), resolved.model) == data.objective
    plain = json.loads(json.dumps(resolved.to_dict()))
    assert plain["data"]["objective"]["type"] == kind
    again = check_run(read_run(plain), 4, "--world-size")
    assert again.to_dict() == resolved.to_dict()


SENTENCES = {"type": "masked_lm", "sentence": "sentence_order"}


@pytest.mark.parametrize(
    ("family", "changes", "messages"),
    [
        ("gpt", {"data.objective": {"type": "masked_lm"}}, ['not for model.family = gpt; use "ca']),
        ("t5", {"data.objective": {"type": "causal_lm"}}, ['"span_corruption" or "prefix_lm"']),
        ("bert", {"data.objective": {"type": "ul2"}}, ['use "masked_lm" or "classification"']),
        ("gpt", {"data.objective": {"whole_word": True}}, ["type = causal_lm does not read it"]),
        ("t5", {"data.objective": {"sentence": "next_sentence"}}, ["span_corruption does not"]),
        ("gpt", {"data.decoder_sequence_length": 8}, ["model.family = gpt has no decoder"]),
        ("bert", {"data.decoder_sequence_length": 8}, ["model.family = bert has no decoder"]),
        ("t5", {"data.objective": {"type": "prefix_lm"}}, ["decoder_sequence_length is missing"]),
        ("t5", {"data.objective": {"type": "ul2"}}, ["decoder_sequence_length is missing"]),
        ("t5", {"data.tokenizer": None}, ["data.tokenizer is missing"]),
        ("bert", {"data.tokenizer": None}, ["data.tokenizer is missing"]),
        ("t5", {"data.isolate_documents": False}, ["isolate_documents = false is not for"]),
        (
            "bert",
            {
                "data.isolate_documents": False,
                "data.objective": SENTENCES,
                "model.sentence_head": True,
            },
            ["masked_lm with sentence = sentence_order"],
        ),
        ("bert", {"model.sentence_head": True}, ["set model.sentence_head to false", "or the obj"]),
        ("bert", {"data.objective": SENTENCES}, ["needs model.sentence_head = true", "or the obj"]),
        (
            "bert",
            {
                "data.objective": SENTENCES,
                "model.sentence_head": True,
                "model.num_token_types": 1,
            },
            ["model.num_token_types = 1; use 2, or 0"],
        ),
        ("bert", {"data.objective": {"type": "classification"}}, ["needs model.num_labels"]),
        (
            "bert",
            {"model.num_labels": 3, "training.z_loss": 1e-3},
            ["training.z_loss = 0.001 has no effect on classes"],
        ),
        (
            "bert",
            {"data.objective": {"type": "masked_lm"}, "model.num_labels": 2},
            ["model.num_labels = 2 makes a model that classifies"],
        ),
        (
            "t5",
            {"model.position": {"type": "learned"}, "data.decoder_sequence_length": 129},
            ["data.decoder_sequence_length = 129 is longer than"],
        ),
        (
            "t5",
            {"parallel.sequence": True, "data.decoder_sequence_length": 33},
            ["data.decoder_sequence_length = 33 is not a multiple", "use 32 or 34"],
        ),
        ("t5", {"parallel.pipeline": 6}, ["num_decoder_layers = 3 + 2 = 5"]),
        (
            "bert",
            {"checkpoint.initialize_from": "runs/test/checkpoints/step_00000002"},
            ["lies in checkpoint.directory = runs/test"],
        ),
    ],
)
def test_each_rule_is_enforced(family, changes, messages) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(family, changes)
    found = problems_of(caught.value)
    assert any(all(message in text for message in messages) for text in found), found


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt", {"data.isolate_documents": False}),
        ("bert", {"data.isolate_documents": False}),
        ("bert", {"data.objective": SENTENCES, "model.sentence_head": True}),
        (
            "bert",
            {
                "data.objective": SENTENCES,
                "model.sentence_head": True,
                "model.num_token_types": 0,
            },
        ),
        ("bert", {"model.num_labels": 2, "data.objective": {"truncate": True}}),
        # The head for sentences gives way to that for classes.
        ("bert", {"model.num_labels": 2, "model.sentence_head": True}),
        ("t5", {"training.label_smoothing": 0.1, "training.z_loss": 1e-4}),
        ("t5", {"parallel.sequence": True}),
        ("t5", {"data.objective": {"special_tokens": {"sentinels": "<s{}>"}}}),
    ],
)
def test_what_fits_is_accepted(family, changes) -> None:
    checked(family, changes)


def test_a_wrong_objective_is_an_error_for_whoever_asks() -> None:
    run = read_run(changed("bert", {"data.objective": {"type": "ul2"}}))
    with pytest.raises(ConfigError, match=r"data\.objective\.type = ul2 is not for"):
        resolve_objective(run, read_model(run.model))


def test_the_default_length_does_not_depend_on_the_layout() -> None:
    one = checked("t5", {"parallel.tensor": 1}).run.data
    assert one == checked("t5", {"parallel.tensor": 4, "parallel.sequence": True}).run.data


def test_a_new_run_needs_the_weights_that_it_starts_from(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data/a.bin", "data/a.idx", "tokenizer.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    run = checked("bert", {"checkpoint.initialize_from": "runs/start"}).run
    with pytest.raises(ConfigError, match="initialize_from = runs/start is not a folder"):
        check_files(run)
    (tmp_path / "runs/start").mkdir(parents=True)
    check_files(run)
    (tmp_path / "runs/start").rmdir()
    # A run that goes on has its own.
    (tmp_path / "runs/test/checkpoints/step_00000001").mkdir(parents=True)
    check_files(run)


def test_a_decoder_too_small_for_its_encoder_is_warned_of() -> None:
    for length, warned in ((None, False), (120, False), (114, False), (112, True), (24, True)):
        changes = {"data.sequence_length": 512, "data.decoder_sequence_length": length}
        warnings = checked("t5", changes).warnings
        told = [text for text in warnings if text.startswith("data.decoder_sequence_length")]
        assert bool(told) == warned
        assert all("use 120, or lower data.sequence_length" in text for text in told)
