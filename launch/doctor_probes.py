"""What ``ds-engine doctor`` reads from the machine; judging it is left to ``launch/doctor.py``.

torch and DeepSpeed are asked in a process of their own with a time limit: a broken installation, or
one that hangs, is then an answer like any other.
"""

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from ds_engine.errors import LaunchError
from launch.guard import check_packages

OPS: Final = ("cpu_adam", "fused_adam", "async_io")
TOOLS: Final = ("gcc", "g++", "ninja", "nvcc", "pdsh", "ssh", "sbatch", "srun", "mpirun")
OPTIONAL: Final = (
    "flash-attn",
    "sentencepiece",
    "ray",
    "fastapi",
    "uvicorn",
    "mpi4py",
)
_SHM_PREFIX: Final = "deepspeed_allreduce_buffer"
_MARK: Final = "ds-engine-probe:"

_PROBE: Final = """
import json
answer = {"ops": {}}
import torch
answer["torch"] = torch.__version__
answer["cuda"] = torch.version.cuda
answer["devices"] = [
    {"name": torch.cuda.get_device_properties(i).name,
     "gib": torch.cuda.get_device_properties(i).total_memory / 2**30}
    for i in range(torch.cuda.device_count())
]
import deepspeed
from deepspeed.accelerator import get_accelerator
accelerator = get_accelerator()
answer["deepspeed"] = deepspeed.__version__
answer["accelerator"] = accelerator._name
answer["bf16"] = bool(accelerator.is_bf16_supported())
answer["fp16"] = bool(accelerator.is_fp16_supported())
from deepspeed.git_version_info import installed_ops
from deepspeed.ops.op_builder.all_ops import ALL_OPS
for name in NAMES:
    if name in ALL_OPS:
        answer["ops"][name] = {
            "compatible": bool(ALL_OPS[name].is_compatible(verbose=False)),
            "installed": bool(installed_ops.get(name, False)),
        }
print("\\n" + MARK + json.dumps(answer), flush=True)
"""


@dataclass(frozen=True)
class Lock:
    """A lock file of torch's extension builder; torch waits for it without a time limit.

    Attributes:
        path: the file.
        age: seconds since it was made.
        held: whether a process of this machine has it open.
    """

    path: str
    age: float
    held: bool


@dataclass(frozen=True)
class Machine:
    """All that the doctor looks at; sizes are in bytes.

    Attributes:
        python: version of the interpreter.
        requires_python: the project's bound, such as ">=3.11".
        requirements: what the project needs, as requirement strings.
        installed: distribution to version, None where it is missing.
        packages_error: why the four packages do not stand beside each other, or None.
        probe: what torch and DeepSpeed say of themselves; empty where they failed.
        probe_error: why they failed, or None.
        tools: program to path, None where it is missing.
        shm_free: free space of the shared memory, None where there is none.
        shm_total: its size.
        shm_leftovers: size of each DeepSpeed buffer there that no process has mapped.
        disk_path: the folder whose disk was measured.
        disk_free: free space of it.
        open_files: soft and hard limit of open files; -1 is unlimited.
        cores: cores that this process may use.
        memory: memory that this process may use.
        locks: locks of torch's extension builder.
        has_wandb_key: whether a wandb key is configured.
    """

    python: str
    requires_python: str
    requirements: Sequence[str]
    installed: Mapping[str, str | None]
    packages_error: str | None
    probe: Mapping[str, Any]
    probe_error: str | None
    tools: Mapping[str, str | None]
    shm_free: int | None
    shm_total: int
    shm_leftovers: Sequence[int]
    disk_path: str
    disk_free: int
    open_files: tuple[int, int]
    cores: int
    memory: int
    has_wandb_key: bool
    locks: Sequence[Lock] = field(default_factory=tuple)


def read_machine(*, folder: Path, environment: Mapping[str, str], timeout: float) -> Machine:
    """Read everything.

    Args:
        folder: where runs would be written; its disk is measured.
        environment: the process's environment.
        timeout: seconds that torch and DeepSpeed may take to answer.

    Raises:
        LaunchError: see ``requirement_name``.
    """
    requires_python, requirements = project_requirements()
    names = [requirement_name(text) for text in requirements]
    probe, probe_error = probe_deepspeed(timeout)
    shm = Path("/dev/shm")
    usage = shutil.disk_usage(shm) if shm.is_dir() else None
    try:
        check_packages()
        packages_error = None
    except LaunchError as error:
        packages_error = str(error)
    return Machine(
        python=".".join(map(str, sys.version_info[:3])),
        requires_python=requires_python,
        requirements=requirements,
        installed={name: installed_version(name) for name in (*names, *OPTIONAL)},
        packages_error=packages_error,
        probe=probe,
        probe_error=probe_error,
        tools={name: shutil.which(name) for name in TOOLS},
        shm_free=usage.free if usage else None,
        shm_total=usage.total if usage else 0,
        shm_leftovers=shm_leftovers(shm),
        disk_path=str(folder.resolve()),
        disk_free=shutil.disk_usage(folder).free,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        cores=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        memory=usable_memory(),
        locks=extension_locks(extensions_folder(environment)),
        has_wandb_key=has_wandb_key(environment),
    )


def requirement_name(text: str) -> str:
    """Return the distribution's name in a requirement such as ``torch>=2.13``.

    Raises:
        LaunchError: the package that understands requirements is missing.
    """
    try:
        from packaging.requirements import Requirement
    except ImportError as error:
        raise LaunchError(
            "the package packaging is missing, so no version can be compared; run "
            "`pip install packaging`"
        ) from error
    return Requirement(text).name


def project_requirements() -> tuple[str, list[str]]:
    """Return the project's Python bound and requirements: of the checkout, else as installed."""
    path = Path(__file__).resolve().parent.parent / "pyproject.toml"
    if path.exists():
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        return project["requires-python"], list(project["dependencies"])
    with contextlib.suppress(metadata.PackageNotFoundError):
        about = metadata.metadata("ds-engine")
        needs = [text for text in metadata.requires("ds-engine") or [] if "extra ==" not in text]
        return about["Requires-Python"] or "", needs
    return "", []


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def probe_deepspeed(timeout: float, code: str = _PROBE) -> tuple[dict[str, Any], str | None]:
    """Ask torch and DeepSpeed, in a process of their own, what they find.

    Returns:
        Their answer and None, or an empty one and the reason.
    """
    source = f"NAMES = {OPS!r}\nMARK = {_MARK!r}\n{code}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", source],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {}, f"no answer within {timeout:g} s"
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            answer: dict[str, Any] = json.loads(line.removeprefix(_MARK))
            return answer, None
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return {}, lines[-1].strip() if lines else f"exit code {done.returncode}"


def extensions_folder(environment: Mapping[str, str]) -> Path:
    """Return where torch builds its extensions (DeepSpeed's ops are such)."""
    if folder := environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder)
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")) / ".cache"
    return Path(cache).expanduser() / "torch_extensions"


def extension_locks(folder: Path) -> list[Lock]:
    """Return the locks below ``folder``; torch keeps a lock open while it holds it."""
    paths = sorted(path for path in (*folder.glob("*/lock"), *folder.glob("*/*/lock")))
    if not paths:
        return []
    opened = _open_files()
    return [
        Lock(str(path), time.time() - path.stat().st_mtime, str(path.resolve()) in opened)
        for path in paths
        if path.exists()
    ]


def _open_files() -> set[str]:
    """Return what the processes that we may look at have open; on Linux only."""
    opened = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process is gone, or not ours
            opened.add(os.readlink(link))
    return opened


def shm_leftovers(folder: Path) -> list[int]:
    """Return the size of each buffer of DeepSpeed's CPU collectives that no process has mapped."""
    buffers = {str(path): path for path in folder.glob(f"{_SHM_PREFIX}*")}
    if not buffers:
        return []
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            mapped |= {line.split()[-1] for line in maps.read_text().splitlines() if line}
    sizes = []
    for name, path in buffers.items():
        if name not in mapped:
            with contextlib.suppress(OSError):
                sizes.append(path.stat().st_size)
    return sizes


def usable_memory() -> int:
    """Return the machine's memory or the limit of this process's control group, the smaller."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            memory = min(memory, int((Path("/sys/fs/cgroup") / name).read_text()))
    return memory


def has_wandb_key(environment: Mapping[str, str]) -> bool:
    """Tell whether wandb would find an API key without asking: in the environment or in netrc."""
    if environment.get("WANDB_API_KEY"):
        return True
    host = environment.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    named = environment.get("NETRC")
    home = Path(environment.get("HOME", "~")).expanduser()
    for path in [Path(named)] if named else [home / ".netrc", home / "_netrc"]:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            words = path.read_text(encoding="utf-8").split()
            if ("machine", host) in pairwise(words):
                return True
    return False
