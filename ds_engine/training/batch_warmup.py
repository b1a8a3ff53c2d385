"""Batch size warm-up: the global batch size as a pure function of the samples consumed so far.

The ramp of GPT-3 (Brown et al. 2020, https://arxiv.org/abs/2005.14165, appendix B): start
small, grow by equal increments, each of which lasts for an equal share of the first ``samples``
samples. With ``n = (final - start) / increment`` increments the size is ``start + k * increment``
while ``k * samples / n <= consumed < (k + 1) * samples / n``, and ``final`` from ``samples`` on.

All arithmetic is on integers and nothing depends on the layout, so a resumed run finds the same
batches.
"""

from ds_engine.config.batch import BatchPlan, check_warmup
from ds_engine.config.reader import raise_problems
from ds_engine.config.schema import BatchSizeWarmupConfig
from ds_engine.errors import ConfigError


def global_batch_size(
    consumed_samples: int, *, config: BatchSizeWarmupConfig | None, final: int
) -> int:
    """Return the size of the batch that begins after ``consumed_samples`` samples.

    Args:
        consumed_samples: of all steps so far.
        config: the ``training.batch_size_warmup`` section, or None for no ramp.
        final: ``train_batch_size``.

    Raises:
        ConfigError: a ramp that misses ``final``, see ``check_warmup``; or a negative position.
    """
    if consumed_samples < 0:
        raise ConfigError(f"consumed_samples = {consumed_samples} is negative; count from 0")
    if config is None:
        return final
    raise_problems(check_warmup(config, BatchPlan(final, 1, final, 1)))  # the layout is not known
    if consumed_samples >= config.samples:
        return final
    increments = (final - config.start) // config.increment
    return config.start + consumed_samples * increments // config.samples * config.increment
