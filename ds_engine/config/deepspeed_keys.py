"""The keys of a DeepSpeed configuration, as read by DeepSpeed 0.19.8.

DeepSpeed ignores unknown top-level keys; this table is what lets ds-engine refuse them. A test
compares it with DeepSpeed's own classes, so that a new release is noticed.

The kind of a value is "bool", "int", "number", "str", "list", "any", a tuple of allowed values, or
an object of further keys. "int" allows 5e8, as DeepSpeed's own documentation writes it.
"""

from collections.abc import Mapping
from typing import TypeAlias

Kind: TypeAlias = "str | tuple[object, ...] | Mapping[str, Kind]"

_DTYPES = ("fp32", "fp16", "bf16")
_DEVICES = ("none", "cpu", "nvme")

_ADAM: dict[str, Kind] = {
    "lr": "number",
    "betas": "list",
    "eps": "number",
    "weight_decay": "number",
    "amsgrad": "bool",
    "torch_adam": "bool",
    "adam_w_mode": "bool",
    "fused": "bool",
    "foreach": "bool",
    "bias_correction": "bool",
    "set_grad_none": "bool",
    "fp32_optimizer_states": "bool",
}

# Optimizers by type (in lower case, as DeepSpeed compares them) and their parameters.
OPTIMIZERS: Mapping[str, Mapping[str, Kind]] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "adagrad": {
        "lr": "number",
        "lr_decay": "number",
        "eps": "number",
        "weight_decay": "number",
        "initial_accumulator_value": "number",
    },
    "lamb": {
        "lr": "number",
        "betas": "list",
        "eps": "number",
        "weight_decay": "number",
        "bias_correction": "bool",
        "max_coeff": "number",
        "min_coeff": "number",
    },
    "lion": {"lr": "number", "betas": "list", "weight_decay": "number"},
    "sgd": {
        "lr": "number",
        "momentum": "number",
        "dampening": "number",
        "weight_decay": "number",
        "nesterov": "bool",
    },
}
OPTIMIZER_NAMES = ("Adam", "AdamW", "Adagrad", "Lamb", "Lion", "SGD")

# Optimizers of DeepSpeed that ds-engine refuses, with the reason and what to do instead.
REFUSED_OPTIMIZERS: Mapping[str, str] = {
    "muon": "it needs every parameter tagged use_muon and a learning rate for each of the two "
    "kinds, and training.lr_schedule sets one rate for all; use AdamW",
}

# Parameters of DeepSpeed's own Adam kernels, which torch's AdamW does not take.
KERNEL_ADAM_KEYS = ("bias_correction", "set_grad_none", "fp32_optimizer_states")

_OFFLOAD_PARAM: dict[str, Kind] = {
    "device": _DEVICES,
    "nvme_path": "str",
    "buffer_count": "int",
    "buffer_size": "int",
    "max_in_cpu": "int",
    "pin_memory": "bool",
}
_OFFLOAD_OPTIMIZER: dict[str, Kind] = {
    "device": _DEVICES,
    "nvme_path": "str",
    "buffer_count": "int",
    "pin_memory": "bool",
    "pipeline_read": "bool",
    "pipeline_write": "bool",
    "fast_init": "bool",
    "ratio": "number",
    "super_offload": "bool",
    "cpuadam_cores_perc": "number",
}
_STAGE3: dict[str, Kind] = {
    "prefetch_bucket_size": "int",
    "param_persistence_threshold": "int",
    "model_persistence_threshold": "int",
    "max_live_parameters": "int",
    "max_reuse_distance": "int",
    "gather_16bit_weights_on_model_save": "bool",
    "module_granularity_threshold": "int",
    "use_all_reduce_for_fetch_params": "bool",
    "allgather_sequential": "bool",
}
_ZERO: dict[str, Kind] = {
    "stage": (0, 1, 2, 3),
    "contiguous_gradients": "bool",
    "reduce_scatter": "bool",
    "reduce_bucket_size": "int",
    "use_multi_rank_bucket_allreduce": "bool",
    "allgather_partitions": "bool",
    "allgather_bucket_size": "int",
    "overlap_comm": "bool",
    "compute_grad_norm": "bool",
    "load_from_fp32_weights": "bool",
    "elastic_checkpoint": "bool",
    "offload_param": _OFFLOAD_PARAM,
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "zenflow": {
        "topk_ratio": "number",
        "select_strategy": "str",
        "select_interval": "any",
        "update_interval": "any",
        "overlap_step": "bool",
        "offload": "bool",
        "auto_ratio": "number",
        "full_warm_up_rounds": "int",
        "pt_reserved_cores_perc": "number",
        "steps_per_epoch": "int",
    },
    "sub_group_size": "int",
    **_STAGE3,
    **{f"stage3_{name}": kind for name, kind in _STAGE3.items()},
    "stage3_gather_fp16_weights_on_model_save": "bool",
    "ignore_unused_parameters": "bool",
    "legacy_stage1": "bool",
    "round_robin_gradients": "bool",
    "parameter_alignment": "bool",
    "zero_hpz_partition_size": "int",
    "zero_quantized_weights": "bool",
    "zero_quantized_nontrainable_weights": "bool",
    "zero_quantized_gradients": "bool",
    "memory_efficient_linear": "bool",
    "pipeline_loading_checkpoint": "bool",
    "override_module_apply": "bool",
    "log_trace_cache_warnings": "bool",
    "enable_sanity_checks": "bool",
    "save_muon_momentum_buffer_in_memory": "bool",
    "leaf_module": {"classes": "list", "names": "list", "name_suffixes": "list"},
    "cpu_offload": "bool",
    "cpu_offload_param": "bool",
    "cpu_offload_use_pin_memory": "bool",
}

KEYS: Mapping[str, Kind] = {
    "train_batch_size": "int",
    "train_micro_batch_size_per_gpu": "int",
    "gradient_accumulation_steps": "int",
    "optimizer": {"type": "str", "params": "any", "legacy_fusion": "bool"},
    "zero_optimization": _ZERO,
    "zero_allow_untested_optimizer": "bool",
    "zero_force_ds_cpu_optimizer": "bool",
    "bf16": {
        "enabled": "bool",
        "immediate_grad_update": "bool",
        "check_grad_overflow": "bool",
        "bf16_master_weights_and_grads": "bool",
        "bf16_optimizer_states": "bool",
    },
    "fp16": {
        "enabled": "bool",
        "auto_cast": "bool",
        "loss_scale": "number",
        "initial_scale_power": "int",
        "loss_scale_window": "int",
        "hysteresis": "int",
        "consecutive_hysteresis": "bool",
        "min_loss_scale": "int",
        "fp16_master_weights_and_grads": "bool",
    },
    "torch_autocast": {
        "enabled": "bool",
        "dtype": "str",
        "lower_precision_safe_modules": "list",
    },
    "data_types": {
        "grad_accum_dtype": _DTYPES,
        "param_dtype": _DTYPES,
        "buffer_dtype": _DTYPES,
        "keep_in_fp32_modules": "any",
    },
    "gradient_clipping": "number",
    "gradient_allreduce_op": ("mean", "sum"),
    "gradient_predivide_factor": "number",
    "prescale_gradients": "bool",
    "communication_data_type": _DTYPES,
    "seq_parallel_communication_data_type": _DTYPES,
    "disable_allgather": "bool",
    "pipeline": {
        "stages": "any",
        "partition": "str",
        "seed_layers": "bool",
        "activation_checkpoint_interval": "int",
        "pipe_partitioned": "bool",
        "grad_partitioned": "bool",
        "use_reentrant": "bool",
    },
    "activation_checkpointing": {
        "partition_activations": "bool",
        "contiguous_memory_optimization": "bool",
        "cpu_checkpointing": "bool",
        "number_checkpoints": "int",
        "synchronize_checkpoint_boundary": "bool",
        "profile": "bool",
    },
    "checkpoint": {
        "tag_validation": "str",
        "load_universal": "bool",
        "use_node_local_storage": "bool",
        "parallel_write": {"pipeline_stage": "bool"},
        "checkpoint_serialization": "bool",
        "writer": "any",
    },
    "wandb": {"enabled": "bool", "group": "str", "team": "str", "project": "str"},
    "tensorboard": {"enabled": "bool", "output_path": "str", "job_name": "str"},
    "csv_monitor": {"enabled": "bool", "output_path": "str", "job_name": "str"},
    "comet": {
        "enabled": "bool",
        "samples_log_interval": "int",
        "project": "str",
        "workspace": "str",
        "experiment_name": "str",
        "experiment_key": "str",
        "online": "bool",
        "mode": "str",
    },
    "comms_logger": {
        "enabled": "bool",
        "prof_all": "bool",
        "prof_ops": "list",
        "verbose": "bool",
        "debug": "bool",
    },
    "flops_profiler": {
        "enabled": "bool",
        "recompute_fwd_factor": "number",
        "profile_step": "int",
        "module_depth": "int",
        "top_modules": "int",
        "detailed": "bool",
        "output_file": "str",
    },
    "aio": {
        "block_size": "int",
        "queue_depth": "int",
        "intra_op_parallelism": "int",
        "single_submit": "bool",
        "overlap_events": "bool",
        "use_gds": "bool",
    },
    "timers": {"throughput": {"enabled": "bool", "synchronized": "bool"}},
    "steps_per_print": "int",
    "wall_clock_breakdown": "bool",
    "memory_breakdown": "bool",
    "dump_state": "bool",
    "disable_python_gc": "bool",
    "use_data_before_expert_parallelism": "bool",
    "log_level": "any",
}

_REMOVED = "DeepSpeed removed it; delete the key"

# Keys that DeepSpeed knows (or knew) and ds-engine refuses, with what to do instead.
REFUSED: Mapping[str, str] = {
    "scheduler": "ds-engine owns the learning rate; describe it in training.lr_schedule",
    "bfloat16": 'it is the old name; write "bf16"',
    "tensor_parallel": "set the degree in parallel.tensor",
    "expert_parallel": "set the degree in parallel.expert",
    "sequence_parallel_size": "set parallel.sequence or parallel.context",
    "managed_gradient_accumulation": "ds-engine relies on DeepSpeed's own accumulation; delete it",
    "hybrid_engine": "it is for inference in RLHF, not for pretraining; delete it",
    "autotuning": "DeepSpeed's tuner does not know pipelines; delete it",
    "compile": "it needs engine.compile(), which ds-engine does not call; delete it",
    "vocabulary_size": "DeepSpeed only warns about it; set model.vocab_size and "
    "model.vocab_multiple",
    "dataloader_drop_last": "it is for DeepSpeed's own loader, which ds-engine does not use (its "
    "batches are always complete); delete it",
    "data_efficiency": "the data order is owned by the data section; delete it",
    "weight_quantization": "it is for inference; delete it",
    "datastates_ckpt": "checkpoints are owned by the checkpoint section; delete it",
    "elasticity": "DeepSpeed removed it; set the batch sizes, and restart on any number of ranks",
    "amp": 'DeepSpeed removed it; use "bf16" or "fp16"',
    "curriculum_learning": _REMOVED,
    "progressive_layer_drop": _REMOVED,
    "sparse_attention": _REMOVED,
    "sparse_gradients": _REMOVED,
    "compression_training": _REMOVED,
    "quantize_training": _REMOVED,
    "eigenvalue": _REMOVED,
    "graph_harvesting": _REMOVED,
    "nebula": _REMOVED,
}
