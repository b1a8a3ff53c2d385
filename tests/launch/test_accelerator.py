"""Which devices ranks get: never more ranks than devices, never somebody else's devices."""

from __future__ import annotations

import pytest

from ds_engine.errors import ConfigError
from launch.accelerator import Accelerator, find_accelerator
from launch.deepspeed_launcher import local_command, local_environment


def test_more_ranks_than_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 ranks \(--nproc\) need 3 devices, but 2 cuda"):
        Accelerator("cuda", 2).check_ranks(3, "--nproc")
    Accelerator("cuda", 2).check_ranks(2, "--nproc")
    Accelerator("cpu", 1).check_ranks(16, "--nproc")


def test_the_environment_chooses_the_cpu() -> None:
    assert find_accelerator({"DS_ACCELERATOR": "cpu"}) == Accelerator("cpu", 1)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", "--num_gpus=2"),
        ("2,3", "--include=localhost:2,3"),
        ("5,6,7", "--include=localhost:5,6"),
    ],
)
def test_visible_devices_are_named(visible: str, expected: str) -> None:
    line = local_command("m", [], nproc=2, port=1, visible_devices=visible)
    assert expected in line
    assert sum(word.startswith(("--num_gpus", "--include")) for word in line) == 1


def test_only_the_cpu_is_written_into_the_environment() -> None:
    inherited = {"CUDA_VISIBLE_DEVICES": "1", "A": "b"}
    on_cpu = local_environment(inherited, accelerator="cpu")
    assert on_cpu["DS_ACCELERATOR"] == "cpu"
    assert "CUDA_VISIBLE_DEVICES" not in on_cpu
    elsewhere = local_environment(inherited, accelerator="xpu")
    assert "DS_ACCELERATOR" not in elsewhere
    assert elsewhere["CUDA_VISIBLE_DEVICES"] == "1"
    assert elsewhere["A"] == "b"
