"""The DeepSpeed section, checked without DeepSpeed, and the JSON that DeepSpeed is given.

Three steps: ``check_deepspeed`` knows the keys and kinds of values; ``check_rules`` knows what does
not work together, or not with the layout; ``normalise_deepspeed`` writes the batch triangle and the
few settings that ds-engine always makes explicit.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from ds_engine.config.batch import BatchPlan
from ds_engine.config.deepspeed_keys import (
    KERNEL_ADAM_KEYS,
    KEYS,
    OPTIMIZER_NAMES,
    OPTIMIZERS,
    REFUSED,
    REFUSED_OPTIMIZERS,
    Kind,
)
from ds_engine.config.reader import did_you_mean, join_path, show
from ds_engine.config.schema import (
    ActivationCheckpointingConfig,
    ParallelConfig,
    RunConfig,
    WandbConfig,
)

NEVER_PRINT = 10**9
_SECRET = "api_key"
_KIND_WORDS = {
    "bool": "true or false",
    "int": "an integer",
    "number": "a number",
    "str": "a string",
    "list": "a list",
}


def check_deepspeed(section: Mapping[str, Any]) -> list[str]:
    """Problems of keys and kinds of values: unknown, misspelt, refused or of another type."""
    problems = [
        f"deepspeed.{key} is not accepted: {fix}" for key, fix in REFUSED.items() if key in section
    ]
    known = {key: value for key, value in section.items() if key not in REFUSED}
    problems += _check_keys(known, KEYS, "deepspeed")
    optimizer = section.get("optimizer")
    if isinstance(optimizer, Mapping) and isinstance(optimizer.get("type"), str):
        name = optimizer["type"].lower()
        params = OPTIMIZERS.get(name)
        if name in REFUSED_OPTIMIZERS:
            problems.append(
                f"deepspeed.optimizer.type = {show(optimizer['type'])} is not accepted: "
                f"{REFUSED_OPTIMIZERS[name]}"
            )
        elif params is None:
            hint = did_you_mean(optimizer["type"], OPTIMIZER_NAMES)
            problems.append(
                f"deepspeed.optimizer.type = {show(optimizer['type'])} is unknown{hint}"
            )
        else:
            place = "deepspeed.optimizer.params"
            problems += _check_value(optimizer.get("params", {}), params, place)
    return problems


def check_rules(section: Mapping[str, Any], parallel: ParallelConfig) -> list[str]:
    """Problems of settings that do not work together or with the layout."""
    problems = [*_check_optimizer(section), *_check_precision(section)]
    stage, clipping = zero_stage(section), section.get("gradient_clipping") or 0
    pipeline = parallel.pipeline
    if pipeline > 1 and stage >= 2:
        problems.append(
            f"deepspeed.zero_optimization.stage = {stage} does not work with parallel.pipeline = "
            f"{pipeline}: a pipeline keeps its gradients over micro-batches; use stage 1, or "
            "parallel.pipeline = 1"
        )
    if clipping < 0:
        problems.append(f"deepspeed.gradient_clipping = {clipping:g} must be at least 0 (0: off)")
    zero = section.get("zero_optimization") or {}
    for name, minimum in (("offload_optimizer", 1), ("offload_param", 3)):
        device = (zero.get(name) or {}).get("device", "none")
        if device == "nvme":
            problems.append(
                f"deepspeed.zero_optimization.{name}.device = nvme is not accepted: states swapped "
                "out to files cannot be written into our checkpoints; use cpu"
            )
        elif device != "none" and stage < minimum:
            problems.append(
                f"deepspeed.zero_optimization.{name}.device = {device} needs ZeRO stage "
                f"{minimum}{' or higher' if minimum < 3 else ''}, not {stage}"
            )
    if section.get("gradient_allreduce_op", "mean") != "mean":
        problems.append(
            "deepspeed.gradient_allreduce_op = sum changes the scale of gradients, which ds-engine "
            "sets by the number of target tokens; remove it"
        )
    return [*problems, *_check_pipeline(section), *_check_activation_checkpointing(section)]


def zero_stage(section: Mapping[str, Any]) -> int:
    """ZeRO stage, 0 to 3."""
    return int((section.get("zero_optimization") or {}).get("stage", 0))


def precision(section: Mapping[str, Any]) -> str:
    """Precision of the forward pass: "bf16", "fp16" or "fp32"."""
    enabled = [name for name in ("bf16", "fp16") if (section.get(name) or {}).get("enabled")]
    return enabled[0] if enabled else "fp32"


def offloads_optimizer(section: Mapping[str, Any]) -> bool:
    """Whether the optimizer step runs on the CPU."""
    offload = (section.get("zero_optimization") or {}).get("offload_optimizer") or {}
    return bool(offload.get("device", "none") != "none")


def fold_deepspeed(run: RunConfig) -> RunConfig:
    """Moves the DeepSpeed blocks that ds-engine carries out itself into its own sections.

    ``activation_checkpointing`` turns on ``training.activation_checkpointing.every = 1`` unless
    that is set; an enabled ``wandb`` block becomes ``tracking.wandb`` unless that is set. Folding
    twice changes nothing.
    """
    section = copy.deepcopy(run.deepspeed)
    block = section.pop("activation_checkpointing", None)
    training, tracking = run.training, run.tracking
    if training.activation_checkpointing.every is None:
        every = ActivationCheckpointingConfig(every=0 if block is None else 1)
        training = dataclasses.replace(training, activation_checkpointing=every)
    wandb = section.pop("wandb", None) or {}
    if wandb.get("enabled") and tracking.wandb is None:
        tracking = dataclasses.replace(
            tracking,
            wandb=WandbConfig(
                project=wandb.get("project", "deepspeed"),
                group=wandb.get("group"),
                entity=wandb.get("team"),
            ),
        )
    return dataclasses.replace(run, training=training, tracking=tracking, deepspeed=section)


def normalise_deepspeed(section: Mapping[str, Any], batch: BatchPlan) -> dict[str, Any]:
    """The JSON handed to DeepSpeed; ``ds_configs/README.md`` lists what is added and why.

    Args:
        section: A checked section.
        batch: The solved batch triangle, written back.

    Returns:
        A new dictionary, valid for DeepSpeed.
    """
    result: dict[str, Any] = copy.deepcopy(dict(section))
    for folded in ("activation_checkpointing", "wandb"):
        result.pop(folded, None)
    result.update(batch.to_deepspeed())
    result["pipeline"] = {
        **result.get("pipeline", {}),
        "pipe_partitioned": False,
        "grad_partitioned": False,
    }
    result.setdefault("gradient_clipping", 0.0)
    result.setdefault("steps_per_print", NEVER_PRINT)
    if precision(section) != "fp32":
        # Without ZeRO, DeepSpeed has no optimizer that accumulates 16-bit gradients in fp32.
        if zero_stage(section) == 0:
            result.setdefault("zero_optimization", {})["stage"] = 1
        result.setdefault("data_types", {}).setdefault("grad_accum_dtype", "fp32")
    if precision(section) == "bf16":
        result["bf16"].setdefault("check_grad_overflow", True)
    optimizer = result.get("optimizer") or {}
    if str(optimizer.get("type")).lower() in ("adam", "adamw"):
        params = optimizer.setdefault("params", {})
        # CPU offload is for DeepSpeed's own CPU kernel, and so are the kernels' parameters.
        if not offloads_optimizer(section) and not any(key in params for key in KERNEL_ADAM_KEYS):
            params.setdefault("torch_adam", True)
            if params["torch_adam"] and not params.get("foreach"):
                # One pass over the weights: 12 ms against 46 ms at 14M parameters on a CPU.
                params.setdefault("fused", True)
    return result


def _check_keys(section: Mapping[str, Any], keys: Mapping[str, Kind], where: str) -> list[str]:
    problems = []
    for key, value in section.items():
        path = join_path(where, key)
        if str(key).lower().endswith(_SECRET):
            problems.append(
                f"{path} is a secret, and the configuration is written into config.json, "
                "checkpoints and trackers; delete it and set the environment variable that its "
                "service reads (COMET_API_KEY, WANDB_API_KEY)"
            )
        elif key not in keys:
            problems.append(f"{path} is not a DeepSpeed key{did_you_mean(key, keys)}")
        else:
            problems += _check_value(value, keys[key], path)
    return problems


def _check_value(value: Any, kind: Kind, where: str) -> list[str]:
    if kind == "any" or value is None:
        return []
    if isinstance(kind, Mapping):
        if isinstance(value, Mapping):
            return _check_keys(value, kind, where)
        return [f"{where} = {show(value)} must be an object with keys such as {next(iter(kind))}"]
    if isinstance(kind, tuple):
        if value in kind and not isinstance(value, bool):
            return []
        return [f"{where} = {show(value)} is not one of its values{did_you_mean(value, kind)}"]
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = {
        "bool": isinstance(value, bool),
        "int": number and value == int(value),
        "number": number,
        "str": isinstance(value, str),
        "list": isinstance(value, list),
    }[kind]
    if fits:
        return []
    auto = ' ("auto" is filled in by the Hugging Face Trainer only)' if value == "auto" else ""
    return [f"{where} = {show(value)} must be {_KIND_WORDS[kind]}{auto}"]


def _check_optimizer(section: Mapping[str, Any]) -> list[str]:
    optimizer = section.get("optimizer") or {}
    name = optimizer.get("type")
    if not name:
        return [
            "deepspeed.optimizer is missing; add ds_configs/deepspeed/adamw.json to the list, or "
            '"optimizer": {"type": "AdamW", "params": {"lr": 6e-4}}'
        ]
    params = optimizer.get("params") or {}
    place, problems = "deepspeed.optimizer.params", []
    rate = params.get("lr")
    if rate is None:
        problems.append(f"{place}.lr is missing; it is the peak learning rate, such as 6e-4")
    elif rate <= 0:
        problems.append(f"{place}.lr = {rate:g} must be above 0")
    for beta in params.get("betas") or []:
        if not isinstance(beta, (int, float)) or not 0 <= beta < 1:
            problems.append(
                f"{place}.betas holds {show(beta)}; each must be at least 0 and below 1"
            )
    kernel = [key for key in KERNEL_ADAM_KEYS if key in params]
    if params.get("torch_adam") and kernel:
        problems.append(
            f"{place}.{kernel[0]} belongs to DeepSpeed's own Adam kernel, but torch_adam = true "
            "chooses torch's; remove one of them"
        )
    untested = zero_stage(section) >= 1 and not section.get("zero_allow_untested_optimizer")
    if name.lower() == "sgd" and untested:
        problems.append(
            "deepspeed.optimizer.type = SGD is not tested with ZeRO by DeepSpeed; set "
            "deepspeed.zero_allow_untested_optimizer = true, or ZeRO stage 0"
        )
    return problems


def _check_precision(section: Mapping[str, Any]) -> list[str]:
    problems = []
    if all((section.get(name) or {}).get("enabled") for name in ("bf16", "fp16")):
        problems.append(
            "deepspeed.bf16.enabled and deepspeed.fp16.enabled are both true; a run has one "
            "precision: keep one of the two fragments"
        )
    accumulate = (section.get("data_types") or {}).get("grad_accum_dtype")
    kind = precision(section)
    if kind == "fp32" and accumulate not in (None, kind) and zero_stage(section) == 0:
        problems.append(
            f"deepspeed.data_types.grad_accum_dtype = {accumulate} with {kind} needs ZeRO stage 1 "
            "or higher; DeepSpeed has no such optimizer without ZeRO"
        )
    return problems


def _check_pipeline(section: Mapping[str, Any]) -> list[str]:
    block, problems = section.get("pipeline") or {}, []
    owners = {
        "stages": "parallel.pipeline",
        "partition": "parallel.partition",
        "seed_layers": "seed",
        "activation_checkpoint_interval": "training.activation_checkpointing.every",
    }
    for key, owner in owners.items():
        if block.get(key):
            problems.append(f"deepspeed.pipeline.{key} is not accepted: set {owner} instead")
    for key in ("pipe_partitioned", "grad_partitioned"):
        if block.get(key):
            problems.append(
                f"deepspeed.pipeline.{key} = true breaks stages that exchange several tensors "
                "under tensor parallelism; remove it (ds-engine sets false)"
            )
    return problems


def _check_activation_checkpointing(section: Mapping[str, Any]) -> list[str]:
    block = section.get("activation_checkpointing") or {}
    return [
        f"deepspeed.activation_checkpointing.{key} = {show(value)} is not carried out by "
        "ds-engine, which recomputes whole transformer layers "
        "(training.activation_checkpointing.every); remove it"
        for key, value in block.items()
        if value
    ]
