"""Judges a machine before a job does: each check is a pure function of what was read from it.

A "problem" stops training, a "note" costs speed or a feature, and both say what to do about it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from launch.doctor_probes import Lock, Machine

Status = Literal["ok", "note", "problem"]

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
# A build of an op takes up to five minutes on a busy machine; an older lock belongs to a dead one.
_LOCK_SECONDS: Final = 600.0

_OPTIONAL: Final = {
    "flash-attn": ("attention falls back to torch's own kernels", '-e ".[flash]"'),
    "sentencepiece": ("no sentencepiece tokenizers", '-e ".[sentencepiece]"'),
    "ray": ("preprocessing is spread over nodes by Slurm or MPI only", '-e ".[cluster]"'),
    "fastapi": ("no generation server", '-e ".[serve]"'),
    "uvicorn": ("no generation server", '-e ".[serve]"'),
    "mpi4py": ("ranks under mpirun are found by its environment only", "mpi4py"),
}
_OP_USE: Final = {
    "cpu_adam": "ZeRO offload falls back to torch's Adam",
    "fused_adam": "torch's fused AdamW is used",
    "async_io": "no offload to NVMe",
}
_TOOL_USE: Final = {
    "gcc": "DeepSpeed ops cannot be compiled",
    "g++": "DeepSpeed ops cannot be compiled",
    "ninja": "DeepSpeed ops cannot be compiled",
    "nvcc": "CUDA ops of DeepSpeed cannot be compiled",
    "pdsh": "the deepspeed launcher needs another way to reach nodes",
    "ssh": "nodes of a hostfile cannot be reached",
    "sbatch": "no Slurm jobs from here",
    "srun": "no Slurm jobs from here",
    "mpirun": "no MPI launch",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: what was looked at.
        status: "ok", "note" (something is slower or missing) or "problem" (training cannot work).
        text: what was found.
        fix: what to do; empty for "ok".
    """

    name: str
    status: Status
    text: str
    fix: str = ""


def examine(machine: Machine) -> list[Finding]:
    """Return all findings, in the order in which they are shown."""
    return [
        check_python(machine.python, machine.requires_python),
        check_packages(machine.packages_error),
        *check_requirements(machine.requirements, machine.installed),
        *check_accelerator(machine.probe, machine.probe_error),
        *check_ops(machine.probe),
        *check_tools(machine.tools, cuda=bool(machine.probe.get("devices"))),
        *check_optional(machine.installed),
        check_shared_memory(machine.shm_free, machine.shm_total),
        check_leftovers(machine.shm_leftovers),
        check_locks(machine.locks),
        check_disk(machine.disk_path, machine.disk_free),
        check_open_files(*machine.open_files),
        check_processor(machine.cores, machine.memory),
        check_wandb(has_key=machine.has_wandb_key),
    ]


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 1 when something stops training, else 0."""
    return int(any(finding.status == "problem" for finding in findings))


def check_python(version: str, bound: str) -> Finding:
    """Compare the interpreter with the project's bound."""
    from packaging.specifiers import SpecifierSet

    if SpecifierSet(bound).contains(version, prereleases=True):
        return Finding("python", "ok", version)
    return Finding(
        "python", "problem", f"{version}, but {bound} is needed", "use a newer interpreter"
    )


def check_packages(error: str | None) -> Finding:
    """Report whether the four packages are those of one checkout."""
    if error is None:
        return Finding(
            "packages", "ok", "ds_engine, models, preprocessing and launch are one checkout"
        )
    text, _, fix = error.rpartition("; ")
    return Finding("packages", "problem", text or error, fix)


def check_requirements(
    requirements: Sequence[str], installed: Mapping[str, str | None]
) -> Iterator[Finding]:
    """Compare each installed distribution with what the project needs."""
    from packaging.requirements import Requirement

    for text in requirements:
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate():
            continue
        version = installed.get(needed.name)
        fix = f'pip install "{text}"'
        if version is None:
            yield Finding(needed.name, "problem", "not installed", fix)
        elif not needed.specifier.contains(version, prereleases=True):
            yield Finding(
                needed.name, "problem", f"{version}, but {needed.specifier} is needed", fix
            )
        else:
            yield Finding(needed.name, "ok", version)


def check_accelerator(probe: Mapping[str, Any], error: str | None) -> Iterator[Finding]:
    """Report the devices and precisions that torch and DeepSpeed see."""
    if error is not None:
        yield Finding(
            "accelerator",
            "problem",
            f"torch and deepspeed do not import: {error}",
            'run `python -c "import torch, deepspeed"` and repair what it names',
        )
        return
    devices = probe["devices"]
    if devices:
        names = sorted({f"{device['name']} ({device['gib']:.0f} GiB)" for device in devices})
        text = f"{len(devices)} x {', '.join(names)}"
    else:
        text = "no GPU"
    kinds = [kind for kind in ("bf16", "fp16") if probe[kind]]
    text = (
        f"{probe['accelerator']}: {text}; precisions fp32{''.join(f', {kind}' for kind in kinds)}"
    )
    if devices and probe["accelerator"] == "cpu":
        yield Finding(
            "accelerator",
            "problem",
            f"{text}, but DeepSpeed would train on the CPU",
            "unset DS_ACCELERATOR, or set it to cuda",
        )
    elif not devices and probe["accelerator"] == "cpu":
        fix = "for GPUs install the driver" if probe["cuda"] else "for GPUs install torch with CUDA"
        yield Finding("accelerator", "note", text, fix)
    else:
        yield Finding("accelerator", "ok", text)


def check_ops(probe: Mapping[str, Any]) -> Iterator[Finding]:
    """Report which DeepSpeed ops are built, can be built, or neither."""
    for name, state in probe.get("ops", {}).items():
        if state["installed"]:
            yield Finding(f"op {name}", "ok", "installed")
        elif state["compatible"]:
            yield Finding(f"op {name}", "ok", "compiled at first use (minutes)")
        else:
            yield Finding(
                f"op {name}",
                "note",
                f"cannot be built here: {_OP_USE.get(name, 'not available')}",
                "run `ds_report` to see what it lacks",
            )


def check_tools(tools: Mapping[str, str | None], *, cuda: bool) -> Iterator[Finding]:
    """Report compilers and launchers; none of them is needed to train on one machine."""
    for name, path in tools.items():
        if path is not None:
            yield Finding(name, "ok", path)
        elif name != "nvcc" or cuda:
            yield Finding(
                name, "note", f"not found: {_TOOL_USE[name]}", f"install {name} if you need it"
            )


def check_optional(installed: Mapping[str, str | None]) -> Iterator[Finding]:
    """Report optional distributions and what is lost without them."""
    for name, (loss, package) in _OPTIONAL.items():
        version = installed.get(name)
        if version is not None:
            yield Finding(name, "ok", version)
        else:
            yield Finding(name, "note", f"not installed: {loss}", f"pip install {package}")


def check_shared_memory(free: int | None, total: int) -> Finding:
    """NCCL and gloo move data between ranks of one machine through /dev/shm."""
    name = "/dev/shm"
    fix = "give the container more (docker run --shm-size=8g, or --ipc=host), or delete files there"
    if free is None:
        return Finding(name, "note", "does not exist", "mount a tmpfs there")
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if free < 64 * _MIB:
        return Finding(name, "problem", f"{text}; ranks of one machine need 64 MiB", fix)
    if free < _GIB:
        return Finding(name, "note", f"{text}; many ranks may need more", fix)
    return Finding(name, "ok", text)


def check_leftovers(sizes: Sequence[int]) -> Finding:
    """DeepSpeed's CPU collectives leave a buffer for each rank and port behind, for ever."""
    name = "DeepSpeed buffers"
    if not sizes:
        return Finding(name, "ok", "none left in /dev/shm")
    text = f"{len(sizes)} left in /dev/shm hold {sum(sizes) / _MIB:.0f} MiB of memory"
    return Finding(
        name, "note", text, "while nobody trains here: rm /dev/shm/deepspeed_allreduce_buffer*"
    )


def check_locks(locks: Sequence[Lock]) -> Finding:
    """A build that was killed leaves its lock, and every later process waits for it silently."""
    name = "extension locks"
    free = [lock for lock in locks if not lock.held]
    stale = [lock for lock in free if lock.age > _LOCK_SECONDS]
    if stale:
        return Finding(
            name,
            "problem",
            f"{len(stale)} left by a build that died; whoever uses its op waits for ever",
            "rm " + " ".join(lock.path for lock in stale),
        )
    if free:
        return Finding(
            name,
            "note",
            f"{len(free)} held by no process of this machine, {free[0].age:.0f} s old",
            f"if no other machine is building, rm {' '.join(lock.path for lock in free)}",
        )
    if locks:
        return Finding(name, "ok", f"{len(locks)} builds in progress")
    return Finding(name, "ok", "none")


def check_disk(path: str, free: int) -> Finding:
    """Checkpoints need room: 16 bytes a parameter with Adam in mixed precision."""
    text = f"{free / _GIB:.1f} GiB free at {path}"
    fix = "free some, or set checkpoint.directory to another disk"
    if free < _GIB:
        return Finding("disk", "problem", f"{text}: no room for a checkpoint", fix)
    if free < 20 * _GIB:
        parameters = free / 16e9
        return Finding(
            "disk", "note", f"{text}: one checkpoint of {parameters:.1f}B parameters", fix
        )
    return Finding("disk", "ok", text)


def check_open_files(soft: int, hard: int) -> Finding:
    """Each rank opens its sources, its peers' sockets and its libraries."""
    name = "open files"
    if soft < 0 or soft >= 4096:
        return Finding(name, "ok", "unlimited" if soft < 0 else f"{soft} a process")
    goal = 65536 if hard < 0 else min(hard, 65536)
    status: Status = "problem" if soft < 256 else "note"
    return Finding(name, status, f"{soft} a process, which many ranks exceed", f"ulimit -n {goal}")


def check_processor(cores: int, memory: int) -> Finding:
    """Report the cores and the memory that this process may use."""
    text = f"{cores} cores, {memory / _GIB:.1f} GiB of memory"
    if memory < 2 * _GIB:
        return Finding(
            "processor", "problem", f"{text}; a rank needs 1 to 2 GiB", "use a larger machine"
        )
    return Finding("processor", "ok", text)


def check_wandb(*, has_key: bool) -> Finding:
    """Report whether wandb can send."""
    if has_key:
        return Finding("wandb key", "ok", "configured")
    return Finding("wandb key", "note", "none: runs stay offline", "wandb login")
