"""Data is refused by objectives that would train on the numbers of its classes as words."""

import json

import pytest

from ds_engine.data.causal_lm import CausalLM
from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.data.masked_lm import MaskedLM
from ds_engine.data.objective import SpecialIds
from ds_engine.data.sentence_pairs import SentencePairs
from ds_engine.data.span_corruption import SpanCorruption
from ds_engine.data.text_to_text import TextToText
from ds_engine.errors import DataError

IDS = SpecialIds(pad=0, eos=1, start=0, mask=2, cls=3, sep=4, sentinels=tuple(range(5, 15)))
LENGTHS = {"encoder_length": 16, "decoder_length": 16}
OBJECTIVES = {
    "causal": CausalLM(8),
    "masked": MaskedLM(16, IDS, 50, 1),
    "pairs": SentencePairs("sentence_order", 16, IDS, 50, 1),
    "spans": SpanCorruption(**LENGTHS, ids=IDS, seed=1),
    "text_to_text": TextToText(**LENGTHS, ids=IDS),
}


def write(folder, **report):
    with IndexedWriter(folder / "x", vocab_size=50) as writer:
        for _ in range(4):
            writer.add_documents([20, 21, 22, 1], [3, 1], [2])
    if report:
        (folder / "x.report.json").write_text(json.dumps(report))
    return IndexedDataset(folder / "x")


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_classes_are_no_words(tmp_path, objective):
    data = write(tmp_path, fields=["text", "kind"], label="kind")
    for use in (lambda: objective.samples(data, seed=1), lambda: objective.validation(data)):
        with pytest.raises(DataError, match=r"--label kind: .*class.*classification"):
            use()


@pytest.mark.parametrize("name", ["causal", "masked", "spans"])
def test_records_are_no_running_text(tmp_path, name):
    data, objective = write(tmp_path, fields=["input", "target"]), OBJECTIVES[name]
    for use in (lambda: objective.samples(data, seed=1), lambda: objective.validation(data)):
        with pytest.raises(DataError, match=r"--fields input,target: .*text_to_text"):
            use()


def test_fields_are_no_sentences(tmp_path):
    data = write(tmp_path, fields=["input", "target"], label=None)
    with pytest.raises(DataError, match=r"--fields input,target.*--split-sentences"):
        OBJECTIVES["pairs"].samples(data, seed=1)
    OBJECTIVES["text_to_text"].samples(data, seed=1)


@pytest.mark.parametrize("report", [{}, {"fields": [], "label": None}, {"other": 1}])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_other_data_is_taken_as_it_is(tmp_path, objective, report):
    data = write(tmp_path, **report)
    objective.samples(data, seed=1)
    objective.validation(data)
    (tmp_path / "x.report.json").write_text("[]")
    objective.validation(data)
