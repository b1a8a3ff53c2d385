"""Rotary positions in Hugging Face configs, present form (``rope_parameters``) and older ones.

Before transformers 5 the base stood beside the scaling: ``rope_theta`` and ``rope_scaling`` (with
``type`` for ``rope_type``), in GPT-NeoX ``rotary_emb_base`` and ``rotary_pct``.
"""

from __future__ import annotations

from typing import Any

from ds_engine.errors import ConfigError
from models.config import GPTConfig
from models.convert.hf_config import HFConfigReader

# Their type -> (ours, {their key: our field}).
_ORIGINAL = {"original_max_position_embeddings": "original_max_sequence_length"}
_TYPES: dict[str, tuple[str, dict[str, str]]] = {
    "default": ("none", {}),
    "linear": ("linear", {"factor": "factor"}),
    "dynamic": ("dynamic_ntk", {"factor": "factor"}),
    "llama3": (
        "llama3",
        {
            "factor": "factor",
            "low_freq_factor": "low_freq_factor",
            "high_freq_factor": "high_freq_factor",
            **_ORIGINAL,
        },
    ),
    "yarn": (
        "yarn",
        {
            "factor": "factor",
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "attention_factor": "attention_factor",
            **_ORIGINAL,
        },
    ),
}
_NEEDED = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


def read_rope(
    reader: HFConfigReader,
    max_position_embeddings: int,
    *,
    base_key: str = "rope_theta",
    fraction_key: str = "partial_rotary_factor",
    default_fraction: float = 1.0,
) -> dict[str, Any]:
    """The ``position`` section of our config.

    Their "dynamic" type leaves sequences up to ``max_position_embeddings`` alone and stretches
    longer ones by their own length; ours stretches once, to ``max_sequence_length``. Both are the
    same up to the length that is read here.

    Raises:
        ConfigError: a type or key that we cannot reproduce.
    """
    parameters = dict(reader.get("rope_parameters") or reader.get("rope_scaling") or {})
    reader.get("rope_scaling")
    base = parameters.pop("rope_theta", None) or reader.get(base_key, 10000.0)
    fraction = parameters.pop("partial_rotary_factor", None)
    fraction = fraction or reader.get(fraction_key, default_fraction)
    reader.get(base_key)
    reader.get(fraction_key)
    legacy = parameters.pop("type", None)
    kind = parameters.pop("rope_type", None) or legacy or "default"
    if kind not in _TYPES:
        raise reader.unsupported("rope_parameters.rope_type", kind, f"one of {', '.join(_TYPES)}")
    ours, fields = _TYPES[kind]
    scaling: dict[str, Any] = {"type": ours}
    for key, value in parameters.items():
        if value is None or (key in _ORIGINAL and kind not in ("llama3", "yarn")):
            continue  # transformers does not read it either
        if key == "truncate" and value is True:
            continue  # its default, and our only way
        if key not in fields:
            allowed = f"{kind} with {', '.join(fields) or 'no keys'}"
            raise reader.unsupported(f"rope_parameters.{key}", value, allowed)
        scaling[fields[key]] = value
    for key in _NEEDED.get(kind, ()):
        if fields[key] not in scaling:
            raise ConfigError(f"rope_parameters.{key} is missing, but {kind} needs it; add it")
    if kind in ("llama3", "yarn"):
        scaling.setdefault("original_max_sequence_length", max_position_embeddings)
    return {
        "type": "rotary",
        "rotary_base": base,
        "rotary_fraction": fraction,
        "rotary_scaling": scaling,
    }


def write_rope(config: GPTConfig) -> dict[str, Any]:
    """Their ``rope_parameters``; without the fraction, which not every family has."""
    position = config.position
    scaling = position.rotary_scaling
    base = position.rotary_base
    kind = next(their for their, (ours, _) in _TYPES.items() if ours == scaling.type)
    if scaling.type == "dynamic_ntk":
        original = scaling.original_max_sequence_length or config.max_sequence_length
        stretch = max(config.max_sequence_length / original, 1.0)
        if stretch > 1:
            # We always use the base of the longest sequence; theirs would follow each length, so
            # the exact counterpart of ours is plain rotary positions with that base.
            dim, factor = config.rotary_dim, scaling.factor
            base *= (factor * stretch - (factor - 1)) ** (dim / (dim - 2))
            kind = "default"
    parameters = {"rope_type": kind, "rope_theta": base}
    for key, name in _TYPES[kind][1].items():
        value = getattr(scaling, name)
        if value is not None:
            parameters[key] = value
    return parameters
