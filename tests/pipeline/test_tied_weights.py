"""The word embedding and the output head of a pipeline are one parameter on two stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.layouts import Layout, synthetic
from tests.training.runs import Job, make_step
from tests.worlds import run_world


def copies_body(rank: int, layout: Layout) -> Any:
    """This rank's copy of the tied weight and its gradient, at each of five steps."""
    from ds_engine.training.engine import full_gradient

    step = make_step(Job(layout, Path(), family="gpt_dropout"))
    name = "embedding.weight"
    parameter = step.module.canonical_parameters().get(name)
    if parameter is None:
        for _ in range(5):
            step.train_batch(None, 1e-3)
        return None
    gradients, weights = [], [parameter.detach().clone()]

    def look() -> None:
        gradients.append(full_gradient(parameter).clone())

    step.engine.before_update = look
    data, context = synthetic("gpt_dropout"), step.context
    for number in range(5):
        batches = data.step(
            number, layout.micro, context.get_data_parallel_rank(), context.dims.data
        )
        step.train_batch(batches, 1e-2)
        weights.append(parameter.detach().clone())
    return gradients, weights, context.coordinates["tensor"]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pipeline=2, micro=2),
        Layout(pipeline=3, micro=2, zero=1),
        Layout(pipeline=2, micro=2, zero=1, bf16=True),
        Layout(pipeline=2, data=2, micro=2, zero=1),
        Layout(pipeline=2, tensor=2, sequence=True, micro=4),
    ],
    ids=lambda layout: layout.name,
)
def test_tied_weights_stay_equal_on_both_stages(layout: Layout) -> None:
    answers = [a for a in run_world(layout.world, copies_body, layout) if a is not None]
    assert len(answers) == 2 * layout.data * layout.tensor
    for tensor in range(layout.tensor):
        first, *others = [a for a in answers if a[2] == tensor]
        assert others
        for other in others:
            for kind in (0, 1):
                for mine, theirs in zip(first[kind], other[kind], strict=True):
                    assert torch.equal(mine, theirs)
        assert not torch.equal(first[1][0], first[1][-1]), "nothing was learnt"
