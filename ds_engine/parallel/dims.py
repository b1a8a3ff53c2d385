"""The arithmetic of a process mesh: degrees, coordinates and group members. Standard library only.

Ranks are laid out with the tensor axis fastest, then context, data and pipeline, so that tensor
groups are neighbours (one node) and pipeline stages are far apart. This is also the order of
DeepSpeed's ``PipeModelDataParallelTopology``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_engine.errors import ConfigError

AXES = ("pipeline", "data", "context", "tensor")


@dataclass(frozen=True)
class ParallelDims:
    """Degrees of parallelism of one run.

    Attributes:
        world: number of processes.
        tensor: ranks that share each layer's weight matrices.
        pipeline: number of stages.
        context: ranks that share each sequence.
        expert: ranks over which the experts of a layer are spread (part of the data axis).
        virtual_pipeline: model chunks per stage.
    """

    world: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    virtual_pipeline: int = 1

    def __post_init__(self) -> None:
        for axis in ("world", "tensor", "pipeline", "context", "expert", "virtual_pipeline"):
            if getattr(self, axis) < 1:
                raise ConfigError(f"parallel.{axis} = {getattr(self, axis)} must be at least 1")
        shards = self.tensor * self.pipeline * self.context
        if self.world % shards:
            raise ConfigError(
                f"{self.world} processes cannot be split into parallel.tensor = {self.tensor} x "
                f"parallel.pipeline = {self.pipeline} x parallel.context = {self.context} "
                f"= {shards}; use a multiple of {shards} processes or smaller degrees"
            )

    @property
    def data(self) -> int:
        """Number of replicas that see different samples."""
        return self.world // (self.tensor * self.pipeline * self.context)

    def sizes(self) -> dict[str, int]:
        """Degree of each mesh axis, slowest first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Position of ``rank`` on each mesh axis."""
        if not 0 <= rank < self.world:
            raise ConfigError(f"rank {rank} is outside a world of {self.world} processes")
        position = {}
        for axis, size in reversed(list(self.sizes().items())):
            rank, position[axis] = divmod(rank, size)
        return {axis: position[axis] for axis in AXES}

    def rank(self, coordinates: dict[str, int]) -> int:
        """Inverse of ``coordinates``."""
        rank = 0
        for axis, size in self.sizes().items():
            rank = rank * size + coordinates[axis]
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """All groups of ranks that differ only along ``axes``; each rank is in exactly one."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            position = self.coordinates(rank)
            key = tuple(position[axis] for axis in AXES if axis not in axes)
            groups.setdefault(key, []).append(rank)
        return list(groups.values())

    def describe(self) -> str:
        """A short name such as ``tp2 x pp2 x dp1``."""
        names = {"tensor": "tp", "context": "cp", "pipeline": "pp"}
        shown = [f"{names[a]}{getattr(self, a)}" for a in names if getattr(self, a) > 1]
        return " x ".join([*shown, f"dp{self.data}"])
