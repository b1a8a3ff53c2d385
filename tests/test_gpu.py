"""The bodies of CPU tests on a GPU, held against the same one-process reference on the CPU."""

from __future__ import annotations

import pytest
import torch

from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.sequential import SequentialModel
from tests.parity.layouts import Layout, plan_for, synthetic
from tests.parity.test_layouts import check

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.gpu

# TF32 is off in torch by default; GPU kernels still sum in other orders than the CPU's.
FP32 = {"tolerance": 1e-4}
BF16 = {"tolerance": 0.2, "scalar_tolerance": 2e-2, "measure": "overall", "reach": 5e-3}


def needs(gpus: int) -> pytest.MarkDecorator:
    return pytest.mark.skipif(gpus > GPUS, reason=f"needs {gpus} GPU(s), this machine has {GPUS}")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(zero=1, device="cuda"), marks=needs(1)),
        pytest.param(Layout(zero=3, recompute=1, device="cuda"), marks=needs(1)),
        pytest.param(Layout(tensor=2, sequence=True, device="cuda"), marks=needs(2)),
        pytest.param(Layout(pipeline=2, device="cuda"), marks=needs(2)),
        pytest.param(Layout(data=2, zero=2, device="cuda"), marks=needs(2)),
    ],
    ids=lambda layout: layout.name,
)
@pytest.mark.parametrize("family", ["gpt_dropout", "llama_dropout"])
def test_layout_on_gpus_equals_one_process_on_the_cpu(family: str, layout: Layout) -> None:
    check(family, layout, **FP32)


@needs(1)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_bf16_on_a_gpu_is_near_fp32_on_the_cpu(family: str) -> None:
    check(family, Layout(zero=1, bf16=True, device="cuda"), **BF16)


@needs(1)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_logits_on_a_gpu_equal_the_cpus(family: str) -> None:
    (inputs, _) = synthetic(family).micro_batch([0, 1, 2, 3])
    model = SequentialModel(plan_for(family, TensorParallel.single())).eval()
    with torch.no_grad():
        expected = model(inputs)
        found = model.cuda()(tuple(t.cuda() for t in inputs)).cpu()
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
