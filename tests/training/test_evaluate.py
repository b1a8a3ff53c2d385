"""Evaluation: the same number in every layout, and no trace in training."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ds_engine.data.samples import Sample
from ds_engine.pipeline.plan import LossTerm, Measure
from ds_engine.training.evaluate import Evaluation
from tests.parity.layouts import Layout, plan_for
from tests.training.runs import Job, assemble, whole_weights, write_data
from tests.worlds import run_world

# What an evaluation reads of a plan: one loss term.
PLAN: Any = SimpleNamespace(losses=(LossTerm(),), measures=(Measure("loss", 0),))
SAMPLES = 11  # what the runs' evaluators use: no multiple of a batch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def disturbed_body(rank: int, data: Path, layout: Layout) -> Any:
    """Train without evaluation and with one after every step."""
    found = []
    for every in (0, 1):
        parts = assemble(Job(layout, data, evaluate_every=every))
        outcome = parts.run()
        train = [row for _, row in parts.recorder.rows if "train/loss" in row]
        evaluations = [row for _, row in parts.recorder.rows if "validation/loss" in row]
        found.append((train, whole_weights(parts.step), evaluations, outcome.evaluation))
    return found


@pytest.mark.parametrize(
    "layout",
    [
        Layout(micro=2),
        Layout(data=2, zero=3, micro=2),
        Layout(data=2, zero=1, micro=2, bf16=True),
        Layout(pipeline=2, micro=2),
        Layout(pipeline=3, zero=1, micro=2, recompute=1),
    ],
    ids=lambda layout: layout.name,
)
def test_evaluation_does_not_disturb_training(data: Path, layout: Layout) -> None:
    (train, weights, none, last), (again, same, rows, _) = run_world(
        layout.world, disturbed_body, data, layout
    )[0]
    assert len(train) == 6
    assert (none, last) == ([], None)
    assert len(rows) == 6
    assert len({row["validation/loss"] for row in rows}) == 6, "the model did not change"
    assert again == train
    for name, value in weights.items():
        assert torch.equal(same[name], value), name


def evaluate_body(
    rank: int, data: Path, layouts: list[Layout], family: str = "llama_dropout"
) -> Any:
    found = []
    for layout in layouts:
        parts = assemble(Job(layout, data, evaluate_every=1, family=family))
        first = parts.evaluator.run()
        assert parts.evaluator.run() == first, "evaluating twice gives two results"
        found.append(first)
    return found


def plain_cross_entropy(data: Path) -> tuple[float, int]:
    """The mean over valid tokens by the book, from logits, without dropout or extra terms."""
    from ds_engine.config.schema import SourceConfig
    from ds_engine.data.causal_lm import CausalLM
    from ds_engine.data.dataset import build_validation
    from ds_engine.data.loader import BatchLoader
    from ds_engine.parallel.tensor_parallel import TensorParallel
    from ds_engine.pipeline.sequential import SequentialModel
    from tests.parity.families import SEQUENCE

    model = SequentialModel(plan_for("llama_dropout", TensorParallel.single())).eval()
    dataset = build_validation([SourceConfig(str(data / "validation"))], CausalLM(SEQUENCE))
    assert len(dataset) > SAMPLES
    loader = BatchLoader(
        dataset,
        CausalLM(SEQUENCE),
        micro_batch_size=SAMPLES,
        data_parallel_rank=0,
        data_parallel_size=1,
        prefetch=0,
    )
    ((inputs, (labels, mask)),) = loader.step(0, SAMPLES)
    losses = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), reduction="none")
    return float((losses.detach() * mask.flatten()).sum() / mask.sum()), int(mask.sum())


def test_the_loss_is_plain_cross_entropy_in_every_layout(data: Path) -> None:
    """Training adds label smoothing, z-loss and dropout here; validation has none of them."""
    wanted, tokens = plain_cross_entropy(data)
    worlds = {
        1: [Layout(micro=1), Layout(micro=2), Layout(micro=8)],
        2: [
            Layout(data=2, micro=2),
            Layout(data=2, micro=1, zero=3),
            Layout(tensor=2, sequence=True, micro=4),
            Layout(pipeline=2, micro=2),
            Layout(pipeline=2, micro=1, zero=1),
        ],
        4: [Layout(pipeline=2, data=2, micro=2), Layout(tensor=2, pipeline=2, micro=4)],
    }
    for size, layouts in worlds.items():
        for layout, found in zip(
            layouts, run_world(size, evaluate_body, data, layouts)[0], strict=True
        ):
            assert found.tokens == tokens, layout.name
            assert found.loss == pytest.approx(wanted, rel=1e-6), layout.name


@pytest.mark.parametrize("family", ["t5_dropout", "bert_dropout"])
def test_all_measures_are_the_same_in_every_layout(data: Path, family: str) -> None:
    """T5's loss; BERT's two losses, each over its own targets, and the accuracy of sentences."""
    worlds = {
        1: [Layout(micro=1), Layout(micro=8)],
        2: [Layout(data=2, micro=2, zero=2), Layout(pipeline=2, micro=2)],
        4: [Layout(tensor=2, sequence=True, pipeline=2, micro=4)],
    }
    first = None
    for size, layouts in worlds.items():
        for layout, found in zip(
            layouts, run_world(size, evaluate_body, data, layouts, family)[0], strict=True
        ):
            first = found if first is None else first
            assert found.tokens == first.tokens > 0, layout.name
            assert found.loss == pytest.approx(first.loss, rel=1e-6), layout.name
            assert found.measures == pytest.approx(first.measures, rel=1e-6), layout.name
    assert first is not None
    if family == "bert_dropout":
        words, sentences = first.measures["masked_lm_loss"], first.measures["sentence_loss"]
        assert first.loss == pytest.approx(words + sentences)
        assert 0 <= first.measures["sentence_accuracy"] <= 1
        assert first.words == words


def test_metrics_of_a_diverged_model_are_numbers() -> None:
    assert Evaluation(2.0, 5, words=2.0).metrics()["validation/perplexity"] == pytest.approx(
        math.exp(2)
    )
    assert Evaluation(1e6, 5, words=1e6).metrics()["validation/perplexity"] == math.inf
    assert math.isnan(Evaluation(math.nan, 5, words=math.nan).metrics()["validation/perplexity"])


class _Numbered:
    """A validation set of ``size`` samples that records which were read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        import numpy as np

        if index < self.size:
            self.read.append(index)
        valid = 5 if index < self.size else 0
        return Sample(np.zeros(5, dtype=np.int64), np.zeros(0, dtype=np.int64), valid)


@pytest.mark.parametrize("micro", [1, 2, 3, 4, 16])
@pytest.mark.parametrize(("size", "most", "used"), [(20, 7, 7), (5, 7, 5), (8, 8, 8), (20, 1, 1)])
def test_exactly_the_asked_samples_are_read(micro: int, size: int, most: int, used: int) -> None:
    from ds_engine.data.causal_lm import CausalLM
    from ds_engine.parallel.context import ParallelContext
    from ds_engine.parallel.dims import ParallelDims
    from ds_engine.training.evaluate import Evaluator, TermTotals

    class Step:
        reads_data = True
        context = ParallelContext(ParallelDims(), 0, None, None, None)

        def evaluate(self, batches: Any, count: int) -> TermTotals:
            tokens = seen = 0
            for seen, (_, (_, mask)) in enumerate(batches, 1):
                # Read one by one: a whole validation set may not fit into memory.
                assert len(dataset.read) == min(used, seen * micro)
                tokens += int(mask.sum())
            assert seen == count
            return TermTotals((0.0,), (tokens,))

    dataset = _Numbered(size)
    evaluator = Evaluator(
        dataset, CausalLM(4), Step(), PLAN, micro_batch_size=micro, max_samples=most
    )
    assert evaluator.run().tokens == 4 * used
    assert sorted(dataset.read) == list(range(used))


def lazy_body(rank: int, data: Path, layout: Layout) -> tuple[int, list[int]]:
    """How many micro-batches there are, and how many were read before each forward pass."""
    parts = assemble(Job(layout, data, evaluate_every=1))
    read, before = [0], []

    def counted(batches: Any) -> Any:
        for batch in batches:
            read[0] += 1
            yield batch

    step, evaluate = parts.step, parts.step.evaluate
    step.evaluate = lambda batches, count: evaluate(
        None if batches is None else counted(batches), count
    )
    step.module.register_forward_pre_hook(lambda *_: before.append(read[0]))
    parts.evaluator.run()
    return read[0], before


@pytest.mark.parametrize(
    "layout", [Layout(micro=2), Layout(pipeline=3, micro=2)], ids=lambda layout: layout.name
)
def test_micro_batches_are_made_when_they_are_needed(data: Path, layout: Layout) -> None:
    ranks = run_world(layout.world, lazy_body, data, layout)
    for number, (read, before) in enumerate(ranks):
        reads = number in (0, layout.world - 1)
        assert read == (6 if reads else 0), "11 samples are 6 micro-batches of 2"
        assert before == (list(range(1, 7)) if reads else [0] * 6)


def test_a_bare_model_computes_where_it_is_told() -> None:
    """With offload the parameters lie elsewhere than the engine computes."""
    from ds_engine.parallel.context import ParallelContext
    from ds_engine.parallel.dims import ParallelDims
    from ds_engine.pipeline.targets import TermSums
    from ds_engine.training.evaluate import ModelStep, TermTotals

    class Offloaded(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, device="meta"))
            self.plan, self.terms = PLAN, TermSums(1)

        def forward(self, inputs: Any, labels: Any) -> torch.Tensor:
            assert {t.device.type for t in (*inputs, *labels)} == {"cpu"}
            return self.terms.add(labels[1].sum())

    context = ParallelContext(ParallelDims(), 0, None, None, None)
    batch = ((torch.zeros(2, 3),), (torch.zeros(2, 3), torch.ones(2, 3)))
    model: Any = Offloaded()
    step = ModelStep(model, model, context, torch.device("cpu"))
    assert step.evaluate(iter([batch, batch]), 2) == TermTotals((12.0,), (12,))
