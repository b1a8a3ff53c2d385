"""T5's and BERT's arithmetic, against published counts and by hand, and their rules."""

from dataclasses import replace

import pytest

from ds_engine.errors import ConfigError
from ds_engine.parallel.dims import ParallelDims
from models.bert_config import BertConfig
from models.registry import FAMILIES, read_model
from models.t5_config import T5Config
from tests.config.samples import BERT_MODEL, MODELS, T5_MODEL

T5_SECTIONS = {
    "norm": {"type": "rmsnorm", "epsilon": 1e-6},
    "position": {"type": "relative"},
}


def t5(**keys) -> T5Config:
    base = {
        "family": "t5",
        "vocab_size": 32128,
        "num_layers": 6,
        "hidden_size": 512,
        "max_sequence_length": 512,
        "attention": {"num_heads": 8, "bias": False},
        "mlp": {"intermediate_size": 2048, "activation": "relu", "bias": False},
    }
    return read_model({**base, **keys})


def bert(**keys) -> BertConfig:
    base = {
        "family": "bert",
        "vocab_size": 30522,
        "num_layers": 12,
        "hidden_size": 768,
        "max_sequence_length": 512,
        "attention": {"num_heads": 12},
        "mlp": {"intermediate_size": 3072},
    }
    return read_model({**base, **keys})


MT5_SMALL = {
    "vocab_size": 250112,
    "num_layers": 8,
    "attention": {"num_heads": 6, "head_dim": 64, "bias": False},
    "mlp": {"intermediate_size": 1024, "activation": "geglu_tanh", "bias": False},
    "tie_embeddings": False,
}
T5_BASE = {
    "num_layers": 12,
    "hidden_size": 768,
    "attention": {"num_heads": 12, "bias": False},
}
V11_BASE = {
    **T5_BASE,
    "mlp": {"intermediate_size": 2048, "activation": "geglu_tanh", "bias": False},
    "tie_embeddings": False,
}
MINILM = {
    "num_layers": 6,
    "hidden_size": 384,
    "mlp": {"intermediate_size": 1536},
    "sentence_head": False,
}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (t5(), 60_506_624),
        (t5(**T5_BASE, mlp={**V11_BASE["mlp"], "activation": "relu", "intermediate_size": 3072}),
         222_903_552),
        (t5(**V11_BASE), 247_577_856),
        (t5(**MT5_SMALL), 300_176_768),
        # BERT-base: 109,482,240 of encoder and pooler, and the heads.
        (bert(), 109_482_240 + (768 * 769 + 2 * 768 + 30522) + 2 * 769),
        (bert(num_labels=3), 109_482_240 + 3 * 769),
        # all-MiniLM-L6: 22,713,216 with a pooler of 384 x 385, which MLM heads stand in for.
        (bert(**MINILM), 22_713_216 + 2 * 384 + 30522),
    ],
    ids=["t5-small", "t5-base", "t5-v1.1-base", "mt5-small", "bert", "bert-3-classes", "minilm"],
)  # fmt: skip
def test_parameters_of_published_models(config, parameters) -> None:
    assert config.num_parameters() == parameters


def test_every_option_of_t5_counts() -> None:
    hidden, inner, keys, width, words = 24, 4 * 5, 2 * 5, 40, 100
    base = T5Config(
        words, 3, hidden, 16,
        attention=replace(T5_MODEL.attention, num_heads=4, num_kv_heads=2, head_dim=5),
        mlp=replace(T5_MODEL.mlp, intermediate_size=width),
        num_decoder_layers=2,
    )  # fmt: skip
    attention = hidden * inner + 2 * hidden * keys + inner * hidden
    mlp = 3 * hidden * width
    encoder, decoder = attention + mlp + 2 * hidden, 2 * attention + mlp + 3 * hidden
    total = words * hidden + 3 * encoder + 2 * decoder + 2 * hidden + 2 * 32 * 4
    assert base.num_parameters() == total
    learned = replace(base, position=replace(base.position, type="learned"))
    assert learned.num_parameters() == total - 2 * 32 * 4 + 2 * 16 * hidden
    untied = replace(base, tie_embeddings=False, head_bias=True)
    assert untied.num_parameters() == total + words * hidden + words
    biased = replace(base, attention=replace(base.attention, bias=True))
    assert biased.num_parameters() == total + 7 * (inner + 2 * keys + hidden)
    biased = replace(base, mlp=replace(base.mlp, bias=True))
    assert biased.num_parameters() == total + 5 * (2 * width + hidden)
    layernorm = replace(base, norm=replace(base.norm, type="layernorm"))
    assert layernorm.num_parameters() == total + (3 * 2 + 2 * 3 + 2) * hidden
    assert replace(base, num_decoder_layers=None).num_parameters() == total + decoder


def test_every_option_of_bert_counts() -> None:
    base, hidden, words = BERT_MODEL, 64, 1000
    layer = 4 * hidden * (hidden + 1) + 2 * hidden * 96 + 96 + hidden + 4 * hidden
    embedding = (words + 128 + 2) * hidden + 2 * hidden
    head = hidden * (hidden + 1) + 2 * hidden + words
    total = embedding + 4 * layer + head
    assert base.num_parameters() == total
    # The norm after the embedding goes, and one after the layers comes.
    assert replace(base, norm_first=True).num_parameters() == total
    assert replace(base, num_token_types=0).num_parameters() == total - 2 * hidden
    pooler = hidden * (hidden + 1)
    assert replace(base, sentence_head=True).num_parameters() == total + pooler + 2 * (hidden + 1)
    assert replace(base, tie_embeddings=False).num_parameters() == total + words * hidden
    classes = replace(base, num_labels=5, sentence_head=True)
    assert classes.num_parameters() == total - head + pooler + 5 * (hidden + 1)
    assert not classes.has_sentence_head


def test_flops_of_a_row() -> None:
    config, source, target = T5_MODEL, 20, 12
    heads, mlp = 4 * 64 * 64, 3 * 64 * 96
    encoder = 6 * source * (heads + mlp) + 12 * 64 * source * source
    decoder = 6 * target * (heads + 2 * 64 * 64 + mlp) + 6 * source * 2 * 64 * 64
    decoder += 12 * 64 * target * (target + source)
    head = 6 * target * 1000 * 64
    assert config.flops_per_sample(source, target) == 3 * encoder + 2 * decoder + head
    assert config.flops_per_sample(source, None) == config.flops_per_sample(source, source)
    assert config.flops_per_token(32) == config.flops_per_sample(32, 32) // 64
    layer = 4 * 64 * 64 + 2 * 64 * 96
    weights = 4 * layer + 64 * 64 + 64 * 1000
    assert BERT_MODEL.flops_per_token(20) == 6 * weights + 12 * 4 * 64 * 20
    classes = replace(BERT_MODEL, num_labels=2)
    assert classes.flops_per_token(20) == 6 * 4 * layer + 12 * 4 * 64 * 20
    for name in ("gpt", "bert"):
        model = MODELS[name]
        assert model.flops_per_sample(20, None) == 20 * model.flops_per_token(20)


def test_defaults_are_those_of_the_papers() -> None:
    config = t5()
    assert (config.position.type, config.norm.type, config.norm.epsilon) == (
        "relative", "rmsnorm", 1e-6,
    )  # fmt: skip
    assert config.decoder_layers == 6 and config.has_scaled_logits
    assert not t5(tie_embeddings=False).has_scaled_logits
    assert t5(tie_embeddings=False, scale_logits=True).has_scaled_logits
    assert not config.scale_attention and config.is_encoder_decoder
    other = bert()
    assert (other.norm.type, other.norm.epsilon, other.norm_first) == ("layernorm", 1e-12, False)
    assert other.has_sentence_head and not other.is_encoder_decoder


HEADS = {"num_heads": 8}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention": {"num_heads": 7}}, "num_heads = 7 does not divide model.hidden_size = 512"),
        ({"position": {"type": "rotary"}}, 'not for T5 models; use "relative" or "learned"'),
        ({"position": {"type": "none"}}, "not for T5 models"),
        ({"position": {"relative_buckets": 16}}, "relative_buckets is set but"),
        ({"position": {"type": "relative", "rotary_base": 5.0}}, "rotary_base is set but"),
        ({"position": {"type": "relative", "relative_buckets": 7}}, "must be even"),
        ({"position": {"type": "relative", "relative_buckets": 2}}, "must be at least 4"),
        (
            {"position": {"type": "relative", "relative_max_distance": 16}},
            "must be above relative_buckets / 2 = 16",
        ),
        ({"attention": {**HEADS, "qk_norm": True}}, "qk_norm = true is not an option of T5"),
        ({"attention": {**HEADS, "sliding_window": 4}}, "sliding_window = 4 is not an option"),
        ({"attention": {**HEADS, "backend": "flash"}}, "flash is not for T5"),
        ({"init": "normal"}, "init_std = 1 is no standard deviation"),
        ({"scaled_output_init": True}, "has no effect with model.init = t5"),
        ({"head_bias": True}, "needs tie_embeddings = false"),
        ({"num_decoder_layers": 0}, "must be at least 1"),
        ({"decoder_layers": 2}, 'did you mean "num_decoder_layers"'),
        ({"norm_first": True}, "norm_first is not a known key"),
    ],
)
def test_inconsistent_t5_models_are_refused(keys, message) -> None:
    with pytest.raises(ConfigError) as caught:
        t5(**keys)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"position": {"type": "relative"}}, 'not for BERT models; use "learned" or "rotary"'),
        ({"position": {"type": "alibi"}}, "not for BERT models"),
        ({"attention": {"num_heads": 12, "qk_norm": True}}, "not an option of BERT models"),
        ({"attention": {"num_heads": 12, "sliding_window": 4}}, "not an option of BERT models"),
        ({"attention": {"num_heads": 5}}, "num_heads = 5 does not divide"),
        ({"num_labels": 1}, "leaves nothing to tell apart"),
        ({"num_labels": 0}, "must be at least 1"),
        ({"num_token_types": -1}, "must be at least 0"),
        ({"head_bias": True}, "head_bias is not a known key"),
    ],
)
def test_inconsistent_bert_models_are_refused(keys, message) -> None:
    with pytest.raises(ConfigError) as caught:
        bert(**keys)
    assert message in str(caught.value)


def test_gpt_has_no_relative_positions() -> None:
    section = {
        "family": "gpt",
        "vocab_size": 100,
        "num_layers": 2,
        "hidden_size": 32,
        "max_sequence_length": 8,
        "attention": {"num_heads": 2},
        "mlp": {"intermediate_size": 32},
    }
    with pytest.raises(ConfigError, match="type = relative is not for GPT models"):
        read_model({**section, "position": {"type": "relative"}})


def test_lengths_are_limited_by_tables_only() -> None:
    assert t5().check_sequence(9999, 9999) == []
    learned = t5(position={"type": "learned"})
    assert learned.position_limit == 512
    assert learned.check_sequence(512, 512) == []
    assert learned.check_sequence(512) == []
    encoder, decoder = learned.check_sequence(513, 514)
    assert encoder.startswith("data.sequence_length = 513 is longer than")
    assert decoder.startswith("data.decoder_sequence_length = 514 is longer than")
    assert bert().check_sequence(512) == []
    assert "513 is longer than model.max_sequence_length = 512" in bert().check_sequence(513)[0]


def test_stages_are_shared_by_encoder_and_decoder() -> None:
    dims = ParallelDims(10, pipeline=10)
    assert t5(num_decoder_layers=4).check(dims) == []
    assert t5(num_layers=1, num_decoder_layers=9).check(dims) == []
    (problem,) = t5(num_decoder_layers=3).check(dims)
    assert "model.num_layers + num_decoder_layers = 6 + 3 = 9, but each stage" in problem
    (problem,) = bert(num_layers=9).check(dims)
    assert "more than model.num_layers = 9" in problem
    assert "use 1, 2, 4 or 8" in t5().check(ParallelDims(3, tensor=3))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_the_same_questions(family) -> None:
    model = MODELS[family]
    assert model.family == family
    assert model.padded_vocab_size(2) == 1024
    assert model.portable() == model
    assert model.flops_per_sample(16, 8) > 0
    assert model.check(ParallelDims(2, tensor=2)) == []
