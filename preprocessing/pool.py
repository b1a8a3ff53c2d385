"""Worker processes that keep order and whose death is an error with a name, never a silence."""

import functools
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess
from typing import TypeVar

from ds_engine.errors import DataError

Item = TypeVar("Item")
Result = TypeVar("Result")

_AHEAD = 3  # batches in flight for each worker: enough to keep it busy, few enough for memory


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    *,
    workers: int,
    describe: Callable[[Item], str],
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` of each item, in order, computed by ``workers`` processes.

    Args:
        function: a module-level function, and whatever it needs, that can be pickled.
        items: read only a few ahead of the results.
        workers: processes; 1 computes in this one.
        describe: names an item in an error.

    Raises:
        DataError: a worker raised, or ended without a result (killed, out of memory): which
            process, how it ended and what it may have been working on.
    """
    if workers == 1:
        for item in items:
            yield _guarded(functools.partial(function, item), item, describe)
        return
    # Not fork: a fork copies locks that other threads (of the tokenizers library) may hold.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(workers, mp_context=context, initializer=_prepare_worker)
    processes: dict[int, BaseProcess] = {}
    others = {process.pid for process in multiprocessing.active_children()}
    pending: deque[tuple[Item, Future[Result]]] = deque()
    remaining = iter(items)
    try:
        while True:
            for item in remaining:
                pending.append((item, executor.submit(function, item)))
                if len(processes) < workers:
                    _note_processes(processes, others)
                if len(pending) >= workers * _AHEAD:
                    break
            if not pending:
                return
            item, future = pending[0]
            result = _guarded(future.result, item, describe)
            pending.popleft()
            yield result
    except BrokenProcessPool as error:
        executor.shutdown(wait=True)
        batches = "no batch"
        if pending:
            first, last = describe(pending[0][0]), describe(pending[-1][0])
            batches = f"one of the batches that begin at {first} to {last}"
        raise DataError(
            f"a worker process ended without a result: {_ends(processes)}; it was working on "
            f"{batches}. Nothing was written. Out of memory looks like this: use fewer --workers"
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


def _guarded(compute: Callable[[], Result], item: Item, describe: Callable[[Item], str]) -> Result:
    try:
        return compute()
    except (DataError, BrokenProcessPool):
        raise
    except Exception as error:
        raise DataError(f"{describe(item)}: {type(error).__name__}: {error}") from error


def _note_processes(processes: dict[int, BaseProcess], others: set[int | None]) -> None:
    """Keep a handle of each worker: the executor forgets them when it breaks."""
    for process in multiprocessing.active_children():
        if process.pid is not None and process.pid not in others:
            processes[process.pid] = process


def _ends(processes: dict[int, BaseProcess]) -> str:
    """Say how workers ended; SIGTERM tells nothing, as the executor ends the survivors with it."""
    codes = {pid: process.exitcode for pid, process in processes.items()}
    own = {pid: code for pid, code in codes.items() if code not in (0, None, -signal.SIGTERM)}
    said = []
    for pid, code in (own or codes).items():
        if code is not None and code < 0:
            said.append(f"process {pid} was killed by {signal.Signals(-code).name}")
        else:
            said.append(f"process {pid} left with exit code {code}")
    return ", ".join(said) or "it died at its start"


def _prepare_worker() -> None:
    """Leave Ctrl-C to the parent, and do not outlive it: an idle worker would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
