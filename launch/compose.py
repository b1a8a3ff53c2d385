"""From a checked run to its parts: the few lines that every command which builds a model shares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_engine.config.deepspeed import precision
from ds_engine.config.schema import RunConfig
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.plan import LayerPlan
from ds_engine.training.checkpoint import files
from ds_engine.training.checkpoint.weights import FullWeights
from ds_engine.training.run_folder import RunFolder
from launch.check import ResolvedRun
from models.common.definition import ModelDefinition, PlanOptions
from models.registry import ModelConfig, load_definition

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def run_dtype(deepspeed: dict[str, Any]) -> torch.dtype:
    """The dtype of weights and activations that a DeepSpeed section asks for."""
    return DTYPES[precision(deepspeed)]


def make_plan(
    run: RunConfig, model: ModelConfig, tp: TensorParallel, *, dtype: torch.dtype
) -> LayerPlan:
    """The run's model as a layer plan for one rank's tensor-parallel handle."""
    definition: ModelDefinition = load_definition(model.family)
    options = PlanOptions(
        seed=run.seed,
        isolate_documents=run.data.isolate_documents,
        label_smoothing=run.training.label_smoothing,
        z_loss=run.training.z_loss,
        dtype=dtype,
        lengths=(run.data.sequence_length, run.data.decoder_sequence_length),
    )
    return definition.plan(model, tp, options)


def plan_of(resolved: ResolvedRun, tp: TensorParallel) -> LayerPlan:
    """``make_plan`` of a checked run in its own precision."""
    return make_plan(resolved.run, resolved.model, tp, dtype=run_dtype(resolved.deepspeed))


def initial_weights(
    run: RunConfig, model: ModelConfig, report: Callable[[str], None]
) -> Callable[[dict[str, nn.Parameter]], None] | None:
    """What fills a new run's parameters from ``checkpoint.initialize_from``; None: nothing does.

    Raises:
        CheckpointError: there are no usable weights.
    """
    source = run.checkpoint.initialize_from
    goes_on = files.checkpoints(RunFolder(Path(run.checkpoint.directory)).checkpoints)
    if source is None or goes_on:
        return None
    checkpoint = files.find(Path(source))
    definition: ModelDefinition = load_definition(model.family)

    def fill(parameters: dict[str, nn.Parameter]) -> None:
        missing = FullWeights(checkpoint).initialize(
            parameters, heads=definition.heads, aliases=definition.aliases
        )
        new = f"; new are {', '.join(missing)}" if missing else ""
        report(f"starting from the weights of {checkpoint}{new}")

    return fill
