"""Recomputed activations: the same numbers to the last bit, and less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.run_layers import recomputed_layers
from ds_engine.pipeline.sequential import SequentialModel
from tests.parity.layouts import Layout, plan_for, synthetic
from tests.training.runs import Job, make_step, whole_weights
from tests.worlds import run_world


def forward_and_backward(family: str, every: int) -> tuple[torch.Tensor, dict[str, Any], int]:
    """Loss, gradients, and the bytes that autograd kept between forward and backward."""
    model = SequentialModel(plan_for(family, TensorParallel.single()), every).train()
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    inputs, labels = synthetic(family).micro_batch([3, 4, 5, 6])
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(inputs, labels)
    size = sum(n for pointer, n in kept.items() if pointer not in weights)
    loss.backward()
    return loss, {n: p.grad for n, p in model.canonical_parameters().items()}, size


@pytest.mark.parametrize("family", ["gpt_dropout", "llama_dropout"])
def test_recomputation_changes_no_bit_and_saves_memory(family: str) -> None:
    loss, gradients, most = forward_and_backward(family, 0)
    sizes = []
    for every in (1, 2):
        again, found, size = forward_and_backward(family, every)
        assert torch.equal(again, loss)
        for name, gradient in gradients.items():
            assert gradient is not None
            assert torch.equal(found[name], gradient), name
        sizes.append(size)
    # All four layers: only their inputs are left. Every second one: half of the rest.
    assert sizes[0] < most / 3
    assert sizes[0] < sizes[1] < most


def test_which_layers_are_recomputed() -> None:
    plan = plan_for("gpt", TensorParallel.single())
    assert recomputed_layers(plan, 0) == set()
    assert recomputed_layers(plan, 1) == {2, 3, 4, 5}
    assert recomputed_layers(plan, 2) == {2, 4}
    assert recomputed_layers(plan, 9) == {2}


def steps_body(rank: int, layouts: list[Layout]) -> Any:
    found = []
    for layout in layouts:
        step = make_step(Job(layout, Path(), family="gpt_dropout"))
        data, context = synthetic("gpt_dropout"), step.context
        results = [
            step.train_batch(
                data.step(n, layout.micro, context.get_data_parallel_rank(), context.dims.data),
                1e-3,
            )
            for n in range(3)
        ]
        found.append(([(r.loss, r.grad_norm) for r in results], whole_weights(step)))
    return found


@pytest.mark.parametrize(
    "layout",
    [Layout(pipeline=2, micro=2), Layout(data=2, zero=1, micro=2)],
    ids=lambda layout: layout.name,
)
def test_recomputation_changes_no_bit_in_the_engines(layout: Layout) -> None:
    from dataclasses import replace

    layouts = [layout, replace(layout, recompute=1), replace(layout, recompute=2)]
    (without, weights), *others = run_world(2, steps_body, layouts)[0]
    for results, found in others:
        assert results == without
        for name, value in weights.items():
            assert torch.equal(found[name], value), name
