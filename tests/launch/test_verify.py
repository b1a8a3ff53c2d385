"""``ds-engine verify``: it says yes to a right layout and names what is wrong in a broken one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launch.tiny import cli_body, run_object
from tests.worlds import run_world


def write(folder: Path, **parallel: Any) -> Path:
    path = folder / "verify.json"
    run = run_object() | {"parallel": parallel}
    path.write_text(json.dumps(run))
    return path


WORDS = ("verify", "--config", "verify.json", "--data", "1", "--steps", "2")


def verify(folder: Path, size: int, sabotage: str = "", *more: str) -> tuple[int, str]:
    answers = run_world(size, sabotaged_body, folder, sabotage, (*WORDS, *more), timeout=90)
    assert [text for _, text in answers[1:]] == [""] * (size - 1)
    return answers[0]


def sabotaged_body(rank: int, folder: Path, sabotage: str, words: tuple[str, ...]) -> Any:
    """The command as a rank, with one well-known mistake built in."""
    import torch

    from ds_engine.parallel import collectives, norm, random
    from ds_engine.pipeline import engine

    if sabotage == "norms":  # Megatron-DeepSpeed#170: gradients of norms are not summed under SP
        norm.local_weight = lambda weight, tp: weight
    elif sabotage == "dropout":  # Megatron-LM#1256: the same mask on every sequence shard
        whole = random.Dropout.forward
        random.Dropout.forward = lambda self, x, ids, first=0: whole(self, x, ids, 0)
    elif sabotage == "row":  # gpt-neox#880: partial sums are not added
        collectives._ReduceFrom.forward = staticmethod(lambda ctx, x, tp: x.clone())
    elif sabotage == "norm":  # tied weights and shards counted more than once
        engine.global_gradient_norm = lambda parameters, mpu: torch.stack(
            [p.grad.norm() for p in parameters if p.grad is not None]
        ).norm()
    return cli_body(rank, folder, words)


def test_right_layouts_are_equal(tmp_path: Path) -> None:
    write(tmp_path, tensor=2, sequence=True)
    code, text = verify(tmp_path, 2)
    assert code == 0, text
    assert "equal to one process in fp32" in text
    assert "DIFFERS" not in text
    write(tmp_path, pipeline=2)
    code, text = verify(tmp_path, 2)
    assert code == 0, text


@pytest.mark.parametrize(
    ("sabotage", "parallel", "named"),
    [
        ("norms", {"tensor": 2, "sequence": True}, r"gradient of .*norm\.(weight|bias)"),
        ("dropout", {"tensor": 2, "sequence": True}, "loss"),
        ("row", {"tensor": 2}, "loss"),
        ("norm", {"pipeline": 2}, "gradient norm"),
    ],
)
def test_a_broken_layout_is_named(
    tmp_path: Path, sabotage: str, parallel: dict[str, Any], named: str
) -> None:
    write(tmp_path, **parallel)
    code, text = verify(tmp_path, 2, sabotage)
    assert code == 1
    assert "NOT equal in fp32: first " in text
    verdict = text.splitlines()[-1]
    if sabotage == "norms":
        assert re.search(named, text), text
    else:
        assert verdict.startswith(f"NOT equal in fp32: first {named}"), verdict


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"tensor": 3}, "parallel.tensor = 3 does not divide"),
        ({"context": 2}, "parallel.context = 2 is not available"),
        ({"expert": 2}, "parallel.expert = 2 is not available"),
        ({"pipeline": 2, "virtual_pipeline": 2}, "parallel.virtual_pipeline = 2 is not available"),
        ({"tensor": 64, "sequence": True}, "data.sequence_length = 32 is not a multiple"),
    ],
)
def test_a_layout_that_cannot_be_trained_is_refused(
    tmp_path: Path, parallel: dict[str, Any], message: str
) -> None:
    from click.testing import CliRunner

    from launch.cli import cli

    path = write(tmp_path, **parallel)
    found = CliRunner().invoke(cli, ["verify", "--config", str(path)])
    assert found.exit_code == 2
    assert message in found.output


def test_a_tensor_degree_that_is_no_power_of_two(tmp_path: Path) -> None:
    """The proof's sequence is a multiple of it, and its model can read it."""
    path = write(tmp_path, tensor=3, sequence=True)
    run = json.loads(path.read_text())
    run["model"] |= {"attention": {"num_heads": 6}, "hidden_size": 48}
    run["model"]["mlp"]["intermediate_size"] = 96
    run["data"]["sequence_length"] = 33
    path.write_text(json.dumps(run))
    code, text = verify(tmp_path, 3)
    assert code == 0, text
    assert "equal to one process in fp32" in text


def planned(parallel: dict[str, Any], **options: Any) -> tuple[Any, Any]:
    from ds_engine.config.load import read_run
    from launch.verify_plan import plan_proof

    raw = run_object() | {"parallel": parallel}
    raw["deepspeed"] |= options.pop("deepspeed", {})
    raw["model"]["attention"] = {"num_heads": 4, **options.pop("attention", {})}
    run = read_run(raw)
    return run, plan_proof(run, data=1, **options)


def test_what_is_not_proven_is_said() -> None:
    from launch.verify_plan import describe

    run, plan = planned({"tensor": 2, "sequence": True}, max_processes=2)
    assert plan.notes == ()
    assert "sequence parallel" in describe(run, plan)
    run, plan = planned({"tensor": 2, "sequence": True}, max_processes=1)
    assert "sequence parallel" not in describe(run, plan)
    halved, sequence = plan.notes
    assert "tensor = 2 is proven at 1" in halved
    assert "parallel.sequence is not proven" in sequence
    _, plan = planned({}, max_processes=1, deepspeed={"fp16": {"enabled": True}})
    assert "deepspeed.fp16 is not proven, only fp32" in plan.notes[0]
    _, plan = planned({}, max_processes=1, attention={"backend": "flash"})
    assert 'proven as "auto"' in plan.notes[0]
    assert plan.model.attention.backend == "auto"


def test_a_proof_writes_nothing_into_the_users_monitors() -> None:
    from ds_engine.verify import AdamSettings
    from launch.verify import _deepspeed

    monitors = {name: {"enabled": True} for name in ("csv_monitor", "tensorboard", "comet")}
    run, plan = planned({}, max_processes=1, deepspeed=monitors)
    assert set(monitors) < set(run.deepspeed)
    section = _deepspeed(run, "fp32", AdamSettings(learning_rate=1e-3), plan.dims)
    assert not set(monitors) & set(section)
