"""The processes that do the lab's work: some trials or warm-ups at a time, each in one of them.

They leave Ctrl-C to the process that started them and end when it does. A trial and a warm-up are one process's at a
time, also when two runs share a cache: the second waits, and finds the work done.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftis_node.errors import FtisError, UserError
from ftis_node.host.loading import loading
from ftis_node.text import say

if TYPE_CHECKING:
    from ftis_node.lab.spec import TrialSpec
    from ftis_node.lab.starts import Start

POLL_SECONDS = 0.3
INTERRUPTED = "Interrupted; what is under way is saved. Once more: end at once."


class Crew:
    """A pool of processes. Use as a context, in the main thread: it takes over Ctrl-C until the context ends.

    Leaving the context asks what is under way to save and stop, and waits for it. A second Ctrl-C kills all and ends
    this process with 130.
    """

    def __init__(self, jobs: int, threads: int) -> None:
        """
        Args:
            jobs: processes.
            threads: of each, for arithmetic; results may hang on their number in the last bits. OMP_NUM_THREADS in the
                environment counts for more.
        """
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        context = multiprocessing.get_context("spawn")
        self._told: Any = context.Queue()
        self._stop = context.Event()
        self._pool = ProcessPoolExecutor(
            jobs,
            mp_context=context,
            initializer=_begin,
            initargs=(self._told, self._stop, int(os.environ["OMP_NUM_THREADS"])),
        )
        self._interrupts = 0

    def __enter__(self) -> Crew:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        """Asks what is under way to save and stop, waits for it, and gives Ctrl-C back."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, *_: object) -> None:
        """On Ctrl-C: the first is noted, and `finish` heeds it; the second kills all processes and ends this one."""
        self._interrupts += 1
        if self._interrupts > 1:  # the first one is being heeded; whoever asks again does not want to wait
            for child in multiprocessing.active_children():
                child.kill()
            os._exit(130)

    def warm_up(self, start: Start, models: Path) -> Future[None]:
        """Begins a warm-up, whose folder will be under `models`. Give the future to `finish`."""
        return self._pool.submit(_warm_up, start, models)

    def run(self, spec: TrialSpec, directory: Path, models: Path, processes: bool) -> Future[None]:
        """Begins a trial, or goes on with it; see `trial.Trial`. One that is finished ends at once. Give the future to
        `finish`."""
        return self._pool.submit(_run_trial, spec, directory, models, processes)

    def finish(
        self,
        jobs: Mapping[Future[None], str],
        steps: Mapping[str, int],
        progressed: Callable[[str, int], None],
    ) -> None:
        """Waits for all jobs. The first that fails ends the waiting; the others stop as the context ends.

        Args:
            jobs: each with its name: the trial's id, or the warm-up's `Start.name`.
            steps: how many a job of this name takes.
            progressed: is told how many a job of this name has taken so far; a job that has ended has taken all.

        Raises:
            KeyboardInterrupt: after Ctrl-C, when everything under way has been saved.
            UserError: a job failed.
        """
        waiting = set(jobs)
        while waiting:
            ready, waiting = concurrent.futures.wait(waiting, timeout=POLL_SECONDS)
            with contextlib.suppress(queue.Empty):
                while True:
                    progressed(*self._told.get_nowait())
            for job in ready:
                _check(job)
                name = jobs[job]
                progressed(name, steps[name])
            if self._interrupts:
                say(INTERRUPTED, error=True, flush=True)
                self._stop.set()
                for job in waiting:
                    job.cancel()
                concurrent.futures.wait(waiting)
                raise KeyboardInterrupt


def _check(job: Future[None]) -> None:
    """Raises what the job raised. Raises UserError if its process died."""
    try:
        job.result()
    except BrokenProcessPool as error:
        what = "A process of the lab ended by itself: killed, or out of memory."
        raise UserError(what, "The same command goes on; with fewer --jobs if memory was short.") from error


# --- in the processes -------------------------------------------------------------------------------------------------

_told: Any = None  # both are set by `_begin`; in the process that started the others they stay None
_stop: Any = None


def _begin(told: Any, stop: Any, threads: int) -> None:
    """What each process does first: it ignores Ctrl-C, watches its parent, and imports what every trial needs.

    Args:
        told: a queue to the parent, for (trial's id, steps so far). stop: an event that asks to save and stop.
    """
    global _told, _stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _told = told
    _stop = stop
    watching = threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True)
    watching.start()
    with loading():
        import torch
        import transformers.modeling_utils  # most of what a trial imports

    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()


def _end_with_parent(parent: int) -> None:
    """End this process within a second of its parent, in a thread: a killed parent can tell nobody."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Holds the lock file in this context, waiting for whoever has it, without a limit. It yields True; False, and
    holds nothing, if it was asked to stop meanwhile. The file stays, and the lock ends with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        while not _stop.is_set():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_SECONDS)
                continue
            yield True
            return
        yield False


def _warm_up(start: Start, models: Path) -> None:
    """A job of the pool. Raises UserError."""
    from ftis_node.lab.starts import make_start

    with _alone(models / f"{start.name}.lock") as mine, _for_a_person(models):
        if mine:
            make_start(start, models, stopping=_stop.is_set)


def _run_trial(spec: TrialSpec, directory: Path, models: Path, processes: bool) -> None:
    """A job of the pool. One that was interrupted ends like one that is done. Raises UserError."""
    from ftis_node.lab.trial import Interrupted, Trial, finished

    with _alone(directory / "lock") as mine, _for_a_person(directory), contextlib.suppress(Interrupted):
        if mine and not finished(directory):
            trial = Trial(
                spec,
                directory,
                models,
                processes=processes,
                stopping=_stop.is_set,
                progressed=lambda done: _told.put((spec.id, done)),
            )
            trial.run()


@contextlib.contextmanager
def _for_a_person(directory: Path) -> Iterator[None]:
    """Turn a failure inside into a UserError: of the disk, or of what works on `directory`. Raises UserError."""
    from safetensors import SafetensorError

    try:
        yield
    except UserError:
        raise
    except (OSError, SafetensorError) as error:
        what = f"{directory} cannot be written or read: {error}."
        raise UserError(what, "Make room; the same command goes on.") from error
    except FtisError as error:
        raise UserError(f"This failed: {error}", f"What there is of it so far is in {directory}.") from error
