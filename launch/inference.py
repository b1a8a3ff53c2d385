"""A trained model out of a run folder, for generation and evaluation in any tensor layout."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from ds_engine.config.load import read_run
from ds_engine.config.schema import RunConfig
from ds_engine.data.objective import SpecialIds
from ds_engine.errors import ConfigError
from ds_engine.parallel.context import ParallelContext, RankInfo, prepare_rendezvous
from ds_engine.parallel.dims import ParallelDims
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel
from ds_engine.training.checkpoint import files
from ds_engine.training.checkpoint.weights import FullWeights, find_weights
from launch.accelerator import local_device
from launch.compose import make_plan, own_tokenizer
from models.registry import ModelConfig, read_model
from preprocessing.special_tokens import encode_marked, special_ids
from preprocessing.tokenize import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class SavedRun:
    """A checkpoint with the run that wrote it.

    Attributes:
        checkpoint: folder of the checkpoint.
        run: the resolved run.
        model: its model.
        tokenizer: path of the tokenizer, or None when the run named none.
    """

    checkpoint: Path
    run: RunConfig
    model: ModelConfig
    tokenizer: Path | None

    @property
    def home(self) -> Path:
        """The run's folder."""
        return self.checkpoint.absolute().parent.parent


def open_run(path: Path, tokenizer: Path | None = None) -> SavedRun:
    """Find the checkpoint that ``path`` means; of its files the model alone must be undamaged.

    Args:
        path: a run folder (its newest usable checkpoint is taken) or a checkpoint folder.
        tokenizer: instead of the run's own.

    Raises:
        CheckpointError: there is no usable checkpoint.
    """
    checkpoint = find_weights(path)
    run = read_run(files.read_json(checkpoint / "config.json"))
    saved = SavedRun(checkpoint, run, read_model(run.model).portable(), tokenizer)
    if tokenizer is None and run.data.tokenizer is not None:
        saved = replace(saved, tokenizer=own_tokenizer(saved.home, run.data.tokenizer))
    return saved


def run_tokenizer(saved: SavedRun, *, eod: str | None = None) -> Tokenizer:
    """Open the tokenizer of a run.

    Args:
        saved: the run.
        eod: token that ended the documents of the training data, see ``load_tokenizer``.

    Raises:
        ConfigError: the run has none.
        DataError: it cannot be opened.
    """
    if saved.tokenizer is None:
        raise ConfigError(
            f"{saved.checkpoint} names no tokenizer (data.tokenizer is null); give one with "
            "--tokenizer"
        )
    return load_tokenizer(saved.tokenizer, eod=eod)


def run_special_ids(saved: SavedRun, tokenizer: Tokenizer) -> SpecialIds:
    """The special ids that a run's objective used.

    Raises:
        ConfigError: the tokenizer lacks one that the run names.
    """
    return special_ids(tokenizer, names=asdict(saved.run.data.objective.special_tokens))


def encode_with_gaps(tokenizer: Tokenizer, text: str, gaps: Mapping[str, int]) -> list[int]:
    """Encode text in which names of special tokens stand for missing words.

    One space before such a name goes: the tokenizers that write a space into the word behind it
    had it in the word that is missing, and the others do not see it.

    Args:
        tokenizer: of the rest.
        text: such as ``import [MASK]``.
        gaps: id of each name.
    """
    for name in gaps:
        text = text.replace(f" {name}", name)
    return encode_marked(tokenizer, text, tokens=gaps)


def connect(tensor: int) -> ParallelContext:
    """Join this rank's world with a tensor-parallel degree; one process needs no world.

    Raises:
        ConfigError: the degree does not divide the number of processes.
    """
    rank = RankInfo.from_environment()
    dims = ParallelDims(rank.world_size, tensor=tensor)
    if rank.world_size > 1:
        from ds_engine.training.engine import init_distributed

        prepare_rendezvous(rank)
        init_distributed()
    return ParallelContext.create(dims)


def load_model(
    saved: SavedRun, tp: TensorParallel, *, dtype: torch.dtype = torch.float32
) -> SequentialModel:
    """Build the model for this rank and fill it from the checkpoint; in evaluation mode.

    Raises:
        ConfigError: the model cannot be cut into so many tensor-parallel ranks.
        CheckpointError: the checkpoint is of another model.
    """
    problems = saved.model.check(ParallelDims(tp.size, tensor=tp.size))
    if problems:
        raise ConfigError("; ".join(problems))
    model = SequentialModel(make_plan(saved.run, saved.model, tp, dtype=dtype)).to(dtype)
    FullWeights(saved.checkpoint).load_into(model.canonical_parameters())
    local_rank = RankInfo.from_environment().local_rank
    return model.to(local_device(os.environ, local_rank)).eval()
