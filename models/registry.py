"""The model families by name; their definitions (which need torch) are imported when asked for."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ds_engine.config.reader import did_you_mean, nearest, read_dataclass, show
from ds_engine.errors import ConfigError
from ds_engine.parallel.dims import ParallelDims
from models.bert_config import BertConfig
from models.config import GPTConfig
from models.t5_config import T5Config


class ModelConfig(Protocol):
    """What every family's configuration can tell without torch."""

    @property
    def family(self) -> str:
        """Name in the registry."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer, before padding."""

    @property
    def num_layers(self) -> int:
        """Transformer layers."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def max_sequence_length(self) -> int:
        """Longest sequence, tokens."""

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether rows have a second sequence, the decoder's."""

    @property
    def position_limit(self) -> int | None:
        """Positions that the model can tell apart; None: no limit."""

    def check(self, dims: ParallelDims) -> list[str]:
        """All reasons why the model cannot be laid out like ``dims``."""

    def check_sequence(self, sequence_length: int, decoder_length: int | None = None) -> list[str]:
        """Whether the model can read sequences of this length (and of this in its decoder)."""

    def num_parameters(self) -> int:
        """Exact number of parameters, vocabulary not padded."""

    def flops_per_token(self, sequence_length: int) -> int:
        """Matrix-multiply FLOPs of one token, forward and backward."""

    def flops_per_sample(self, sequence_length: int, decoder_length: int | None) -> int:
        """Matrix-multiply FLOPs of one row, forward and backward."""

    def padded_vocab_size(self, tensor: int) -> int:
        """Rows of the embedding for a tensor-parallel degree."""

    def portable(self) -> "ModelConfig":
        """The same model with kernels that run on any device."""

    def shrunk(self, dims: ParallelDims) -> "ModelConfig":
        """The same architecture at sizes for a proof on a CPU."""


@dataclass(frozen=True)
class Family:
    """One line of the registry.

    Attributes:
        config: The configuration class.
        module: Module of the definition, imported on use.
        definition: Name of the definition in that module.
    """

    config: type[Any]
    module: str
    definition: str


FAMILIES: Mapping[str, Family] = {
    "gpt": Family(GPTConfig, "models.gpt", "GPT_DEFINITION"),
    "t5": Family(T5Config, "models.t5", "T5_DEFINITION"),
    "bert": Family(BertConfig, "models.bert", "BERT_DEFINITION"),
}


def find_family(name: object) -> Family:
    """The family called ``name``.

    Raises:
        ConfigError: For an unknown name, with the nearest.
    """
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise ConfigError(
            f"model.family = {show(name)} is not a model family{did_you_mean(name, FAMILIES)}"
        )
    return family


def read_model(section: Mapping[str, Any]) -> ModelConfig:
    """Reads the ``model`` section with its family's configuration class.

    Raises:
        ConfigError: For an unknown family, key or value.
    """
    if "family" not in section:
        near = nearest("family", map(str, section))
        if near:
            raise ConfigError(f'model.{near[0]} is not a known key; did you mean "family"?')
        raise ConfigError(f"model.family is missing; add it (one of {', '.join(FAMILIES)})")
    config: ModelConfig = read_dataclass(find_family(section["family"]).config, section, "model")
    return config


def load_definition(name: str) -> Any:
    """Imports the definition of a family (and with it torch).

    Raises:
        ConfigError: For an unknown name.
    """
    family = find_family(name)
    return getattr(importlib.import_module(family.module), family.definition)
