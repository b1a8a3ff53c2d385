"""Includes, merging, overrides and the way back to JSON."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_engine.config.load import load_run, merged_run, read_run, run_to_dict
from ds_engine.errors import ConfigError
from tests.config.samples import full_run, small_run


def write(folder: Path, name: str, value: object) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def write_run(folder: Path, **sections: object) -> Path:
    return write(folder, "runs/run.json", {**small_run(), **sections})


def test_resolved_json_reads_back_to_an_equal_run(tmp_path) -> None:
    for number, raw in enumerate((small_run(), full_run())):
        run = read_run(raw)
        path = write(tmp_path, f"{number}.json", run_to_dict(run))
        assert load_run(path) == run
        assert run_to_dict(load_run(path)) == run_to_dict(run)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**40),
            "parallel": st.fixed_dictionaries(
                {}, optional={"pipeline": st.integers(1, 64), "context": st.integers(1, 8)}
            ),
            "checkpoint": st.fixed_dictionaries(
                {"directory": st.text(min_size=1)},
                optional={"every": st.integers(0, 10**6), "keep_last": st.none() | st.just(2)},
            ),
            "tracking": st.fixed_dictionaries(
                {},
                optional={
                    "peak_tflops": st.none() | st.floats(0.1, 1e4),
                    "wandb": st.none()
                    | st.fixed_dictionaries(
                        {"project": st.text()}, optional={"tags": st.lists(st.text(), max_size=3)}
                    ),
                },
            ),
        },
    )
)
def test_round_trip_through_json(sections) -> None:
    run = read_run({**small_run(), **sections})
    assert read_run(json.loads(json.dumps(run_to_dict(run)))) == run


def test_files_merge_and_objects_at_the_end_override(tmp_path) -> None:
    write(tmp_path, "ds/a.json", {"optimizer": {"type": "AdamW", "params": {"lr": 1, "eps": 1}}})
    write(tmp_path, "ds/b.json", {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}})
    write(tmp_path, "model.json", small_run()["model"])
    inline = {"optimizer": {"params": {"lr": 0.5}}, "train_batch_size": 4}
    path = write_run(
        tmp_path,
        model=["../model.json", {"attention": {"num_kv_heads": 2}}],
        deepspeed=["../ds/a.json", "../ds/b.json", inline, {"train_batch_size": 8}],
    )
    run = load_run(path)
    assert run.deepspeed == {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5, "eps": 1}},
        "bf16": {"enabled": True},
        "train_batch_size": 8,
    }
    assert run.model["attention"] == {**small_run()["model"]["attention"], "num_kv_heads": 2}
    assert load_run(write_run(tmp_path, model="../model.json")).model == small_run()["model"]


def test_two_files_that_disagree_are_both_named(tmp_path) -> None:
    write(tmp_path, "ds/a.json", {"bf16": {"enabled": True}, "gradient_clipping": 1})
    write(tmp_path, "ds/b.json", {"bf16": {"enabled": False}, "gradient_clipping": 1})
    parts = ["../ds/a.json", "../ds/b.json"]
    path = write_run(tmp_path, deepspeed=parts)
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    text = str(caught.value)
    assert 'deepspeed.bf16.enabled is false in "../ds/b.json" but' in text
    assert 'true in "../ds/a.json"' in text
    assert "gradient_clipping" not in text
    inline = {"bf16": {"enabled": True}, "optimizer": small_run()["deepspeed"]["optimizer"]}
    assert load_run(write_run(tmp_path, deepspeed=[*parts, inline])).deepspeed["bf16"]["enabled"]


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ({"a": {"b": 1}}, {"a": 1}, True),
        ({"a": 1}, {"a": {"b": 1}}, True),
        ({"a": {}}, {"a": {"b": 1}}, False),
        ({"a": {"b": 1}}, {"a": {}}, False),
        ({"a": [1]}, {"a": [2]}, True),
        ({"a": [1]}, {"a": [1]}, False),
        ({"a": 1}, {"a": True}, True),
        ({"ab": 1}, {"a": 1}, False),
    ],
)
def test_what_counts_as_a_clash(tmp_path, one, other, clash) -> None:
    write(tmp_path, "runs/one.json", one)
    write(tmp_path, "runs/other.json", other)
    path = write_run(tmp_path, model=["one.json", "other.json"])
    if clash:
        with pytest.raises(ConfigError, match=r'in "other\.json" but'):
            merged_run(path)
    else:
        assert merged_run(path)["model"] == {**one, **other} or {"a": {"b": 1}}


def test_included_files_may_be_lists_relative_to_themselves(tmp_path) -> None:
    write(tmp_path, "models/base/gpt.json", {"family": "gpt", "num_layers": 2})
    write(tmp_path, "models/deep.json", ["base/gpt.json", {"num_layers": 9}])
    path = write_run(tmp_path, model=["../models/deep.json", {"hidden_size": 8}])
    assert merged_run(path)["model"] == {"family": "gpt", "num_layers": 9, "hidden_size": 8}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ([{"seed": 1}, "a.json"], "objects come last"),
        (["a.json", 3], "lists 3"),
        ("loop.json", 'includes "loop.json", which includes itself'),
        ("number.json", "a model section must be an object"),
        ("missing.json", "No such file"),
        ("broken.json", "line 1, column 2"),
        (3, "model = 3 must be an object"),
    ],
)
def test_bad_includes(tmp_path, section, message) -> None:
    write(tmp_path, "runs/a.json", {})
    write(tmp_path, "runs/loop.json", "loop.json")
    write(tmp_path, "runs/number.json", 3)
    (tmp_path / "runs/broken.json").write_text("{x}")
    path = write_run(tmp_path, model=section)
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert message in str(caught.value)


def test_overrides_reach_everything(tmp_path, monkeypatch) -> None:
    write(tmp_path, "model.json", {**small_run()["model"], "num_layers": 3})
    monkeypatch.chdir(tmp_path)
    path = write_run(tmp_path)
    run = load_run(
        path,
        [
            "training.steps=7",
            "training.lr_schedule.type=linear",
            'data.train.0.path="a=b"',
            "data.tokenizer=true.json",
            "checkpoint.keep_last=null",
            "model=model.json",
            "model.attention.num_heads=16",
            'tracking.wandb={"project": "x"}',
            "tracking.wandb.tags=[]",
            "deepspeed.zero_optimization.stage=1",
            "seed=5",
        ],
    )
    assert (run.training.steps, run.training.lr_schedule.type) == (7, "linear")
    assert (run.data.train[0].path, run.data.tokenizer) == ("a=b", "true.json")
    assert (run.model["num_layers"], run.model["attention"]["num_heads"]) == (3, 16)
    assert (run.checkpoint.keep_last, run.seed) == (None, 5)
    assert run.tracking.wandb is not None
    assert run.deepspeed["zero_optimization"] == {"stage": 1}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.steps", "write it as key.key=value"),
        ("training..steps=1", "write it as key.key=value"),
        ("=1", "write it as key.key=value"),
        ("trainin.steps=1", 'did you mean "training"'),
        ("training.step=1", 'training.step is not a known key; did you mean "steps"'),
        ("training.lr_schedule.tipe=linear", 'did you mean "type"'),
        ("deepspeed.bf16.enable=true", 'did you mean "enabled"'),
        ("data.train.1.path=a", "data.train is a list of 1; use an index below 1"),
        ("data.train.-1.path=a", "use an index below 1"),
        ("data.train.first.path=a", "use an index below 1"),
        ("seed.a=1", "seed is 1234 and has no key a"),
        ("training.steps.a=1", "training.steps is 10 and has no key a"),
        ("training.steps=ten", 'training.steps = "ten" must be an integer'),
        ("training.steps=1e3", "training.steps = 1000.0 must be an integer"),
        ("seed=NaN", 'seed = "NaN" must be an integer'),
        ("tracking.wandb={project: x}", "not valid JSON"),
    ],
)
def test_bad_overrides(tmp_path, override, message) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run(write_run(tmp_path), [override])
    assert message in str(caught.value)


def test_the_file_is_not_changed_and_sections_are_not_shared(tmp_path) -> None:
    raw = small_run()
    run = read_run(raw)
    run.deepspeed["optimizer"]["params"]["lr"] = 99
    assert read_run(small_run()).deepspeed["optimizer"]["params"]["lr"] == 1e-3
    assert raw["deepspeed"]["optimizer"]["params"]["lr"] == 1e-3


def test_a_run_file_must_be_an_object(tmp_path) -> None:
    with pytest.raises(ConfigError, match="must hold one JSON object"):
        load_run(write(tmp_path, "list.json", []))
    with pytest.raises(ConfigError, match="model is missing"):
        load_run(write(tmp_path, "empty.json", {}))
