"""The Hugging Face families by ``model_type``; a new one is a file and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from ds_engine.config.reader import did_you_mean, show
from ds_engine.errors import ConfigError
from models.convert.table import HFFamily

MODULES: Mapping[str, str] = {
    "bert": "models.convert.bert",
    "gpt2": "models.convert.gpt2",
    "gpt_neox": "models.convert.gpt_neox",
    "llama": "models.convert.llama",
    "megatron-bert": "models.convert.megatron_bert",
    "mt5": "models.convert.mt5",
    "qwen3": "models.convert.qwen3",
    "t5": "models.convert.t5",
}


def find_hf_family(model_type: object) -> HFFamily:
    """The family that reads and writes a ``model_type``.

    Raises:
        ConfigError: for one that is not supported, with the nearest.
    """
    module = MODULES.get(model_type) if isinstance(model_type, str) else None
    if module is None:
        raise ConfigError(
            f"model_type = {show(model_type)} is not a supported Hugging Face family"
            f"{did_you_mean(model_type, MODULES)}"
        )
    family: HFFamily = importlib.import_module(module).FAMILY
    return family
