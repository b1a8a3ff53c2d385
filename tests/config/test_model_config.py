"""The model's arithmetic, against published parameter counts, and its layout rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.errors import ConfigError
from ds_engine.parallel.dims import ParallelDims
from models.config import GPTConfig
from models.registry import load_definition, read_model
from models.sections import divisors


def gpt(**keys) -> GPTConfig:
    base = {
        "family": "gpt",
        "vocab_size": 1000,
        "num_layers": 4,
        "hidden_size": 64,
        "max_sequence_length": 128,
        "attention": {"num_heads": 8},
        "mlp": {"intermediate_size": 256},
    }
    return read_model({**base, **keys})


ROTARY = {"type": "rotary"}
RMS = {"type": "rmsnorm"}
YARN = {
    "type": "rotary",
    "rotary_scaling": {"type": "yarn", "original_max_sequence_length": 64, "factor": 2.0},
}

PUBLISHED = {
    "GPT-2 124M": (
        124_439_808,
        {
            "vocab_size": 50257,
            "num_layers": 12,
            "hidden_size": 768,
            "max_sequence_length": 1024,
            "attention": {"num_heads": 12},
            "mlp": {"intermediate_size": 3072},
        },
    ),
    "GPT-2 XL": (
        1_557_611_200,
        {
            "vocab_size": 50257,
            "num_layers": 48,
            "hidden_size": 1600,
            "max_sequence_length": 1024,
            "attention": {"num_heads": 25},
            "mlp": {"intermediate_size": 6400},
        },
    ),
    "GPT-NeoX 20B": (
        20_554_567_680,
        {
            "vocab_size": 50432,
            "num_layers": 44,
            "hidden_size": 6144,
            "max_sequence_length": 2048,
            "attention": {"num_heads": 64},
            "mlp": {"intermediate_size": 24576},
            "position": {"type": "rotary", "rotary_fraction": 0.25},
            "parallel_residual": True,
            "tie_embeddings": False,
        },
    ),
    "Llama 2 7B": (
        6_738_415_616,
        {
            "vocab_size": 32000,
            "num_layers": 32,
            "hidden_size": 4096,
            "max_sequence_length": 4096,
            "attention": {"num_heads": 32, "bias": False},
            "norm": RMS,
            "position": ROTARY,
            "mlp": {"intermediate_size": 11008, "activation": "swiglu", "bias": False},
            "tie_embeddings": False,
        },
    ),
    "Llama 3.1 8B": (
        8_030_261_248,
        {
            "vocab_size": 128256,
            "num_layers": 32,
            "hidden_size": 4096,
            "max_sequence_length": 131072,
            "attention": {"num_heads": 32, "num_kv_heads": 8, "bias": False},
            "norm": RMS,
            "mlp": {"intermediate_size": 14336, "activation": "swiglu", "bias": False},
            "position": ROTARY,
            "tie_embeddings": False,
        },
    ),
    "Qwen2.5 0.5B": (
        494_032_768,
        {
            "vocab_size": 151936,
            "num_layers": 24,
            "hidden_size": 896,
            "max_sequence_length": 32768,
            "attention": {"num_heads": 14, "num_kv_heads": 2, "bias": True, "output_bias": False},
            "mlp": {"intermediate_size": 4864, "activation": "swiglu", "bias": False},
            "norm": RMS,
            "position": ROTARY,
        },
    ),
    "Qwen3 0.6B": (
        596_049_920,
        {
            "vocab_size": 151936,
            "num_layers": 28,
            "hidden_size": 1024,
            "max_sequence_length": 32768,
            "attention": {
                "num_heads": 16,
                "num_kv_heads": 8,
                "head_dim": 128,
                "bias": False,
                "qk_norm": True,
            },
            "mlp": {"intermediate_size": 3072, "activation": "swiglu", "bias": False},
            "norm": RMS,
            "position": ROTARY,
        },
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name) -> None:
    parameters, keys = PUBLISHED[name]
    assert gpt(**keys).num_parameters() == parameters


def test_head_bias_counts_once_per_word() -> None:
    untied, biased = gpt(tie_embeddings=False), gpt(tie_embeddings=False, head_bias=True)
    assert biased.num_parameters() - untied.num_parameters() == 1000


def test_flops_follow_palm() -> None:
    config = gpt()
    weights = 4 * (4 * 64 * 64 + 2 * 64 * 256) + 1000 * 64
    assert config.flops_per_token(128) == 6 * weights + 12 * 4 * 64 * 128
    assert gpt(tie_embeddings=False).flops_per_token(128) == config.flops_per_token(128)
    window = gpt(attention={"num_heads": 8, "sliding_window": 32})
    assert window.flops_per_token(128) == config.flops_per_token(32)


@given(st.integers(1, 10**6), st.integers(1, 256), st.integers(1, 64))
def test_padded_vocabulary(words, multiple, tensor) -> None:
    padded = gpt(vocab_size=words, vocab_multiple=multiple).padded_vocab_size(tensor)
    assert padded >= words
    assert padded % (multiple * tensor) == 0
    assert padded - words < multiple * tensor


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 65}, "num_heads = 8 does not divide model.hidden_size = 65"),
        ({"attention": {"num_heads": 8, "num_kv_heads": 3}}, "use 1, 2, 4 or 8"),
        ({"attention": {"num_heads": 8, "num_kv_heads": 16}}, "use 1, 2, 4 or 8"),
        ({"attention": {"num_heads": 8, "sliding_window": 0}}, "must be at least 1"),
        ({"attention": {"num_heads": 8, "head_dim": 7}, "position": ROTARY}, "turn pairs"),
        ({"position": {"type": "rotary", "rotary_fraction": 0.1}}, "turns 0 features"),
        ({"position": {"type": "rotary", "rotary_fraction": 1.5}}, "at most 1"),
        ({"position": {"type": "alibi", "rotary_base": 5e5}}, "rotary_base is set but"),
        ({"position": {"type": "alibi", "rotary_scaling": {"type": "linear"}}}, "is set but"),
        ({"position": {"type": "rotary", "rotary_scaling": {"factor": 2}}}, "has no effect"),
        ({"position": {"type": "rotary", "rotary_scaling": {"type": "yarn"}}}, "yarn needs"),
        ({"position": {**YARN, "rotary_base": 1.0}}, "must be above 1"),
        (
            {
                "position": {
                    "type": "rotary",
                    "rotary_fraction": 0.25,
                    "rotary_scaling": {"type": "dynamic_ntk", "factor": 2},
                }
            },
            "an even number of at least 4",
        ),
        (
            {"attention": {"num_heads": 8, "backend": "flash"}, "position": {"type": "alibi"}},
            "flash cannot add ALiBi",
        ),
        (
            {"attention": {"num_heads": 8, "backend": "flash", "dropout": 0.1}},
            "flash cannot drop attention probabilities (dropout = 0.1)",
        ),
        ({"position": {"type": "rotry"}}, 'did you mean "rotary"'),
        ({"mlp": {"intermediate_size": 4, "activation": "swigelu"}}, 'did you mean "swiglu"'),
        ({"hidden_dropout": 1.0}, "below 1"),
        ({"head_bias": True}, "head_bias = true needs tie_embeddings = false"),
        ({"family": "gtp"}, 'did you mean "gpt"'),
        ({"family": ["gpt"]}, "is not a model family"),
    ],
)
def test_inconsistent_models_are_refused(keys, message) -> None:
    with pytest.raises(ConfigError) as caught:
        gpt(**keys)
    assert message in str(caught.value)


def dims(**degrees) -> ParallelDims:
    world = 1
    for axis in ("tensor", "pipeline", "context"):
        world *= degrees.get(axis, 1)
    return ParallelDims(world=world, **degrees)


def test_layouts_that_fit_have_no_problems() -> None:
    config = gpt(attention={"num_heads": 8, "num_kv_heads": 2})
    for degrees in ({}, {"tensor": 2}, {"tensor": 4}, {"tensor": 8, "pipeline": 4}):
        assert config.check(dims(**degrees)) == []


def test_layouts_that_do_not_fit_name_those_that_do() -> None:
    config = gpt(attention={"num_heads": 8}, mlp={"intermediate_size": 100})
    (heads, width) = config.check(dims(tensor=3))
    assert heads == (
        "parallel.tensor = 3 does not divide model.attention.num_heads = 8; use 1, 2, 4 or 8"
    )
    assert width.endswith("model.mlp.intermediate_size = 100; use 1, 2 or 4")
    kv = gpt(hidden_size=96, attention={"num_heads": 12, "num_kv_heads": 4, "head_dim": 8})
    (problem,) = kv.check(dims(tensor=6))[:1]
    assert "num_kv_heads = 4 nor is a multiple of it; use 1, 2 or 4" in problem
    (deep,) = config.check(dims(pipeline=5))
    assert "model.num_layers = 4" in deep
    assert config.check(dims(pipeline=2, virtual_pipeline=4))


@given(st.integers(1, 16), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 512))
def test_every_proposed_degree_works(tensor, kv_heads, width) -> None:
    config = gpt(
        attention={"num_heads": 16, "num_kv_heads": kv_heads, "head_dim": 4},
        mlp={"intermediate_size": width},
    )
    for problem in config.check(dims(tensor=tensor)):
        if "intermediate_size" in problem or "num_kv_heads" in problem:
            words = problem.rpartition("use ")[2].replace(" or ", ", ").split(", ")
            assert all(config.check(dims(tensor=int(word))) == [] for word in words)


def test_learned_positions_limit_the_sequence() -> None:
    assert gpt().check_sequence(128) == []
    assert "model.max_sequence_length = 128" in gpt().check_sequence(129)[0]
    assert gpt(position=ROTARY).check_sequence(129) == []
    assert gpt().position_limit == 128
    for kind in ("rotary", "alibi", "none"):
        assert gpt(position={"type": kind}).position_limit is None


def test_divisors_in_words() -> None:
    assert divisors(1) == "1"
    assert divisors(12) == "1, 2, 3, 4, 6 or 12"


def test_unknown_definitions_are_refused_without_an_import() -> None:
    with pytest.raises(ConfigError, match="not a model family"):
        load_definition("bret")
