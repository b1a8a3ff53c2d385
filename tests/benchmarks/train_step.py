"""CPU-seconds of one training step: ds-engine against a bare PyTorch loop, in turn, in one process.

    OMP_NUM_THREADS=1 python tests/benchmarks/train_step.py [--json FILE]

Process CPU time does not depend on what else the machine does; the figure to quote is the ratio,
the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

import torch  # noqa: E402

from ds_engine.config.batch import BatchPlan  # noqa: E402
from ds_engine.config.deepspeed import normalise_deepspeed  # noqa: E402
from ds_engine.parallel.context import ParallelContext  # noqa: E402
from ds_engine.parallel.dims import ParallelDims  # noqa: E402
from ds_engine.training.engine import build_train_step, init_distributed  # noqa: E402
from launch.deepspeed_launcher import free_port  # noqa: E402
from models.common.definition import PlanOptions  # noqa: E402
from models.config import AttentionConfig, GPTConfig, MLPConfig  # noqa: E402
from models.gpt import build_plan  # noqa: E402
from tests.benchmarks.bare_loop import BareLoop, Sizes  # noqa: E402

CASES = [("fp32", 8192), ("fp32", 50304), ("bf16", 8192), ("bf16", 50304)]


def our_step(sizes: Sizes, dtype: str) -> Callable[[torch.Tensor, torch.Tensor], float]:
    config = GPTConfig(
        vocab_size=sizes.vocab,
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        max_sequence_length=sizes.sequence,
        attention=AttentionConfig(num_heads=sizes.heads),
        mlp=MLPConfig(intermediate_size=4 * sizes.hidden),
    )
    context = ParallelContext.create(ParallelDims())
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    options = PlanOptions(isolate_documents=False, dtype=torch_dtype)
    plan = build_plan(config, context.tensor_parallel(sequence_parallel=False), options)
    section = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, "fused": True},
        },
        "gradient_clipping": 1.0,
        "bf16": {"enabled": dtype == "bf16"},
    }
    batch = BatchPlan(sizes.batch, sizes.batch, 1, 1)
    step = build_train_step(plan, context, normalise_deepspeed(section, batch))
    shape = (sizes.batch, sizes.sequence)
    positions = torch.arange(sizes.sequence).expand(shape)
    segments, ids = torch.zeros(shape, dtype=torch.long), torch.arange(sizes.batch)

    def run(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        batch = ((tokens, positions, segments, ids), (labels, torch.ones(shape)))
        return step.train_batch([batch], 1e-4).loss

    return run


def measure(dtype: str, vocab: int, rounds: int, steps: int) -> dict[str, object]:
    sizes = Sizes(vocab=vocab)
    bare = BareLoop(sizes, {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    ours = our_step(sizes, dtype)
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randint(vocab, (sizes.batch, sizes.sequence + 1), generator=generator)
        for _ in range(steps)
    ]

    def seconds(step: Callable[[torch.Tensor, torch.Tensor], float]) -> float:
        began = time.process_time()
        for tokens in batches:
            step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        return (time.process_time() - began) / steps

    seconds(bare.step), seconds(ours)
    pairs = [(seconds(bare.step), seconds(ours)) for _ in range(rounds)]
    return {
        "dtype": dtype,
        "vocabulary": vocab,
        "bare_cpu_seconds": statistics.median(b for b, _ in pairs),
        "ours_cpu_seconds": statistics.median(o for _, o in pairs),
        "ratio": statistics.median(o / b for b, o in pairs),
        "ratios": [round(o / b, 4) for b, o in pairs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--case", help="for example fp32-8192")
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(free_port())
    init_distributed()
    rows = []
    print("| dtype | vocabulary | bare loop, CPU s/step | ds-engine, CPU s/step | ratio |")
    print("|---|---:|---:|---:|---:|")
    for dtype, vocab in CASES:
        if arguments.case and arguments.case != f"{dtype}-{vocab}":
            continue
        row = measure(dtype, vocab, arguments.rounds, arguments.steps)
        rows.append(row)
        print(
            f"| {dtype} | {vocab:,} | {row['bare_cpu_seconds']:.3f} | "
            f"{row['ours_cpu_seconds']:.3f} | {row['ratio']:.3f} |",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
