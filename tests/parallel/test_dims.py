"""The arithmetic of the mesh, and the live groups made from it."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.errors import ConfigError, LaunchError
from ds_engine.parallel.context import ParallelContext, RankInfo
from ds_engine.parallel.dims import AXES, ParallelDims

DEGREE = st.integers(1, 4)


@st.composite
def dims(draw) -> ParallelDims:
    tensor, pipeline, context, data = (draw(DEGREE) for _ in range(4))
    world = tensor * pipeline * context * data
    return ParallelDims(world, tensor=tensor, pipeline=pipeline, context=context)


@given(dims())
def test_coordinates_and_rank_are_inverse(mesh) -> None:
    assert prod(mesh.sizes().values()) == mesh.world
    seen = set()
    for rank in range(mesh.world):
        position = mesh.coordinates(rank)
        assert all(0 <= position[axis] < mesh.sizes()[axis] for axis in AXES)
        assert mesh.rank(position) == rank
        seen.add(tuple(position.values()))
    assert seen == set(product(*(range(size) for size in mesh.sizes().values())))


@given(dims(), st.sets(st.sampled_from(AXES)))
def test_groups_partition_the_world(mesh, axes) -> None:
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    size = prod(mesh.sizes()[axis] for axis in axes)
    for group in groups:
        assert len(group) == size and group == sorted(group)
        fixed = {tuple(mesh.coordinates(r)[a] for a in AXES if a not in axes) for r in group}
        assert len(fixed) == 1


def test_tensor_ranks_are_neighbours_and_stages_far_apart() -> None:
    mesh = ParallelDims(16, tensor=2, pipeline=2, context=2)
    assert mesh.data == 2
    assert mesh.groups("tensor")[:2] == [[0, 1], [2, 3]]
    assert mesh.groups("pipeline")[0] == [0, 8]
    assert mesh.describe() == "tp2 x cp2 x pp2 x dp2"


@pytest.mark.parametrize(
    ("degrees", "named"),
    [
        ({"tensor": 0}, "parallel.tensor = 0"),
        ({"pipeline": -1}, "parallel.pipeline = -1"),
        ({"tensor": 3}, "8 processes"),
        ({"tensor": 4, "pipeline": 4}, "= 16"),
    ],
)
def test_impossible_degrees_are_named(degrees, named) -> None:
    with pytest.raises(ConfigError, match=named):
        ParallelDims(8, **degrees)


def test_rank_outside_of_the_world_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 4"):
        ParallelDims(4).coordinates(4)


@pytest.mark.parametrize(
    ("variables", "answer"),
    [
        ({}, RankInfo(0, 0, 1)),
        ({"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, RankInfo(3, 1, 4)),
        ({"RANK": "3"}, "LOCAL_RANK, WORLD_SIZE"),
        ({"RANK": "x", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}, "whole numbers"),
    ],
)
def test_rank_info(monkeypatch, variables, answer) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(answer, RankInfo):
        assert RankInfo.from_environment() == answer
    else:
        with pytest.raises(LaunchError, match=answer):
            RankInfo.from_environment()


def groups_body(rank: int, mesh: ParallelDims) -> dict[str, list[int] | None]:
    import torch.distributed as dist

    context = ParallelContext.create(mesh)
    tp = context.tensor_parallel(sequence_parallel=True)
    assert (tp.rank, tp.size) == (context.coordinates["tensor"], mesh.tensor)
    assert tp.scatters_sequence == (mesh.tensor > 1)
    groups = {"data": context.data_group, "model": context.model_group, "tensor": tp.group}
    found = {n: None if g is None else dist.get_process_group_ranks(g) for n, g in groups.items()}
    assert context.get_data_parallel_world_size() == len(found["data"])
    assert context.get_model_parallel_world_size() == len(found["model"])
    assert found["data"].index(rank) == context.get_data_parallel_rank()
    return found


@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"pipeline": 2, "tensor": 2}, {"context": 2}])
def test_live_groups(warm_world, degrees) -> None:
    mesh = ParallelDims(4, **degrees)
    for rank, found in enumerate(warm_world(4, groups_body, mesh)):
        axes = {"data": ("data", "context"), "model": ("tensor", "pipeline"), "tensor": ("tensor",)}
        for name, along in axes.items():
            expected = next(g for g in mesh.groups(*along) if rank in g)
            assert found[name] == (expected if name != "tensor" or mesh.tensor > 1 else None)


def wrong_world_body(rank: int) -> str:
    try:
        ParallelContext.create(ParallelDims(4))
    except LaunchError as error:
        return str(error)
    return "no error"


def test_layout_for_another_world_is_refused(warm_world) -> None:
    assert all("4 processes but 2" in text for text in warm_world(2, wrong_world_body))
    with pytest.raises(LaunchError, match=r"torch\.distributed"):
        ParallelContext.create(ParallelDims(2))
