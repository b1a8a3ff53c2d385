"""Where a parameter's float32 master and optimizer state live on this rank, for every ZeRO stage.

DeepSpeed's optimizers work on flat tensors: the parameter itself (no ZeRO), a flat partition of a
parameter group (ZeRO-1, -2 and bf16), or a flat partition of each parameter (ZeRO-3). A ``Place``
says which piece of which canonical parameter sits where, so that a checkpoint holds named pieces
and never DeepSpeed's internal layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Place:
    """A piece of a parameter in one of the base optimizer's tensors.

    Attributes:
        flat: the tensor that the base optimizer updates.
        at: offset of the piece in ``flat``, elements.
        start: offset of the piece in this rank's flattened parameter (its tensor-parallel shard).
        length: elements.
        is_parameter: whether ``flat`` is the model's own parameter, so that there is no master.
    """

    flat: Tensor
    at: int
    start: int
    length: int
    is_parameter: bool

    def view(self, tensor: Tensor) -> Tensor:
        """This piece of a tensor of ``flat``'s shape (a view)."""
        return tensor.detach().view(-1).narrow(0, self.at, self.length)


def partition_sharded(parameter: Tensor) -> bool:
    """Whether ZeRO-3 has cut this parameter itself over the replicas."""
    return hasattr(parameter, "ds_tensor")


def locate(engine: Any, parameter: Tensor) -> Place | None:
    """Find this rank's piece of a parameter; None when other replicas hold all of it."""
    optimizer = engine.optimizer
    if partition_sharded(parameter):
        return _locate_stage3(optimizer, parameter)
    if hasattr(parameter, "_hp_mapping"):
        mapping: Any = parameter._hp_mapping
        if mapping is None:
            return None
        groups = getattr(optimizer, "single_partition_of_fp32_groups", None)
        if groups is None:
            groups = optimizer.fp32_groups_flat_partition
        return Place(
            groups[mapping.param_group_index],
            mapping.hp_fragment_address.start,
            mapping.lp_fragment_address.start,
            mapping.lp_fragment_address.numel,
            is_parameter=False,
        )
    return Place(parameter, 0, 0, parameter.numel(), is_parameter=True)


def _locate_stage3(optimizer: Any, parameter: Tensor) -> Place | None:
    group, at, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
    part = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    start = rank * part
    length = min(part, parameter.ds_numel - start)  # type: ignore[attr-defined]
    if length <= 0:
        return None
    return Place(optimizer.fp32_partitioned_groups_flat[group], at, start, length, False)


def optimizer_state(engine: Any, place: Place) -> dict[str, Tensor]:
    """State entries of a piece by key: views for tensors like ``flat``, else scalars."""
    state = engine.basic_optimizer.state.get(place.flat, {})
    found = {}
    for key, value in state.items():
        # Kernels such as DeepSpeed's Adams count steps in a Python int; int64 marks it.
        entry = value if torch.is_tensor(value) else torch.tensor(value)
        found[key] = place.view(entry) if entry.shape == place.flat.shape else entry.detach()
    return found


def restore_state(engine: Any, place: Place, key: str, value: Tensor) -> None:
    """Write one state entry of a piece, making the optimizer's tensor when it has none yet."""
    state = engine.basic_optimizer.state[place.flat]
    if value.ndim == 0:
        state[key] = int(value) if value.dtype == torch.int64 else value.clone()
        return
    if key not in state:
        state[key] = torch.zeros_like(place.flat, dtype=value.dtype).detach()
    place.view(state[key]).copy_(value)


def restore_master(parameter: Tensor, place: Place, value: Tensor) -> None:
    """Write a piece of the float32 master and, under ZeRO-3, the model's own partition."""
    place.view(place.flat).copy_(value)
    if partition_sharded(parameter):
        partition = parameter.ds_tensor  # type: ignore[attr-defined]
        partition.data.view(-1)[: place.length].copy_(value)


def finish_restore(engine: Any) -> None:
    """Tell DeepSpeed that the base optimizer's state exists now."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
