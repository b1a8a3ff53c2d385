"""Sample configurations for the tests of this folder: one that sets every key, and a small one."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ds_engine.config.deepspeed_keys import KEYS, OPTIMIZERS, Kind
from ds_engine.config.load import run_to_dict
from ds_engine.config.objective import DenoiserConfig
from ds_engine.config.schema import (
    ActivationCheckpointingConfig,
    BatchSizeWarmupConfig,
    CheckpointConfig,
    DataConfig,
    LRScheduleConfig,
    ParallelConfig,
    RunConfig,
    SourceConfig,
    TrackingConfig,
    TrainingConfig,
    WandbConfig,
)
from models.bert_config import BertConfig
from models.config import AttentionConfig, GPTConfig, MLPConfig, PositionConfig
from models.t5_config import T5Config

MODEL = GPTConfig(
    vocab_size=1000,
    num_layers=4,
    hidden_size=64,
    max_sequence_length=128,
    attention=AttentionConfig(num_heads=8, num_kv_heads=4),
    mlp=MLPConfig(intermediate_size=256),
    position=PositionConfig(type="rotary"),
)

T5_MODEL = T5Config(
    vocab_size=1000,
    num_layers=3,
    num_decoder_layers=2,
    hidden_size=64,
    max_sequence_length=128,
    attention=AttentionConfig(num_heads=8, bias=False),
    mlp=MLPConfig(intermediate_size=96, activation="geglu_tanh", bias=False),
)

BERT_MODEL = BertConfig(
    vocab_size=1000,
    num_layers=4,
    hidden_size=64,
    max_sequence_length=128,
    attention=AttentionConfig(num_heads=8),
    mlp=MLPConfig(intermediate_size=96),
    sentence_head=False,
)

MODELS = {"gpt": MODEL, "t5": T5_MODEL, "bert": BERT_MODEL}

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}


def small_run(**deepspeed: Any) -> dict[str, Any]:
    """A run object for 4 ranks (tensor 2 x data 2), with extra keys for its DeepSpeed section."""
    return run_to_dict(
        RunConfig(
            model=dataclasses.asdict(MODEL),
            data=DataConfig(sequence_length=128, train=(SourceConfig("data/a"),)),
            training=TrainingConfig(steps=10),
            checkpoint=CheckpointConfig("runs/test"),
            deepspeed={"optimizer": OPTIMIZER, "train_batch_size": 8, **deepspeed},
            parallel=ParallelConfig(tensor=2),
        )
    )


def family_run(family: str) -> dict[str, Any]:
    """``small_run`` for a family, with what its first objective needs."""
    run = small_run()
    run["model"] = dataclasses.asdict(MODELS[family])
    if family != "gpt":
        run["data"]["tokenizer"] = "tokenizer.json"
    return run


def full_run() -> dict[str, Any]:
    """A run object in which every optional section is present."""
    run = small_run()
    run["data"]["validation"] = [{"path": "data/b", "weight": 2.0}]
    run["data"]["objective"].update(
        type="ul2", denoisers=[dataclasses.asdict(DenoiserConfig(mode_token="[R]"))]
    )
    run["training"].update(
        lr_schedule=dataclasses.asdict(LRScheduleConfig(type="wsd", decay_steps=3)),
        batch_size_warmup=dataclasses.asdict(BatchSizeWarmupConfig(4, 2, 100)),
        activation_checkpointing=dataclasses.asdict(ActivationCheckpointingConfig(2)),
    )
    run["tracking"] = run_to_dict_of(TrackingConfig(wandb=WandbConfig("p", tags=("a", "b"))))
    run["deepspeed"] = example(KEYS)
    run["deepspeed"]["optimizer"] = {"type": "AdamW", "params": example(OPTIMIZERS["adamw"])}
    return run


def run_to_dict_of(section: Any) -> dict[str, Any]:
    """One section as plain JSON values."""
    plain = dataclasses.asdict(section)
    plain["wandb"]["tags"] = list(plain["wandb"]["tags"])
    return plain


def example(kind: Kind) -> Any:
    """A value of a kind in the DeepSpeed key table, with every key of an object."""
    if isinstance(kind, Mapping):
        return {key: example(inner) for key, inner in kind.items()}
    if isinstance(kind, tuple):
        return kind[0]
    return {"bool": False, "int": 8, "number": 0.5, "str": "a", "list": [], "any": {}}[kind]
