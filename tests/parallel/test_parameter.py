"""Shards of parameters: what is taken and placed, and where initial values come from."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_engine.parallel.init import BLOCK_ROWS, derive_seed, initialize
from ds_engine.parallel.parameter import (
    ONES,
    ParameterSpec,
    make_parameter,
    normal,
    spec_of,
)
from ds_engine.parallel.tensor_parallel import TensorParallel

STD = 0.02


@st.composite
def specs(draw) -> list[ParameterSpec]:
    """The specs of all ranks of one parameter."""
    size = draw(st.integers(1, 4))
    dim = draw(st.sampled_from([None, 0, 1]))
    shape = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    blocks: tuple[int, ...] = ()
    if dim is not None:
        parts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        blocks = tuple(part * size for part in parts)
        shape[dim] = sum(blocks)
        blocks = blocks if len(blocks) > 1 or draw(st.booleans()) else ()
    return [ParameterSpec(tuple(shape), dim, r, size, ONES, blocks) for r in range(size)]


@given(specs())
@settings(deadline=None)
def test_take_and_place_are_inverse(ranks) -> None:
    shape = ranks[0].full_shape
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    joined = torch.full(shape, -1)
    held = 0
    for spec in ranks:
        local = spec.take(full)
        assert tuple(local.shape) == spec.local_shape
        spec.place(local, joined)
        assert torch.equal(spec.take(joined), local)
        held += local.numel()
    assert torch.equal(joined, full)
    assert held == full.numel() * (1 if ranks[0].sharded or len(ranks) == 1 else len(ranks))


def test_fused_blocks_are_cut_one_by_one() -> None:
    full = torch.arange(8)  # q0 q1 q2 q3 | k0 k1 | v0 v1
    spec = ParameterSpec((8,), 0, 1, 2, ONES, blocks=(4, 2, 2))
    assert spec.take(full).tolist() == [2, 3, 5, 7]


def test_parameters_without_a_description_are_refused() -> None:
    with pytest.raises(TypeError, match="make_parameter"):
        spec_of(torch.nn.Parameter(torch.ones(1)))


def whole(shape, size, *, dim, name="layer.weight", seed=3, **options) -> torch.Tensor:
    """Initialise on every rank and put the parts together."""
    full = torch.full(shape, torch.nan)
    for rank in range(size):
        tp = TensorParallel(None, rank, size)
        parameter = make_parameter(shape, tp, normal(STD), dim=dim, **options)
        assert parameter.tensor_model_parallel == (dim is not None and size > 1)
        initialize(parameter, name, seed)
        spec_of(parameter).place(parameter.detach(), full)
    return full


@pytest.mark.parametrize(
    ("shape", "dim", "blocks"),
    [
        ((BLOCK_ROWS * 2 + 8, 24), 0, ()),
        ((24, BLOCK_ROWS * 2 + 8), 1, ()),
        ((3 * BLOCK_ROWS, 8), 0, (BLOCK_ROWS,) * 3),
        ((600, 8), 0, (200, 400)),
        ((12, 8), 0, (4, 4, 4)),
        ((40, 8), None, ()),
    ],
)
def test_initial_values_do_not_depend_on_the_degree(shape, dim, blocks) -> None:
    single = whole(shape, 1, dim=dim, blocks=blocks)
    for size in (2, 4):
        assert torch.equal(whole(shape, size, dim=dim, blocks=blocks), single)
    # Fusing is about shards only: a single process draws the same without blocks.
    assert torch.equal(whole(shape, 1, dim=dim), single)


@pytest.mark.parametrize("words", [1, 50, 256, 300])
def test_padded_rows_are_zero_and_the_words_stay(words) -> None:
    single = whole((-(-words // 8) * 8, 16), 1, dim=0, valid=words)
    for size in (1, 2, 4):
        padded = -(-words // (8 * size)) * 8 * size
        full = whole((padded, 16), size, dim=0, valid=words)
        assert torch.equal(full[:words], single[:words])
        assert full[:words].all() and not full[words:].any()


def test_names_and_seeds_give_different_values_of_the_right_spread() -> None:
    shape = (512, 300)
    base = whole(shape, 1, dim=0)
    count = base.numel()
    assert abs(base.mean()) < 5 * STD * count**-0.5
    assert abs(base.std() / STD - 1) < 5 * (2 * count) ** -0.5
    others = [whole(shape, 1, dim=0, name="layer.bias"), whole(shape, 1, dim=0, seed=4)]
    others.append(base.roll(BLOCK_ROWS, 0))  # blocks of one parameter
    for other in others:
        correlation = (base * other).mean() / STD**2
        assert abs(correlation) < 5 * count**-0.5
    assert torch.equal(base, whole(shape, 1, dim=0))


def test_constants() -> None:
    parameter = make_parameter((4, 4), TensorParallel.single(), ONES)
    initialize(parameter, "x", 1)
    assert torch.equal(parameter, torch.ones(4, 4))


def test_seeds_are_stable_and_separate_their_parts() -> None:
    assert derive_seed(1, "a", 2) == derive_seed(1, "a", 2)
    parts = [(1, "a"), (1, "b"), (2, "a"), ("1a",), (1, "a", 0), (11, "a"), (1, "1a")]
    assert len({derive_seed(*p) for p in parts}) == len(parts)
    assert all(0 <= derive_seed(i) < 2**63 for i in range(50))
    # A new value here means that every saved run starts from other weights: do not change it.
    assert derive_seed(1234, "layers.0.mlp.up.weight", 0) == 7280481834715115211
