"""From a checked run to its parts: the few lines that every command which builds a model shares."""

from __future__ import annotations

from typing import Any

import torch

from ds_engine.config.deepspeed import precision
from ds_engine.config.schema import RunConfig
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.plan import LayerPlan
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
