"""``check_run`` finds everything at once, and ``check_files`` every missing file."""

import dataclasses
import json

import pytest

from ds_engine.config.load import read_run
from ds_engine.config.memory import GIB, model_states
from ds_engine.config.reader import problems_of
from ds_engine.errors import ConfigError
from launch.check import check_files, check_run
from tests.config.samples import small_run


def changed(changes: dict) -> dict:
    raw = small_run()
    for path, value in changes.items():
        *sections, key = path.split(".")
        target = raw
        for section in sections:
            target = target.setdefault(section, {})
        target[key] = value
    return raw


def problems(changes: dict, world: int = 4) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        check_run(read_run(changed(changes)), world, "--world-size")
    return problems_of(caught.value)


def test_a_sound_run_is_resolved() -> None:
    run = read_run(small_run(activation_checkpointing={}))
    resolved = check_run(run, 4, "--world-size")
    assert (resolved.dims.tensor, resolved.dims.data, resolved.batch.accumulation) == (2, 2, 1)
    assert resolved.deepspeed["train_micro_batch_size_per_gpu"] == 4
    assert resolved.run.training.activation_checkpointing.every == 1
    assert resolved.model.num_layers == 4
    assert resolved.warnings == ()
    # Resolved JSON checks again, to the same result.
    assert check_run(resolved.run, 4, "--world-size") == resolved


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({}, 3, "world size = 3 (from --world-size) is not a multiple of parallel.tensor = 2"),
        ({}, 1, "use at least 2 ranks"),
        ({"parallel.tensor": 3}, 3, "does not divide model.attention.num_heads = 8"),
        ({"parallel.tensor": 16}, 16, "parallel.tensor = 16 does not divide"),
        ({"parallel.pipeline": 8}, 16, "more than model.num_layers = 4"),
        ({"parallel.context": 2}, 4, "parallel.context = 2 is not available"),
        ({"parallel.expert": 2}, 4, "parallel.expert = 2 is not available"),
        ({"parallel.virtual_pipeline": 2}, 4, "parallel.virtual_pipeline = 2 is not available"),
        (
            {"parallel.sequence": True, "data.sequence_length": 101},
            4,
            "use 100 or 102",
        ),
        (
            {"model.position": {"type": "learned"}, "data.sequence_length": 129},
            4,
            "model.max_sequence_length = 128",
        ),
        ({"training.evaluate_every": 5}, 4, "needs data.validation"),
        ({"training.lr_schedule": {"min_lr": 1}}, 4, "min_lr = 1.0 must lie between 0"),
        ({"training.lr_schedule": {"type": "wsd", "decay_steps": 11}}, 4, "use at most 10"),
        ({"deepspeed.train_batch_size": 7}, 4, "use train_batch_size = 6 or 8"),
        (
            {"training.batch_size_warmup": {"start": 1, "increment": 1, "samples": 9}},
            4,
            "start = 1 is not a multiple",
        ),
        ({"model.attention.num_heads": "8"}, 4, "must be an integer"),
        ({"deepspeed.zero_optimization": {"stage": 2}, "parallel.pipeline": 2}, 4, "use stage 1"),
    ],
)
def test_each_rule_is_enforced(changes, world, message) -> None:
    assert any(message in problem for problem in problems(changes, world))


def test_all_problems_are_listed_together() -> None:
    found = problems(
        {
            "model.attention.num_kv_heads": 3,
            "parallel.context": 2,
            "deepspeed.optimizer": {"type": "AdamW"},
            "deepspeed.train_batch_size": 7,
            "training.evaluate_every": 1,
        },
        world=8,
    )
    assert len(found) == 5


def test_the_resolved_json_holds_the_solved_batch_and_loads() -> None:
    run = read_run(small_run(activation_checkpointing={}))
    resolved = check_run(run, 4, "--world-size")
    plain = json.loads(json.dumps(resolved.to_dict()))
    solved = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
    }
    assert {key: plain["deepspeed"].get(key) for key in solved} == solved
    again = check_run(read_run(plain), 4, "--world-size")
    assert (again.batch, again.deepspeed) == (resolved.batch, resolved.deepspeed)
    assert again.to_dict() == resolved.to_dict()
    assert "train_micro_batch_size_per_gpu" not in resolved.run.deepspeed


def test_parameters_of_another_kind_do_not_break_the_check() -> None:
    run = dataclasses.replace(
        read_run(small_run()), deepspeed={"optimizer": {"type": "AdamW", "params": 3}}
    )
    with pytest.raises(ConfigError, match="must be an object"):
        check_run(run, 4, "--world-size")


def test_a_run_built_in_code_is_checked_too() -> None:
    run = dataclasses.replace(read_run(small_run()), deepspeed={"optimiser": {}})
    with pytest.raises(ConfigError, match='did you mean "optimizer"'):
        check_run(run, 4, "--world-size")


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({"parallel.tensor": 16, "model.attention": {"num_heads": 16}}, 16, "more than the 8"),
        (
            {"parallel.pipeline": 4, "deepspeed.zero_optimization": {"stage": 1}},
            8,
            "idles 75% of the time",
        ),
        ({"training.lr_schedule": {"warmup_steps": 10}}, 4, "never reached"),
        ({"deepspeed.optimizer": {"type": "Lion", "params": {"lr": 1}}}, 4, "no kernel for CPU"),
        ({"deepspeed.bf16": {"enabled": True}}, 4, "run as ZeRO stage 1"),
    ],
)
def test_doubtful_settings_are_warned_of(changes, world, message) -> None:
    if changes.get("model.attention"):
        changes = {**changes, "model.position": {"type": "none"}}
    warnings = check_run(read_run(changed(changes)), world, "--world-size").warnings
    assert any(message in warning for warning in warnings)


def test_missing_files_are_all_named(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"")
    run = read_run(
        changed(
            {
                "data.train": [{"path": "a"}],
                "data.validation": [{"path": "b"}],
                "data.tokenizer": "tokenizer.json",
            }
        )
    )
    with pytest.raises(ConfigError) as caught:
        check_files(run)
    train, validation, tokenizer = problems_of(caught.value)
    assert "no file a.idx " in train
    assert "no file b.bin and b.idx " in validation
    assert "data.tokenizer = tokenizer.json" in tokenizer
    for name in ("a.idx", "b.bin", "b.idx", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"")
    check_files(run)
    with pytest.raises(ConfigError, match=r"data\.train is empty"):
        check_files(dataclasses.replace(run, data=dataclasses.replace(run.data, train=())))


@pytest.mark.parametrize(
    ("stage", "bytes_per_parameter"),
    [(0, 2 + 2 + 12), (1, 2 + 6 + 12 / 4), (2, 2 + 6 / 4 + 12 / 4), (3, (2 + 6 + 12) / 4)],
)
def test_memory_by_stage(stage, bytes_per_parameter) -> None:
    section = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
    assert model_states(GIB, section, 4).total_gib == pytest.approx(bytes_per_parameter)
    section["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    assert model_states(GIB, section, 4).optimizer == 0
    assert model_states(GIB, {}, 4).total_gib == 16
