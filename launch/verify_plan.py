"""What a proof of a user's run will cover: the layout and the shrunk model. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from ds_engine.config.deepspeed import precision, zero_stage
from ds_engine.config.reader import raise_problems
from ds_engine.config.schema import RunConfig
from ds_engine.parallel.dims import ParallelDims
from launch.check import check_layout
from models.registry import ModelConfig, read_model


@dataclass(frozen=True)
class ProofPlan:
    """What will be proven.

    Attributes:
        dims: the layout, with degrees cut so that it fits ``max_processes``.
        model: the shrunk model.
        notes: what differs from the user's run, for people.
    """

    dims: ParallelDims
    model: ModelConfig
    notes: tuple[str, ...]

    @property
    def lengths(self) -> tuple[int, int | None]:
        """Tokens of a row; and of its decoder's part, shorter where the ranks can cut it."""
        whole, tensor = self.model.max_sequence_length, self.dims.tensor
        if not self.model.is_encoder_decoder:
            return whole, None
        return whole, -(-whole // 2 // tensor) * tensor


def plan_proof(run: RunConfig, *, data: int, max_processes: int) -> ProofPlan:
    """Shrink a run to what a small machine can hold.

    Args:
        run: the user's run.
        data: replicas to prove with.
        max_processes: most ranks to start; larger degrees are halved until it fits.

    Raises:
        ConfigError: the layout does not exist or does not fit the model, as in training.
    """
    parallel, notes = run.parallel, []
    degrees = {"tensor": parallel.tensor, "pipeline": parallel.pipeline, "data": data}

    def world() -> int:
        return degrees["tensor"] * degrees["pipeline"] * degrees["data"]

    asked = dict(degrees)
    while world() > max_processes:
        largest = max(degrees, key=lambda axis: degrees[axis])
        degrees[largest] = max(degrees[largest] // 2, 1)
    notes += [
        f"{axis} = {asked[axis]} is proven at {degrees[axis]} (at most {max_processes} processes)"
        for axis in degrees
        if degrees[axis] != asked[axis]
    ]
    if parallel.sequence and degrees["tensor"] == 1:
        notes.append("parallel.sequence is not proven: at tensor = 1 there is nothing to split")
    if precision(run.deepspeed) == "fp16":
        notes.append("deepspeed.fp16 is not proven, only fp32: a CPU does not train in fp16")
    model = read_model(run.model)
    if model.portable() != model:
        notes.append('model.attention.backend = "flash" is proven as "auto": it needs a GPU')
    whole = ParallelDims(
        parallel.tensor * parallel.pipeline, tensor=parallel.tensor, pipeline=parallel.pipeline
    )
    raise_problems(
        [
            *check_layout(run),
            *model.check(whole),
            *model.check_sequence(run.data.sequence_length, run.data.decoder_sequence_length),
        ]
    )
    dims = ParallelDims(world(), tensor=degrees["tensor"], pipeline=degrees["pipeline"])
    return ProofPlan(dims, model.shrunk(dims), tuple(notes))


def describe(run: RunConfig, plan: ProofPlan) -> str:
    """What is about to be proven, in one line."""
    extras = [f"ZeRO {zero_stage(run.deepspeed)}"]
    if run.parallel.sequence and plan.dims.tensor > 1:
        extras.append("sequence parallel")
    return (
        f"{plan.dims.describe()}, {', '.join(extras)}: {plan.model.num_parameters():,} parameters"
    )
