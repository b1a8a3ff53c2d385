"""Random tiny Hugging Face models, ours with the same weights, and how to compare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.plan import LayerPlan
from ds_engine.pipeline.sequential import SequentialModel
from models.common.definition import PlanOptions
from models.convert.table import HFFamily, load_full
from models.registry import load_definition
from tests.tables import CURRENT, TRANSFORMERS, note

TOLERANCE = 1e-5


def hf_model(config: Any, model: type[nn.Module], seed: int) -> nn.Module:
    """A model whose every weight, bias and norm differs from its neutral value."""
    config._attn_implementation = "eager"
    built = model(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return built


def plan_of(config: Any, tp: TensorParallel, options: PlanOptions | None = None) -> LayerPlan:
    return load_definition(config.family).plan(config, tp, options or PlanOptions())


def our_model(config: Any, options: PlanOptions | None = None) -> SequentialModel:
    return SequentialModel(plan_of(config, TensorParallel.single(), options)).eval()


def randomise(model: SequentialModel, seed: int) -> SequentialModel:
    """Move biases and norms away from zero and one, which would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(model.canonical_parameters().items()):
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def random_tokens(vocab_size: int, batch: int, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch, length), generator=generator)


def inputs_of(tokens: Tensor, segments: Tensor | None = None) -> tuple[Tensor, ...]:
    """Tokens with positions that restart at each segment."""
    batch, length = tokens.shape
    index = torch.arange(length).expand(batch, length)
    if segments is None:
        segments = torch.zeros_like(tokens)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    first = torch.where(starts, index, 0).cummax(1).values
    return tokens, index - first, segments, torch.arange(batch)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest magnitude."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def gradients_of(model: SequentialModel) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.canonical_parameters().items()}
    assert all(grad is not None for grad in found.values())
    return found  # type: ignore[return-value]


def converted(theirs: nn.Module, family: HFFamily, config: Any) -> dict[str, Tensor]:
    """Their weights by our names; checks that they round trip bit for bit."""
    state = theirs.state_dict()
    full = family.from_hf(state, config)
    back = family.to_hf(full, config)
    kept = {name: t for name, t in state.items() if name in back}
    assert set(state) - set(kept) <= set(family.spare(config))
    for name, tensor in kept.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
    again = family.from_hf(back, config)
    assert all(torch.equal(again[name], full[name]) for name in full)
    return full


def gradient_differences(
    ours: SequentialModel, theirs: nn.Module, family: HFFamily, config: Any
) -> dict[str, float]:
    """Of every gradient, by our names: a block that is zero, such as that of a bias of keys, is
    measured by the matrix that it is a part of."""
    spare = family.spare(config)
    state = {n: p.grad for n, p in theirs.named_parameters() if n not in spare}
    expected = family.from_hf(state, config)
    found = gradients_of(ours)
    assert set(found) == set(expected)
    words = {name: grad[: len(expected[name])] for name, grad in found.items()}  # no padding
    return {f"gradient of {n}": difference(words[n], expected[n]) for n in expected}


def parity(
    theirs: nn.Module,
    family: HFFamily,
    config: Any,
    tokens: Tensor,
    only_ours: Mapping[str, Tensor] | None = None,
) -> dict[str, float]:
    """Differences of logits, loss and each gradient; checks that weights round trip exactly.

    Args:
        only_ours: parameters that the other side lacks, with the value that switches them off.
    """
    extra = dict(only_ours or {})
    full = converted(theirs, family, config)
    ours = our_model(config)
    load_full(ours.canonical_parameters(), {**full, **extra})
    result = {}
    with torch.no_grad():
        result["logits"] = difference(ours(inputs_of(tokens)), theirs(tokens).logits)

    loss = theirs(input_ids=tokens, labels=tokens).loss
    loss.backward()
    labels = tokens[:, 1:].contiguous()
    weights = torch.full(labels.shape, 1.0 / labels.numel())
    our_loss = ours(inputs_of(tokens[:, :-1]), (labels, weights))
    our_loss.backward()
    result["loss"] = difference(our_loss.detach(), loss.detach())

    gradients = gradients_of(ours)
    written = family.to_hf({n: g for n, g in gradients.items() if n not in extra}, config)
    compared = set()
    for name, parameter in theirs.named_parameters():
        result[f"gradient of {name}"] = difference(written[name], parameter.grad)
        compared.add(name)
    assert compared == set(written)
    return result


def assert_parity(result: dict[str, float], tolerance: float = TOLERANCE) -> None:
    wrong = {name: value for name, value in result.items() if not value <= tolerance}
    assert wrong == {}
    model = CURRENT.get().name.removeprefix("test_")
    for name, value in result.items():
        column = "gradients" if name.startswith("gradient of") else name
        note(TRANSFORMERS, model, column, value)
