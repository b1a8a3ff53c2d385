"""What may change between two starts of a run, and what is another run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from ds_engine.training.checkpoint import files
from ds_engine.training.checkpoint.checkpointer import differing_keys

RUN = {
    "seed": 1,
    "model": {
        "num_layers": 2,
        "hidden_dropout": 0.1,
        "attention": {"num_heads": 4, "backend": "auto"},
    },
    "data": {"sequence_length": 16, "isolate_documents": True, "train": [{"path": "a"}]},
    "training": {"steps": 5},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    run = copy.deepcopy(RUN)
    *parents, last = path.split(".")
    section: Any = run
    for name in parents:
        section = section[name]
    section[last] = value
    return run


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("seed", 2),
        ("model.attention.num_heads", 8),
        ("model.activation", "relu"),
        ("data.sequence_length", 32),
        ("data.isolate_documents", False),
    ],
)
def test_another_model_or_order_of_data_is_named(path: str, value: Any) -> None:
    (text,) = differing_keys(RUN, changed(path, value))
    assert text.startswith(f"{path} ")
    assert text.endswith(f"-> {value}")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("training.steps", 100),
        ("model.hidden_dropout", 0.0),
        ("model.attention.backend", "sdpa"),
        ("data.train", [{"path": "b"}]),
    ],
)
def test_what_moves_no_parameter_and_no_sample_may_change(path: str, value: Any) -> None:
    assert differing_keys(RUN, changed(path, value)) == []


def save(root: Path, step: int, count: int | None) -> Path:
    temporary = files.prepare(root, step)
    (temporary / "data").write_bytes(b"x" * 10)
    entries = {"data": files.describe_file(temporary / "data")}
    path = files.commit(root, step, entries)
    files.keep_newest(root, count, saved=step)
    return path


def test_damaged_checkpoints_do_not_count_among_those_kept(tmp_path: Path) -> None:
    good = save(tmp_path, 2, None)
    damaged = save(tmp_path, 3, None)
    (damaged / "data").write_bytes(b"x")
    newest = save(tmp_path, 4, 2)
    assert good.is_dir()
    assert newest.is_dir()
    save(tmp_path, 5, 2)
    assert not good.exists()
    assert files.newest_complete(tmp_path)[0] == tmp_path / "step_00000005"
