"""Our models compute what Hugging Face's do: logits, loss and every gradient, in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MptConfig,
    MptForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from models.common.position import alibi_bias, alibi_slopes
from models.config import AttentionConfig, GPTConfig, MLPConfig, PositionConfig
from models.convert.families import find_hf_family
from models.convert.table import HFFamily, linear, same, words
from tests.models.tiny import assert_parity, hf_model, parity, random_tokens

VOCABULARY, LENGTH = 59, 24
SPECIAL = {"bos_token_id": None, "eos_token_id": None}
NEOX = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    **SPECIAL,
}
LLAMA = {**NEOX, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.5,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "factor": 4.0,
        "beta_fast": 8.0,
        "beta_slow": 0.3,
        "original_max_position_embeddings": 256,
    },
}


def check(config: Any, model: Any, seed: int, **changes: Any) -> GPTConfig:
    """Convert config and weights of a random model and compare; return our config."""
    family = find_hf_family(config.model_type)
    ours = family.config_from_hf(config.to_dict())
    theirs = hf_model(config, model, seed)
    assert type(theirs).__name__ == family.architecture
    tokens = random_tokens(VOCABULARY, 2, LENGTH, seed)
    assert_parity(parity(theirs, family, replace(ours, **changes), tokens))
    written = type(config)(**family.config_to_hf(ours))
    assert family.config_from_hf(written.to_dict()) == ours
    return ours


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (1, {}),
        (2, {"activation_function": "gelu", "n_inner": 40}),
        (3, {"activation_function": "relu", "tie_word_embeddings": False}),
    ],
)
def test_gpt2(seed, options) -> None:
    sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    check(GPT2Config(**sizes, **SPECIAL, **options), GPT2LMHeadModel, seed)


@pytest.mark.parametrize("parallel_residual", [True, False])
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True, "attention_bias": False}])
def test_gpt_neox(parallel_residual, options) -> None:
    options = {**NEOX, "use_parallel_residual": parallel_residual, **options}
    ours = check(GPTNeoXConfig(**options, rotary_pct=0.25), GPTNeoXForCausalLM, 4)
    assert ours.rotary_dim == 2 and ours.parallel_residual is parallel_residual


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
        {"num_key_value_heads": 1, "head_dim": 12, "hidden_act": "gelu"},
        {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"},
        {"num_key_value_heads": 4, "attention_bias": True},
    ],
    ids=["gqa", "mha-tied", "mqa", "gqa-biases", "mha-biases"],
)
def test_llama(options) -> None:
    check(LlamaConfig(**{**LLAMA, **options}), LlamaForCausalLM, 5)


@pytest.mark.parametrize("kind", SCALINGS)
def test_rotary_scaling(kind) -> None:
    rope = {"rope_type": kind, "rope_theta": 500.0, **SCALINGS[kind]}
    check(LlamaConfig(**LLAMA, rope_parameters=rope), LlamaForCausalLM, 6)


def test_yarn_attention_factor_and_partly_rotated_heads() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 100.0, **SCALINGS["yarn"], "attention_factor": 1.3}
    config = GPTNeoXConfig(**NEOX, rope_parameters=rope, rotary_pct=0.5)
    assert check(config, GPTNeoXForCausalLM, 7).rotary_dim == 4


def test_dynamic_ntk_is_stretched_to_our_longest_sequence() -> None:
    """Theirs follows the length of each input; at the longest one both are the same."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    config = LlamaConfig(**{**LLAMA, "max_position_embeddings": 16}, rope_parameters=rope)
    family = find_hf_family("llama")
    ours = family.config_from_hf(config.to_dict())
    position = ours.position
    scaling = replace(position.rotary_scaling, original_max_sequence_length=16)
    longer = replace(
        ours,
        max_sequence_length=LENGTH - 1,  # what the loss sees
        position=replace(position, rotary_scaling=scaling),
    )
    theirs = hf_model(config, LlamaForCausalLM, 8)
    tokens = random_tokens(VOCABULARY, 2, LENGTH, 8)
    theirs(input_ids=tokens[:, :-1])  # its frequencies grow, and stay while inputs do not grow
    result = parity(theirs, family, longer, tokens[:, :-1])
    assert_parity(result)
    # Exported it is plain rotary positions with the larger base: equal at every length.
    exported = LlamaConfig(**family.config_to_hf(longer))
    assert exported.rope_parameters["rope_type"] == "default"
    assert_parity(parity(hf_model(exported, LlamaForCausalLM, 8), family, longer, tokens[:, :9]))


def test_qk_norm_is_qwen3s() -> None:
    config = Qwen3Config(**LLAMA, head_dim=8)
    assert check(config, Qwen3ForCausalLM, 9).attention.qk_norm


@pytest.mark.parametrize("window", [2, 5, 64])
def test_sliding_window_is_mistrals(window) -> None:
    llama = find_hf_family("llama")
    ours = llama.config_from_hf(LlamaConfig(**LLAMA).to_dict())
    ours = replace(ours, attention=replace(ours.attention, sliding_window=window))
    config = MistralConfig(**LLAMA, sliding_window=window)
    theirs = hf_model(config, MistralForCausalLM, 10)
    assert_parity(parity(theirs, llama, ours, random_tokens(VOCABULARY, 2, LENGTH, 10)))


@pytest.mark.parametrize("heads", [1, 3, 4, 12, 16, 20])
def test_alibi_slopes_are_blooms(heads) -> None:
    bias = alibi_bias(alibi_slopes(heads), LENGTH, LENGTH)[0]
    theirs = build_alibi_tensor(torch.ones(1, LENGTH), heads, torch.float32)
    # Theirs counts from the first key; softmax does not see the difference of each query's row.
    ours = bias - bias[:, :, :1]
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    expected = theirs.expand(heads, LENGTH, LENGTH)
    torch.testing.assert_close(ours[:, causal], expected[:, causal], rtol=1e-6, atol=1e-6)


def mpt_entries(config: GPTConfig):
    yield words("embedding.weight", "transformer.wte.weight")
    ours, block = "layers.{i}", "transformer.blocks.{i}"
    yield from linear(same, f"{ours}.attention_norm", f"{block}.norm_1", bias=False)
    yield from linear(same, f"{ours}.attention.qkv", f"{block}.attn.Wqkv", bias=False)
    yield from linear(same, f"{ours}.attention.output", f"{block}.attn.out_proj", bias=False)
    yield from linear(same, f"{ours}.mlp_norm", f"{block}.norm_2", bias=False)
    yield from linear(same, f"{ours}.mlp.up", f"{block}.ffn.up_proj", bias=False)
    yield from linear(same, f"{ours}.mlp.down", f"{block}.ffn.down_proj", bias=False)
    yield same("final_norm.norm.weight", "transformer.norm_f.weight")


def test_alibi_attention_is_mpts() -> None:
    config = MptConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=VOCABULARY, max_seq_len=32, use_cache=False
    )
    ours = GPTConfig(
        vocab_size=VOCABULARY,
        num_layers=2,
        hidden_size=32,
        max_sequence_length=32,
        attention=AttentionConfig(num_heads=4, bias=False),
        mlp=MLPConfig(intermediate_size=128, bias=False),
        position=PositionConfig(type="alibi"),
    )
    family = HFFamily(
        model_type="mpt",
        architecture="MptForCausalLM",
        config_from_hf=lambda _: ours,
        config_to_hf=lambda _: {},
        entries=mpt_entries,
        base_prefix="transformer.",
        embedding="transformer.wte.weight",
    )
    norms = ["final_norm.norm"]
    norms += [f"layers.{i}.{name}_norm" for i in range(2) for name in ("attention", "mlp")]
    biases = {f"{name}.bias": torch.zeros(32) for name in norms}
    theirs = hf_model(config, MptForCausalLM, 11)
    assert_parity(parity(theirs, family, ours, random_tokens(VOCABULARY, 2, LENGTH, 11), biases))
