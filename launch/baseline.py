"""What a model that ignores its input could reach: the entropy of a validation set's targets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ds_engine.data.dataset import build_validation
from ds_engine.data.objective import Objective, ValidationSamples
from ds_engine.parallel.tensor_parallel import TensorParallel
from launch.check import ResolvedRun
from launch.compose import plan_of
from launch.objective import make_objective

Counts = npt.NDArray[np.int64]


def count_labels(objective: Objective, samples: ValidationSamples, number: int) -> list[Counts]:
    """How often each label counts in the first ``number`` samples, for each loss term.

    Args:
        objective: makes the rows, with the masks and spans that an evaluation sees.
        samples: of a validation set.
        number: of samples to look at.
    """
    counts: list[Counts] = []
    for index in range(number):
        targets = objective(samples[index], index).targets
        counts = counts or [np.zeros(0, dtype=np.int64) for _ in targets[::2]]
        for term, (labels, mask) in enumerate(zip(targets[::2], targets[1::2], strict=True)):
            found = np.bincount(np.atleast_1d(labels)[np.atleast_1d(mask) > 0])
            size = max(len(found), len(counts[term]))
            counts[term] = np.pad(counts[term], (0, size - len(counts[term])))
            counts[term][: len(found)] += found
    return counts


def entropy(counts: Counts) -> float:
    """Entropy in nats of the frequencies of labels that were counted."""
    shares = counts[counts > 0] / counts.sum()
    return float(np.abs(np.sum(shares * np.log(shares))))  # abs: no -0.0 for a single label


def validation_baselines(resolved: ResolvedRun) -> dict[str, float]:
    """The best that a model can be on what the run evaluates if it reads nothing.

    A model that gives every target the same probabilities has a loss of at least the entropy of the
    labels, even if it knows the frequencies of these very labels; an accuracy of at most the share
    of the most frequent one.

    Args:
        resolved: a checked run, whose data and tokenizer lie where it says.

    Returns:
        The bound by the name of the measure in the log, without ``validation/``. Empty without
        validation data; a loss term without a target that counts is left out.

    Raises:
        DsEngineError: the objective, its tokenizer or the validation data cannot be used.
    """
    run, model = resolved.run, resolved.model
    if not run.data.validation:
        return {}
    objective = make_objective(run, model)
    samples = build_validation(run.data.validation, objective, vocab_size=model.vocab_size)
    evaluated = run.training.evaluate_batches * resolved.batch.train_batch_size
    counts = count_labels(objective, samples, min(len(samples), evaluated))
    plan = plan_of(resolved, TensorParallel.single())
    found = {}
    for index, measure in enumerate(plan.measures):
        if not counts or not counts[measure.term].any():
            continue
        labels = counts[measure.term]
        if index >= len(plan.losses):
            found[measure.name] = float(labels.max() / labels.sum())
        else:
            # A single term is logged as the loss.
            name = measure.name if len(plan.losses) > 1 else "loss"
            found[name] = entropy(labels)
    return found
