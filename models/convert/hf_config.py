"""Reading and writing Hugging Face configs without guessing: nothing that matters is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from ds_engine.config.reader import show
from ds_engine.errors import ConfigError

# Keys of config.json that say nothing about the function that the model computes.
# fmt: off
NEUTRAL = frozenset((
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "architectures",
    "attn_implementation", "bos_token_id", "chunk_size_feed_forward", "classifier_dropout",
    "decoder_start_token_id", "dtype", "eos_token_id", "finetuning_task", "gradient_checkpointing",
    "id2label", "label2id",
    "max_length", "model_type", "name_or_path", "num_labels", "output_attentions",
    "output_hidden_states", "pad_token_id", "prefix", "pretraining_tp", "problem_type",
    "return_dict", "sep_token_id", "summary_activation", "summary_first_dropout",
    "summary_proj_to_labels", "summary_type", "summary_use_proj", "task_specific_params",
    "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
))
# fmt: on

PLAIN_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_new": "geglu_tanh",
    "gelu_pytorch_tanh": "geglu_tanh",
}


class HFConfigReader:
    """A config.json whose every key must be asked for, or be neutral, or be switched off.

    Args:
        config: the parsed file, or ``config.to_dict()``.
        model_type: the family that reads it.

    Raises:
        ConfigError: ``config`` is of another family.
    """

    def __init__(self, config: Mapping[str, Any], model_type: str) -> None:
        self._config, self._asked = config, set(NEUTRAL)
        self.model_type = model_type
        found = config.get("model_type", model_type)
        if found != model_type:
            raise ConfigError(
                f"model_type = {show(found)} cannot be read as {model_type}; use the converter of "
                "its own family"
            )

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``key``; null means ``default``, as in the config classes."""
        self._asked.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """The value of a key that has no sensible default.

        Raises:
            ConfigError: it is missing.
        """
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{key} is missing in the {self.model_type} config; add it")
        return value

    def fixed(self, key: str, value: Any) -> None:
        """Accept only ``value`` (also the default), because nothing else is supported.

        Raises:
            ConfigError: it is set to something else.
        """
        found = self.get(key, value)
        if found != value:
            raise self.unsupported(key, found, show(value))

    def choice(self, key: str, default: str, names: Mapping[str, str]) -> str:
        """Our name of a value such as an activation.

        Raises:
            ConfigError: it has no counterpart.
        """
        found = self.get(key, default)
        if found not in names:
            raise self.unsupported(key, found, f"one of {', '.join(names)}")
        return names[found]

    def unsupported(self, key: str, found: Any, supported: str) -> ConfigError:
        """An error to raise."""
        return ConfigError(
            f"{key} = {show(found)} in the {self.model_type} config is not supported; "
            f"only {supported} can be converted"
        )

    def finish(self) -> None:
        """Check that nothing was left unread.

        Raises:
            ConfigError: an unknown key is set.
        """
        for key, value in self._config.items():
            if key not in self._asked and value is not None and value is not False:
                raise ConfigError(
                    f"{key} = {show(value)} is not a known key of a {self.model_type} config; "
                    "remove it if the model computes the same without it"
                )


def expect(config: Any, model_type: str, rules: Mapping[str, Any]) -> None:
    """Check that a family can express a config of ours.

    Args:
        config: ours.
        model_type: the family to be written.
        rules: dotted attribute -> the only value that the family has.

    Raises:
        ConfigError: naming the first attribute that differs.
    """
    for path, value in rules.items():
        found = reduce(getattr, path.split("."), config)
        if found != value:
            raise ConfigError(
                f"model.{path} = {show(found)} cannot be written as {model_type}, which always has "
                f"{show(value)}; export to a family that has it"
            )


def theirs(names: Mapping[str, str], ours: str, path: str, model_type: str) -> str:
    """The first of their names for one of ours.

    Raises:
        ConfigError: there is none.
    """
    found = next((their for their, our in names.items() if our == ours), None)
    if found is None:
        raise ConfigError(
            f"model.{path} = {ours} cannot be written as {model_type}; "
            f"it knows {', '.join(sorted(set(names.values())))}"
        )
    return found
