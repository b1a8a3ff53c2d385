"""Conversion refuses what it cannot do, and says what and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.errors import CheckpointError, ConfigError
from ds_engine.parallel.parameter import spec_of
from ds_engine.parallel.tensor_parallel import TensorParallel
from models.convert.families import MODULES, find_hf_family
from models.convert.table import load_full, per_head, stacked, transposed
from tests.models.tiny import our_model, plan_of, randomise

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
}
GPT2_SIZES = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
T5_SIZES = {
    "vocab_size": 61,
    "d_model": 32,
    "d_kv": 12,
    "d_ff": 48,
    "num_heads": 4,
    "num_layers": 2,
    "num_decoder_layers": 3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "bert": SIZES,
    "gpt2": GPT2_SIZES,
    "gpt_neox": SIZES,
    "llama": {**SIZES, "num_key_value_heads": 2},
    "megatron-bert": {**SIZES, "tie_word_embeddings": False},
    "mt5": {**T5_SIZES, "tie_word_embeddings": False},
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 8},
    "t5": T5_SIZES,
}


def read(family: str, **changes: Any) -> Any:
    return find_hf_family(family).config_from_hf({**CONFIGS[family], **changes})


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **keys}}


def test_every_family_has_a_sample_here() -> None:
    assert set(MODULES) == set(CONFIGS)


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("gpt2", {"activation_function": "quick_gelu"}, "activation_function"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"model_type": "gptj"}, "gptj"),
        ("gpt_neox", {"hidden_act": "silu"}, "hidden_act"),
        ("gpt_neox", rope("longrope", short_factor=[1.0]), "rope_type"),
        ("llama", {"hidden_act": "relu"}, "hidden_act"),
        ("llama", {"attention_multiplier": 0.5}, "attention_multiplier"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"vocab_size": None}, "vocab_size"),
        ("llama", {"hidden_size": 33}, "hidden_size"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", rope("linear"), "factor"),
        ("llama", rope("llama3", factor=8.0), "low_freq_factor"),
        ("llama", rope("yarn", factor=2.0, truncate=False), "truncate"),
        ("llama", rope("yarn", factor=2.0, mscale=0.7), "mscale"),
        ("llama", rope("default", factor=2.0), "factor"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ],
)
def test_unsupported_features_are_named(family, changes, named) -> None:
    with pytest.raises(ConfigError, match=named):
        read(family, **changes)


def test_keys_without_effect_are_accepted() -> None:
    neutral = {"architectures": ["X"], "torch_dtype": "bfloat16", "use_cache": True}
    assert read("llama", **neutral, transformers_version="4.40", new_key=None) == read("llama")


def test_older_spellings_mean_the_same() -> None:
    scaling = {"factor": 2.0, "original_max_position_embeddings": 16}
    new = read("llama", rope_parameters={"rope_type": "yarn", "rope_theta": 5e5, **scaling})
    assert read("llama", rope_theta=5e5, rope_scaling={"type": "yarn", **scaling}) == new
    new = read("gpt_neox", **rope("default", partial_rotary_factor=0.5))
    assert read("gpt_neox", rotary_pct=0.5, rotary_emb_base=10000) == new
    assert read("gpt_neox").position.rotary_fraction == 0.25


@pytest.mark.parametrize(
    ("family", "section", "changes", "named"),
    [
        ("gpt2", "attention", {"qk_norm": True}, "qk_norm"),
        ("gpt2", "attention", {"num_kv_heads": 2}, "kv_heads"),
        ("gpt2", "attention", {"output_bias": False}, "output_bias"),
        ("gpt2", "attention", {"head_dim": 4}, "head_dim"),
        ("gpt2", "norm", {"type": "rmsnorm"}, "norm.type"),
        ("gpt2", "position", {"type": "alibi"}, "position.type"),
        ("gpt2", "mlp", {"activation": "swiglu"}, "mlp.activation"),
        ("gpt2", None, {"head_bias": True}, "head_bias"),
        ("gpt_neox", "attention", {"output_bias": False}, "output_bias"),
        ("gpt_neox", "position", {"rotary_interleaved": True}, "rotary_interleaved"),
        ("llama", "attention", {"sliding_window": 8}, "sliding_window"),
        ("llama", "attention", {"qk_norm": True}, "qk_norm"),
        ("llama", "mlp", {"activation": "gelu"}, "mlp.activation"),
        ("llama", None, {"parallel_residual": True}, "parallel_residual"),
        ("qwen3", "attention", {"qk_norm": False}, "qk_norm"),
        ("qwen3", "mlp", {"bias": True}, "mlp.bias"),
    ],
)
def test_what_a_family_cannot_express_is_named(family, section, changes, named) -> None:
    config = read(family)
    if section is not None:
        changes = {section: replace(getattr(config, section), **changes)}
    with pytest.raises(ConfigError, match=named):
        find_hf_family(family).config_to_hf(replace(config, **changes))


def test_unknown_family_suggests_the_nearest() -> None:
    with pytest.raises(ConfigError, match='did you mean "llama"'):
        find_hf_family("lama")


def hf_weights(family: str, **changes: Any) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    config = read(family, **changes)
    parameters = randomise(our_model(config), 1).canonical_parameters()
    full = {name: p.detach() for name, p in parameters.items()}
    found = find_hf_family(family)
    return found, config, found.to_hf(full, config)


@pytest.mark.parametrize("family", CONFIGS)
def test_padded_vocabulary_is_cut_and_zero_again(family) -> None:
    found, config, state = hf_weights(family)
    assert state[found.embedding].shape[0] == config.vocab_size
    model = our_model(config)
    table = model.canonical_parameters()["embedding.weight"]
    assert table.shape[0] > config.vocab_size
    with torch.no_grad():
        table.fill_(7.0)
    load_full(model.canonical_parameters(), found.from_hf(state, config))
    assert torch.equal(table[: config.vocab_size], state[found.embedding])
    assert torch.count_nonzero(table[config.vocab_size :]) == 0


def test_written_tensors_do_not_share_memory() -> None:
    _, _, state = hf_weights("llama")
    places = [t.untyped_storage().data_ptr() for t in state.values()]
    assert len(set(places)) == len(places)
    assert all(t.is_contiguous() for t in state.values())


def test_names_are_checked_in_both_directions() -> None:
    found, config, state = hf_weights("gpt_neox")
    name = "gpt_neox.layers.1.mlp.dense_h_to_4h.bias"
    without = {key: t for key, t in state.items() if key != name}
    with pytest.raises(CheckpointError, match=f"lacks 1 .*{name}"):
        found.from_hf(without, config)
    with pytest.raises(CheckpointError, match=r"unexpected 1 .*adapter"):
        found.from_hf({**state, "gpt_neox.adapter": torch.zeros(1)}, config)
    full = found.from_hf(state, config)
    with pytest.raises(CheckpointError, match=r"unexpected 1 .*layers\.9\.x"):
        found.to_hf({**full, "layers.9.x": torch.zeros(1)}, config)
    parameters = our_model(config).canonical_parameters()
    with pytest.raises(CheckpointError, match=r"lacks 1 .*head\.weight"):
        load_full(parameters, {k: t for k, t in full.items() if k != "head.weight"})


def test_wrong_shapes_are_named_and_nothing_is_changed() -> None:
    found, config, state = hf_weights("llama")
    parameters = our_model(config).canonical_parameters()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    full = found.from_hf(state, config)
    full["layers.1.mlp.down.weight"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down\.weight is \(3, 3\)"):
        load_full(parameters, full)
    assert all(torch.equal(before[name], p) for name, p in parameters.items())
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight has 60 rows"):
        found.from_hf({**state, found.embedding: state[found.embedding][:60]}, config)
    broken = {**state, "model.layers.0.self_attn.k_proj.weight": torch.zeros(5, 32)}
    with pytest.raises(CheckpointError, match=r"k_proj.*\(5, 32\)"):
        found.from_hf(broken, config)


def test_tied_head_must_be_the_embedding() -> None:
    found, config, state = hf_weights("gpt2")
    assert config.tie_embeddings and found.head not in state
    embedding = state[found.embedding]
    found.from_hf({**state, found.head: embedding.clone()}, config)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        found.from_hf({**state, found.head: embedding + 1}, config)


def test_older_checkpoints_are_read() -> None:
    found, config, state = hf_weights("gpt2")
    base = {name.removeprefix("transformer."): t for name, t in state.items()}
    base["h.0.attn.bias"] = torch.ones(1, 1, 4, 4).tril()
    base["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    assert found.from_hf(base, config).keys() == found.from_hf(state, config).keys()
    found, config, state = hf_weights("gpt_neox")
    state["embed_out.weight"] = state.pop("lm_head.weight")
    state["gpt_neox.layers.1.attention.rotary_emb.inv_freq"] = torch.ones(1)
    assert "head.weight" in found.from_hf(state, config)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_rearrangements_are_inverse(heads, blocks, width, columns) -> None:
    x = torch.arange(heads * blocks * width * columns).reshape(-1, columns)
    entries = [per_head(heads, blocks)("a", "b"), transposed("a", "b")]
    entries.append(stacked("a", *(f"b{i}" for i in range(blocks))))
    for entry in entries:
        assert torch.equal(entry.read(*entry.write(x)), x)
    assert torch.equal(entries[0].write(entries[0].read(x))[0], x)


def test_per_head_order_by_hand() -> None:
    entry = per_head(2, 3)("a", "b")
    theirs = torch.tensor([10, 11, 12, 20, 21, 22])  # head 1: q, k, v; head 2: q, k, v
    assert entry.read(theirs).tolist() == [10, 20, 11, 21, 12, 22]


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("size", [2, 4])
def test_shards_come_from_the_full_weights(family, size) -> None:
    """Each rank of a tensor-parallel group takes its part; together they hold everything."""
    found, config, state = hf_weights(family)
    full = found.from_hf(state, config)
    joined: dict[str, torch.Tensor] = {}
    for rank in range(size):
        plan = plan_of(config, TensorParallel(None, rank, size))
        parameters = {
            f"{spec.name}.{name}": parameter
            for spec in [*plan.layers, *plan.shared]
            for name, parameter in spec.build().named_parameters()
        }
        load_full(parameters, full)
        for name, parameter in parameters.items():
            spec = spec_of(parameter)
            whole = joined.setdefault(name, torch.full(spec.full_shape, torch.nan))
            if not spec.sharded:
                assert torch.equal(parameter, full[name])
            spec.place(parameter.detach(), whole)
    for name, whole in joined.items():
        rows = full[name].shape[0]
        assert torch.equal(whole[:rows], full[name]), name
        assert torch.equal(whole[rows:], torch.zeros_like(whole[rows:])), name
    again = found.to_hf(joined, config)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)
