"""From the ``tracking`` section to one tracker."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TextIO

from ds_engine.errors import LaunchError
from ds_engine.training.run_folder import RunFolder
from ds_engine.training.tracking.jsonl import JsonlTracker
from ds_engine.training.tracking.progress import ProgressTracker
from ds_engine.training.tracking.tracker import (
    CompositeTracker,
    GuardedTracker,
    NullTracker,
    Tracker,
)
from ds_engine.training.tracking.wandb_tracker import WandbTracker, resolve_mode

if TYPE_CHECKING:
    from ds_engine.config.schema import TrackingConfig, WandbConfig

# A wandb that is down can take seconds to fail; stop asking it after so many failures in a row.
_WANDB_PATIENCE: Final = 3


def build_tracker(
    config: "TrackingConfig",
    *,
    run_folder: RunFolder,
    run_id: str,
    resolved_config: Mapping[str, Any],
    total_steps: int,
    first_step: int,
    rank: int,
    has_wandb_key: bool = False,
    stream: TextIO | None = None,
) -> Tracker:
    """Return the run's tracker; on every rank but 0 it records nothing and touches no file.

    What cannot work is refused here, before the first step. Afterwards no tracker can stop
    training: each one's failures are reported once.

    Args:
        config: the ``tracking`` section.
        run_folder: the run folder; created where missing.
        run_id: the run's id (``RunFolder.run_id``), also wandb's.
        resolved_config: the resolved run config, stored with the wandb run.
        total_steps: ``training.steps``.
        first_step: completed optimizer steps at the start: 0, or the step of the checkpoint resumed
            from.
        rank: this process's rank in the whole job.
        has_wandb_key: whether a wandb API key is configured.
        stream: where progress goes; the default is standard output.

    Raises:
        ConfigError: wandb is asked for and cannot start.
        LaunchError: the run folder or its log cannot be written.
    """
    if rank != 0:
        return NullTracker()
    run_folder.create()
    trackers: list[Tracker] = []
    if config.jsonl:
        try:
            log = JsonlTracker(run_folder.log_path, run_id=run_id, first_step=first_step)
        except OSError as error:
            raise LaunchError(
                f"{run_folder.log_path} cannot be written: {error.strerror}; free the disk, or "
                "choose another checkpoint.directory"
            ) from error
        trackers.append(GuardedTracker(log, name="log.jsonl"))
    if config.wandb is not None:
        mode = resolve_mode(config.wandb.mode, has_key=has_wandb_key)
        if mode != "disabled":
            trackers.append(_wandb(config.wandb, mode, run_folder, run_id, resolved_config))
    if config.progress:
        progress = ProgressTracker(total_steps=total_steps, first_step=first_step, stream=stream)
        trackers.append(GuardedTracker(progress, name="progress"))
    return CompositeTracker(trackers)


def _wandb(
    config: "WandbConfig",
    mode: str,
    run_folder: RunFolder,
    run_id: str,
    resolved_config: Mapping[str, Any],
) -> Tracker:
    tracker = WandbTracker(
        config, mode=mode, folder=run_folder.path, run_id=run_id, resolved_config=resolved_config
    )
    return GuardedTracker(tracker, name="wandb", patience=_WANDB_PATIENCE)
