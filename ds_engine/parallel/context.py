"""The live process groups of one rank. The only place below the launchers that reads the
environment, because torch's rendezvous is defined by it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

import torch.distributed as dist

from ds_engine.errors import LaunchError
from ds_engine.parallel.dims import ParallelDims
from ds_engine.parallel.tensor_parallel import TensorParallel

ProcessGroup = dist.ProcessGroup


@dataclass(frozen=True)
class RankInfo:
    """Who this process is, from RANK, LOCAL_RANK and WORLD_SIZE (all 0 of 1 when unset)."""

    rank: int
    local_rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> RankInfo:
        """Read the launcher's variables.

        Raises:
            LaunchError: a variable is not a number, or only some are set.
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        found = {name: os.environ[name] for name in names if name in os.environ}
        if not found:
            return cls(0, 0, 1)
        if len(found) != len(names):
            missing = ", ".join(n for n in names if n not in found)
            raise LaunchError(
                f"{', '.join(found)} set but not {missing}: start ranks with `ds-engine train "
                "--nproc N`, `deepspeed` or `torchrun`, which set all of them"
            )
        try:
            return cls(*(int(found[name]) for name in names))
        except ValueError as error:
            raise LaunchError(f"{found} must be whole numbers") from error


def prepare_rendezvous(rank: RankInfo) -> None:
    """See that torch.distributed can find the other ranks; a single process meets itself.

    Raises:
        LaunchError: there are several ranks and no address to meet at.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if not missing:
        return
    if rank.world_size > 1:
        raise LaunchError(
            f"{' and '.join(missing)} not set for a world of {rank.world_size} ranks; start them "
            "with `ds-engine`, `deepspeed` or `torchrun`, which set both"
        )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **own})


@dataclass(frozen=True)
class ParallelContext:
    """Groups of this rank on each axis of ``dims``; None stands for a group of one.

    It also answers the questions that DeepSpeed asks its ``mpu`` argument.
    """

    dims: ParallelDims
    rank: int
    tensor_group: ProcessGroup | None
    data_group: ProcessGroup | None
    model_group: ProcessGroup | None

    @classmethod
    def create(cls, dims: ParallelDims) -> ParallelContext:
        """Make the groups; every rank of the world must call this.

        Raises:
            LaunchError: the world that is running has another size than ``dims``.
        """
        if not dist.is_initialized():
            if dims.world != 1:
                raise LaunchError(f"a layout of {dims.world} processes needs torch.distributed")
            return cls(dims, 0, None, None, None)
        if dist.get_world_size() != dims.world:
            raise LaunchError(
                f"the layout is for {dims.world} processes but {dist.get_world_size()} are running"
            )
        rank = dist.get_rank()

        def own(*axes: str) -> ProcessGroup:
            mine = None
            for ranks in dims.groups(*axes):
                group = dist.new_group(ranks)
                mine = group if rank in ranks else mine
            assert mine is not None
            return mine

        return cls(
            dims,
            rank,
            tensor_group=own("tensor"),
            data_group=own("data", "context"),
            model_group=own("tensor", "pipeline"),
        )

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's place on each axis."""
        return self.dims.coordinates(self.rank)

    def tensor_parallel(self, *, sequence_parallel: bool) -> TensorParallel:
        """The handle for layers."""
        return TensorParallel(
            self.tensor_group if self.dims.tensor > 1 else None,
            self.coordinates["tensor"],
            self.dims.tensor,
            sequence_parallel,
        )

    # -- DeepSpeed's names ------------------------------------------------------------------
    def get_data_parallel_rank(self) -> int:
        """Place among the replicas."""
        return self.coordinates["data"] * self.dims.context + self.coordinates["context"]

    def get_data_parallel_world_size(self) -> int:
        """Number of ranks over which gradients are averaged."""
        return self.dims.data * self.dims.context

    def get_data_parallel_group(self) -> ProcessGroup | None:
        """Group over which gradients are averaged."""
        return self.data_group

    def get_model_parallel_rank(self) -> int:
        """Place among the ranks that together hold one model."""
        return self.coordinates["pipeline"] * self.dims.tensor + self.coordinates["tensor"]

    def get_model_parallel_world_size(self) -> int:
        """Number of ranks that together hold one model."""
        return self.dims.pipeline * self.dims.tensor

    def get_model_parallel_group(self) -> ProcessGroup | None:
        """Ranks that together hold one model."""
        return self.model_group

    def get_tensor_model_parallel_rank(self) -> int:
        """Place in the tensor-parallel group."""
        return self.coordinates["tensor"]

    def get_tensor_model_parallel_world_size(self) -> int:
        """Size of the tensor-parallel group."""
        return self.dims.tensor

    def get_tensor_model_parallel_group(self) -> ProcessGroup | None:
        """The tensor-parallel group."""
        return self.tensor_group
