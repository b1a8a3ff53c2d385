"""BERT: post-norm, token types, a head for words and one for sentences, or classes instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ds_engine.config.reader import read_dataclass
from models.bert_config import BertConfig
from models.convert.hf_config import PLAIN_ACTIVATIONS, HFConfigReader, expect, theirs
from models.convert.table import Entry, HFFamily, linear, same, stacked, words

TYPE = "bert"
PRETRAINING, MASKED_LM, CLASSES = "ForPreTraining", "ForMaskedLM", "ForSequenceClassification"
WORD_BIAS, HEAD = "cls.predictions.bias", "cls.predictions.decoder"


def config_from_hf(hf_config: Mapping[str, Any]) -> BertConfig:
    """Our config from a BERT config.json.

    Which heads there are is what ``architectures`` says: a sentence head unless it names
    BertForMaskedLM, classes with BertForSequenceClassification. Some published files name another
    class than the one whose weights are beside them; change ``sentence_head`` then.

    Raises:
        ConfigError: a feature that cannot be converted.
    """
    return read_config(HFConfigReader(hf_config, TYPE), "Bert", norm_first=False)


def read_config(hf: HFConfigReader, prefix: str, *, norm_first: bool) -> BertConfig:
    """BERT's keys or Megatron's, which are the same; ``prefix`` of the names of classes."""
    for key, value in (
        ("is_decoder", False),
        ("add_cross_attention", False),
        ("is_encoder_decoder", False),
        ("position_embedding_type", "absolute"),
        ("directionality", "bidi"),
    ):
        hf.fixed(key, value)
    for part in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type"):
        hf.get(f"pooler_{part}")  # in some published files; no model reads them
    dropout = hf.get("hidden_dropout_prob", 0.1)
    section = {
        "family": "bert",
        "vocab_size": hf.need("vocab_size"),
        "num_layers": hf.need("num_hidden_layers"),
        "hidden_size": hf.need("hidden_size"),
        "max_sequence_length": hf.get("max_position_embeddings", 512),
        "attention": {
            "num_heads": hf.need("num_attention_heads"),
            "dropout": hf.get("attention_probs_dropout_prob", 0.1),
        },
        "norm": {"type": "layernorm", "epsilon": hf.get("layer_norm_eps", 1e-12)},
        "norm_first": norm_first,
        "num_token_types": hf.get("type_vocab_size", 2),
        "mlp": {
            "intermediate_size": hf.need("intermediate_size"),
            "activation": hf.choice("hidden_act", "gelu", PLAIN_ACTIVATIONS),
        },
        "tie_embeddings": hf.get("tie_word_embeddings", True),
        "embedding_dropout": dropout,
        "hidden_dropout": dropout,
        "init_std": hf.get("initializer_range", 0.02),
        **_read_heads(hf, prefix),
    }
    hf.finish()
    return read_dataclass(BertConfig, section, "model")


def _read_heads(hf: HFConfigReader, prefix: str) -> dict[str, Any]:
    known = {prefix + end for end in (PRETRAINING, MASKED_LM, CLASSES, "Model")}
    names = hf.get("architectures") or [prefix + PRETRAINING]
    if len(names) != 1 or names[0] not in known:
        raise hf.unsupported("architectures", names, f"one of {', '.join(sorted(known))}")
    if names[0] != prefix + CLASSES:
        return {"sentence_head": names[0] != prefix + MASKED_LM}
    if hf.get("problem_type") not in (None, "single_label_classification"):
        raise hf.unsupported("problem_type", hf.get("problem_type"), "single_label_classification")
    return {"num_labels": hf.get("num_labels", len(hf.get("id2label", (0, 1))))}


def config_to_hf(config: BertConfig) -> dict[str, Any]:
    """A BERT config.json.

    Raises:
        ConfigError: the model has something that BERT has not.
    """
    expect(config, TYPE, {"norm_first": False})
    return write_config(config, TYPE, "Bert")


def write_config(config: BertConfig, kind: str, prefix: str) -> dict[str, Any]:
    """The keys of BERT and of Megatron's BERT.

    They have one rate for the embedding's dropout and the blocks': that of our blocks is written.
    """
    rules = {
        "position.type": "learned",
        "norm.type": "layernorm",
        "attention.kv_heads": config.attention.num_heads,
        "head_dim": config.hidden_size // config.attention.num_heads,
        "attention.bias": True,
        "attention.has_output_bias": True,
        "mlp.bias": True,
        # They add the first row of their table to every token, so that there must be one.
        "num_token_types": max(config.num_token_types, 1),
    }
    expect(config, kind, rules)
    activation = theirs(PLAIN_ACTIVATIONS, config.mlp.activation, "mlp.activation", kind)
    heads = PRETRAINING if config.sentence_head else MASKED_LM
    classes = config.num_labels
    return {
        "model_type": kind,
        "architectures": [prefix + (heads if classes is None else CLASSES)],
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_sequence_length,
        "num_attention_heads": config.attention.num_heads,
        "intermediate_size": config.mlp.intermediate_size,
        "hidden_act": activation,
        "layer_norm_eps": config.norm.epsilon,
        "type_vocab_size": config.num_token_types,
        "hidden_dropout_prob": config.hidden_dropout,
        "attention_probs_dropout_prob": config.attention.dropout,
        "initializer_range": config.init_std,
        "tie_word_embeddings": config.tie_embeddings,
        **({} if classes is None else {"num_labels": classes}),
    }


def entries(config: BertConfig) -> Iterable[Entry]:
    """The weight table."""
    yield from ends(config)
    yield from linear(same, "position.norm", "bert.embeddings.LayerNorm")
    ours, block = "layers.{i}", "bert.encoder.layer.{i}"
    yield from layer(config)
    yield from linear(same, f"{ours}.attention_norm", f"{block}.attention.output.LayerNorm")
    yield from linear(same, f"{ours}.mlp_norm", f"{block}.output.LayerNorm")


def layer(config: BertConfig) -> Iterable[Entry]:
    """The matrices of a layer, which post-norm and pre-norm models name alike."""
    ours, block = "layers.{i}", "bert.encoder.layer.{i}"
    parts = (f"{block}.attention.self.{name}" for name in ("query", "key", "value"))
    yield from linear(stacked, f"{ours}.attention.qkv", *parts)
    yield from linear(same, f"{ours}.attention.output", f"{block}.attention.output.dense")
    yield from linear(same, f"{ours}.mlp.up", f"{block}.intermediate.dense")
    yield from linear(same, f"{ours}.mlp.down", f"{block}.output.dense")


def ends(config: BertConfig) -> Iterable[Entry]:
    """Embeddings and heads."""
    tables = "bert.embeddings"
    yield words("embedding.weight", f"{tables}.word_embeddings.weight")
    yield same("position.weight", f"{tables}.position_embeddings.weight")
    yield same("position.token_types", f"{tables}.token_type_embeddings.weight")
    if config.num_labels is not None:
        yield from linear(same, "classifier.pooler", "bert.pooler.dense")
        yield from linear(same, "classifier.output", "classifier")
        return
    if config.sentence_head:
        yield from linear(same, "sentence.pooler", "bert.pooler.dense")
        yield from linear(same, "sentence.output", "cls.seq_relationship")
    yield from linear(same, "mlm.dense", "cls.predictions.transform.dense")
    yield from linear(same, "mlm.norm", "cls.predictions.transform.LayerNorm")
    if config.tie_embeddings:
        yield words("mlm.bias", WORD_BIAS)
    else:
        yield words("head.weight", f"{HEAD}.weight")
        yield words("mlm.bias", f"{HEAD}.bias")


def copies(config: BertConfig) -> Mapping[str, str | None]:
    """The words' bias has two names with tied weights; without, the second is used alone."""
    if config.num_labels is not None:
        return {}
    return {f"{HEAD}.bias": WORD_BIAS} if config.tie_embeddings else {WORD_BIAS: None}


def family(
    model_type: str, architecture: str, read: Any, write: Any, table: Any = entries
) -> HFFamily:
    """BERT or Megatron's BERT, whose tables and heads have the same names."""
    return HFFamily(
        model_type=model_type,
        architecture=architecture,
        config_from_hf=read,
        config_to_hf=write,
        entries=table,
        base_prefix="bert.",
        embedding="bert.embeddings.word_embeddings.weight",
        head=f"{HEAD}.weight",
        copies=copies,
        aliases=((r"(.*LayerNorm)\.gamma", r"\1.weight"), (r"(.*LayerNorm)\.beta", r"\1.bias")),
        ignored=(r"bert\.embeddings\.(position|token_type)_ids",),
    )


FAMILY = family(TYPE, "BertForPreTraining", config_from_hf, config_to_hf)
