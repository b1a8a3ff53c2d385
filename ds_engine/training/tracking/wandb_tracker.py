"""Metrics to Weights & Biases: one run a job, the same run after a restart.

Steps are passed to wandb explicitly, so that a resumed session continues the curves where they
were. Online, wandb refuses rows of a step that it already holds: after a crash at step 130 and a
resume from 100, it keeps its first rows of 101 to 130 (``log.jsonl`` has both). Offline, each
session is a folder of its own below ``wandb/`` with the same run id; ``wandb sync --append`` joins
them.

Wrap the tracker in ``GuardedTracker``: after the start, nothing that wandb raises may stop
training.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_engine.errors import ConfigError

if TYPE_CHECKING:
    from ds_engine.config.schema import WandbConfig

_FIX = 'run `wandb login`, set WANDB_API_KEY, or set tracking.wandb.mode to "offline"'


def resolve_mode(mode: str, *, has_key: bool) -> str:
    """Return "online", "offline" or "disabled" for the configured ``mode``.

    Args:
        mode: one of these, or "auto": online where a key is configured, offline elsewhere.
        has_key: whether an API key is configured; the caller looks, because only ``launch`` reads
            the environment.

    Raises:
        ConfigError: "online" without a key (wandb would ask on the terminal, and a job has none),
            or an unknown mode.
    """
    if mode == "auto":
        return "online" if has_key else "offline"
    if mode not in ("online", "offline", "disabled"):
        raise ConfigError(
            f'tracking.wandb.mode = "{mode}" is unknown; use "auto", "online", "offline" or '
            '"disabled"'
        )
    if mode == "online" and not has_key:
        raise ConfigError(
            f'tracking.wandb.mode = "online" needs an API key and none is configured; {_FIX}'
        )
    return mode


class WandbTracker:
    """One wandb run, written below ``folder/wandb``.

    Args:
        config: the ``tracking.wandb`` section.
        mode: as returned by ``resolve_mode``: "online" or "offline".
        folder: the run folder, which must exist.
        run_id: the run's id, the same in every session.
        resolved_config: the whole run config as JSON values.
        start: stands in for ``wandb.init`` in tests.

    Raises:
        ConfigError: wandb is not installed or the run cannot be started; the message says how to
            train without it.
    """

    def __init__(
        self,
        config: "WandbConfig",
        *,
        mode: str,
        folder: Path,
        run_id: str,
        resolved_config: Mapping[str, Any],
        start: Callable[..., Any] | None = None,
    ) -> None:
        try:
            self._run = (start or _start)(
                project=config.project,
                name=config.name,
                group=config.group,
                entity=config.entity,
                tags=list(config.tags),
                mode=mode,
                id=run_id,
                # Offline there is no server to ask whether the run exists; wandb would only warn.
                resume="allow" if mode == "online" else None,
                dir=str(folder),
                config=dict(resolved_config),
                # A longer run or another layout is an ordinary reason to resume with a changed
                # config.
                allow_val_change=True,
            )
        except Exception as error:
            raise ConfigError(
                f'tracking.wandb.mode = "{mode}" but wandb did not start: {type(error).__name__}: '
                f"{error}; {_FIX}, or remove tracking.wandb"
            ) from error

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log one row."""
        self._run.log(dict(metrics), step=int(step))

    def summary(self, values: Mapping[str, float]) -> None:
        """Write run-level values, shown in wandb's table of runs."""
        self._run.summary.update(dict(values))

    def close(self, exit_code: int) -> None:
        """Finish the run; wandb marks it failed where ``exit_code`` is not 0."""
        self._run.finish(exit_code=exit_code)


def _start(**arguments: Any) -> Any:
    import wandb

    # console: wandb's capture of the terminal records a progress bar as thousands of lines.
    settings = wandb.Settings(console="off", silent=True)
    return wandb.init(**arguments, settings=settings)
