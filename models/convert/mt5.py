"""mT5: T5 1.1 with a vocabulary for 101 languages; its logits are never scaled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_engine.config.reader import read_dataclass
from models.convert import t5
from models.convert.hf_config import HFConfigReader, expect
from models.t5_config import T5Config

TYPE = "mt5"


def config_from_hf(hf_config: Mapping[str, Any]) -> T5Config:
    """Our config from an mT5 config.json.

    transformers 5 writes ``tie_word_embeddings = true`` whether or not the weights are tied; the
    published files say false, as they are.

    Raises:
        ConfigError: a feature that cannot be converted.
    """
    hf = HFConfigReader(hf_config, TYPE)
    section = t5.read_common(hf, default_activation="gated-gelu")
    section["scale_logits"] = False if section["tie_embeddings"] else None
    hf.finish()
    return read_dataclass(T5Config, section, "model")


def config_to_hf(config: T5Config) -> dict[str, Any]:
    """An mT5 config.json.

    Raises:
        ConfigError: the model has something that mT5 has not.
    """
    expect(config, TYPE, {"has_scaled_logits": False})
    return t5.write_common(config, FAMILY)


FAMILY = t5.family(TYPE, "MT5ForConditionalGeneration", config_from_hf, config_to_hf)
