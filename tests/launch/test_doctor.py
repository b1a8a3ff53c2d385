import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest

from launch.doctor import (
    Finding,
    check_accelerator,
    check_disk,
    check_leftovers,
    check_locks,
    check_open_files,
    check_ops,
    check_optional,
    check_packages,
    check_processor,
    check_python,
    check_requirements,
    check_shared_memory,
    check_tools,
    check_wandb,
    examine,
    exit_code,
)
from launch.doctor_probes import (
    Lock,
    Machine,
    extension_locks,
    extensions_folder,
    has_wandb_key,
    probe_deepspeed,
    project_requirements,
    shm_leftovers,
    usable_memory,
)

GIB = 1 << 30
PROBE = {
    "torch": "2.13.0",
    "cuda": None,
    "devices": [],
    "deepspeed": "0.19.8",
    "accelerator": "cpu",
    "bf16": True,
    "fp16": False,
    "ops": {"cpu_adam": {"compatible": True, "installed": False}},
}
GPU = {
    **PROBE,
    "cuda": "12.8",
    "accelerator": "cuda",
    "fp16": True,
    "devices": [{"name": "H100", "gib": 79.6}] * 8,
}
HEALTHY = Machine(
    python="3.12.1",
    requires_python=">=3.11",
    requirements=["torch>=2.13"],
    installed={"torch": "2.13.0"},
    packages_error=None,
    probe=GPU,
    probe_error=None,
    tools={"gcc": "/usr/bin/gcc"},
    shm_free=8 * GIB,
    shm_total=8 * GIB,
    shm_leftovers=[],
    disk_path="/runs",
    disk_free=500 * GIB,
    open_files=(65536, 65536),
    cores=64,
    memory=512 * GIB,
    has_wandb_key=True,
)


def one(findings) -> Finding:
    (finding,) = findings
    return finding


def test_a_healthy_machine_has_no_problem():
    findings = examine(HEALTHY)
    assert {finding.status for finding in findings if "not installed" not in finding.text} == {"ok"}
    assert exit_code(findings) == 0


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"python": "3.10.4"}, "python"),
        ({"installed": {"torch": "2.1.0"}}, "torch"),
        ({"installed": {"torch": None}}, "torch"),
        ({"packages_error": "models is elsewhere; start elsewhere"}, "packages"),
        ({"probe": {}, "probe_error": "no answer within 5 s"}, "accelerator"),
        ({"shm_free": 1 << 20}, "/dev/shm"),
        ({"locks": [Lock("/x/lock", 7200.0, held=False)]}, "extension locks"),
        ({"disk_free": 1 << 20}, "disk"),
        ({"open_files": (128, 128)}, "open files"),
        ({"memory": GIB}, "processor"),
    ],
)
def test_what_stops_training_is_a_problem_with_a_fix(change, name):
    findings = examine(dataclasses.replace(HEALTHY, **change))
    problem = one(finding for finding in findings if finding.status == "problem")
    assert problem.name == name
    assert problem.fix
    assert exit_code(findings) == 1


def test_python():
    assert check_python("3.11.7", ">=3.11") == Finding("python", "ok", "3.11.7")
    assert check_python("3.10.1", ">=3.11").text == "3.10.1, but >=3.11 is needed"


def test_packages_keep_the_reason_and_the_fix_apart():
    finding = check_packages("models would come from /a; another shadows it: start elsewhere")
    assert (finding.text, finding.fix) == (
        "models would come from /a",
        "another shadows it: start elsewhere",
    )


def test_requirements_know_local_versions_and_markers():
    needs = ["torch>=2.13.0", "wandb>=0.31", 'winreg>=1; sys_platform == "win32"']
    torch, wandb = check_requirements(needs, {"torch": "2.13.0+cpu", "wandb": "0.30.9"})
    assert torch.status == "ok"
    assert wandb.text == "0.30.9, but >=0.31 is needed"
    assert wandb.fix == 'pip install "wandb>=0.31"'


def test_accelerators():
    assert one(check_accelerator(GPU, None)) == Finding(
        "accelerator", "ok", "cuda: 8 x H100 (80 GiB); precisions fp32, bf16, fp16"
    )
    cpu = one(check_accelerator(PROBE, None))
    assert (cpu.status, cpu.text) == ("note", "cpu: no GPU; precisions fp32, bf16")
    assert cpu.fix == "for GPUs install torch with CUDA"
    driverless = one(check_accelerator({**PROBE, "cuda": "12.8"}, None))
    assert driverless.fix == "for GPUs install the driver"
    hidden = one(check_accelerator({**GPU, "accelerator": "cpu"}, None))
    assert hidden.status == "problem"
    assert "DS_ACCELERATOR" in hidden.fix


def test_ops():
    states = {
        "cpu_adam": {"compatible": True, "installed": True},
        "fused_adam": {"compatible": True, "installed": False},
        "async_io": {"compatible": False, "installed": False},
    }
    installed, later, missing = check_ops({"ops": states})
    assert installed.text == "installed"
    assert later.text.startswith("compiled at first use")
    assert (missing.status, missing.text) == ("note", "cannot be built here: no offload to NVMe")
    assert list(check_ops({})) == []


def test_tools_are_notes_and_nvcc_matters_only_with_a_gpu():
    tools = {"gcc": "/usr/bin/gcc", "nvcc": None, "srun": None}
    assert [finding.name for finding in check_tools(tools, cuda=False)] == ["gcc", "srun"]
    gcc, nvcc, srun = check_tools(tools, cuda=True)
    assert (gcc.status, nvcc.status, srun.status) == ("ok", "note", "note")


def test_optional_packages_say_what_is_lost():
    findings = {finding.name: finding for finding in check_optional({"ray": "2.50"})}
    assert findings["ray"].status == "ok"
    assert findings["flash-attn"].status == "note"
    assert findings["flash-attn"].fix == 'pip install -e ".[flash]"'


def test_shared_memory():
    statuses = [
        check_shared_memory(free, 16 * GIB).status
        for free in (None, 63 << 20, 64 << 20, GIB - 1, GIB)
    ]
    assert statuses == ["note", "problem", "note", "note", "ok"]


def test_leftover_buffers_are_counted_in_mib():
    assert check_leftovers([]).status == "ok"
    finding = check_leftovers([69 << 20] * 3)
    assert finding.text == "3 left in /dev/shm hold 207 MiB of memory"


def test_locks():
    held, young = Lock("/a/lock", 7200.0, held=True), Lock("/b/lock", 30.0, held=False)
    old = Lock("/c/lock", 601.0, held=False)
    assert check_locks([]).status == "ok"
    assert check_locks([held]).text == "1 builds in progress"
    assert check_locks([held, young]).status == "note"
    problem = check_locks([held, young, old])
    assert (problem.status, problem.fix) == ("problem", "rm /c/lock")


def test_disk_open_files_processor_wandb():
    statuses = [check_disk("/r", free).status for free in (GIB - 1, 19 * GIB, 20 * GIB)]
    assert statuses == ["problem", "note", "ok"]
    statuses = [check_open_files(soft, 8192).status for soft in (255, 1024, 4096, -1)]
    assert statuses == ["problem", "note", "ok", "ok"]
    assert check_open_files(1024, 8192).fix == "ulimit -n 8192"
    assert check_open_files(1024, -1).fix == "ulimit -n 65536"
    assert check_processor(2, 16 * GIB).text == "2 cores, 16.0 GiB of memory"
    assert check_wandb(has_key=False).status == "note"


# Probes


def test_the_projects_requirements_are_read():
    bound, needs = project_requirements()
    assert bound.startswith(">=3")
    assert any(text.startswith("deepspeed") for text in needs)


def test_a_probe_that_hangs_crashes_or_raises_is_an_answer():
    assert probe_deepspeed(1.0, "import time; time.sleep(60)") == ({}, "no answer within 1 s")
    assert probe_deepspeed(30.0, "import os; os.abort()") == ({}, "exit code -6")
    answer, error = probe_deepspeed(30.0, "raise ImportError('libcudart.so.12 is missing')")
    assert (answer, error) == ({}, "ImportError: libcudart.so.12 is missing")


def test_locks_are_found_and_their_holder_is_seen(tmp_path):
    (tmp_path / "py311_cpu" / "cpu_adam").mkdir(parents=True)
    path = tmp_path / "py311_cpu" / "cpu_adam" / "lock"
    path.write_text("")
    os.utime(path, (time.time() - 5000,) * 2)
    lock = one(extension_locks(tmp_path))
    assert lock.path == str(path)
    assert 4990 < lock.age < 5100
    assert not lock.held
    with path.open():
        assert one(extension_locks(tmp_path)).held
    assert extension_locks(tmp_path / "nowhere") == []


def test_the_extensions_folder_is_torchs():
    assert str(extensions_folder({"TORCH_EXTENSIONS_DIR": "/x"})) == "/x"
    assert str(extensions_folder({"HOME": "/h"})) == "/h/.cache/torch_extensions"
    assert str(extensions_folder({"HOME": "/h", "XDG_CACHE_HOME": "/c"})) == "/c/torch_extensions"


def test_a_buffer_in_use_is_no_leftover(tmp_path):
    import mmap

    for name in ("deepspeed_allreduce_buffer_0_a", "deepspeed_allreduce_buffer_1_a", "other"):
        (tmp_path / name).write_bytes(b"x" * 8192)
    assert shm_leftovers(tmp_path) == [8192, 8192]
    with (tmp_path / "deepspeed_allreduce_buffer_0_a").open("r+b") as stream:
        mapping = mmap.mmap(stream.fileno(), 0)
        assert shm_leftovers(tmp_path) == [8192]
        mapping.close()


def test_wandb_keys(tmp_path):
    home = {"HOME": str(tmp_path)}
    assert not has_wandb_key(home)
    assert has_wandb_key({**home, "WANDB_API_KEY": "x"})
    (tmp_path / ".netrc").write_text("machine example.org\n  login a\n  password b\n")
    assert not has_wandb_key(home)
    assert has_wandb_key({**home, "WANDB_BASE_URL": "https://example.org"})
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password b\n")
    assert has_wandb_key(home)


def test_memory_is_plausible():
    assert 1 << 28 < usable_memory() < 1 << 50


@pytest.mark.slow
@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_on_this_machine(as_json):
    command = [sys.executable, "-m", "launch.cli", "doctor", *(["--json"] if as_json else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode in (0, 1), done.stderr
    if as_json:
        findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
        assert findings["torch"]["status"] == "ok"
        assert findings["accelerator"]["status"] != "problem", findings["accelerator"]
        stops = any(finding["status"] == "problem" for finding in findings.values())
        assert done.returncode == int(stops)
    else:
        assert "deepspeed" in done.stdout
        assert "problems" in done.stdout
