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


def test_a_layout_that_does_not_fit_the_model_is_refused(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from launch.cli import cli

    path = write(tmp_path, tensor=3)
    found = CliRunner().invoke(cli, ["verify", "--config", str(path)])
    assert found.exit_code == 2
    assert "tensor = 3" in found.output
