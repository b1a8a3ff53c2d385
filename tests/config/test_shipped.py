"""Every file under ds_configs works as its README says."""

import json
import re
from pathlib import Path

import pytest

from ds_engine.config.load import load_run, run_to_dict
from ds_engine.config.reader import read_json
from ds_engine.config.reference import attribute_texts, markdown
from ds_engine.config.schema import RunConfig
from launch.check import check_run
from launch.commands.config import all_keys
from models.registry import FAMILIES, read_model

ROOT = Path(__file__).parents[2] / "ds_configs"
README = (ROOT / "README.md").read_text()
STATED = {name: int(gpus) for name, gpus in re.findall(r"\| `(runs/\S+)` \| (\d+) \|", README)}
RUNS = sorted(f"runs/{path.name}" for path in (ROOT / "runs").glob("*.json"))
MODELS = sorted((ROOT / "models").glob("*.json"))

NAMED_SIZES = {"m": 1e6, "b": 1e9}


def test_readme_lists_exactly_the_files() -> None:
    assert sorted(STATED) == RUNS
    fragments = sorted(path.name for path in (ROOT / "deepspeed").glob("*.json"))
    assert sorted(re.findall(r"\| `deepspeed/(\S+)` \|", README)) == fragments


@pytest.mark.parametrize("name", RUNS)
def test_runs_check_at_their_stated_size(name, tmp_path) -> None:
    run = load_run(ROOT / name)
    resolved = check_run(run, STATED[name], "the README")
    assert resolved.warnings == ()
    assert resolved.batch.data_parallel == STATED[name] // run.parallel.model_ranks
    (tmp_path / "run.json").write_text(json.dumps(run_to_dict(run)))
    assert load_run(tmp_path / "run.json") == run
    # A run that wandb or a cluster must not be needed for.
    assert run.tracking.wandb is not None
    assert run.tracking.wandb.mode == "offline"


@pytest.mark.parametrize("name", RUNS)
def test_runs_can_be_tried_for_two_steps(name) -> None:
    run = load_run(ROOT / name, ["training.steps=2", "training.evaluate_every=0"])
    assert "never reached" in check_run(run, STATED[name], "the README").warnings[0]


def test_the_tiny_run_checks_on_one_two_and_four_processes() -> None:
    run = load_run(ROOT / "runs/gpt_tiny.json")
    for world in (1, 2):
        check_run(run, world, "the test")
    split = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true"]
    check_run(load_run(ROOT / "runs/gpt_tiny.json", split), 4, "the test")


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_models_have_the_size_in_their_name(path) -> None:
    model = read_model(read_json(path))
    size = re.search(r"_([\d.]+)([mb])$", path.stem)
    if size is None:
        assert path.stem == "gpt_tiny"
        return
    named = float(size[1]) * NAMED_SIZES[size[2]]
    # "400m" is the name in the literature of a model of 356 million; the others are within 8%.
    assert model.num_parameters() == pytest.approx(named, rel=0.12)
    if path.stem.startswith("gpt3"):
        assert model.padded_vocab_size(8) == 51200


def test_the_key_table_is_current() -> None:
    table = README.partition("<!-- keys -->\n")[2].partition("\n<!-- end of keys -->")[0]
    assert table == markdown(all_keys()), "paste the output of `ds-engine config keys`"


def test_every_key_is_documented_and_named_once() -> None:
    rows = all_keys()
    paths = [row.path for row in rows]
    assert len(paths) == len(set(paths))
    assert all(row.text.endswith(".") and "|" not in row.text for row in rows)


@pytest.mark.parametrize("cls", [RunConfig, *(family.config for family in FAMILIES.values())])
def test_docstrings_describe_no_field_that_is_gone(cls) -> None:
    assert set(attribute_texts(cls)) == set(cls.__dataclass_fields__)
