"""The number of parameters that a configuration states is that of the model built from it."""

from dataclasses import replace

import pytest

from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel
from models.common.definition import PlanOptions
from models.config import AttentionConfig, MLPConfig, NormConfig, PositionConfig
from models.registry import load_definition
from tests.config.samples import BERT_MODEL, MODEL, T5_MODEL

# Without padding, because the count is of the words alone.
GPT, T5, BERT = (replace(model, vocab_multiple=1) for model in (MODEL, T5_MODEL, BERT_MODEL))
BIASED = MLPConfig(96, "relu", bias=True)
CASES = {
    "gpt": GPT,
    "gpt-learned-qk-norm": replace(
        GPT, position=PositionConfig(), attention=AttentionConfig(8, qk_norm=True)
    ),
    "gpt-untied-bias": replace(GPT, tie_embeddings=False, head_bias=True),
    "t5": T5,
    "t5-untied-bias": replace(T5, tie_embeddings=False, head_bias=True),
    "t5-learned-layernorm-biases": replace(
        T5,
        position=PositionConfig(),
        norm=NormConfig("layernorm"),
        attention=AttentionConfig(8),
        mlp=BIASED,
    ),
    "t5-grouped-wide": replace(
        T5, attention=AttentionConfig(8, 2, 16, bias=False), num_decoder_layers=None
    ),
    "t5-output-bias": replace(T5, attention=AttentionConfig(8, bias=False, output_bias=True)),
    "t5-few-buckets": replace(T5, position=PositionConfig("relative", relative_buckets=8)),
    "bert": BERT,
    "bert-pre-norm": replace(BERT, norm_first=True),
    "bert-sentence": replace(BERT, sentence_head=True),
    "bert-untied-no-types": replace(BERT, tie_embeddings=False, num_token_types=0),
    "bert-classes": replace(BERT, num_labels=3, tie_embeddings=False),
    "bert-grouped-gated": replace(
        BERT, attention=AttentionConfig(8, 2, bias=False), mlp=MLPConfig(96, "geglu")
    ),
    "bert-rmsnorm": replace(BERT, norm=NormConfig("rmsnorm"), sentence_head=True),
}


@pytest.mark.parametrize("name", CASES)
def test_the_stated_count_is_the_built_one(name) -> None:
    config = CASES[name]
    plan = load_definition(config.family).plan(config, TensorParallel.single(), PlanOptions())
    built = SequentialModel(plan).canonical_parameters()
    sizes = {key: value.numel() for key, value in built.items()}
    assert config.num_parameters() == sum(sizes.values()), sizes
