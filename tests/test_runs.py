"""Every shipped run file trains: its own layout and options, sizes shrunk, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.worlds import run_world

RUNS = sorted((Path(__file__).parent.parent / "ds_configs" / "runs").glob("*.json"))
PROCESSES = 4


def _plan(path: str) -> tuple[Any, Any]:
    from ds_engine.config.deepspeed import fold_deepspeed
    from ds_engine.config.load import load_run
    from launch.verify_plan import plan_proof

    run = fold_deepspeed(load_run(path))
    return run, plan_proof(run, data=2, max_processes=PROCESSES)


def prove_body(rank: int, path: str) -> Any:
    from launch.verify import prove

    run, plan = _plan(path)
    proofs = prove(run, plan, steps=2)
    return [(proof.precision, proof.rows) for proof in proofs]


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_shipped_run_equals_one_process(path: Path) -> None:
    _, plan = _plan(str(path))
    for precision, rows in run_world(plan.dims.world, prove_body, str(path))[0]:
        wrong = [f"{row.name} {row.value:.1e}" for row in rows if not row.equal]
        assert rows and not wrong, f"{precision}: {wrong}"
