"""Using a finished run: generation and evaluation give the same in every tensor layout."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch.tiny import HOME, cli, cli_body, environment, losses
from tests.worlds import run_world

PROMPTS = ("--prompt", "abc", "--prompt", "a longer prompt", "--prompt", "")
SHORT = ("--max-new-tokens", "12")


def in_world(size: int, home: Path, *arguments: str) -> str:
    """What rank 0 prints; the others print nothing, and nobody fails."""
    answers = run_world(size, cli_body, home, arguments)
    assert [code for code, _ in answers] == [0] * size
    assert [text for _, text in answers[1:]] == [""] * (size - 1)
    return answers[0][1]


def generate(home: Path, tensor: int, *more: str) -> str:
    words = ("generate", "--checkpoint", "runs/whole", *PROMPTS, *SHORT)
    return in_world(tensor, home, *words, "--tensor", str(tensor), *more)


def test_generation_is_the_same_for_all_tensor_degrees(home: Path) -> None:
    likeliest = generate(home, 1)
    assert len(likeliest.split("\n----\n")) == 3
    assert likeliest.startswith("abc")
    assert generate(home, 2) == likeliest
    drawn = ("--temperature", "1.0", "--top-k", "50", "--seed", "4")
    sampled = generate(home, 1, *drawn)
    assert sampled != likeliest
    assert generate(home, 2, *drawn) == sampled
    assert generate(home, 4, *drawn) == sampled


@pytest.mark.slow
def test_generation_starts_its_own_ranks(home: Path) -> None:
    found = subprocess.run(
        cli("generate", "--checkpoint", "runs/whole", *PROMPTS, *SHORT, "--tensor", "2"),
        cwd=home,
        env=environment() | {"PYTHONPATH": str(HOME)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert found.stdout == generate(home, 1)


def test_evaluation_is_the_same_for_all_layouts(home: Path) -> None:
    words = ("eval", "--checkpoint", "runs/whole", "--json")
    whole = json.loads(in_world(1, home, *words))
    assert whole["validation/tokens"] > 500
    # the run's own last evaluation saw the first 16 samples
    part = json.loads(in_world(1, home, *words, "--max-samples", "16"))
    assert part["validation/loss"] == pytest.approx(
        losses(home / "runs" / "whole")[60]["validation/loss"], rel=1e-6
    )
    for size, more in ((2, ("--tensor", "2")), (2, ("--nproc", "2")), (1, ())):
        found = json.loads(in_world(size, home, *words, *more, "--micro-batch-size", "3"))
        assert found["validation/tokens"] == whole["validation/tokens"]
        assert found["validation/loss"] == pytest.approx(whole["validation/loss"], rel=1e-6)
    text = in_world(1, home, "eval", "--checkpoint", "runs/whole", "--data", "data/train")
    assert text.startswith("loss ")
    assert "perplexity" in text


def test_one_checkpoint_and_a_damaged_one(home: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(home / "runs" / "whole", run)
    words = ("eval", "--json", "--max-samples", "4", "--checkpoint")
    older = in_world(1, home, *words, str(run / "checkpoints" / "step_00000050"))
    newest = in_world(1, home, *words, str(run))
    assert newest != older
    for file in (run / "checkpoints" / "step_00000060").glob("model-*"):
        file.write_bytes(file.read_bytes()[:-9])
    assert in_world(1, home, *words, str(run)) == older
    ((code, _),) = run_world(1, failing_body, home, str(run / "checkpoints" / "step_00000060"))
    assert code == 4


def failing_body(rank: int, folder: Path, checkpoint: str) -> tuple[int, str]:
    """``ds-engine eval`` that fails: outside of ranks ``fail`` exits in the ordinary way."""
    import os

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name)
    return cli_body(rank, folder, ("eval", "--checkpoint", checkpoint))


def test_a_degree_that_does_not_fit_is_refused(home: Path) -> None:
    from click.testing import CliRunner

    from launch.cli import cli as group

    words = ["generate", "--checkpoint", str(home / "runs" / "whole")]
    assert "give at least one --prompt" in CliRunner().invoke(group, words).output
    empty = home / "data"
    found = CliRunner().invoke(group, ["generate", "--checkpoint", str(empty), "--prompt", "a"])
    assert found.exit_code == 4
    assert "no usable checkpoint" in found.output
