"""A resumed run equals the uninterrupted one to the last bit, in every layout."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from ds_engine.errors import CheckpointError
from ds_engine.parallel.parameter import spec_of
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel
from ds_engine.training.checkpoint import files, fragments
from ds_engine.training.checkpoint.weights import FullWeights
from tests.parity.layouts import Layout, adam, plan_for
from tests.training.runs import Job, run_body, write_data
from tests.worlds import RankError, run_world


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
]


def contents(checkpoint: Path) -> dict[str, Any]:
    """Hashes of all tensors' files and the counters: equal means equal to the last bit."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    hashes = {n: f["sha256"] for n, f in manifest["files"].items() if n.endswith(".safetensors")}
    return hashes | {"state": json.loads((checkpoint / "state.json").read_text())}


OTHER_FAMILIES = [
    ("t5_dropout", Layout(data=2, zero=3, micro=2)),
    ("t5_dropout", Layout(tensor=2, sequence=True, pipeline=2, micro=4)),
    ("bert_dropout", Layout(data=2, zero=2, micro=2)),
    ("bert_dropout", Layout(tensor=2, sequence=True, pipeline=2, zero=1, micro=4)),
    ("roberta_dropout", Layout(data=2, zero=1, micro=2, bf16=True)),
]
ADAM = adam().deepspeed_optimizer()
# what the configuration chooses; offloading leaves the kernel to DeepSpeed
FUSED = {"optimizer": {**ADAM, "params": {**ADAM["params"], "fused": True}}}


@pytest.mark.parametrize(
    ("family", "layout"),
    [*[("gpt_dropout", layout) for layout in LAYOUTS], *OTHER_FAMILIES],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_resumed_run_equals_the_uninterrupted_one(
    tmp_path: Path, data: Path, family: str, layout: Layout
) -> None:
    changes = {} if layout.offload else FUSED
    if layout.zero == 3 and layout.bf16:
        # DeepSpeed's default: small parameters, all of these, stay whole on every rank
        changes = {**changes, "zero_optimization": {"stage": 3}}
    first = Job(
        layout,
        data,
        tmp_path / "first",
        family=family,
        steps=4,
        every=2,
        evaluate_every=2,
        changes=changes,
    )
    whole = run_world(layout.world, run_body, first)
    shutil.copytree(first.root / "step_00000002", tmp_path / "second" / "step_00000002")
    second = replace(first, root=tmp_path / "second")
    resumed = run_world(layout.world, run_body, second)
    assert [step for step, row in whole[0]["rows"] if "train/loss" in row] == [1, 2, 3, 4]
    after = [entry for entry in whole[0]["rows"] if entry[0] > 2]
    assert resumed[0]["rows"] == after
    assert resumed[0]["state"] == whole[0]["state"]
    assert resumed[0]["state"]["consumed_samples"] == 32
    assert "resumed from step_00000002" in resumed[0]["reports"]
    assert len({row["train/lr"] for _, row in after if "train/lr" in row}) == 2
    ours, theirs = (contents(tmp_path / r / "step_00000004") for r in ("second", "first"))
    assert len(ours) >= 3
    assert ours == theirs
    for path in (tmp_path / "first" / "step_00000004").iterdir():
        assert path.suffix in (".json", ".safetensors")
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as reader:
                assert list(reader.keys())
    weights = FullWeights(tmp_path / "first" / "step_00000004")
    for name, value in whole[0]["weights"].items():
        full = weights.full(name)
        assert torch.equal(full.float(), value[: full.shape[0]].float()), name


SAVED = Layout(data=2, zero=1, micro=2)
SGD = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_allow_untested_optimizer": True,
}


def refused_body(rank: int, jobs: dict[str, Job]) -> dict[str, str]:
    """Try to resume each job in one world; every rank gets its error."""
    from dataclasses import replace

    from models.config import MLPConfig
    from tests.parity.families import FAMILIES, Family, gpt_config
    from tests.training.runs import make_checkpointer, make_step, raises_everywhere

    wide = replace(gpt_config(), mlp=MLPConfig(intermediate_size=96))
    FAMILIES["wide"] = Family("wide", "models.gpt", wide)
    found = {}
    for name, job in jobs.items():
        checkpointer = make_checkpointer(job, make_step(job), [])
        with raises_everywhere(CheckpointError) as messages:
            checkpointer.resume()
        found[name] = messages[0]
    return found


def test_another_layout_model_or_optimizer_is_refused_on_every_rank(
    tmp_path: Path, data: Path
) -> None:
    root = tmp_path / "root"
    run_world(2, run_body, Job(SAVED, data, root, steps=1, every=1))
    jobs = {
        "zero": Job(Layout(data=2, zero=2, micro=2), data, root),
        "tensor": Job(Layout(tensor=2, zero=1, micro=2), data, root),
        "pipeline": Job(Layout(pipeline=2, zero=1, micro=2), data, root),
        "precision": Job(Layout(data=2, zero=1, micro=2, bf16=True), data, root),
        "names": Job(SAVED, data, root, family="llama"),
        "shapes": Job(SAVED, data, root, family="wide"),
        "optimizer": Job(SAVED, data, root, changes=SGD),
    }
    answers = run_world(2, refused_body, jobs)
    assert answers[0] == answers[1]
    expected = {
        "zero": "another layout (zero 1 -> 2)",
        "tensor": "another layout (tensor 1 -> 2, data 2 -> 1)",
        "pipeline": "another layout (pipeline 1 -> 2, data 2 -> 1)",
        "precision": "another layout (precision fp32 -> bf16)",
        "names": "is of another model: it lacks head.weight, layers.0.attention.key_norm",
        "shapes": "layers.0.mlp.up.weight has shape (64, 32) there and (96, 32) here",
        "optimizer": "another layout (optimizer AdamW -> SGD)",
    }
    for name, text in expected.items():
        assert text in answers[0][name], answers[0][name]
        assert "step_00000001" in answers[0][name]


def trouble_body(rank: int, job: Job) -> list[str]:
    """Writes and reads that fail on one rank only: an error everywhere, and no harm done."""
    from safetensors import SafetensorError

    from ds_engine.training.checkpoint import checkpointer as module
    from ds_engine.training.checkpoint import weights
    from tests.training.runs import assemble, raises_everywhere

    parts = assemble(job)
    parts.run()
    state, checkpointer = parts.state, parts.checkpointer
    found = []

    def broken(on_rank: int, owner: Any, name: str, error: Exception, action: Any) -> None:
        whole = getattr(owner, name)

        def fails(*args: Any, **kwargs: Any) -> Any:
            raise error

        if rank == on_rank:
            setattr(owner, name, fails)
        with raises_everywhere(CheckpointError) as messages:
            action()
        setattr(owner, name, whole)
        found.append(messages[0])

    state.step = 2

    def save() -> None:
        checkpointer.save(state)

    full = OSError(28, "No space left on device", "optimizer")
    # safetensors turns the system's error into a class of its own
    broken(1, module, "save_file", SafetensorError("I/O error: No space left on device"), save)
    broken(1, module, "save_file", full, save)
    broken(0, weights, "save_file", full, save)
    broken(0, files, "prepare", OSError(30, "Read-only file system", "root"), save)
    broken(0, files, "write_json", full, save)
    broken(0, files, "commit", full, save)
    broken(1, module, "safe_open", OSError(5, "Input/output error"), checkpointer.resume)
    broken(0, module, "safe_open", SafetensorError("bad header"), checkpointer.resume)
    if rank == 0:
        path, problems = files.newest_complete(job.root)
        assert (path.name, problems) == ("step_00000001", [])
    checkpointer.save(state)
    if rank == 0:
        files.verify(job.root / "step_00000002")
        assert sorted(p.name for p in job.root.iterdir()) == [
            "latest",
            "step_00000001",
            "step_00000002",
        ]
    return found


def test_a_write_that_fails_on_one_rank_fails_on_all_and_hurts_nothing(
    tmp_path: Path, data: Path
) -> None:
    job = Job(SAVED, data, tmp_path / "root", steps=1, every=1)
    found = run_world(2, trouble_body, job, timeout=60)
    assert found[0] == found[1]
    assert "Read-only file system" in found[0][3]
    assert found[0][0].startswith("rank 1: SafetensorError: I/O error: No space left on device")
    assert found[0][2].startswith("rank 0: OSError: ")
    assert found[0][6].startswith("rank 1: OSError: ")
    assert len(found[0]) == 8


def test_resume_falls_back_and_says_why(tmp_path: Path, data: Path) -> None:
    layout, root = Layout(micro=4), tmp_path / "root"
    run_world(1, run_body, Job(layout, data, root, steps=2, every=1))
    model = root / "step_00000002" / "model-pp00-tp00.safetensors"
    content = bytearray(model.read_bytes())
    content[-5] ^= 4
    model.write_bytes(content)
    answer = run_world(1, run_body, Job(layout, data, root, steps=2, every=1))[0]
    assert [step for step, _ in answer["rows"]] == [2]
    assert answer["reports"][0].startswith("step_00000002 is not usable")
    assert "has changed" in answer["reports"][0]
    assert answer["reports"][1] == "resumed from step_00000001"
    files.verify(root / "step_00000002")  # replaced
    for path in root.glob("step_*"):
        (path / "manifest.json").unlink()
    with pytest.raises(RankError, match=r"no usable checkpoint in .*Remove the folder to start"):
        run_world(1, run_body, Job(layout, data, root, steps=2, every=1))


def test_new_blend_weights_begin_where_the_old_ones_ended(tmp_path: Path, data: Path) -> None:
    layout, root = Layout(micro=4), tmp_path / "root"
    first = run_world(1, run_body, Job(layout, data, root, steps=3))[0]["state"]
    changed = Job(layout, data, root, steps=6, weights=(0.25, 0.75))
    second = run_world(1, run_body, changed)[0]["state"]
    assert first["blend"]["start"] == 0
    assert second["blend"]["start"] == 24
    consumed = second["blend"]["consumed"]
    assert sum(consumed.values()) == 24
    assert abs(consumed[str(data / "a")] - 0.7 * 24) <= 1
    # and resuming with the weights that already hold changes nothing
    third = run_world(1, run_body, Job(layout, data, root, steps=7, weights=(0.25, 0.75)))
    assert third[0]["state"]["blend"] == second["blend"]


def test_weights_load_into_any_tensor_layout(tmp_path: Path, data: Path) -> None:
    layout = Layout(tensor=2, sequence=True, pipeline=2, zero=1, micro=4)
    job = Job(layout, data, tmp_path / "root", steps=1, family="llama")
    whole = run_world(4, run_body, job)[0]["weights"]
    saved = FullWeights(job.root / "step_00000001")
    for size in (1, 2, 4):
        for rank in range(size):
            tp = TensorParallel(None, rank, size, False)
            model = SequentialModel(plan_for("llama", tp)).canonical_parameters()
            saved.load_into(model)
            for name, parameter in model.items():
                spec = spec_of(parameter)
                full = whole[name].new_zeros(spec.full_shape)
                rows = min(len(full), len(whole[name]))
                full[:rows] = whole[name][:rows]
                assert torch.equal(parameter, spec.take(full)), (name, size, rank)
    small = SequentialModel(plan_for("gpt", TensorParallel.single())).canonical_parameters()
    with pytest.raises(CheckpointError, match=r"lacks final_norm.norm.bias.*and 2\d more"):
        saved.load_into(small)


def test_step_counters_of_kernels_stay_whole_numbers() -> None:
    """DeepSpeed's Adam kernels keep ``step`` as an int and refuse a tensor."""
    flat = torch.zeros(4)
    place = fragments.Place(flat, 1, 0, 2, is_parameter=False)
    state = {"step": 7, "exp_avg": torch.arange(4.0), "torch_step": torch.tensor(7.0)}
    engine = SimpleNamespace(basic_optimizer=SimpleNamespace(state={flat: state}))
    found = fragments.optimizer_state(engine, place)
    fresh = SimpleNamespace(basic_optimizer=SimpleNamespace(state=defaultdict(dict)))
    for key, value in found.items():
        fragments.restore_state(fresh, place, key, value)
    restored = fresh.basic_optimizer.state[flat]
    assert restored["step"] == 7
    assert type(restored["step"]) is int
    assert torch.equal(restored["torch_step"], torch.tensor(7.0))
    assert restored["exp_avg"].tolist() == [0, 1, 2, 0]
