"""Every layout equals one process: five steps of loss, gradients, norm and updated weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from ds_engine.verify import Trace, compare
from tests.parity.layouts import Layout, layouts_body, reference_body
from tests.tables import LAYOUTS as TABLE
from tests.tables import note
from tests.worlds import run_world

# fp32: relative to the largest magnitude of each tensor. bf16 rounds to 8 bits, so tensors are
# compared by length: the figures are what one process in bf16 differs from fp32 by, doubled.
FP32 = {"tolerance": 1e-5}
BF16 = {"tolerance": 0.2, "scalar_tolerance": 2e-2, "measure": "overall", "reach": 5e-3}

LAYOUTS = [
    Layout(micro=4),
    Layout(zero=1),
    Layout(zero=2, micro=1),
    Layout(zero=3, recompute=1),
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(tensor=2, sequence=True),
    Layout(tensor=4, sequence=True, recompute=2),
    Layout(pipeline=2, micro=1),
    Layout(pipeline=4, recompute=1),
    Layout(data=2, micro=1),
    Layout(data=2, zero=1, recompute=2),
    Layout(data=2, zero=2),
    Layout(data=2, zero=3, recompute=1),
    Layout(data=2, zero=1, offload=True),
    Layout(data=2, zero=2, offload=True),
    Layout(data=2, zero=3, offload=True),
    Layout(tensor=2, pipeline=2),
    Layout(tensor=2, sequence=True, pipeline=2, recompute=1),
    Layout(pipeline=2, data=2, zero=1),
    Layout(pipeline=2, data=2, zero=1, offload=True),
    Layout(tensor=2, data=2, zero=1),
    Layout(tensor=2, data=2, zero=2),
    Layout(tensor=2, sequence=True, data=2, zero=2),
    Layout(tensor=2, sequence=True, data=2, zero=2, offload=True),
    Layout(tensor=2, data=2, zero=3),
    pytest.param(Layout(tensor=2, pipeline=2, data=2, zero=1), marks=pytest.mark.slow),
    pytest.param(
        Layout(tensor=2, sequence=True, pipeline=2, data=2, zero=1, recompute=1),
        marks=pytest.mark.slow,
    ),
]
# What differs between the variants of a family are layers, so a few hard layouts tell.
VARIANT_LAYOUTS = [
    Layout(zero=3, recompute=1),
    Layout(tensor=4, sequence=True, recompute=2),
    Layout(pipeline=4, recompute=1),
    Layout(tensor=2, sequence=True, pipeline=2, micro=1),
    Layout(tensor=2, data=2, zero=3),
]
FAMILIES = ("gpt_dropout", "llama_dropout", "t5_dropout", "bert_dropout")
PLAIN_FAMILIES = ("gpt", "llama", "t5", "bert")
VARIANTS = (
    "t5_11_dropout",
    "t5_learned_dropout",
    "roberta_dropout",
    "bert_rotary_dropout",
    "classify_dropout",
)
PLAIN_LAYOUTS = [
    Layout(micro=4),
    Layout(tensor=2, sequence=True, recompute=2),
    Layout(pipeline=4, micro=1),
    Layout(tensor=2, pipeline=2, recompute=1),
    Layout(data=2, zero=2),
]
BF16_LAYOUTS = [
    Layout(zero=1, bf16=True),
    Layout(zero=1, data=2, bf16=True),
    Layout(zero=2, data=2, bf16=True),
    Layout(zero=3, data=2, bf16=True),
    Layout(zero=1, pipeline=2, bf16=True),
    Layout(zero=1, tensor=2, sequence=True, bf16=True),
    Layout(zero=1, tensor=2, pipeline=2, recompute=1, bf16=True),
]


@functools.cache
def reference(family: str) -> Trace:
    return run_world(1, reference_body, family)[0]


@functools.lru_cache(maxsize=1)
def traces(families: tuple[str, ...], layout: Layout) -> dict[str, Trace]:
    """All families of a table in one layout; the tests ask for them one after the other."""
    return run_world(layout.world, layouts_body, families, layout, device=layout.device)[0]


def check(
    family: str, layout: Layout, *, beside: tuple[str, ...] | None = None, **tolerances: Any
) -> None:
    """Hold a family in a layout against one process.

    Args:
        beside: families to train in the same world, this one among them.
        tolerances: see ``compare``.
    """
    trace = traces(beside or (family,), layout)[family]
    rows = compare(trace, reference(family), **tolerances)
    wrong = [f"{row.name}: {row.value:.2e} in step {row.step}" for row in rows if not row.equal]
    assert len(rows) > 60
    assert not wrong, f"{family} {layout.name}: {wrong[:8]} and {max(len(wrong) - 8, 0)} more"
    note(TABLE, layout.name, family, max(row.value for row in rows))


# Of stacked parameters the upper one varies fastest: all families of a layout follow each other.
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_layout_equals_one_process(family: str, layout: Layout) -> None:
    check(family, layout, beside=FAMILIES, **FP32)


@pytest.mark.parametrize("family", VARIANTS)
@pytest.mark.parametrize("layout", VARIANT_LAYOUTS, ids=lambda layout: layout.name)
def test_variant_equals_one_process(family: str, layout: Layout) -> None:
    check(family, layout, beside=VARIANTS, **FP32)


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
@pytest.mark.parametrize("layout", PLAIN_LAYOUTS, ids=lambda layout: layout.name)
def test_layout_without_dropout_equals_one_process(family: str, layout: Layout) -> None:
    check(family, layout, beside=PLAIN_FAMILIES, **FP32)


@pytest.mark.parametrize("family", PLAIN_FAMILIES)
@pytest.mark.parametrize("layout", BF16_LAYOUTS, ids=lambda layout: layout.name)
def test_bf16_layout_is_near_one_process_in_fp32(family: str, layout: Layout) -> None:
    check(family, layout, beside=PLAIN_FAMILIES, **BF16)
