"""Every shipped run file trains: its own layout and options, sizes shrunk, against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_engine.config.deepspeed import precision
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


@pytest.fixture(scope="module")
def proven() -> dict[str, Any]:
    """Results by everything that a proof depends on: sizes of one family often shrink to one."""
    return {}


def _essence(run: Any, plan: Any) -> str:
    """What ``prove`` reads of a run, but for names, sizes, rates and places."""
    parts = [plan.dims, plan.model, run.parallel, run.data.isolate_documents, run.seed]
    parts += [run.deepspeed.get("zero_optimization"), precision(run.deepspeed), _share(run)]
    training = run.training
    parts += [training.label_smoothing, training.z_loss, training.activation_checkpointing]
    return repr(parts)


def _share(run: Any) -> Any:
    """Lengths balance the stages by their ratio."""
    lengths = run.data.sequence_length, run.data.decoder_sequence_length
    return lengths if run.parallel.pipeline > 1 else None


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_shipped_run_equals_one_process(path: Path, proven: dict[str, Any]) -> None:
    run, plan = _plan(str(path))
    essence = _essence(run, plan)
    if essence not in proven:
        proven[essence] = run_world(plan.dims.world, prove_body, str(path))[0]
    for kind, rows in proven[essence]:
        wrong = [f"{row.name} {row.value:.1e}" for row in rows if not row.equal]
        assert rows and not wrong, f"{kind}: {wrong}"
