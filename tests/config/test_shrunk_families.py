"""T5 and BERT shrink to models that keep every option and fit the layout."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.config.reader import read_dataclass
from ds_engine.parallel.dims import ParallelDims
from models.config import AttentionConfig, MLPConfig, NormConfig, PositionConfig
from tests.config.samples import BERT_MODEL, T5_MODEL

LAYOUTS = st.builds(
    lambda tensor, pipeline: ParallelDims(tensor * pipeline, tensor=tensor, pipeline=pipeline),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.integers(1, 9),
)
SIZES = {
    "vocab_size",
    "num_layers",
    "num_decoder_layers",
    "hidden_size",
    "max_sequence_length",
    "attention",
    "mlp",
    "position",
    "vocab_multiple",
}


@st.composite
def t5_models(draw):
    kv_heads = draw(st.sampled_from([None, 1, 2, 8]))
    normal = draw(st.booleans())
    relative = PositionConfig("relative", relative_buckets=draw(st.sampled_from([4, 32, 64])))
    return dataclasses.replace(
        T5_MODEL,
        num_layers=draw(st.integers(1, 40)),
        num_decoder_layers=draw(st.none() | st.integers(1, 40)),
        attention=AttentionConfig(
            8, kv_heads, draw(st.sampled_from([None, 16])), bias=draw(st.booleans())
        ),
        mlp=MLPConfig(64, draw(st.sampled_from(["relu", "geglu_tanh"])), draw(st.booleans())),
        position=draw(st.sampled_from([relative, PositionConfig()])),
        norm=NormConfig(draw(st.sampled_from(["rmsnorm", "layernorm"]))),
        tie_embeddings=draw(st.booleans()),
        scale_logits=draw(st.sampled_from([None, True, False])),
        scale_attention=draw(st.booleans()),
        activation_dropout=draw(st.sampled_from([0.0, 0.1])),
        init="normal" if normal else "t5",
        init_std=0.02 if normal else 1.0,
        scaled_output_init=normal,
    )


@st.composite
def bert_models(draw):
    return dataclasses.replace(
        BERT_MODEL,
        num_layers=draw(st.integers(1, 40)),
        norm_first=draw(st.booleans()),
        num_token_types=draw(st.integers(0, 2)),
        sentence_head=draw(st.booleans()),
        num_labels=draw(st.sampled_from([None, 2, 7])),
        tie_embeddings=draw(st.booleans()),
    )


def check_small(config, small, dims: ParallelDims) -> None:
    assert read_dataclass(type(config), dataclasses.asdict(small), "model") == small
    assert small.check(dims) == []
    assert (small.vocab_size, small.vocab_multiple) == (61, 8)
    length = small.max_sequence_length
    assert length % dims.tensor == 0 and small.check_sequence(length, length) == []
    for field in dataclasses.fields(config):
        if field.name not in SIZES:
            assert getattr(small, field.name) == getattr(config, field.name), field.name
    assert small.attention.bias == config.attention.bias
    assert bool(small.attention.head_dim) == bool(config.attention.head_dim)
    grouped = [m.attention.kv_heads < m.attention.num_heads for m in (small, config)]
    assert grouped[0] == grouped[1]
    assert small.mlp == dataclasses.replace(
        config.mlp, intermediate_size=small.mlp.intermediate_size
    )
    assert small.position.type == config.position.type
    assert small.num_parameters() < 10**7


@given(t5_models(), LAYOUTS)
def test_t5_shrinks(config, dims) -> None:
    small = config.shrunk(dims)
    check_small(config, small, dims)
    assert small.num_layers != small.decoder_layers
    assert max(3, dims.pipeline) <= small.num_layers + small.decoder_layers <= dims.pipeline + 3
    if config.decoder_layers > config.num_layers:
        assert small.decoder_layers > small.num_layers
    if small.position.type == "relative":
        assert small.position.relative_buckets <= 8
        # The last bucket is for distances that a row has.
        assert small.position.relative_max_distance == 16 < small.max_sequence_length


@given(bert_models(), LAYOUTS)
def test_bert_shrinks(config, dims) -> None:
    small = config.shrunk(dims)
    check_small(config, small, dims)
    assert small.num_layers == max(2, dims.pipeline)


@pytest.mark.parametrize("layers", [(1, 1), (6, 6), (2, 24), (24, 2)])
def test_a_proof_of_t5_on_one_process_has_three_layers(layers) -> None:
    config = dataclasses.replace(T5_MODEL, num_layers=layers[0], num_decoder_layers=layers[1])
    small = config.shrunk(ParallelDims())
    assert sorted((small.num_layers, small.decoder_layers)) == [1, 2]
