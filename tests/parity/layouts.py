"""The table of layouts, and the body that one rank of each runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.parity.families import DECODER_SEQUENCE, FAMILIES, SEQUENCE

STEPS = 5
GLOBAL_BATCH = 8


@dataclass(frozen=True)
class Layout:
    """Degrees and options of one parallel run; accumulation is what the batch leaves."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    sequence: bool = False
    zero: int = 0
    offload: bool = False
    micro: int = 2
    recompute: int = 0
    bf16: bool = False
    device: str = "cpu"

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def name(self) -> str:
        parts = [f"tp{self.tensor}" + ("+sp" if self.sequence else "")]
        parts += [f"pp{self.pipeline}", f"dp{self.data}", f"zero{self.zero}"]
        parts += ["offload"] if self.offload else []
        parts += [f"mbs{self.micro}"]
        parts += [f"recompute{self.recompute}"] if self.recompute else []
        parts += ["bf16"] if self.bf16 else []
        parts += [self.device] if self.device != "cpu" else []
        return "-".join(parts)


def deepspeed_config(layout: Layout) -> dict[str, Any]:
    accumulation = GLOBAL_BATCH // (layout.micro * layout.data)
    config: dict[str, Any] = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": layout.micro,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 10**9,
        "gradient_clipping": adam().clip,
        "optimizer": adam().deepspeed_optimizer(),
        "zero_optimization": {"stage": layout.zero, **_zero3(layout)},
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }
    if layout.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        config["zero_force_ds_cpu_optimizer"] = False
    if layout.bf16:
        config["bf16"] = {"enabled": True, "check_grad_overflow": True}
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def _zero3(layout: Layout) -> dict[str, Any]:
    """Cut every parameter: by default ZeRO-3 leaves small ones, here all, whole on each rank."""
    return {"stage3_param_persistence_threshold": 0} if layout.zero == 3 else {}


def adam() -> Any:
    from ds_engine.verify import AdamSettings

    return AdamSettings(learning_rate=1e-3, clip=0.5)


def synthetic(family: str) -> Any:
    from ds_engine.parallel.tensor_parallel import TensorParallel
    from ds_engine.synthetic import SyntheticData

    config = FAMILIES[family].config
    return SyntheticData.for_plan(
        plan_for(family, TensorParallel.single()),
        vocab_size=config.vocab_size,
        lengths=(SEQUENCE, DECODER_SEQUENCE if config.is_encoder_decoder else None),
        global_batch=GLOBAL_BATCH,
    )


def plan_for(family: str, tp: Any, *, bf16: bool = False) -> Any:
    import importlib

    import torch

    from models.common.definition import PlanOptions

    entry = FAMILIES[family]
    options = PlanOptions(
        seed=7,
        label_smoothing=0.1,
        z_loss=1e-3,
        dtype=torch.bfloat16 if bf16 else torch.float32,
    )
    return importlib.import_module(entry.module).build_plan(entry.config, tp, options)


def layout_body(rank: int, family: str, layout: Layout) -> Any:
    """Train as one rank; the trace of rank 0 is complete."""
    from ds_engine.parallel.context import ParallelContext
    from ds_engine.parallel.dims import ParallelDims
    from ds_engine.training.engine import (
        build_train_step,
        full_gradient,
        full_weight,
        init_distributed,
    )
    from ds_engine.verify import layout_trace

    init_distributed()
    dims = ParallelDims(layout.world, tensor=layout.tensor, pipeline=layout.pipeline)
    context = ParallelContext.create(dims)
    tp = context.tensor_parallel(sequence_parallel=layout.sequence)
    plan = plan_for(family, tp, bf16=layout.bf16)
    step = build_train_step(
        plan, context, deepspeed_config(layout), recompute_every=layout.recompute
    )
    data = synthetic(family)
    replica, replicas = context.get_data_parallel_rank(), context.get_data_parallel_world_size()
    trace = layout_trace(
        step,
        lambda number: data.step(number, layout.micro, replica, replicas),
        STEPS,
        adam(),
        full_gradient=full_gradient,
        full_weight=full_weight,
    )
    return trace if rank == 0 else None


def layouts_body(rank: int, families: tuple[str, ...], layout: Layout) -> dict[str, Any]:
    """Train several families in one world, one after the other: a world costs as much as each."""
    return {family: layout_body(rank, family, layout) for family in families}


def reference_body(rank: int, family: str) -> Any:
    """The same training in one plain process, all samples in micro-batches of four."""
    from ds_engine.parallel.tensor_parallel import TensorParallel
    from ds_engine.verify import reference_trace

    data = synthetic(family)
    plan = plan_for(family, TensorParallel.single())
    steps = [data.step(number, 4, 0, 1) for number in range(STEPS)]
    return reference_trace(plan, steps, adam())
