"""Batch size warm-up: the global batch size as a pure function of the samples consumed so far.

The ramp of GPT-3 (Brown et al. 2020, https://arxiv.org/abs/2005.14165, appendix B): start
small, grow by equal increments, each of which lasts for an equal share of the first ``samples``
samples. With ``n = (final - start) / increment`` increments the size is ``start + k * increment``
while ``k * samples / n <= consumed < (k + 1) * samples / n``, and ``final`` from ``samples`` on.

All arithmetic is on integers and nothing depends on the layout, so a resumed run finds the same
batches.
"""

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_engine.errors import ConfigError

if TYPE_CHECKING:
    from ds_engine.config.schema import BatchSizeWarmupConfig

_WHERE = "training.batch_size_warmup"


@dataclass(frozen=True)
class BatchStage:
    """A run of steps with one batch size.

    Attributes:
        first_step: completed optimizer steps when it begins.
        first_sample: consumed samples when it begins.
        batch_size: samples of each of its steps, over all ranks.
    """

    first_step: int
    first_sample: int
    batch_size: int


def check_batch_warmup(
    config: "BatchSizeWarmupConfig | None", *, final: int, multiple: int = 1
) -> None:
    """Refuse a ramp that cannot be followed.

    Args:
        config: the ``training.batch_size_warmup`` section, or None for no ramp.
        final: ``train_batch_size``.
        multiple: micro-batch size times data-parallel size: what every batch must be divisible by.

    Raises:
        ConfigError: a number out of range, a ramp that misses ``final``, or a batch that cannot be
            divided among the ranks.
    """
    if config is None:
        return
    for name, value in (("start", config.start), ("increment", config.increment)):
        if value < 1:
            raise ConfigError(f"{_WHERE}.{name} = {value} must be at least 1")
    if config.samples < 0:
        raise ConfigError(f"{_WHERE}.samples = {config.samples} is negative")
    if config.start > final:
        raise ConfigError(
            f"{_WHERE}.start = {config.start} is above train_batch_size = {final}; "
            f"use at most {final}"
        )
    if (final - config.start) % config.increment:
        raise ConfigError(
            f"{_WHERE}.increment = {config.increment} does not lead from start = {config.start} to "
            f"train_batch_size = {final}; use a divisor of {final - config.start}"
        )
    for name, value in (("start", config.start), ("increment", config.increment)):
        if value % multiple and final > config.start:
            raise ConfigError(
                f"{_WHERE}.{name} = {value} is not a multiple of micro-batch size x data parallel "
                f"= {multiple}; every batch of the ramp must divide evenly among the ranks"
            )


def global_batch_size(
    consumed_samples: int, *, config: "BatchSizeWarmupConfig | None", final: int
) -> int:
    """Return the size of the batch that begins after ``consumed_samples`` samples.

    Raises:
        ConfigError: see ``check_batch_warmup``; or a negative position.
    """
    check_batch_warmup(config, final=final)
    if consumed_samples < 0:
        raise ConfigError(f"consumed_samples = {consumed_samples} is negative")
    if config is None or consumed_samples >= config.samples:
        return final
    increments = (final - config.start) // config.increment
    return config.start + consumed_samples * increments // config.samples * config.increment


def batch_stages(config: "BatchSizeWarmupConfig | None", *, final: int) -> tuple[BatchStage, ...]:
    """Return the stages of the ramp in order; the last one, of size ``final``, never ends.

    A batch may jump over a stage that is shorter than itself; such a stage is left out. The work is
    proportional to the number of stages, not of steps.

    Raises:
        ConfigError: see ``check_batch_warmup``.
    """
    stages = []
    step, consumed = 0, 0
    while True:
        size = global_batch_size(consumed, config=config, final=final)
        stages.append(BatchStage(step, consumed, size))
        if config is None or size == final:
            return tuple(stages)
        increments = (final - config.start) // config.increment
        index = (size - config.start) // config.increment
        end = -(-(index + 1) * config.samples // increments)  # the first sample of the next stage
        steps = -(-(end - consumed) // size)
        step, consumed = step + steps, consumed + steps * size


def position_after(steps: int, *, config: "BatchSizeWarmupConfig | None", final: int) -> int:
    """Return the samples consumed by the first ``steps`` optimizer steps.

    Raises:
        ConfigError: see ``check_batch_warmup``; or a negative number of steps.
    """
    if steps < 0:
        raise ConfigError(f"steps = {steps} is negative")
    stages = batch_stages(config, final=final)
    stage = stages[bisect_right(stages, steps, key=lambda item: item.first_step) - 1]
    return stage.first_sample + (steps - stage.first_step) * stage.batch_size


def steps_after(
    consumed_samples: int, *, config: "BatchSizeWarmupConfig | None", final: int
) -> int:
    """Return how many whole steps fit into ``consumed_samples``: the inverse of ``position_after``.

    Raises:
        ConfigError: see ``check_batch_warmup``; or a negative position.
    """
    if consumed_samples < 0:
        raise ConfigError(f"consumed_samples = {consumed_samples} is negative")
    stages = batch_stages(config, final=final)
    index = bisect_right(stages, consumed_samples, key=lambda item: item.first_sample) - 1
    stage = stages[index]
    return stage.first_step + (consumed_samples - stage.first_sample) // stage.batch_size
