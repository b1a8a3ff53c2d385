"""Imported once by the fork server, so that each rank does not pay for it again."""

import gc
import importlib

from deepspeed.ops import __compatible_ops__

# The look-up asks a compiler which of DeepSpeed's operators could be built; it is remembered.
assert "deepspeed_shm_comm" in __compatible_ops__

for name in (
    # imports torch._inductor, which every ZeRO optimizer's start would do
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.bf16_optimizer",
    "safetensors.torch",
    "ds_engine.data.dataset",
    "ds_engine.data.loader",
    "ds_engine.training.checkpoint.checkpointer",
    "ds_engine.training.trainer",
):
    importlib.import_module(name)

# DeepSpeed collects garbage in every step; half a million imported objects need not be looked at.
gc.collect()
gc.freeze()
