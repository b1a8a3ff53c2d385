"""Real many-process gloo worlds for tests, from one warm fork server.

``run_world(n, body, *args)`` gives n fresh ranks: nothing leaks between tests. ``warm_world(n)``
keeps n ranks for the session: milliseconds a call, for collectives and property tests. A body is a
module-level function ``body(rank, *args)``; its return values come back as a list by rank. The
rendezvous is a file, so parallel test runs cannot collide on ports. A failing rank ends its peers
and its traceback becomes the test's error; a rank that hangs is named.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "deepspeed",
    "deepspeed.pipe",
    "ds_engine.training.engine",
    "ds_engine.verify",
    "models.gpt",
    "tests.preload",
]
TIMEOUT = 120.0
GRACE = 3.0  # seconds that the peers of a failed rank get before they are ended


class RankError(AssertionError):
    """One or more ranks failed; the message holds their tracebacks."""


@functools.cache
def _server() -> Any:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def _context(device: str) -> Any:
    """How ranks start: forked from a warm server, or fresh where CUDA must not be inherited."""
    if device == "cpu":
        return _server()
    return mp.get_context("spawn")


def _send(pipe: Connection, value: Any) -> None:
    # Plain pickle: multiprocessing's own would share tensors with a process that is about to end.
    pipe.send_bytes(pickle.dumps(value))


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _join(rank: int, size: int, store: str, device: str) -> None:
    os.environ["DS_ACCELERATOR"] = device
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )


def _serve(rank: int, size: int, store: str, pipe: Connection, *, once: bool, device: str) -> None:
    faulthandler.enable()
    try:
        _join(rank, size, store, device)
        while (job := _receive(pipe)) is not None:
            body, args = job
            try:
                answer = ("ok", body(rank, *args))
            except BaseException:
                answer = ("error", traceback.format_exc())
            _send(pipe, answer)
            if once:
                break
    except BaseException:
        with contextlib.suppress(OSError):
            _send(pipe, ("error", traceback.format_exc()))
    os._exit(0)  # gloo's teardown after a failed collective can hang


class World:
    """``size`` live ranks that run one body after another."""

    def __init__(self, size: int, *, once: bool = False, device: str = "cpu") -> None:
        context = _context(device)
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="world_")
        store = str(Path(self._folder.name) / "store")
        self._processes, self._pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, size, store, theirs),
                kwargs={"once": once, "device": device},
                daemon=True,
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, body: Callable[..., Any], *args: Any, timeout: float = TIMEOUT) -> list[Any]:
        """Run ``body(rank, *args)`` on every rank.

        Raises:
            RankError: with the failed ranks' tracebacks and the names of those that hang.
        """
        for pipe in self._pipes:
            _send(pipe, (body, args))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0))
            if not ready:
                errors |= dict.fromkeys(waiting.values(), "no answer (waiting in a collective?)\n")
                break
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    kind, value = _receive(pipe)
                except EOFError:
                    kind, value = "error", "the process died\n"
                if kind == "ok":
                    results[rank] = value
                else:
                    errors[rank] = value
                    deadline = min(deadline, time.monotonic() + GRACE)
        if errors:
            self.close()
            raise RankError(
                "\n".join(f"rank {r} of {self.size}:\n{errors[r]}" for r in sorted(errors))
            )
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the ranks."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def run_world(
    size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT,
    device: str = "cpu",
) -> list[Any]:
    """Run ``body(rank, *args)`` on ``size`` fresh ranks; what each returned."""
    world = World(size, once=True, device=device)
    try:
        return world.run(body, *args, timeout=timeout)
    finally:
        world.close()
