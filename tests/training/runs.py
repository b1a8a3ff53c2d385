"""A tiny but whole training run in one rank of a test world: engine, data, trainer, checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.parity.families import DECODER_SEQUENCE, SEQUENCE
from tests.parity.layouts import GLOBAL_BATCH, Layout, deepspeed_config, plan_for

VOCABULARY = 61
CLOCK = {
    "train/step_seconds",
    "train/data_wait_seconds",
    "train/tokens_per_second",
    "train/samples_per_second",
}


def write_data(folder: Path) -> Path:
    """Two training sources and one for validation, with documents of unequal length."""
    from ds_engine.data.indexed_writer import IndexedWriter

    random = np.random.default_rng(5)
    for name, documents in (("a", 60), ("b", 30), ("validation", 12)):
        with IndexedWriter(folder / name, vocab_size=VOCABULARY) as writer:
            for _ in range(documents):
                document = random.integers(0, VOCABULARY, random.integers(3, 60))
                # Sentences for the models that know them; the others see the document.
                for begin in range(0, len(document), 4):
                    writer.add_sequence(document[begin : begin + 4])
                writer.end_document()
    return folder


def objective_for(family: str) -> Any:
    """What a family of ``tests.parity.families`` is trained on."""
    from ds_engine.data.causal_lm import CausalLM
    from ds_engine.data.masked_lm import MaskedLM
    from ds_engine.data.objective import SpecialIds
    from ds_engine.data.sentence_pairs import SentencePairs
    from ds_engine.data.span_corruption import SpanCorruption

    if family.startswith(("gpt", "llama")):
        return CausalLM(SEQUENCE)
    if family.startswith("t5"):
        ids = SpecialIds(pad=0, eos=1, start=0, sentinels=(60, 59, 58, 57))
        return SpanCorruption(
            encoder_length=SEQUENCE, decoder_length=DECODER_SEQUENCE, ids=ids, seed=3
        )
    ids = SpecialIds(pad=0, mask=2, cls=3, sep=4, special=frozenset({0, 2, 3, 4}))
    if family.startswith("roberta"):
        return MaskedLM(SEQUENCE, ids, VOCABULARY, 3)
    return SentencePairs("sentence_order", SEQUENCE, ids, VOCABULARY, 3)


@dataclass(frozen=True)
class Job:
    """What one world does; it travels to the ranks by pickle."""

    layout: Layout
    data: Path
    root: Path | None = None
    family: str = "gpt_dropout"
    steps: int = 6
    every: int = 3
    evaluate_every: int = 0
    log_every: int = 1
    max_nonfinite_steps: int = 20
    weights: tuple[float, float] = (0.7, 0.3)
    sizes: tuple[int, ...] = ()
    keep_last: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Recorder:
    """A tracker that remembers, on every rank."""

    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def log(self, step: int, metrics: Any) -> None:
        self.rows.append((step, {k: v for k, v in metrics.items() if k not in CLOCK}))

    def summary(self, values: Any) -> None: ...

    def close(self, exit_code: int) -> None: ...


@dataclass
class Parts:
    """A job put together on this rank."""

    step: Any
    checkpointer: Any
    evaluator: Any
    trainer: Any
    recorder: Recorder
    reports: list[str]
    dataset: Any
    state: Any

    def run(self) -> Any:
        with self.trainer.loader:
            return self.trainer.run(self.state)


def make_step(job: Job) -> Any:
    from ds_engine.parallel.context import ParallelContext
    from ds_engine.parallel.dims import ParallelDims
    from ds_engine.training.engine import build_train_step, init_distributed

    init_distributed()
    layout = job.layout
    dims = ParallelDims(layout.world, tensor=layout.tensor, pipeline=layout.pipeline)
    context = ParallelContext.create(dims)
    tp = context.tensor_parallel(sequence_parallel=layout.sequence)
    plan = plan_for(job.family, tp, bf16=layout.bf16)
    config = deepspeed_config(layout) | job.changes
    return build_train_step(plan, context, config, recompute_every=layout.recompute)


def make_checkpointer(job: Job, step: Any, reports: list[str]) -> Any:
    from ds_engine.training.checkpoint.checkpointer import Checkpointer
    from ds_engine.training.engine import gather_parameter

    assert job.root is not None
    return Checkpointer(
        job.root,
        step,
        config={"a": "run"},
        keep_last=job.keep_last,
        report=reports.append,
        gather=gather_parameter,
    )


def assemble(job: Job) -> Parts:
    """Everything but the launcher; resumes when the job has a root with checkpoints."""
    from ds_engine.config.schema import LRScheduleConfig, SourceConfig
    from ds_engine.data.dataset import build_dataset, build_validation
    from ds_engine.data.loader import BatchLoader
    from ds_engine.training.evaluate import Evaluator
    from ds_engine.training.lr_schedules import learning_rate
    from ds_engine.training.metrics import StepTimer
    from ds_engine.training.state import TrainState
    from ds_engine.training.trainer import Trainer, TrainerSettings

    step, reports, recorder = make_step(job), [], Recorder()
    checkpointer = make_checkpointer(job, step, reports) if job.root else None
    state = (checkpointer.resume() if checkpointer else None) or TrainState()
    objective = objective_for(job.family)
    dataset = build_dataset(
        [SourceConfig(str(job.data / name), w) for name, w in zip("ab", job.weights, strict=True)],
        objective,
        seed=3,
        vocab_size=VOCABULARY,
        state=state.blend or None,
        first_sample=state.consumed_samples,
    )
    state.blend = dataset.state()
    context = step.context
    loader = BatchLoader(
        dataset,
        objective,
        micro_batch_size=job.layout.micro,
        data_parallel_rank=context.get_data_parallel_rank(),
        data_parallel_size=context.get_data_parallel_world_size(),
    )
    evaluator = None
    if job.evaluate_every:
        evaluator = Evaluator(
            build_validation([SourceConfig(str(job.data / "validation"))], objective),
            objective,
            step,
            step.module.plan,
            micro_batch_size=job.layout.micro,
            max_samples=11,
        )
    schedule = LRScheduleConfig(warmup_steps=2, min_lr=1e-5)
    trainer = Trainer(
        step=step,
        loader=loader,
        learning_rate=lambda done: learning_rate(done, config=schedule, peak=1e-3, total_steps=6),
        batch_size=_sizes(job),
        settings=TrainerSettings(
            job.steps, job.log_every, job.evaluate_every, job.every, job.max_nonfinite_steps
        ),
        checkpointer=checkpointer,
        evaluator=evaluator,
        tracker=recorder,
        timer=StepTimer(),
        report=reports.append,
    )
    return Parts(step, checkpointer, evaluator, trainer, recorder, reports, dataset, state)


def _sizes(job: Job) -> Callable[[int], int]:
    """The global batch at a sample number: each of ``job.sizes`` for one step, then the last."""

    def size(consumed: int) -> int:
        first = 0
        for value in job.sizes:
            if consumed <= first:
                return value
            first += value
        return job.sizes[-1] if job.sizes else GLOBAL_BATCH

    return size


def run_body(rank: int, job: Job) -> dict[str, Any]:
    """Train to the end; what every rank saw."""
    parts = assemble(job)
    outcome = parts.run()
    return {
        "rows": parts.recorder.rows,
        "state": parts.state.to_json(),
        "reports": parts.reports,
        "outcome": outcome,
        "weights": whole_weights(parts.step),
    }


def whole_weights(step: Any) -> dict[str, Any]:
    """All full weights, on rank 0."""
    from ds_engine.training.checkpoint.fragments import partition_sharded
    from ds_engine.training.engine import gather_parameter
    from ds_engine.verify import gather_full

    parameters = step.module.canonical_parameters()
    local = {
        n: gather_parameter(p) if partition_sharded(p) else p.detach().clone()
        for n, p in parameters.items()
    }
    full, faults = gather_full(local, parameters, step.context)
    assert not faults, faults
    return full


@contextlib.contextmanager
def raises_everywhere(kind: type[Exception]) -> Any:
    """Like ``pytest.raises`` inside a rank, where pytest is not imported; yields the messages."""
    messages: list[str] = []
    try:
        yield messages
    except kind as error:
        messages.append(str(error))
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
