"""GPT-2: learned positions, fused Conv1D projections, tied head."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ds_engine.config.reader import read_dataclass
from models.config import GPTConfig
from models.convert.hf_config import PLAIN_ACTIVATIONS, HFConfigReader, expect, theirs
from models.convert.table import Entry, HFFamily, linear, same, transposed, words

TYPE = "gpt2"


def config_from_hf(hf_config: Mapping[str, Any]) -> GPTConfig:
    """Our config from a GPT-2 config.json.

    Raises:
        ConfigError: a feature that cannot be converted.
    """
    hf = HFConfigReader(hf_config, TYPE)
    for key, value in (
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
        ("is_encoder_decoder", False),
    ):
        hf.fixed(key, value)
    hf.get("reorder_and_upcast_attn")  # the same products in another precision
    hf.get("n_ctx")  # written by old versions beside n_positions
    width = hf.get("n_embd", 768)
    dropout = hf.get("resid_pdrop", 0.1)
    section = {
        "family": "gpt",
        "vocab_size": hf.get("vocab_size", 50257),
        "num_layers": hf.get("n_layer", 12),
        "hidden_size": width,
        "max_sequence_length": hf.get("n_positions", 1024),
        "attention": {"num_heads": hf.get("n_head", 12), "dropout": hf.get("attn_pdrop", 0.1)},
        "position": {"type": "learned"},
        "norm": {"type": "layernorm", "epsilon": hf.get("layer_norm_epsilon", 1e-5)},
        "mlp": {
            "intermediate_size": hf.get("n_inner", 4 * width),
            "activation": hf.choice("activation_function", "gelu_new", PLAIN_ACTIVATIONS),
        },
        "tie_embeddings": hf.get("tie_word_embeddings", True),
        "embedding_dropout": hf.get("embd_pdrop", 0.1),
        "hidden_dropout": dropout,
        "init_std": hf.get("initializer_range", 0.02),
    }
    hf.finish()
    return read_dataclass(GPTConfig, section, "model")


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """A GPT-2 config.json.

    Raises:
        ConfigError: the model has something that GPT-2 has not.
    """
    rules = {
        "position.type": "learned",
        "norm.type": "layernorm",
        "attention.kv_heads": config.attention.num_heads,
        "head_dim": config.hidden_size // config.attention.num_heads,
        "attention.bias": True,
        "attention.has_output_bias": True,
        "attention.qk_norm": False,
        "attention.sliding_window": None,
        "mlp.bias": True,
        "parallel_residual": False,
        "head_bias": False,
    }
    expect(config, TYPE, rules)
    activation = theirs(PLAIN_ACTIVATIONS, config.mlp.activation, "mlp.activation", TYPE)
    return {
        "model_type": TYPE,
        "architectures": [FAMILY.architecture],
        "vocab_size": config.vocab_size,
        "n_layer": config.num_layers,
        "n_embd": config.hidden_size,
        "n_positions": config.max_sequence_length,
        "n_head": config.attention.num_heads,
        "n_inner": config.mlp.intermediate_size,
        "activation_function": activation,
        "layer_norm_epsilon": config.norm.epsilon,
        "attn_pdrop": config.attention.dropout,
        "embd_pdrop": config.embedding_dropout,
        "resid_pdrop": config.hidden_dropout,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
    }


def entries(config: GPTConfig) -> Iterable[Entry]:
    """The weight table."""
    yield words("embedding.weight", "transformer.wte.weight")
    yield same("position.weight", "transformer.wpe.weight")
    ours, block = "layers.{i}", "transformer.h.{i}"
    yield from linear(same, f"{ours}.attention_norm", f"{block}.ln_1")
    yield from linear(transposed, f"{ours}.attention.qkv", f"{block}.attn.c_attn")
    yield from linear(transposed, f"{ours}.attention.output", f"{block}.attn.c_proj")
    yield from linear(same, f"{ours}.mlp_norm", f"{block}.ln_2")
    yield from linear(transposed, f"{ours}.mlp.up", f"{block}.mlp.c_fc")
    yield from linear(transposed, f"{ours}.mlp.down", f"{block}.mlp.c_proj")
    yield from linear(same, "final_norm.norm", "transformer.ln_f")
    if not config.tie_embeddings:
        yield words("head.weight", "lm_head.weight")


FAMILY = HFFamily(
    model_type=TYPE,
    architecture="GPT2LMHeadModel",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    entries=entries,
    base_prefix="transformer.",
    embedding="transformer.wte.weight",
    ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
)
