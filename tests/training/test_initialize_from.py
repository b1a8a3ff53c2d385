"""``checkpoint.initialize_from``: a new run starts from another's trunk, in every layout."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_engine.config.load import read_run
from ds_engine.errors import CheckpointError, ConfigError, DsEngineError
from ds_engine.training.checkpoint.weights import FullWeights, find_weights
from launch.check import check_files
from launch.compose import initial_weights
from models.registry import read_model
from tests.launch.untrained import model_section, write_run, write_tokenizer
from tests.training.runs import whole_weights
from tests.worlds import run_world


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a pretrained BERT in ``source``."""
    write_run(tmp_path / "source", model_section("bert"))
    return tmp_path


def run_section(source: str | None, folder: str = "runs/new", **model: Any) -> dict[str, Any]:
    return {
        "seed": 9,
        "model": model_section("bert", **{"num_labels": 3, "init_std": 0.3} | model),
        "data": {
            "train": [{"path": "data/train"}],
            "sequence_length": 32,
            "tokenizer": "source/tokenizer.json",
        },
        "training": {"steps": 1, "lr_schedule": {"warmup_steps": 0}},
        "checkpoint": {"directory": folder, "initialize_from": source},
        "deepspeed": {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.003}},
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
        },
    }


def start_body(rank: int, home: Path, section: dict[str, Any]) -> Any:
    """Build a run as ``launch.train`` does and save it: (weights by rank 0, reports)."""
    from ds_engine.parallel.context import ParallelContext
    from ds_engine.training.checkpoint.checkpointer import Checkpointer
    from ds_engine.training.engine import build_train_step, gather_parameter, init_distributed
    from ds_engine.training.state import TrainState
    from launch.check import check_run
    from launch.compose import plan_of

    os.chdir(home)
    world = int(os.environ["WORLD_SIZE"])
    resolved = check_run(read_run(section), world, "the test")
    run, reports = resolved.run, []
    init_distributed()
    context = ParallelContext.create(resolved.dims)
    step = build_train_step(
        plan_of(resolved, context.tensor_parallel(sequence_parallel=False)),
        context,
        resolved.deepspeed,
        initial=initial_weights(run, resolved.model, reports.append),
    )
    checkpointer = Checkpointer(
        Path(run.checkpoint.directory) / "checkpoints",
        step,
        config=resolved.to_dict(),
        keep_last=None,
        report=reports.append,
        gather=gather_parameter,
    )
    checkpointer.save(TrainState())
    return whole_weights(step), reports


def start(home: Path, size: int, section: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    return run_world(size, start_body, home, section)[0]


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    full = FullWeights(find_weights(run))
    return {name: full.full(name) for name in full.names()}


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal to the last bit, padding of the vocabulary aside."""
    return torch.equal(found[: len(wanted)].cpu(), wanted)


LAYOUTS: dict[str, tuple[int, dict[str, int], int]] = {
    "one": (1, {}, 0),
    "tp2": (2, {"tensor": 2}, 0),
    "pp2": (2, {"pipeline": 2}, 0),
    "zero3": (2, {}, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_trunk_is_the_source_s_and_the_head_is_new(home: Path, layout: str) -> None:
    size, parallel, zero = LAYOUTS[layout]
    source = weights_of(home / "source")
    section = run_section("source")
    section["parallel"] = parallel
    section["deepspeed"]["zero_optimization"] = {"stage": zero}
    if zero == 3:
        section["deepspeed"]["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    weights, reports = start(home, size, section)
    new = {"classifier.output.weight", "classifier.output.bias"}
    for name, value in weights.items():
        other = name.replace("classifier.pooler", "sentence.pooler")
        if name not in new:
            assert same(value, source[other]), name
    assert new < set(weights)
    assert weights["classifier.output.weight"].shape == (3, 32)
    assert float(weights["classifier.output.weight"].std()) == pytest.approx(0.3, rel=0.3)
    # Also where the head is on another stage than the rank that speaks.
    (line,) = reports
    assert line.startswith("starting from the weights of source/checkpoints/step_00000001")
    assert line.endswith("new, with random weights: classifier.output.bias, " + max(new))
    # What was saved in this layout starts a run in another, its head included.
    again = run_section("runs/new", "runs/again")
    again["parallel"] = {"tensor": 2} if layout == "pp2" else {}
    second, reports = start(home, 2 if layout == "pp2" else 1, again)
    saved = weights_of(home / "runs" / "new")
    assert all(same(second[name], saved[name]) for name in saved)
    assert "random" not in reports[0]


def test_other_classes_are_a_new_head(home: Path) -> None:
    write_run(home / "three", model_section("bert", num_labels=3))
    source = weights_of(home / "three")
    weights, (line,) = start(home, 1, run_section("three", num_labels=5))
    assert weights["classifier.output.weight"].shape == (5, 32)
    assert same(weights["classifier.pooler.weight"], source["classifier.pooler.weight"])
    assert "new, with random weights: classifier.output.bias, classifier.output.weight" in line


def refused_body(rank: int, home: Path, sections: list[dict[str, Any]]) -> list[str]:
    answers = []
    for section in sections:
        try:
            start_body(rank, home, section)
        except CheckpointError as error:
            answers.append(str(error))
        else:
            answers.append("it started")
    return answers


def test_another_model_is_refused_on_all_ranks(home: Path) -> None:
    write_run(home / "gpt", model_section("gpt"))
    sections = [
        run_section("source", num_layers=4),
        run_section("source", num_layers=1),
        run_section("source", hidden_size=64),
        run_section("source", vocab_size=310),
        run_section("source", norm_first=True),
        run_section("gpt"),
        run_section("nowhere"),
    ]
    answers = run_world(1, refused_body, home, sections)[0]
    for section in sections:
        section["parallel"] = {"pipeline": 2}
    sections.pop(1)  # one layer makes no two stages
    ranks = run_world(2, refused_body, home, sections)
    assert ranks[0] == ranks[1]
    for found in (answers, ranks[0]):
        assert "it lacks layers.2." in found[0]
        assert "has shape" in found[-5]
        assert "embedding.weight has shape (300, 32) in the checkpoint and (310, 32)" in found[-4]
        assert "final_norm" in found[-3]
        assert "of another model" in found[-2]
        assert found[-1].startswith("checkpoint.initialize_from = nowhere: nowhere has no usable")
    assert "it has layers.1." in answers[1]
    assert not (home / "runs").exists()


def test_a_run_that_goes_on_does_not_look_at_the_source(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    run = read_run(run_section("source"))
    model = read_model(run.model)
    assert initial_weights(run, model, print) is not None
    assert initial_weights(read_run(run_section(None)), model, print) is None
    shutil.copytree("source/checkpoints", "runs/new/checkpoints")
    assert initial_weights(run, model, print) is None
    shutil.move("source", "elsewhere")
    assert initial_weights(run, model, print) is None
    for name in ("data/train.bin", "data/train.idx", "source/tokenizer.json"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    shutil.rmtree("source")
    Path("source").touch()
    with pytest.raises(ConfigError) as error:
        check_files(run)
    assert "initialize_from" not in str(error.value)
    shutil.rmtree("runs")
    with pytest.raises(ConfigError, match=r"checkpoint\.initialize_from = source is not a folder"):
        check_files(run)


def test_damage_beside_the_model_does_not_matter(home: Path) -> None:
    root = home / "source" / "checkpoints"
    newest = root / "step_00000002"
    shutil.copytree(root / "step_00000001", newest)
    manifest = json.loads((newest / "manifest.json").read_text())
    manifest["step"] = 2
    manifest["files"]["optimizer-pp00-tp00-dp000.safetensors"] = {"size": 9, "sha256": "0" * 64}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert find_weights(home / "source") == newest
    assert find_weights(newest) == newest
    (model,) = newest.glob("model-*")
    content = model.read_bytes()
    model.write_bytes(content[:-1] + b"?")
    assert find_weights(home / "source") == root / "step_00000001"
    with pytest.raises(CheckpointError, match="has changed"):
        find_weights(newest)
    model.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        find_weights(newest)
    (newest / "manifest.json").write_text("[]")
    with pytest.raises(CheckpointError, match="damaged"):
        find_weights(newest)
    (root / "step_00000001" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        find_weights(home / "source")


def test_another_tokenizer_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    section = run_section("source")
    section["data"]["tokenizer"] = "other.json"
    write_tokenizer(home / "other.json")
    reports: list[str] = []
    run = read_run(section)
    initial_weights(run, read_model(run.model), reports.append)
    assert reports == []
    content = json.loads(Path("other.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    Path("other.json").write_text(json.dumps(content))
    initial_weights(run, read_model(run.model), reports.append)
    (line,) = reports
    assert line.startswith("warning: data.tokenizer = other.json numbers 2 of ")
    assert "source/tokenizer.json" in line
    Path("source/tokenizer.json").unlink()
    initial_weights(run, read_model(run.model), reports.append)
    assert len(reports) == 1


def test_errors_of_a_rank_travel() -> None:
    """They cross process boundaries in ``initial_weights``."""
    import pickle

    for kind in (DsEngineError, CheckpointError, ConfigError):
        found = pickle.loads(pickle.dumps(kind("text")))
        assert isinstance(found, kind)
        assert str(found) == "text"
