"""Qwen3: Llama with norms on queries and keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ds_engine.config.reader import read_dataclass
from models.config import GPTConfig
from models.convert import llama
from models.convert.hf_config import HFConfigReader, expect
from models.convert.table import Entry, HFFamily, same

TYPE = "qwen3"


def config_from_hf(hf_config: Mapping[str, Any]) -> GPTConfig:
    """Our config from a Qwen3 config.json.

    Raises:
        ConfigError: a feature that cannot be converted, such as windows on some layers only.
    """
    hf = HFConfigReader(hf_config, TYPE)
    hf.fixed("use_sliding_window", False)
    for key in ("sliding_window", "max_window_layers"):
        hf.get(key)  # no effect without use_sliding_window
    for kind in hf.get("layer_types", ()):
        if kind != "full_attention":
            raise hf.unsupported("layer_types", kind, '"full_attention"')
    section = llama.read_common(hf, default_length=32768)
    section["attention"]["qk_norm"] = True
    section["attention"]["head_dim"] = hf.get("head_dim", 128)
    hf.finish()
    return read_dataclass(GPTConfig, section, "model")


def config_to_hf(config: GPTConfig) -> dict[str, Any]:
    """A Qwen3 config.json.

    Raises:
        ConfigError: the model has something that Qwen3 has not.
    """
    expect(config, TYPE, {"attention.qk_norm": True, "mlp.bias": False})
    return llama.write_common(config, FAMILY)


def entries(config: GPTConfig) -> Iterable[Entry]:
    """The weight table."""
    yield from llama.entries(config)
    for ours, theirs in (("query", "q"), ("key", "k")):
        yield same(
            f"layers.{{i}}.attention.{ours}_norm.weight",
            f"model.layers.{{i}}.self_attn.{theirs}_norm.weight",
        )


FAMILY = HFFamily(
    model_type=TYPE,
    architecture="Qwen3ForCausalLM",
    config_from_hf=config_from_hf,
    config_to_hf=config_to_hf,
    entries=entries,
    base_prefix="model.",
    embedding="model.embed_tokens.weight",
)
