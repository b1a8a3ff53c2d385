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
UNNAMED_SIZES = {"gpt_tiny": 3.15e6, "t5_tiny": 3.44e6, "bert_tiny": 2.61e6, "t5_small": 60506624}


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


@pytest.mark.parametrize("name", [name for name in RUNS if "tiny" in name])
def test_the_tiny_runs_check_on_one_two_and_four_processes(name) -> None:
    run = load_run(ROOT / name)
    for world in (1, 2):
        check_run(run, world, "the test")
    split = ["parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true"]
    check_run(load_run(ROOT / name, split), 4, "the test")


@pytest.mark.parametrize("name", ["t5_finetune_tiny", "bert_classify_tiny"])
def test_fine_tuning_starts_from_the_run_of_its_model(name) -> None:
    run = load_run(ROOT / f"runs/{name}.json")
    start = load_run(ROOT / f"runs/{Path(run.checkpoint.initialize_from or '').name}.json")
    assert start.checkpoint.directory == run.checkpoint.initialize_from
    assert {**run.model, "num_labels": None} == {**start.model, "num_labels": None}
    assert run.data.tokenizer == start.data.tokenizer
    assert run.data.sequence_length <= start.data.sequence_length


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_models_have_the_size_in_their_name(path) -> None:
    model = read_model(read_json(path))
    size = re.search(r"_([\d.]+)([mb])$", path.stem)
    if size is None:
        assert path.stem in UNNAMED_SIZES
        assert model.num_parameters() == pytest.approx(UNNAMED_SIZES[path.stem], rel=0.005)
        return
    named = float(size[1]) * NAMED_SIZES[size[2]]
    # "400m" is the name in the literature of a model of 356 million; the others are within 10%
    # (bert_20b has 22 billion, mt5_11b 11.9).
    assert model.num_parameters() == pytest.approx(named, rel=0.12)
    if path.stem.startswith("gpt3"):
        assert model.padded_vocab_size(8) == 51200


def test_the_key_table_is_current() -> None:
    table = README.partition("<!-- keys -->\n")[2].partition("\n<!-- end of keys -->")[0]
    assert table == markdown(all_keys()), "paste the output of `ds-engine config keys`"


def test_the_size_table_is_that_of_the_models() -> None:
    rows = re.findall(r"^\| (`\w+`.*?) \| ([^|]+) \| ([\d +]+) \| (\d+) \|", README, re.MULTILINE)
    stated = {}
    for names, counts, layers, hidden in rows:
        words = re.findall(r"`([\w.]+)`", names), re.findall(r"([\d.]+)([MB])", counts)
        for name, (count, unit) in zip(*words, strict=True):
            stated[name] = (float(count) * NAMED_SIZES[unit.lower()], layers, int(hidden))
    tables = {path.stem for path in MODELS if path.stem.startswith(("t5", "mt5", "bert"))}
    assert set(stated) == tables - {"t5_tiny", "bert_tiny"}
    for name, (count, layers, hidden) in stated.items():
        model = read_model(read_json(ROOT / f"models/{name}.json"))
        assert model.num_parameters() == pytest.approx(count, rel=0.02)
        assert model.hidden_size == hidden
        decoder = f" + {model.decoder_layers}" if model.is_encoder_decoder else ""
        assert layers == f"{model.num_layers}{decoder}"


def test_every_key_is_documented_and_named_once() -> None:
    rows = all_keys()
    names = [row.name for row in rows]
    assert len(names) == len(set(names))
    assert all(row.text.endswith(".") and "|" not in row.text for row in rows)


@pytest.mark.parametrize("cls", [RunConfig, *(family.config for family in FAMILIES.values())])
def test_docstrings_describe_no_field_that_is_gone(cls) -> None:
    assert set(attribute_texts(cls)) == set(cls.__dataclass_fields__)
