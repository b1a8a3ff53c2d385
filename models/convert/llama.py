"""Llama: rotary positions, RMS norms, gated MLP, grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ds_engine.config.reader import read_dataclass
from models.config import GPTConfig
from models.convert.hf_config import GATED_ACTIVATIONS, HFConfigReader, expect, theirs
from models.convert.rope import read_rope, write_rope
from models.convert.table import Entry, HFFamily, linear, same, stacked, words

TYPE = "llama"


def config_from_hf(hf_config: Mapping[str, Any]) -> GPTConfig:
    """Our config from a Llama config.json.

    Raises:
        ConfigError: a feature that cannot be converted.
    """
    hf = HFConfigReader(hf_config, TYPE)
    section = read_common(hf, default_length=2048)
    section["mlp"]["bias"] = hf.get("mlp_bias", False)
    hf.finish()
    return read_dataclass(GPTConfig, section, "model")


def read_common(hf: HFConfigReader, default_length: int) -> dict[str, Any]:
    """What Llama and its descendants spell alike, as our ``model`` section."""
    hf.fixed("is_encoder_decoder", False)
    length = hf.get("max_position_embeddings", default_length)
    rope = read_rope(hf, length)
    if rope["rotary_fraction"] != 1:
        raise hf.unsupported("partial_rotary_factor", rope["rotary_fraction"], "1")
    return {
        "family": "gpt",
        "vocab_size": hf.need("vocab_size"),
        "num_layers": hf.need("num_hidden_layers"),
        "hidden_size": hf.need("hidden_size"),
        "max_sequence_length": length,
        "attention": {
            "num_heads": hf.need("num_attention_heads"),
            "num_kv_heads": hf.get("num_key_value_heads"),
            "head_dim": hf.get("head_dim"),
            "bias": hf.get("attention_bias", False),
            "dropout": hf.get("attention_dropout", 0.0),
        },
        "position": rope,
        "norm": {"type": "rmsnorm", "epsilon": hf.get("rms_norm_eps", 1e-6)},
        "mlp": {
            "intermediate_size": hf.need("intermediate_size"),
            "activation": hf.choice("hidden_act", "silu", GATED_ACTIVATIONS),
            "bias": False,
        },
        "tie_embeddings": hf.get("tie_word_embeddings", False),
        "init_std": hf.get("initializer_range", 0.02),
        "scaled_output_init": False,
    }


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """A Llama config.json; Llama has no dropout but that of attention.

    Raises:
        ConfigError: the model has something that Llama has not.
    """
    expect(config, TYPE, {"attention.qk_norm": False})
    return {**write_common(config, FAMILY), "mlp_bias": config.mlp.bias}


def write_common(config: GPTConfig, family: HFFamily) -> dict[str, Any]:
    """What Llama and its descendants spell alike, from our config."""
    rules = {
        "position.type": "rotary",
        "position.rotary_fraction": 1.0,
        "position.rotary_interleaved": False,
        "norm.type": "rmsnorm",
        "attention.has_output_bias": config.attention.bias,
        "attention.sliding_window": None,
        "parallel_residual": False,
        "head_bias": False,
    }
    kind = family.model_type
    expect(config, kind, rules)
    return {
        "model_type": kind,
        "architectures": [family.architecture],
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_sequence_length,
        "num_attention_heads": config.attention.num_heads,
        "num_key_value_heads": config.attention.kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.attention.bias,
        "attention_dropout": config.attention.dropout,
        "rope_parameters": write_rope(config),
        "rms_norm_eps": config.norm.epsilon,
        "intermediate_size": config.mlp.intermediate_size,
        "hidden_act": theirs(GATED_ACTIVATIONS, config.mlp.activation, "mlp.activation", kind),
        "tie_word_embeddings": config.tie_embeddings,
        "initializer_range": config.init_std,
    }


def entries(config: GPTConfig) -> Iterable[Entry]:
    """The weight table."""
    bias, mlp_bias = config.attention.bias, config.mlp.bias
    yield words("embedding.weight", "model.embed_tokens.weight")
    ours, block = "layers.{i}", "model.layers.{i}"
    query, key, value, output = (f"{block}.self_attn.{name}_proj" for name in "qkvo")
    gate, up, down = (f"{block}.mlp.{name}_proj" for name in ("gate", "up", "down"))
    yield from linear(same, f"{ours}.attention_norm", f"{block}.input_layernorm", bias=False)
    if config.attention.kv_heads == config.attention.num_heads:
        yield from linear(stacked, f"{ours}.attention.qkv", query, key, value, bias=bias)
    else:
        yield from linear(same, f"{ours}.attention.query", query, bias=bias)
        yield from linear(stacked, f"{ours}.attention.key_value", key, value, bias=bias)
    yield from linear(same, f"{ours}.attention.output", output, bias=bias)
    yield from linear(same, f"{ours}.mlp_norm", f"{block}.post_attention_layernorm", bias=False)
    yield from linear(stacked, f"{ours}.mlp.up", gate, up, bias=mlp_bias)
    yield from linear(same, f"{ours}.mlp.down", down, bias=mlp_bias)
    yield same("final_norm.norm.weight", "model.norm.weight")
    if not config.tie_embeddings:
        yield words("head.weight", "lm_head.weight")


FAMILY = HFFamily(
    model_type=TYPE,
    architecture="LlamaForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    entries=entries,
    base_prefix="model.",
    embedding="model.embed_tokens.weight",
    ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)
