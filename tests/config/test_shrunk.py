"""What a proof trains: any model that fits a layout shrinks to a model that fits it too."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.config.reader import read_dataclass
from ds_engine.errors import ConfigError
from ds_engine.parallel.dims import ParallelDims
from models.common.position import rotary_frequencies
from models.config import (
    AttentionConfig,
    GPTConfig,
    MLPConfig,
    NormConfig,
    PositionConfig,
    RotaryScalingConfig,
)

SCALINGS = ("none", "linear", "dynamic_ntk", "llama3", "yarn")
DEGREES = st.sampled_from([1, 2, 3, 4, 6, 8])


def positions() -> st.SearchStrategy[PositionConfig]:
    def scaling(kind: str, factor: float, original: int) -> RotaryScalingConfig:
        if kind == "none":
            return RotaryScalingConfig()
        return RotaryScalingConfig(kind, factor, original)

    rotary = st.builds(
        PositionConfig,
        type=st.just("rotary"),
        rotary_base=st.sampled_from([1.5, 1e4, 5e5]),
        rotary_fraction=st.one_of(st.sampled_from([0.05, 0.25, 0.4, 1.0]), st.floats(0.01, 1)),
        rotary_interleaved=st.booleans(),
        rotary_scaling=st.builds(
            scaling, st.sampled_from(SCALINGS), st.floats(1, 64), st.integers(1, 10**5)
        ),
    )
    others = st.sampled_from(["learned", "alibi", "none"]).map(PositionConfig)
    return st.one_of(rotary, others)


@st.composite
def models_in_layouts(draw) -> tuple[GPTConfig, ParallelDims]:
    """A model that its own rules and ``check`` accept, and the layout."""
    tensor, pipeline = draw(DEGREES), draw(st.integers(1, 4))
    heads = tensor * draw(st.integers(1, 4))
    divide = [n for n in range(1, heads + 1) if heads % n == 0]
    kv_heads = draw(st.sampled_from([n for n in divide if n % tensor == 0 or tensor % n == 0]))
    head_dim = draw(st.sampled_from([2, 4, 10, 64, 80, 128]))
    tied = draw(st.booleans())
    config = GPTConfig(
        vocab_size=draw(st.integers(1, 10**5)),
        num_layers=pipeline * draw(st.integers(1, 3)),
        hidden_size=heads * head_dim,
        max_sequence_length=draw(st.integers(1, 10**5)),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=draw(st.sampled_from([kv_heads, None])),
            head_dim=draw(st.sampled_from([head_dim, None])),
            qk_norm=draw(st.booleans()),
            sliding_window=draw(st.sampled_from([None, 1, 4096])),
            backend=draw(st.sampled_from(["auto", "flash", "sdpa"])),
        ),
        mlp=MLPConfig(tensor * draw(st.integers(1, 500))),
        position=draw(positions()),
        norm=NormConfig(draw(st.sampled_from(["layernorm", "rmsnorm"]))),
        tie_embeddings=tied,
        head_bias=not tied and draw(st.booleans()),
    )
    return config, ParallelDims(tensor * pipeline, tensor=tensor, pipeline=pipeline)


def read_again(config: GPTConfig) -> GPTConfig:
    return read_dataclass(GPTConfig, dataclasses.asdict(config), "model")


@given(models_in_layouts(), DEGREES)
@settings(max_examples=300, deadline=None)
def test_what_shrinks_fits_where_the_model_fits(case, halved) -> None:
    config, dims = case
    try:
        read_again(config)
    except ConfigError:
        return
    assert config.check(dims) == []
    # A proof may also have had to take fewer ranks than the run.
    for layout in (dims, ParallelDims(halved, tensor=halved)):
        small = config.shrunk(layout)
        assert read_again(small) == small
        assert small.check(layout) == []
        length = small.max_sequence_length
        assert length % layout.tensor == 0 and small.check_sequence(length) == []
        assert small.num_parameters() < 10**7
        assert small.attention.backend != "flash"
        assert (small.attention.kv_heads < small.attention.num_heads) == (
            config.attention.kv_heads < config.attention.num_heads
        )
        if small.position.type == "rotary":
            assert small.rotary_dim >= 4 and small.rotary_dim % 2 == 0
            inverse, factor = rotary_frequencies(
                small.rotary_dim, small.position.rotary_base, small.position.rotary_scaling, length
            )
            assert bool(torch.isfinite(inverse).all()) and factor > 0


@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_accepted_scaling_has_frequencies_in_the_smallest_head(scaling) -> None:
    least = 4 if scaling == "dynamic_ntk" else 2
    config = RotaryScalingConfig(scaling, 2.0, 16)
    inverse, _ = rotary_frequencies(least, 10000.0, config, 64)
    assert inverse.shape == (least // 2,) and bool(torch.isfinite(inverse).all())


def test_a_portable_model_is_the_same_with_another_kernel() -> None:
    attention = AttentionConfig(4, backend="flash")
    config = GPTConfig(10, 2, 32, 16, attention, MLPConfig(8))
    plain = dataclasses.replace(config, attention=AttentionConfig(4))
    assert config.portable() == plain
    assert plain.portable() is plain
