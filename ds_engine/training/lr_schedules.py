"""Learning rate as a pure function of the step: nothing to save, nothing to go wrong on resume.

Convention, the same for every schedule: ``step`` is the number of optimizer steps completed so far,
so ``learning_rate(0)`` is used by the first update and ``learning_rate(total_steps - 1)`` by the
last. Warm-up is linear, starts above zero and arrives at the peak at ``step == warmup_steps``::

    lr(step) = peak * (step + 1) / (warmup_steps + 1)          for step < warmup_steps

A first update with a learning rate of zero would be a batch thrown away, which is why one is added.
Schedules that have an end arrive at ``min_lr`` there and stay: wsd at ``step == total_steps``,
cosine and linear too, or ``decay_steps`` after the warm-up where that is given. inverse_sqrt and
constant have no end and do not depend on ``total_steps``.

The batch size and the number of ranks play no part: the rate does not depend on the layout.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from ds_engine.errors import ConfigError

if TYPE_CHECKING:
    from ds_engine.config.schema import LRScheduleConfig

_WHERE: Final = "training.lr_schedule"


def learning_rate(step: int, *, config: "LRScheduleConfig", peak: float, total_steps: int) -> float:
    """Return the learning rate of the update that follows ``step`` completed ones.

    Args:
        step: completed optimizer steps, 0 or more; skipped (non-finite) steps count like any other.
        config: the ``training.lr_schedule`` section.
        peak: the largest rate, the optimizer's ``lr``.
        total_steps: ``training.steps``.

    Raises:
        ConfigError: the schedule cannot be followed (see ``check_schedule``), or ``step`` is
            negative.
    """
    if step < 0:
        raise ConfigError(f"step = {step} is negative; count completed optimizer steps from 0")
    check_schedule(config, peak=peak, total_steps=total_steps)
    warmup = config.warmup_steps
    if config.type not in _UNBOUNDED and step >= total_steps:
        return config.min_lr
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return _SCHEDULES[config.type](step, config, peak, total_steps)


def check_schedule(config: "LRScheduleConfig", *, peak: float, total_steps: int) -> None:
    """Refuse a schedule that has no meaning.

    A warm-up longer than the run is accepted (a run of two steps that only tries a config out is
    ordinary, and a warm-up that is cut short is still well defined).

    Raises:
        ConfigError: an unknown type or decay shape, a negative number, ``min_lr`` above ``peak``,
            ``decay_steps`` for a schedule without a decay, or a wsd decay that does not fit between
            the warm-up and the end of the run.
    """
    if config.type not in _SCHEDULES:
        raise ConfigError(f'{_WHERE}.type = "{config.type}" is unknown; use {_listed(_SCHEDULES)}')
    if total_steps < 1:
        raise ConfigError(f"training.steps = {total_steps} must be at least 1")
    if config.warmup_steps < 0:
        raise ConfigError(
            f"{_WHERE}.warmup_steps = {config.warmup_steps} is negative; use 0 for no warm-up"
        )
    if not (math.isfinite(peak) and peak >= 0):
        raise ConfigError(f"the peak learning rate = {peak} must be finite and not negative")
    if not 0 <= config.min_lr <= peak:
        raise ConfigError(
            f"{_WHERE}.min_lr = {config.min_lr} must lie between 0 and the optimizer's lr = {peak}"
        )
    _check_decay(config, total_steps)


def _check_decay(config: "LRScheduleConfig", total_steps: int) -> None:
    if config.decay_shape not in _SHAPES:
        raise ConfigError(
            f'{_WHERE}.decay_shape = "{config.decay_shape}" is unknown; use {_listed(_SHAPES)}'
        )
    decay = config.decay_steps
    if decay is None:
        return
    if config.type in _UNBOUNDED:
        raise ConfigError(
            f'{_WHERE}.decay_steps = {decay} has no meaning for type "{config.type}"; remove it'
        )
    if decay < 1:
        raise ConfigError(f"{_WHERE}.decay_steps = {decay} must be at least 1, or null")
    room = total_steps - config.warmup_steps
    if config.type == "wsd" and room >= 0 and decay > room:
        raise ConfigError(
            f"{_WHERE}.decay_steps = {decay} does not fit: training.steps = {total_steps} less "
            f"warmup_steps = {config.warmup_steps} leaves {room}; use at most {room}"
        )


def decay_range(config: "LRScheduleConfig", total_steps: int) -> tuple[int, int]:
    """Return the steps [start, end) between which the rate falls from the peak to ``min_lr``.

    Without ``decay_steps``, wsd takes the last tenth of the run, which MiniCPM found to be enough
    (https://arxiv.org/abs/2404.06395, section 4), and the others all that follows the warm-up.
    """
    warmup, steps = config.warmup_steps, config.decay_steps
    if config.type == "wsd":
        steps = total_steps // 10 if steps is None else steps
        return max(total_steps - steps, warmup), total_steps
    return warmup, total_steps if steps is None else warmup + steps


def _progress(step: int, start: int, end: int) -> float:
    """Return the fraction of [start, end) that lies behind ``step``; 1 where the range is empty."""
    return 1.0 if end <= start else min(max((step - start) / (end - start), 0.0), 1.0)


def _cosine_shape(progress: float) -> float:
    # SGDR without restarts, Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, eq. 5.
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _linear_shape(progress: float) -> float:
    return 1.0 - progress


def _sqrt_shape(progress: float) -> float:
    # "1-sqrt", Haegele et al. 2024, https://arxiv.org/abs/2405.18392.
    return 1.0 - math.sqrt(progress)


def _decay(
    step: int, config: "LRScheduleConfig", peak: float, total_steps: int, shape: str
) -> float:
    fraction = _SHAPES[shape](_progress(step, *decay_range(config, total_steps)))
    return config.min_lr + (peak - config.min_lr) * fraction


def _cosine(step: int, config: "LRScheduleConfig", peak: float, total_steps: int) -> float:
    return _decay(step, config, peak, total_steps, "cosine")


def _linear(step: int, config: "LRScheduleConfig", peak: float, total_steps: int) -> float:
    return _decay(step, config, peak, total_steps, "linear")


def _wsd(step: int, config: "LRScheduleConfig", peak: float, total_steps: int) -> float:
    # Warmup-stable-decay: MiniCPM, Hu et al. 2024, https://arxiv.org/abs/2404.06395, section 4.
    if step < decay_range(config, total_steps)[0]:
        return peak
    return _decay(step, config, peak, total_steps, config.decay_shape)


def _inverse_sqrt(step: int, config: "LRScheduleConfig", peak: float, total_steps: int) -> float:
    # Attention is all you need, Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, eq. 3,
    # scaled to `peak`: with n = step + 1 and w = warmup_steps + 1, min(n / w, sqrt(w / n)).
    del total_steps
    return max(config.min_lr, peak * math.sqrt((config.warmup_steps + 1) / (step + 1)))


def _constant(step: int, config: "LRScheduleConfig", peak: float, total_steps: int) -> float:
    del step, config, total_steps
    return peak


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(f'"{name}"' for name in names)


_SHAPES: Final[dict[str, Callable[[float], float]]] = {
    "linear": _linear_shape,
    "sqrt": _sqrt_shape,
    "cosine": _cosine_shape,
}
_SCHEDULES: Final[dict[str, Callable[[int, "LRScheduleConfig", float, int], float]]] = {
    "cosine": _cosine,
    "linear": _linear,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
    "constant": _constant,
}
_UNBOUNDED: Final = frozenset({"inverse_sqrt", "constant"})
