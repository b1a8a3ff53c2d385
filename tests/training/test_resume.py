"""A resumed run equals the uninterrupted one to the last bit, in every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ds_engine.training.checkpoint import files
from ds_engine.training.checkpoint.weights import FullWeights
from tests.parity.layouts import Layout
from tests.training.runs import Job, run_body, write_data
from tests.worlds import run_world


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


LAYOUTS = [
    Layout(micro=2),
    Layout(data=2, micro=2),
    Layout(data=2, zero=1, micro=2),
    Layout(data=2, zero=2, micro=2),
    Layout(data=2, zero=3, micro=2),
    Layout(tensor=2, sequence=True, micro=4),
    Layout(pipeline=2, micro=2),
    Layout(pipeline=2, zero=1, micro=2),
    Layout(tensor=2, pipeline=2, micro=4),
    Layout(data=2, zero=1, micro=2, bf16=True),
    Layout(data=2, zero=2, micro=2, bf16=True),
    Layout(data=2, zero=3, micro=2, bf16=True),
    Layout(data=2, zero=2, micro=2, offload=True),
    Layout(tensor=2, data=2, zero=1, micro=2),
]


def contents(checkpoint: Path) -> dict[str, Any]:
    """Hashes of all tensors' files and the counters: equal means equal to the last bit."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    hashes = {n: f["sha256"] for n, f in manifest["files"].items() if n.endswith(".safetensors")}
    return hashes | {"state": json.loads((checkpoint / "state.json").read_text())}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, data: Path, layout: Layout
) -> None:
    first = Job(layout, data, tmp_path / "first", evaluate_every=2)
    whole = run_world(layout.world, run_body, first)
    shutil.copytree(first.root / "step_00000003", tmp_path / "second" / "step_00000003")
    resumed = run_world(
        layout.world, run_body, Job(layout, data, tmp_path / "second", evaluate_every=2)
    )
    assert [step for step, row in whole[0]["rows"] if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    after = [entry for entry in whole[0]["rows"] if entry[0] > 3]
    assert resumed[0]["rows"] == after
    assert resumed[0]["state"] == whole[0]["state"]
    assert resumed[0]["state"]["consumed_samples"] == 48
    assert "resumed from step_00000003" in resumed[0]["reports"]
    assert len({row["train/lr"] for _, row in after if "train/lr" in row}) == 3
    ours, theirs = (contents(tmp_path / r / "step_00000006") for r in ("second", "first"))
    assert len(ours) >= 3
    assert ours == theirs
    for path in (tmp_path / "first" / "step_00000006").iterdir():
        assert path.suffix in (".json", ".safetensors")
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as reader:
                assert list(reader.keys())
    weights = FullWeights(tmp_path / "first" / "step_00000006")
    for name, value in whole[0]["weights"].items():
        full = weights.full(name)
        assert torch.equal(full.float(), value[: full.shape[0]].float()), name
