"""Run folders of models that were never trained, for commands that use a finished run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL = ["<pad>", "</s>", "<extra_id_0>", "<extra_id_1>", "[CLS]", "[SEP]", "[MASK]"]
SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "num_layers": 2,
    "hidden_size": 32,
    "max_sequence_length": 64,
}


def model_section(family: str, **changes: Any) -> dict[str, Any]:
    own: dict[str, Any] = {
        "attention": {"num_heads": 4, "bias": family != "t5"},
        "mlp": {"intermediate_size": 64, "bias": family != "t5"},
        # Large enough that not every text is one word for ever.
        "init_std": 0.5,
    }
    if family == "t5":
        own |= {"init": "normal"}
    return {"family": family, **SIZES, **own, **changes}


def write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    words = Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words.train_from_iterator(["a"], trainer)
    words.save(str(path))


def write_run(folder: Path, model: dict[str, Any]) -> Path:
    """A run folder with one checkpoint of initial weights; returns it."""
    from ds_engine.config.load import read_run, run_to_dict
    from ds_engine.parallel.tensor_parallel import TensorParallel
    from ds_engine.pipeline.sequential import SequentialModel
    from ds_engine.training.checkpoint import files, weights
    from models.common.definition import PlanOptions
    from models.registry import load_definition, read_model

    folder.mkdir(parents=True)
    write_tokenizer(folder / "tokenizer.json")
    run = read_run(
        {
            "model": model,
            "data": {
                "train": [{"path": "data/train"}],
                "sequence_length": 32,
                "tokenizer": str(folder / "tokenizer.json"),
            },
            "training": {"steps": 1, "lr_schedule": {"warmup_steps": 0}},
            "checkpoint": {"directory": str(folder)},
            "deepspeed": {
                "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
                "train_batch_size": 8,
            },
        }
    )
    plan = load_definition(model["family"]).plan(
        read_model(run.model), TensorParallel.single(), PlanOptions(seed=3)
    )
    parameters = dict(SequentialModel(plan).canonical_parameters())
    root = folder / "checkpoints"
    root.mkdir()
    temporary = files.temporary_folder(root, 1)
    temporary.mkdir()
    name = weights.file_name(0, 0)
    values = {key: value.detach() for key, value in parameters.items()}
    weights.save_weights(temporary / name, values, parameters)
    (temporary / "config.json").write_text(json.dumps(run_to_dict(run)))
    entries = {each: files.describe_file(temporary / each) for each in (name, "config.json")}
    files.commit(root, 1, entries)
    return folder
