"""Our table of DeepSpeed's keys against DeepSpeed, our rules, and the JSON that we hand over."""

import ast
import copy
import json
from pathlib import Path

import pytest

from ds_engine.config.batch import BatchPlan
from ds_engine.config.deepspeed import (
    check_deepspeed,
    check_rules,
    fold_deepspeed,
    normalise_deepspeed,
    zero_stage,
)
from ds_engine.config.deepspeed_keys import (
    KEYS,
    OPTIMIZER_NAMES,
    OPTIMIZERS,
    REFUSED,
    REFUSED_OPTIMIZERS,
)
from ds_engine.config.load import read_run
from ds_engine.config.schema import ParallelConfig
from ds_engine.errors import ConfigError
from tests.config.samples import OPTIMIZER, example, small_run

FRAGMENTS = sorted((Path(__file__).parents[2] / "ds_configs/deepspeed").glob("*.json"))
BATCH = BatchPlan(16, 2, 4, 2)


class Recorder(dict):
    """A DeepSpeed configuration that notes which of its top-level keys are looked up."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.seen: set[str] = set()

    def __contains__(self, key) -> bool:
        self.seen.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.seen.add(key)
        return super().get(key, default)

    def keys(self):
        return self

    def __copy__(self):
        return self


@pytest.fixture(scope="module")
def deepspeed_config():
    return pytest.importorskip("deepspeed.runtime.config").DeepSpeedConfig


@pytest.mark.slow
def test_top_level_keys_are_those_that_deepspeed_looks_up(deepspeed_config) -> None:
    recorder = Recorder({"train_batch_size": 1})
    deepspeed_config(recorder)
    ours = set(KEYS) | set(REFUSED)
    assert recorder.seen - ours == set(), "DeepSpeed reads keys that deepspeed_keys.py lacks"
    # Read outside of DeepSpeedConfig: by the comms logger and for a config without an mpu.
    assert ours - recorder.seen <= {"sequence_parallel_size"}


def fields(model) -> set[str]:
    names = set(model.model_fields)
    return names | {field.alias for field in model.model_fields.values() if field.alias}


@pytest.mark.slow
def test_nested_keys_are_those_of_deepspeeds_models(deepspeed_config) -> None:
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero import config as zero
    from deepspeed.runtime.zero import offload_config as offload
    from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    block = KEYS["zero_optimization"]
    pairs = [
        (block, zero.DeepSpeedZeroConfig),
        (block["offload_param"], offload.DeepSpeedZeroOffloadParamConfig),
        (block["offload_optimizer"], offload.DeepSpeedZeroOffloadOptimizerConfig),
        (block["zenflow"], ZenFlowConfig),
        (block["leaf_module"], DeepSpeedZeroLeafModuleConfig),
        (KEYS["bf16"], DeepSpeedBF16Config),
        (KEYS["fp16"], DeepSpeedFP16Config),
        (KEYS["wandb"], monitor.WandbConfig),
        (KEYS["tensorboard"], monitor.TensorBoardConfig),
        (KEYS["csv_monitor"], monitor.CSVConfig),
        (KEYS["comet"], monitor.CometConfig),
        (KEYS["comms_logger"], CommsLoggerConfig),
        (KEYS["timers"]["throughput"], DeepSpeedThroughputTimerConfig),
    ]
    for keys, model in pairs:
        # Secrets are refused, in whatever block they stand.
        assert set(keys) == fields(model) - {"api_key"}, model.__name__


def constants(module) -> set[str]:
    """String constants of a module of DeepSpeed constants that name keys."""
    tree = ast.parse(Path(module.__file__).read_text())
    return {
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node.value.value.isidentifier()
    }


@pytest.mark.slow
def test_plain_blocks_match_deepspeeds_constants(deepspeed_config) -> None:
    from deepspeed.profiling import constants as profiling
    from deepspeed.runtime import config
    from deepspeed.runtime.activation_checkpointing import config as activation
    from deepspeed.runtime.swap_tensor import constants as aio

    assert constants(profiling) == {"flops_profiler", *KEYS["flops_profiler"]}
    assert constants(aio) == {"aio", *KEYS["aio"]}
    assert set(activation.ACT_CHKPT_DEFAULT) == set(KEYS["activation_checkpointing"])
    # use_reentrant is read by the pipeline engine itself.
    assert {*config.get_pipeline_config({}), "use_reentrant"} == set(KEYS["pipeline"])
    mup = {"muadam", "muadamw", "musgd"}
    ours = set(OPTIMIZERS) | set(REFUSED_OPTIMIZERS)
    assert set(config.DEEPSPEED_OPTIMIZERS) - mup | {"sgd"} == ours
    assert set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) <= set(REFUSED)


def test_optimizer_names_match_their_parameters() -> None:
    assert {name.lower() for name in OPTIMIZER_NAMES} == set(OPTIMIZERS)


@pytest.mark.slow
@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.stem)
def test_fragments_are_valid_for_deepspeed_and_for_us(path, deepspeed_config) -> None:
    fragment = json.loads(path.read_text())
    assert check_deepspeed(fragment) == []
    if path.stem == "offload":
        fragment["zero_optimization"]["stage"] = 2
    section = {"optimizer": OPTIMIZER, **fragment}
    assert check_rules(section, ParallelConfig()) == []
    deepspeed_config({**fragment, "train_batch_size": 1})
    deepspeed_config(normalise_deepspeed(section, BatchPlan(1, 1, 1, 1)))


@pytest.mark.parametrize("key", REFUSED)
def test_refused_keys_say_what_to_do(key) -> None:
    (problem,) = check_deepspeed({key: {}})
    assert problem == f"deepspeed.{key} is not accepted: {REFUSED[key]}"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"gradient_cliping": 1}, 'did you mean "gradient_clipping"'),
        ({"fp16": {"loss_scaling": 1}}, 'did you mean "loss_scale"'),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, '"device"'),
        ({"zero_optimization": {"stage": 4}}, "is not one of its values"),
        ({"zero_optimization": {"stage": True}}, "is not one of its values"),
        ({"zero_optimization": True}, "must be an object"),
        ({"bf16": {"enabled": "true"}}, "must be true or false"),
        ({"train_batch_size": "auto"}, "Hugging Face Trainer only"),
        ({"train_batch_size": 1.5}, "must be an integer"),
        ({"gradient_clipping": True}, "must be a number"),
        ({"data_types": {"grad_accum_dtype": "float32"}}, "Known: fp32, fp16, bf16"),
        ({"optimizer": {"type": "AdmW"}}, 'did you mean "AdamW"'),
        ({"optimizer": {"type": "OneBitAdam"}}, "is unknown"),
        ({"optimizer": {"type": "Muon", "params": {"lr": 1}}}, "tagged use_muon"),
        ({"compile": {"deepcompile": True}}, "which ds-engine does not call"),
        ({"vocabulary_size": 1024}, "set model.vocab_size"),
        ({"dataloader_drop_last": True}, "batches are always complete"),
        ({"optimizer": {"type": "AdamW", "params": {"beta": 1}}}, 'did you mean "betas"'),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}, "must be a number"),
        ({"optimizer": {"type": "AdamW", "params": 3}}, "must be an object"),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, "not a DeepSpeed key"),
    ],
)
def test_keys_and_kinds(section, message) -> None:
    (problem,) = check_deepspeed(section)
    assert message in problem


@pytest.mark.parametrize(
    "section",
    [
        {"comet": {"enabled": True, "api_key": "hunter2"}},
        {"wandb": {"project": "p", "API_KEY": "hunter2"}},
        {"optimizer": {"type": "AdamW", "params": {"comet_api_key": "hunter2"}}},
        {"comet_api_key": "hunter2"},
    ],
)
def test_a_secret_is_refused_and_not_repeated(section) -> None:
    (problem,) = check_deepspeed(section)
    assert "is a secret" in problem and "COMET_API_KEY" in problem
    assert "hunter2" not in problem
    with pytest.raises(ConfigError, match="is a secret"):
        read_run(small_run(**section))


def test_every_known_key_is_accepted() -> None:
    assert check_deepspeed(example(KEYS) | {"optimizer": OPTIMIZER}) == []
    assert check_deepspeed({"zero_optimization": {"reduce_bucket_size": 5e8}}) == []


ZERO = [{"zero_optimization": {"stage": stage}} for stage in range(4)]
BF16 = {"bf16": {"enabled": True}}
CLIP = {"gradient_clipping": 1.0}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
NVME_DEVICE = {"device": "nvme", "nvme_path": "swap"}
NVME = {"offload_optimizer": NVME_DEVICE}


@pytest.mark.parametrize(
    ("section", "pipeline", "message"),
    [
        ({}, 1, None),
        (ZERO[1] | BF16 | CLIP, 4, None),
        (ZERO[3] | BF16, 1, None),
        (ZERO[2], 2, "use stage 1, or parallel.pipeline = 1"),
        (CLIP, 2, None),  # our engine clips by its own norm there
        (CLIP | ZERO[1], 2, None),
        (CLIP | BF16, 2, None),
        ({"gradient_clipping": -1}, 1, "must be at least 0"),
        (BF16 | {"fp16": {"enabled": True}}, 1, "are both true"),
        (BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, 1, None),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, 1, "needs ZeRO stage 1"),
        ({"optimizer": {"type": "AdamW"}}, 1, "params.lr is missing"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0}}}, 1, "must be above 0"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1, "betas": [1]}}}, 1, "below 1"),
        ({"optimizer": {}}, 1, "deepspeed.optimizer is missing"),
        ({"zero_optimization": OFFLOAD}, 1, "needs ZeRO stage 1 or higher, not 0"),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, 1, "stage 3"),
        ({"zero_optimization": {"stage": 2, **NVME}}, 1, "optimizer.device = nvme is not accepted"),
        ({"zero_optimization": {"stage": 3, "offload_param": NVME_DEVICE}}, 1, "use cpu"),
        ({"gradient_allreduce_op": "sum"}, 1, "remove it"),
        ({"pipeline": {"stages": 2}}, 1, "set parallel.pipeline instead"),
        ({"pipeline": {"pipe_partitioned": True}}, 1, "ds-engine sets false"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, 1, "is not carried out"),
        ({"activation_checkpointing": {"number_checkpoints": 4}}, 1, "is not carried out"),
        ({"activation_checkpointing": {"number_checkpoints": None}}, 1, None),
    ],
)
def test_cross_rules(section, pipeline, message) -> None:
    section = {"optimizer": OPTIMIZER} | section
    assert check_deepspeed(section) == []
    problems = check_rules(section, ParallelConfig(pipeline=pipeline))
    if message is None:
        assert problems == []
    else:
        assert len(problems) == 1
        assert message in problems[0]


def test_torch_adam_and_kernel_parameters_exclude_each_other() -> None:
    params = {"lr": 1, "torch_adam": True, "bias_correction": False}
    (problem,) = check_rules({"optimizer": {"type": "Adam", "params": params}}, ParallelConfig())
    assert "bias_correction belongs to DeepSpeed's own Adam kernel" in problem


def test_sgd_needs_a_word_with_zero() -> None:
    section = {"optimizer": {"type": "SGD", "params": {"lr": 1}}} | ZERO[1]
    assert "zero_allow_untested_optimizer" in check_rules(section, ParallelConfig())[0]
    section["zero_allow_untested_optimizer"] = True
    assert check_rules(section, ParallelConfig()) == []


def test_normalised_json_is_explicit_and_leaves_the_section_alone() -> None:
    section = {"optimizer": OPTIMIZER} | copy.deepcopy(ZERO[1]) | copy.deepcopy(BF16)
    before = copy.deepcopy(section)
    result = normalise_deepspeed(section, BATCH)
    assert section == before
    assert result == {
        "optimizer": {
            "type": "AdamW",
            "params": {**OPTIMIZER["params"], "torch_adam": True, "fused": True},
        },
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True, "check_grad_overflow": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    assert normalise_deepspeed(result, BATCH) == result


def test_normalised_json_keeps_what_the_user_set() -> None:
    section = {
        "optimizer": {"type": "Adam", "params": {"lr": 1, "torch_adam": False}},
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "data_types": {"grad_accum_dtype": "bf16"},
        "gradient_clipping": 0.5,
        "steps_per_print": 7,
        "pipeline": {"use_reentrant": False},
    }
    result = normalise_deepspeed(section, BATCH)
    for key, value in section.items():
        assert result[key] == value or key == "pipeline"
    assert result["pipeline"]["use_reentrant"] is False


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_gradients_accumulate_in_fp32_wherever_deepspeed_can(stage, kind) -> None:
    section = {"optimizer": OPTIMIZER} | ZERO[stage] | {kind: {"enabled": True}}
    result = normalise_deepspeed(section, BATCH)
    half = kind != "fp32"
    assert result.get("data_types") == ({"grad_accum_dtype": "fp32"} if half else None)
    assert zero_stage(result) == max(stage, int(half))


@pytest.mark.parametrize(
    "section",
    [
        {"optimizer": {"type": "AdamW", "params": {"lr": 1, "bias_correction": False}}},
        {"optimizer": OPTIMIZER, "zero_optimization": {"stage": 1, **OFFLOAD}},
        {"optimizer": {"type": "Lion", "params": {"lr": 1}}},
    ],
)
def test_torch_adam_is_not_forced_on_kernels(section) -> None:
    assert "torch_adam" not in normalise_deepspeed(section, BATCH)["optimizer"]["params"]


def test_blocks_that_we_carry_out_are_folded() -> None:
    wandb = {"enabled": True, "project": "p", "team": "t", "group": "g"}
    run = read_run(small_run(activation_checkpointing={"profile": False}, wandb=wandb))
    folded = fold_deepspeed(run)
    assert folded.training.activation_checkpointing.every == 1
    assert folded.tracking.wandb is not None
    assert (folded.tracking.wandb.project, folded.tracking.wandb.entity) == ("p", "t")
    assert folded.tracking.wandb.group == "g"
    assert not {"activation_checkpointing", "wandb"} & set(folded.deepspeed)
    assert fold_deepspeed(folded) == folded
    assert {"activation_checkpointing", "wandb"} < set(run.deepspeed)


def test_our_own_sections_go_before_deepspeeds_blocks() -> None:
    raw = small_run(activation_checkpointing={}, wandb={"enabled": True, "project": "theirs"})
    raw["training"]["activation_checkpointing"] = {"every": 0}
    raw["tracking"]["wandb"] = {"project": "ours"}
    folded = fold_deepspeed(read_run(raw))
    assert folded.training.activation_checkpointing.every == 0
    assert folded.tracking.wandb is not None
    assert folded.tracking.wandb.project == "ours"


def test_nothing_is_folded_from_nothing() -> None:
    folded = fold_deepspeed(read_run(small_run(wandb={"enabled": False})))
    assert folded.training.activation_checkpointing.every == 0
    assert folded.tracking.wandb is None
