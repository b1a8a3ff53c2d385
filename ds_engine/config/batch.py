"""The batch triangle: one owner of how the global batch is made of micro-batches.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data parallel

The three values come from the DeepSpeed section, the data-parallel degree from the world size and
the layout. What is missing is solved, and the result is written back into DeepSpeed's JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_engine.config.reader import show
from ds_engine.config.schema import BatchSizeWarmupConfig, ParallelConfig
from ds_engine.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchPlan:
    """A solved batch triangle.

    Attributes:
        train_batch_size: Samples in one optimizer step, over all ranks.
        micro_batch_size: Samples in one forward pass of one model replica.
        accumulation: Micro-batches of one replica in one optimizer step.
        data_parallel: Model replicas.
    """

    train_batch_size: int
    micro_batch_size: int
    accumulation: int
    data_parallel: int

    @property
    def quantum(self) -> int:
        """Samples of one micro-batch on every replica: all batch sizes are multiples of it."""
        return self.micro_batch_size * self.data_parallel

    def to_deepspeed(self) -> dict[str, int]:
        """The triangle under DeepSpeed's keys."""
        return {
            TRAIN: self.train_batch_size,
            MICRO: self.micro_batch_size,
            ACCUMULATION: self.accumulation,
        }

    def explain(self) -> str:
        """The triangle in one sentence."""
        return (
            f"{self.train_batch_size} samples per step = {self.micro_batch_size} per micro-batch "
            f"x {self.accumulation} micro-batches x {self.data_parallel} data-parallel replicas"
        )


def data_parallel_degree(parallel: ParallelConfig, world_size: int, world_source: str) -> int:
    """What the layout leaves of the world for data parallelism.

    Args:
        parallel: The layout.
        world_size: Number of ranks.
        world_source: Where that number came from, for the message ("--world-size", "hostfile").

    Raises:
        ConfigError: If the layout does not divide the world.
    """
    ranks = parallel.model_ranks
    if world_size >= 1 and world_size % ranks == 0:
        return world_size // ranks
    below = world_size - world_size % ranks
    near = f"{below} or {below + ranks}" if below > 0 else f"at least {ranks}"
    raise ConfigError(
        f"world size = {world_size} (from {world_source}) is not a multiple of parallel.tensor = "
        f"{parallel.tensor} x pipeline = {parallel.pipeline} x context = {parallel.context} = "
        f"{ranks}; use {near} ranks, or a layout whose product divides {world_size}"
    )


def explain_data_parallel(parallel: ParallelConfig, world_size: int, world_source: str) -> str:
    """The data-parallel degree with its derivation, for messages."""
    return (
        f"data-parallel degree {world_size // parallel.model_ranks} (world size {world_size} from "
        f"{world_source} / (tensor {parallel.tensor} x pipeline {parallel.pipeline} x context "
        f"{parallel.context}))"
    )


def solve_batch(section: Mapping[str, Any], data_parallel: int, origin: str = "") -> BatchPlan:
    """Solves the batch triangle.

    With two of the three values the third follows; with all three they must agree; with only the
    global or only the micro batch size, one micro-batch per step is assumed, as DeepSpeed does.

    Args:
        section: The DeepSpeed section.
        data_parallel: Data-parallel degree.
        origin: How that degree came about; see ``explain_data_parallel``.

    Raises:
        ConfigError: Explaining all numbers, with the nearest values that work.
    """
    origin = origin or f"data-parallel degree {data_parallel}"
    train, micro, accumulation = (_value(section, key) for key in (TRAIN, MICRO, ACCUMULATION))
    if train is None and micro is None:
        raise ConfigError(
            f"deepspeed.{TRAIN} and deepspeed.{MICRO} are both missing; set one of them, or two of "
            f"{TRAIN}, {MICRO} and {ACCUMULATION}"
        )
    if train is None:
        assert micro is not None
        accumulation = accumulation or 1
        return BatchPlan(micro * accumulation * data_parallel, micro, accumulation, data_parallel)
    if micro is None:
        accumulation = accumulation or 1
        unit, known = accumulation * data_parallel, f"{ACCUMULATION} = {accumulation}"
        if train % unit:
            raise ConfigError(_not_a_multiple(train, unit, known, origin))
        return BatchPlan(train, train // unit, accumulation, data_parallel)
    unit, known = micro * data_parallel, f"{MICRO} = {micro}"
    if accumulation is not None and train != unit * accumulation:
        other = "" if train % unit else f"{ACCUMULATION} = {train // unit}, "
        raise ConfigError(
            f"deepspeed.{TRAIN} = {train} is not {known} x {ACCUMULATION} = {accumulation} x "
            f"{origin} = {unit * accumulation}; use {TRAIN} = {unit * accumulation}, {other}"
            "or leave one of the three out"
        )
    if train % unit:
        raise ConfigError(_not_a_multiple(train, unit, known, origin))
    return BatchPlan(train, micro, train // unit, data_parallel)


def check_warmup(warmup: BatchSizeWarmupConfig, plan: BatchPlan) -> list[str]:
    """Rules of a growing batch: whole micro-batches at every size, and it ends at the target."""
    problems = []
    where, unit = "training.batch_size_warmup", plan.quantum
    for name, value in (("start", warmup.start), ("increment", warmup.increment)):
        if value % unit:
            problems.append(
                f"{where}.{name} = {value} is not a multiple of {unit} ({MICRO} = "
                f"{plan.micro_batch_size} x data-parallel degree {plan.data_parallel}); "
                f"use {_near(value, unit)}"
            )
    growth = plan.train_batch_size - warmup.start
    if growth < 0:
        problems.append(
            f"{where}.start = {warmup.start} is above {TRAIN} = {plan.train_batch_size}; "
            "start below it"
        )
    elif growth % warmup.increment:
        problems.append(
            f"{where}.increment = {warmup.increment} does not lead from start = {warmup.start} to "
            f"{TRAIN} = {plan.train_batch_size}; use a divisor of {growth}"
        )
    return problems


def _value(section: Mapping[str, Any], key: str) -> int | None:
    value = section.get(key)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"deepspeed.{key} = {show(value)} must be an integer, at least 1")
    return value


def _not_a_multiple(train: int, unit: int, known: str, origin: str) -> str:
    degree = origin.split(" (", maxsplit=1)[0]
    return (
        f"deepspeed.{TRAIN} = {train} is not a multiple of {known} x {origin} = {unit}; use "
        f"{TRAIN} = {_near(train, unit)}, or change {known.partition(' =')[0]} or the {degree}"
    )


def _near(value: int, unit: int) -> str:
    below = value - value % unit
    return f"{below} or {below + unit}" if below else str(unit)
