"""T5 1.0 and 1.1: encoder and decoder, a table of relative positions in the first block of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ds_engine.config.reader import read_dataclass
from models.convert.hf_config import HFConfigReader, expect, theirs
from models.convert.table import Entry, HFFamily, layered, same, stacked, words
from models.t5_config import T5Config

TYPE = "t5"
# "gated-gelu" is the approximation, by their own rule for older configs. The first spelling is
# written.
ACTIVATIONS = {
    "relu": "relu",
    "gated-gelu": "geglu_tanh",
    "gated-gelu_new": "geglu_tanh",
    "gated-gelu_pytorch_tanh": "geglu_tanh",
    "gated-gelu_python": "geglu",
    "gated-silu": "swiglu",
    "gated-swish": "swiglu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def config_from_hf(hf_config: Mapping[str, Any]) -> T5Config:
    """Our config from a T5 config.json.

    Raises:
        ConfigError: a feature that cannot be converted.
    """
    hf = HFConfigReader(hf_config, TYPE)
    section = read_common(hf, default_activation="relu")
    # Older files say by the tied weights whether logits are scaled. Newer ones say it themselves,
    # and always call the weights tied.
    tied = section["tie_embeddings"]
    scaled = hf.get("scale_decoder_outputs", tied)
    section["scale_logits"] = None if scaled == tied else scaled
    hf.finish()
    return read_dataclass(T5Config, section, "model")


def read_common(hf: HFConfigReader, *, default_activation: str) -> dict[str, Any]:
    """What T5 and mT5 spell alike, as our ``model`` section."""
    hf.fixed("is_encoder_decoder", True)
    hf.fixed("is_decoder", False)
    hf.get("output_past")  # the same results with or without
    name = hf.get("feed_forward_proj", default_activation)
    activation = hf.choice("feed_forward_proj", default_activation, ACTIVATIONS)
    hf.fixed("is_gated_act", name.startswith("gated-"))
    plain = name.removeprefix("gated-")
    hf.fixed("dense_act_fn", "gelu_new" if name == "gated-gelu" else plain)
    layers, dropout = hf.get("num_layers", 6), hf.get("dropout_rate", 0.1)
    decoder_layers = hf.get("num_decoder_layers", layers)
    return {
        "family": "t5",
        "vocab_size": hf.need("vocab_size"),
        "num_layers": layers,
        "num_decoder_layers": None if decoder_layers == layers else decoder_layers,
        "hidden_size": hf.need("d_model"),
        # Only what the model was trained with: relative positions have no limit.
        "max_sequence_length": hf.get("n_positions", 512),
        "attention": {
            "num_heads": hf.need("num_heads"),
            "head_dim": hf.need("d_kv"),
            "bias": False,
            "dropout": dropout,
        },
        "position": {
            "type": "relative",
            "relative_buckets": hf.get("relative_attention_num_buckets", 32),
            "relative_max_distance": hf.get("relative_attention_max_distance", 128),
        },
        "norm": {"type": "rmsnorm", "epsilon": hf.get("layer_norm_epsilon", 1e-6)},
        "mlp": {
            "intermediate_size": hf.need("d_ff"),
            "activation": activation,
            "bias": False,
        },
        "tie_embeddings": hf.get("tie_word_embeddings", True),
        "embedding_dropout": dropout,
        "hidden_dropout": dropout,
        "activation_dropout": dropout,
        "init_std": hf.get("initializer_factor", 1.0),
    }


def config_to_hf(config: T5Config) -> dict[str, Any]:
    """A T5 config.json.

    Raises:
        ConfigError: the model has something that T5 has not.
    """
    # For readers before transformers 5, scaled and tied are one; those after take both keys.
    return {**write_common(config, FAMILY), "scale_decoder_outputs": config.has_scaled_logits}


def write_common(config: T5Config, family: HFFamily) -> dict[str, Any]:
    """What T5 and mT5 spell alike, from our config.

    They have one rate for every dropout: that of our blocks' outputs is written.
    """
    rules = {
        "position.type": "relative",
        "norm.type": "rmsnorm",
        "attention.kv_heads": config.attention.num_heads,
        "attention.bias": False,
        "attention.has_output_bias": False,
        "mlp.bias": False,
        "scale_attention": False,
        "head_bias": False,
    }
    kind = family.model_type
    expect(config, kind, rules)
    name = theirs(ACTIVATIONS, config.mlp.activation, "mlp.activation", kind)
    written = {
        "model_type": kind,
        "architectures": [family.architecture],
        "is_encoder_decoder": True,
        "vocab_size": config.vocab_size,
        "num_layers": config.num_layers,
        "num_decoder_layers": config.decoder_layers,
        "d_model": config.hidden_size,
        "d_kv": config.head_dim,
        "d_ff": config.mlp.intermediate_size,
        "num_heads": config.attention.num_heads,
        "n_positions": config.max_sequence_length,
        "relative_attention_num_buckets": config.position.relative_buckets,
        "relative_attention_max_distance": config.position.relative_max_distance,
        "layer_norm_epsilon": config.norm.epsilon,
        "feed_forward_proj": name,
        "dropout_rate": config.hidden_dropout,
        "tie_word_embeddings": config.tie_embeddings,
        # Their vocabularies' padding, which the other defaults of the class assume too.
        "decoder_start_token_id": 0,
    }
    # A factor on T5's own rule; other initial values have no key there.
    return {**written, **({"initializer_factor": config.init_std} if config.init == "t5" else {})}


def entries(config: T5Config) -> Iterable[Entry]:
    """The weight table."""
    yield words("embedding.weight", "shared.weight")
    yield from layered(_stack("encoder", config, cross=False), config.num_layers)
    yield from layered(_stack("decoder", config, cross=True), config.decoder_layers)
    if not config.tie_embeddings:
        yield words("head.weight", "lm_head.weight")


def _stack(stack: str, config: T5Config, *, cross: bool) -> Iterator[Entry]:
    ours, block = f"{stack}.layers.{{i}}", f"{stack}.block.{{i}}.layer"
    attentions = [("attention", "SelfAttention"), ("cross", "EncDecAttention")]
    for place, (name, attention) in enumerate(attentions[: 1 + cross]):
        at = f"{block}.{place}.{attention}"
        own = f"{ours}.{'cross_attention' if name == 'cross' else name}"
        yield same(f"{ours}.{name}_norm.weight", f"{block}.{place}.layer_norm.weight")
        yield same(f"{own}.query.weight", f"{at}.q.weight")
        yield stacked(f"{own}.key_value.weight", f"{at}.k.weight", f"{at}.v.weight")
        yield same(f"{own}.output.weight", f"{at}.o.weight")
    last = f"{block}.{1 + cross}"
    yield same(f"{ours}.mlp_norm.weight", f"{last}.layer_norm.weight")
    up = ("wi_0", "wi_1") if config.mlp.is_gated else ("wi",)
    dense = f"{last}.DenseReluDense"
    yield stacked(f"{ours}.mlp.up.weight", *(f"{dense}.{name}.weight" for name in up))
    yield same(f"{ours}.mlp.down.weight", f"{dense}.wo.weight")
    yield same(
        f"{stack}.relative_bias.weight",
        f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    )
    yield same(f"{stack}.final_norm.norm.weight", f"{stack}.final_layer_norm.weight")


def copies(config: T5Config) -> Mapping[str, str | None]:
    """Both stacks look words up in one table."""
    return dict.fromkeys(
        ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"
    )


def family(model_type: str, architecture: str, read: Any, write: Any) -> HFFamily:
    """T5 or mT5, whose weights have the same names."""
    return HFFamily(
        model_type=model_type,
        architecture=architecture,
        config_from_hf=read,
        config_to_hf=write,
        entries=entries,
        base_prefix="",
        embedding="shared.weight",
        copies=copies,
        # Of early checkpoints; cross-attention never used one.
        ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )


FAMILY = family(TYPE, "T5ForConditionalGeneration", config_from_hf, config_to_hf)
