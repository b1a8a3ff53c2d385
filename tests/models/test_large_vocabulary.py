"""mT5's quarter of a million words: the logits of a batch are never in memory at once."""

from __future__ import annotations

import subprocess
import sys

import pytest

TOKENS, WORDS = 1024, 250_112
CODE = f"""
import torch
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel
from ds_engine.synthetic import SyntheticData
from ds_engine.training.metrics import process_peak_bytes
from models.common.definition import PlanOptions
from models.sections import AttentionConfig, MLPConfig
from models.t5 import build_plan
from models.t5_config import T5Config

config = T5Config(
    vocab_size={WORDS}, num_layers=1, hidden_size=16, max_sequence_length=64,
    attention=AttentionConfig(num_heads=2, bias=False),
    mlp=MLPConfig(intermediate_size=32, bias=False), tie_embeddings=False,
)
plan = build_plan(config, TensorParallel.single(), PlanOptions())
model = SequentialModel(plan)
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
data = SyntheticData.for_plan(
    plan, vocab_size={WORDS}, lengths=(64, 64), global_batch={TOKENS} // 64
)
inputs, targets = data.micro_batch(range({TOKENS} // 64))
before = process_peak_bytes()
loss = model(inputs, targets)
loss.backward()
assert torch.isfinite(loss)
print(process_peak_bytes() - before)
"""


@pytest.mark.slow
def test_logits_of_mt5s_vocabulary_stay_in_chunks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, timeout=240
    )
    grown, whole = int(done.stdout), 4 * TOKENS * WORDS
    assert whole > 1_000_000_000
    # A chunk's logits and their gradient, and the gradient of the table; not the batch's logits.
    assert grown < 0.45 * whole, f"{grown / 1e6:.0f} MB for {whole / 1e6:.0f} MB of logits"
