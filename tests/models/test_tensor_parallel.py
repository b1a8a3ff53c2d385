"""Full weights loaded on tensor-parallel ranks: the loss and gradients of one process.

Every way of knowing positions and every shape of attention, with fewer key/value heads than ranks
among them; training over many steps and other axes is the parity suite's business.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ds_engine.parallel.parameter import spec_of
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel
from models.common.definition import PlanOptions
from models.convert.table import load_full
from models.gpt import build_plan
from tests.models.configs import CONFIGS, LENGTH
from tests.models.tiny import (
    difference,
    gradients_of,
    inputs_of,
    our_model,
    random_tokens,
    randomise,
)

OPTIONS = PlanOptions(label_smoothing=0.1, z_loss=1e-3)


def outcome(model: SequentialModel) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    tokens = random_tokens(61, 2, LENGTH, 5)
    inputs = inputs_of(tokens, torch.tensor([[0] * 7 + [1] * 13, [0] * 12 + [1] * 8]))
    labels = tokens.roll(-1, 1)
    labels[0, 6] = -100
    weights = torch.full(labels.shape, 1 / 39)
    with torch.no_grad():
        logits = model.eval()(inputs)
    loss = model.train()(inputs, (labels, weights))
    loss.backward()
    return logits, loss.detach(), gradients_of(model)


def rank_body(rank: int, name: str, sequence: bool, full: dict[str, Tensor], expected) -> float:
    tp = TensorParallel(dist.group.WORLD, rank, dist.get_world_size(), sequence)
    model = SequentialModel(build_plan(CONFIGS[name], tp, OPTIONS))
    load_full(model.canonical_parameters(), full)
    logits, loss, gradients = outcome(model)
    worst = max(difference(logits, expected[0]), difference(loss, expected[1]))
    assert worst < 1e-5
    scale = max(float(g.abs().max()) for g in expected[2].values())
    for key, parameter in model.canonical_parameters().items():
        spec, whole = spec_of(parameter), expected[2][key]
        missing = spec.full_shape[0] - whole.shape[0]  # vocabularies are padded per degree
        if missing > 0:
            whole = torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])])
        error = (gradients[key] - spec.take(whole)).abs().max()
        assert error < 1e-5 * max(float(whole.abs().max()), 1e-2 * scale), key
    return worst


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_equal_to_one_process(warm_world, name, size, sequence) -> None:
    config = CONFIGS[name]
    model = randomise(our_model(config, OPTIONS), 3)
    words = config.vocab_size
    parameters = model.canonical_parameters()
    full = {
        key: p.detach().clone()[: words if spec_of(p).valid else None]
        for key, p in parameters.items()
    }
    with torch.no_grad():
        load_full(parameters, full)  # zero padding, as the ranks have it
    expected = outcome(model)
    cut = {
        key: g[: words if spec_of(parameters[key]).valid else None]
        for key, g in expected[2].items()
    }
    warm_world(size, rank_body, name, sequence, full, (expected[0], expected[1], cut))
