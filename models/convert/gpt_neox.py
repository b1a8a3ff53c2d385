"""GPT-NeoX and Pythia: partly rotated heads, parallel residual, projections interleaved by head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ds_engine.config.reader import read_dataclass
from models.config import GPTConfig
from models.convert.hf_config import PLAIN_ACTIVATIONS, HFConfigReader, expect, theirs
from models.convert.rope import read_rope, write_rope
from models.convert.table import Entry, HFFamily, linear, per_head, same, words

TYPE = "gpt_neox"


def config_from_hf(hf_config: Mapping[str, Any]) -> GPTConfig:
    """Our config from a GPT-NeoX config.json.

    Raises:
        ConfigError: a feature that cannot be converted.
    """
    hf = HFConfigReader(hf_config, TYPE)
    hf.fixed("is_encoder_decoder", False)
    hf.get("is_decoder")
    length = hf.get("max_position_embeddings", 2048)
    dropout = hf.get("hidden_dropout", 0.0)
    rope = read_rope(
        hf, length, base_key="rotary_emb_base", fraction_key="rotary_pct", default_fraction=0.25
    )
    hf.get("rope_theta")  # some exporters write it beside rotary_emb_base; it was never read
    section = {
        "family": "gpt",
        "vocab_size": hf.need("vocab_size"),
        "num_layers": hf.need("num_hidden_layers"),
        "hidden_size": hf.need("hidden_size"),
        "max_sequence_length": length,
        "attention": {
            "num_heads": hf.need("num_attention_heads"),
            "bias": hf.get("attention_bias", True),
            "dropout": hf.get("attention_dropout", 0.0),
        },
        "position": rope,
        "norm": {"type": "layernorm", "epsilon": hf.get("layer_norm_eps", 1e-5)},
        "mlp": {
            "intermediate_size": hf.need("intermediate_size"),
            "activation": hf.choice("hidden_act", "gelu", PLAIN_ACTIVATIONS),
        },
        "parallel_residual": hf.get("use_parallel_residual", True),
        "tie_embeddings": hf.get("tie_word_embeddings", False),
        "embedding_dropout": dropout,
        "hidden_dropout": dropout,
        "init_std": hf.get("initializer_range", 0.02),
    }
    hf.finish()
    return read_dataclass(GPTConfig, section, "model")


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """A GPT-NeoX config.json; its one dropout is our ``hidden_dropout``.

    Raises:
        ConfigError: the model has something that GPT-NeoX has not.
    """
    rules = {
        "position.type": "rotary",
        "position.rotary_interleaved": False,
        "norm.type": "layernorm",
        "attention.kv_heads": config.attention.num_heads,
        "head_dim": config.hidden_size // config.attention.num_heads,
        "attention.has_output_bias": config.attention.bias,
        "attention.qk_norm": False,
        "attention.sliding_window": None,
        "mlp.bias": True,
        "head_bias": False,
    }
    expect(config, TYPE, rules)
    rope = {**write_rope(config), "partial_rotary_factor": config.position.rotary_fraction}
    activation = theirs(PLAIN_ACTIVATIONS, config.mlp.activation, "mlp.activation", TYPE)
    return {
        "model_type": TYPE,
        "architectures": [FAMILY.architecture],
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_sequence_length,
        "num_attention_heads": config.attention.num_heads,
        "attention_bias": config.attention.bias,
        "attention_dropout": config.attention.dropout,
        "rope_parameters": rope,
        "layer_norm_eps": config.norm.epsilon,
        "intermediate_size": config.mlp.intermediate_size,
        "hidden_act": activation,
        "use_parallel_residual": config.parallel_residual,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_dropout": config.hidden_dropout,
        "initializer_range": config.init_std,
    }


def entries(config: GPTConfig) -> Iterable[Entry]:
    """The weight table."""
    fused, bias = per_head(config.attention.num_heads, blocks=3), config.attention.bias
    yield words("embedding.weight", "gpt_neox.embed_in.weight")
    ours, block = "layers.{i}", "gpt_neox.layers.{i}"
    qkv, dense = f"{block}.attention.query_key_value", f"{block}.attention.dense"
    yield from linear(same, f"{ours}.attention_norm", f"{block}.input_layernorm")
    yield from linear(fused, f"{ours}.attention.qkv", qkv, bias=bias)
    yield from linear(same, f"{ours}.attention.output", dense, bias=bias)
    yield from linear(same, f"{ours}.mlp_norm", f"{block}.post_attention_layernorm")
    yield from linear(same, f"{ours}.mlp.up", f"{block}.mlp.dense_h_to_4h")
    yield from linear(same, f"{ours}.mlp.down", f"{block}.mlp.dense_4h_to_h")
    yield from linear(same, "final_norm.norm", "gpt_neox.final_layer_norm")
    if not config.tie_embeddings:
        yield words("head.weight", "lm_head.weight")


FAMILY = HFFamily(
    model_type=TYPE,
    architecture="GPTNeoXForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    entries=entries,
    base_prefix="gpt_neox.",
    embedding="gpt_neox.embed_in.weight",
    aliases=((r"embed_out\.weight", "lm_head.weight"),),
    ignored=(
        r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias",
        r"gpt_neox\.layers\.\d+\.attention\.rotary_emb\.inv_freq",
    ),
)
