"""The same weights in transformers write the same text."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch

from ds_engine.inference.generate import generate, left_padded
from ds_engine.inference.sampling import GenerationSettings, distribution, penalise_repetition
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel
from models.common.definition import PlanOptions
from models.config import AttentionConfig
from models.gpt import build_plan
from tests.inference.setups import NEW, PROMPTS, configs

families = pytest.importorskip("models.convert.families")
GROUPED = AttentionConfig(num_heads=4, num_kv_heads=2, bias=False)
CONFIGS = {
    "gpt2": configs()["gpt"],
    "llama": replace(configs()["llama"], attention=GROUPED),
    "qwen3": replace(configs()["llama"], attention=replace(GROUPED, qk_norm=True)),
}


@functools.cache
def pair(name):
    """Our model and theirs."""
    import transformers

    config, family = CONFIGS[name], families.find_hf_family(name)
    model = SequentialModel(build_plan(config, TensorParallel.single(), PlanOptions(seed=3)))
    state = family.to_hf({n: p.detach() for n, p in model.canonical_parameters().items()}, config)
    section = dict(family.config_to_hf(config))
    hf_config = transformers.AutoConfig.for_model(section.pop("model_type"), **section)
    theirs = getattr(transformers, family.architecture)(hf_config).eval()
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert unexpected == []
    assert all(key == family.head for key in missing)
    theirs.tie_weights()
    return model.eval(), theirs


def ours(name, prompts, **changes):
    settings = GenerationSettings(max_new_tokens=NEW, **changes)
    single = TensorParallel.single()
    return generate(pair(name)[0], prompts, settings, single, max_sequence_length=16)


def theirs(name, prompts, **changes):
    tokens, _, segments, _ = left_padded(prompts, torch.device("cpu"))
    written = pair(name)[1].generate(
        tokens,
        attention_mask=(segments == 0).long(),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **changes,
    )
    return written[:, tokens.shape[1] :].tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_text_is_the_same(name):
    rows = ours(name, PROMPTS)
    assert rows == theirs(name, PROMPTS)
    assert max(len(set(row)) for row in rows) > 3


@pytest.mark.parametrize("name", CONFIGS)
def test_repetition_penalty_is_the_same(name):
    # One by one: transformers counts padding among the words that were seen.
    for prompt in PROMPTS:
        penalised = ours(name, [prompt], repetition_penalty=1.4)
        assert penalised == theirs(name, [prompt], repetition_penalty=1.4)
    assert ours(name, PROMPTS, repetition_penalty=1.4) != ours(name, PROMPTS)


@pytest.mark.parametrize("seed", range(5))
def test_the_distribution_is_the_same(seed):
    from transformers.generation import logits_process as hf

    logits = 3 * torch.randn(3, 50, generator=torch.Generator().manual_seed(seed))
    tokens = torch.tensor([[1, 2, 2], [7, 8, 49], [0, 0, 0]])
    seen = torch.zeros(3, 50, dtype=torch.bool).scatter(1, tokens, value=True)
    settings = GenerationSettings(max_new_tokens=1, temperature=0.7, top_k=20, top_p=0.8)
    expected = logits
    for step in (
        hf.RepetitionPenaltyLogitsProcessor(1.3),
        hf.TemperatureLogitsWarper(0.7),
        hf.TopKLogitsWarper(20),
        hf.TopPLogitsWarper(0.8),
    ):
        expected = step(tokens, expected)
    found = distribution(penalise_repetition(logits, seen, 1.3), settings)
    assert torch.allclose(found.float(), expected.softmax(-1), atol=1e-6)
