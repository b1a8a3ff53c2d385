"""Megatron's BERT: norms before each block, and one after the last layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from models.bert_config import BertConfig
from models.convert import bert
from models.convert.hf_config import HFConfigReader, expect
from models.convert.table import Entry, linear, same

TYPE, PREFIX = "megatron-bert", "MegatronBert"


def config_from_hf(hf_config: Mapping[str, Any]) -> BertConfig:
    """Our config from a Megatron BERT config.json; the heads as in ``bert.config_from_hf``.

    Raises:
        ConfigError: a feature that cannot be converted.
    """
    return bert.read_config(HFConfigReader(hf_config, TYPE), PREFIX, norm_first=True)


def config_to_hf(config: BertConfig) -> dict[str, Any]:
    """A Megatron BERT config.json.

    Raises:
        ConfigError: the model has something that Megatron's BERT has not.
    """
    expect(config, TYPE, {"norm_first": True})
    return bert.write_config(config, TYPE, PREFIX)


def entries(config: BertConfig) -> Iterable[Entry]:
    """The weight table."""
    yield from bert.ends(config)
    yield from bert.layer(config)
    ours, block = "layers.{i}", "bert.encoder.layer.{i}"
    yield from linear(same, f"{ours}.attention_norm", f"{block}.attention.ln")
    yield from linear(same, f"{ours}.mlp_norm", f"{block}.ln")
    yield from linear(same, "final_norm.norm", "bert.encoder.ln")


FAMILY = bert.family(TYPE, f"{PREFIX}ForPreTraining", config_from_hf, config_to_hf, entries)
