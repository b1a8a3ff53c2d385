"""Twenty steps of loss and gradient norm per family, pinned: a change of mathematics shows here.

Refresh on purpose with ``pytest tests/golden --refresh-golden`` and say in the commit why.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.verify import AdamSettings, reference_trace
from tests.parity.families import FAMILIES
from tests.parity.layouts import plan_for, synthetic

STEPS = 20
FOLDER = Path(__file__).parent
# Kernels differ in the last bits between processors; a real change is far larger.
TOLERANCE = 2e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_norms_are_the_pinned_ones(family: str, request: pytest.FixtureRequest) -> None:
    data = synthetic(family)
    plan = plan_for(family, TensorParallel.single())
    batches = [data.step(number, 4, 0, 1) for number in range(STEPS)]
    trace = reference_trace(plan, batches, AdamSettings(learning_rate=1e-3, clip=0.5))
    found = {"losses": trace.losses, "norms": trace.norms}
    path = FOLDER / f"{family}.json"
    if request.config.getoption("--refresh-golden"):
        path.write_text(json.dumps(found, indent=2) + "\n")
    pinned = json.loads(path.read_text())
    for name in ("losses", "norms"):
        assert found[name] == pytest.approx(pinned[name], rel=TOLERANCE), name
