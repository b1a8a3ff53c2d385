"""The equality proof on a user's own run: same model options and layout, sizes shrunk.

Each rank trains its part for a few steps on hard synthetic batches (packed documents of unequal
length, masked tokens); rank 0 also trains the whole model alone, with torch and nothing else, and
holds the two traces against each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ds_engine.config.batch import BatchPlan
from ds_engine.config.deepspeed import normalise_deepspeed, precision
from ds_engine.config.schema import RunConfig
from ds_engine.parallel.context import ParallelContext
from ds_engine.parallel.dims import ParallelDims
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.synthetic import SyntheticData
from ds_engine.training.engine import (
    build_train_step,
    full_gradient,
    full_weight,
    init_distributed,
)
from ds_engine.verify import (
    AdamSettings,
    Difference,
    Trace,
    compare,
    layout_trace,
    reference_trace,
)
from launch.compose import DTYPES, make_plan
from launch.verify_plan import ProofPlan

ACCUMULATION = 2
MICRO_BATCH = 2
# Clipping is always active, and so strong that rounding of the gradients (1e-7 of them) stays small
# beside Adam's epsilon: a bias that starts at zero is made of Adam's steps alone, and where its
# gradient is small they are steep in it.
CLIP = 0.05
# Small steps: a wrong update shows where it is made before it spreads into the next loss.
LEARNING_RATE = 2e-4
# A proof writes nothing into the user's monitors and files.
NOT_PROVEN = ("comet", "csv_monitor", "tensorboard", "wandb", "comms_logger", "flops_profiler")
# Sums in another order: 1e-5 of the largest magnitude. bf16 rounds to 8 bits: 20 % by length, where
# gradients are seen to differ by 3 % and Adam, which looks at their sign, makes 12 % of it.
TOLERANCES: dict[str, dict[str, Any]] = {
    "fp32": {"tolerance": 1e-5},
    "bf16": {"tolerance": 0.2, "scalar_tolerance": 0.02, "measure": "overall"},
}


@dataclass(frozen=True)
class Proof:
    """Result of one precision."""

    precision: str
    rows: list[Difference]

    @property
    def first_wrong(self) -> Difference | None:
        """The first quantity, in the order of the model, that differs too much."""
        return next((row for row in self.rows if not row.equal), None)


def _deepspeed(run: RunConfig, kind: str, adam: AdamSettings, dims: ParallelDims) -> dict[str, Any]:
    section = {**run.deepspeed, "optimizer": adam.deepspeed_optimizer()}
    for name in ("bf16", "fp16", "data_types", *NOT_PROVEN):
        section.pop(name, None)
    if kind == "bf16":
        section["bf16"] = {"enabled": True}
    section["gradient_clipping"] = adam.clip
    section["zero_force_ds_cpu_optimizer"] = False
    batch = BatchPlan(ACCUMULATION * MICRO_BATCH * dims.data, MICRO_BATCH, ACCUMULATION, dims.data)
    return normalise_deepspeed(section, batch)


def prove(run: RunConfig, plan: ProofPlan, *, steps: int) -> list[Proof]:
    """Prove as one rank of ``plan.dims``; the result is complete on rank 0.

    fp32 is always proven, because only there is equality sharp; bf16 too when the run uses it.
    """
    init_distributed()
    context = ParallelContext.create(plan.dims)
    kinds = ["fp32"] + (["bf16"] if precision(run.deepspeed) == "bf16" else [])
    adam = AdamSettings(learning_rate=LEARNING_RATE, clip=CLIP)
    dims = plan.dims
    whole = make_plan(run, plan.model, TensorParallel.single(), dtype=torch.float32)
    data = SyntheticData.for_plan(
        whole,
        vocab_size=plan.model.vocab_size,
        lengths=plan.lengths,
        global_batch=ACCUMULATION * MICRO_BATCH * dims.data,
        seed=run.seed,
    )
    reference = None
    if context.rank == 0:
        batches = [data.step(number, MICRO_BATCH, 0, 1) for number in range(steps)]
        reference = reference_trace(whole, batches, adam)
    proofs = []
    for kind in kinds:
        trace = _trace(run, plan, context, kind, data, adam, steps)
        rows = []
        if reference is not None:
            reach = adam.learning_rate * steps if kind == "bf16" else 0.0
            rows = compare(trace, reference, reach=reach, **TOLERANCES[kind])
        proofs.append(Proof(kind, rows))
    return proofs


def _trace(
    run: RunConfig,
    plan: ProofPlan,
    context: ParallelContext,
    kind: str,
    data: SyntheticData,
    adam: AdamSettings,
    steps: int,
) -> Trace:
    tp = context.tensor_parallel(sequence_parallel=run.parallel.sequence)
    step = build_train_step(
        make_plan(run, plan.model, tp, dtype=DTYPES[kind]),
        context,
        _deepspeed(run, kind, adam, plan.dims),
        partition=run.parallel.partition,
        recompute_every=run.training.activation_checkpointing.every or 0,
    )
    replica, replicas = context.get_data_parallel_rank(), context.get_data_parallel_world_size()
    return layout_trace(
        step,
        lambda number: data.step(number, MICRO_BATCH, replica, replicas),
        steps,
        adam,
        full_gradient=full_gradient,
        full_weight=full_weight,
    )


def table(proof: Proof, *, rows: int = 12) -> str:
    """The largest differences as text, loss and norm first."""
    scalars, tensors = proof.rows[:2], proof.rows[2:]
    worst = sorted(tensors, key=lambda row: -row.value if row.value == row.value else -1e300)
    lines = [f"{'quantity':<58} {'largest difference':>18} {'allowed':>9}"]
    for row in [*scalars, *worst[:rows]]:
        mark = "" if row.equal else "  DIFFERS"
        lines.append(f"{row.name:<58} {row.value:>18.2e} {row.tolerance:>9.0e}{mark}")
    return "\n".join(lines)


def verdict(proofs: Sequence[Proof]) -> tuple[str, bool]:
    """(one line for people, whether all is equal)."""
    for proof in proofs:
        wrong = proof.first_wrong
        if wrong is not None:
            return (
                f"NOT equal in {proof.precision}: first {wrong.name}, off by {wrong.value:.2e} "
                f"in step {wrong.step + 1} (allowed {wrong.tolerance:.0e})",
                False,
            )
    names = " and ".join(proof.precision for proof in proofs)
    return f"equal to one process in {names}", True
