"""Conversion of T5 and BERT: what is refused, copies among their names, headless models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_engine.errors import CheckpointError, ConfigError
from models.convert.families import find_hf_family
from models.convert.table import load_full
from tests.models.test_convert import hf_weights, read
from tests.models.tiny import our_model, randomise

FAMILIES = ("t5", "mt5", "bert", "megatron-bert")
CLASSES = {"architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("t5", {"feed_forward_proj": "gated-relu"}, "feed_forward_proj"),
        ("t5", {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}, "dense_act_fn"),
        ("t5", {"is_gated_act": True}, "is_gated_act"),
        ("t5", {"is_decoder": True}, "is_decoder"),
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder"),
        ("t5", {"d_kv": None}, "d_kv"),
        ("t5", {"model_type": "umt5"}, "umt5"),
        ("t5", {"sparse_step": 2}, "sparse_step"),
        ("t5", {"relative_attention_num_buckets": 7}, "relative_buckets"),
        ("mt5", {"model_type": "t5"}, "model_type"),
        ("mt5", {"scale_decoder_outputs": True}, "scale_decoder_outputs"),
        ("bert", {"hidden_act": "silu"}, "hidden_act"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention"),
        ("bert", {"architectures": ["BertForTokenClassification"]}, "BertForTokenClassification"),
        ("bert", {"embedding_size": 16}, "embedding_size"),
        ("bert", {**CLASSES, "problem_type": "regression"}, "problem_type"),
        ("bert", {**CLASSES, "num_labels": 1}, "num_labels"),
        ("megatron-bert", {"architectures": ["BertForMaskedLM"]}, "architectures"),
    ],
)
def test_unsupported_features_are_named(family, changes, named) -> None:
    with pytest.raises(ConfigError, match=named):
        read(family, **changes)


@pytest.mark.parametrize(
    ("family", "section", "changes", "named"),
    [
        ("t5", "position", {"type": "learned"}, "position.type"),
        ("t5", "norm", {"type": "layernorm"}, "norm.type"),
        ("t5", "attention", {"num_kv_heads": 2}, "kv_heads"),
        ("t5", "attention", {"bias": True}, "attention.bias"),
        ("t5", "mlp", {"bias": True}, "mlp.bias"),
        ("t5", None, {"scale_attention": True}, "scale_attention"),
        ("mt5", None, {"head_bias": True}, "head_bias"),
        ("mt5", None, {"scale_logits": True}, "scaled_logits"),
        ("mt5", None, {"tie_embeddings": True}, "scaled_logits"),
        ("bert", None, {"norm_first": True}, "norm_first"),
        ("bert", None, {"num_token_types": 0}, "num_token_types"),
        ("bert", "attention", {"num_kv_heads": 2}, "kv_heads"),
        ("bert", "attention", {"head_dim": 4}, "head_dim"),
        ("bert", "mlp", {"activation": "swiglu"}, "mlp.activation"),
        ("bert", "norm", {"type": "rmsnorm"}, "norm.type"),
        ("megatron-bert", None, {"norm_first": False}, "norm_first"),
    ],
)
def test_what_a_family_cannot_express_is_named(family, section, changes, named) -> None:
    config = read(family)
    if section is not None:
        changes = {section: replace(getattr(config, section), **changes)}
    with pytest.raises(ConfigError, match=named):
        find_hf_family(family).config_to_hf(replace(config, **changes))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        ("t5", {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu"}),
        ("t5", {"feed_forward_proj": "gated-gelu_python", "num_decoder_layers": None}),
        ("t5", {"tie_word_embeddings": False, "scale_decoder_outputs": True}),
        ("t5", {"scale_decoder_outputs": False, "n_positions": 77, "dropout_rate": 0.2}),
        ("mt5", {"tie_word_embeddings": True, "initializer_factor": 0.5}),
        ("bert", {"architectures": ["BertForMaskedLM"], "hidden_act": "gelu_new"}),
        ("bert", {**CLASSES, "num_labels": 5, "layer_norm_eps": 1e-6}),
        ("megatron-bert", {"type_vocab_size": 4, "hidden_dropout_prob": 0.3}),
    ],
)
def test_configs_round_trip(family, changes) -> None:
    config, found = read(family, **changes), find_hf_family(family)
    written = found.config_to_hf(config)
    assert found.config_from_hf(written) == config
    assert {key: written[key] for key in changes if changes[key] is not None} == {
        key: value for key, value in changes.items() if value is not None
    }


def test_published_files_are_read() -> None:
    """Keys of t5-small, t5-v1_1-small, mt5-small and bert-base-chinese beside the sizes."""
    old = {"n_positions": 512, "output_past": True, "task_specific_params": {"summarization": {}}}
    config = read("t5", **old, is_encoder_decoder=True, architectures=["T5WithLMHeadModel"])
    assert config.tie_embeddings and config.has_scaled_logits
    assert config.mlp.activation == "relu"
    newer = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    for family in ("t5", "mt5"):
        config = read(family, **newer, output_past=True, tokenizer_class="T5Tokenizer")
        assert not config.tie_embeddings and not config.has_scaled_logits
        assert config.mlp.activation == "geglu_tanh"
    pooler = {
        "pooler_fc_size": 768,
        "pooler_type": "first_token_transform",
        "directionality": "bidi",
    }
    config = read("bert", **pooler, architectures=["BertForMaskedLM"], gradient_checkpointing=True)
    assert not config.sentence_head


@pytest.mark.parametrize(("family", "stack"), [("t5", "encoder"), ("mt5", "decoder")])
def test_both_stacks_of_t5_share_the_table_of_words(family, stack) -> None:
    found, config, state = hf_weights(family)
    name, table = f"{stack}.embed_tokens.weight", state["shared.weight"]
    assert name not in state
    full = found.from_hf({**state, name: table.clone()}, config)
    assert full.keys() == found.from_hf(state, config).keys()
    with pytest.raises(
        CheckpointError, match=rf"{stack}\.embed_tokens\.weight differs from shared"
    ):
        found.from_hf({**state, name: table + 1}, config)


def test_bias_of_words_has_two_names() -> None:
    found, config, state = hf_weights("bert")
    bias = state["cls.predictions.bias"]
    found.from_hf({**state, "cls.predictions.decoder.bias": bias.clone()}, config)
    with pytest.raises(CheckpointError, match=r"decoder\.bias differs .*set it to false"):
        found.from_hf({**state, "cls.predictions.decoder.bias": bias + 1}, config)
    # Without tied weights only the second is used, whatever the first holds.
    found, config, state = hf_weights("bert", tie_word_embeddings=False)
    full = found.from_hf({**state, "cls.predictions.bias": bias + 1}, config)
    assert torch.equal(full["mlm.bias"], state["cls.predictions.decoder.bias"])


def test_older_bert_names_are_read() -> None:
    found, config, state = hf_weights("bert")
    renames = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    old = state
    for new_name, old_name in renames:
        old = {name.replace(new_name, old_name): tensor for name, tensor in old.items()}
    assert old.keys() != state.keys()
    old["bert.embeddings.position_ids"] = torch.arange(32)[None]
    full, again = found.from_hf(state, config), found.from_hf(old, config)
    assert full.keys() == again.keys()
    assert all(torch.equal(full[name], again[name]) for name in full)


def base_of(state: dict[str, Any]) -> dict[str, Any]:
    """The state dict of the headless class: no prefix, no heads."""
    return {k.removeprefix("bert."): t for k, t in state.items() if k.startswith("bert.")}


@pytest.mark.parametrize("family", ["bert", "megatron-bert"])
@pytest.mark.parametrize("labels", [None, 3])
def test_headless_weights_leave_the_heads_alone(family, labels) -> None:
    found, config, state = hf_weights(family)
    config = replace(config, num_labels=labels)
    full = found.from_hf(base_of(state), config, headless=True)
    model = randomise(our_model(config), 9)
    parameters = model.canonical_parameters()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    load_full({name: parameters[name] for name in full}, full)
    changed = {name for name, p in parameters.items() if not torch.equal(p, before[name])}
    head = "sentence" if labels is None else "classifier"
    kept = {f"{head}.output.weight", f"{head}.output.bias"}
    if labels is None:
        kept |= {f"mlm.{part}" for part in ("dense.weight", "dense.bias", "bias")}
        kept |= {"mlm.norm.weight", "mlm.norm.bias"}
        kept |= set() if config.tie_embeddings else {"head.weight"}
    assert set(parameters) - changed == kept
    assert torch.equal(parameters[f"{head}.pooler.weight"], state["bert.pooler.dense.weight"])


def test_headless_weights_are_not_taken_for_a_whole_model() -> None:
    found, config, state = hf_weights("bert")
    with pytest.raises(CheckpointError, match=r"lacks 7 \(cls\.seq_relationship"):
        found.from_hf(base_of(state), config)
    with pytest.raises(CheckpointError, match=r"unexpected 7 \(cls\."):
        found.from_hf(state, config, headless=True)
    config = replace(config, sentence_head=False)
    with pytest.raises(CheckpointError, match=r"unexpected 2 \(bert\.pooler.*compare .*heads"):
        found.from_hf(base_of(state), config, headless=True)
