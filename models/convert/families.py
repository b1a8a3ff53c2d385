"""The Hugging Face families by ``model_type``; a new one is a file and a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from ds_engine.config.reader import did_you_mean, show
from ds_engine.errors import ConfigError
from models.convert.table import HFFamily

MODULES: Mapping[str, str] = {
    "gpt2": "models.convert.gpt2",
    "gpt_neox": "models.convert.gpt_neox",
    "llama": "models.convert.llama",
    "qwen3": "models.convert.qwen3",
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
