"""The daemon: wires the rooms together and owns the life cycle, from an empty home to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sqlite3
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftis_node.errors import FtisError, UsageError, UserError
from ftis_node.files import replace_text
from ftis_node.observe.api import Api
from ftis_node.observe.metrics import MetricsLog
from ftis_node.observe.provenance import versions
from ftis_node.report import peers_report, training_status
from ftis_node.run import RunFile, check_fit, dump_run_file, load_run_file, refuse_horizontal, run_for
from ftis_node.saving import Books, LearnedSizes, Saving, settled
from ftis_node.settings import Settings
from ftis_node.stepping import Progress, Stepper
from ftis_node.store.checkpoints import labelled
from ftis_node.store.home import Home
from ftis_node.store.packets import PacketStore
from ftis_node.swarm.addresses import parse_address
from ftis_node.swarm.admission import AdmissionContext, Rejection, admit
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.membership import Reachability, fetch_run
from ftis_node.swarm.p2pd import listening_of, somebody_else
from ftis_node.swarm.standing import Standing
from ftis_node.swarm.swarm import Swarm
from ftis_node.swarm.transport import Transport
from ftis_node.worker.client import Worker, WorkerDied, WorkerFault

logger = logging.getLogger(__name__)

# After a request to stop, the running step has so long to end, and then the last checkpoint and evaluation.
GRACE_SECONDS = 12.0
FINISH_SECONDS = 13.0
FAILURES_OF_NEWEST = 2  # in a row, before an older checkpoint is tried
DUPLICATE_SECONDS = 5.0
WORKER_FAILURES = 5  # in a row, without a step between them


_REACHED = {
    Reachability.DIRECT: ("ONLINE", ""),
    Reachability.RELAYED: ("RELAYED", "; others reach this node through relays"),
    Reachability.OUTBOUND_ONLY: ("OUTBOUND-ONLY", ", all over connections that this node opened: nobody can dial it"),
}


@dataclass(frozen=True)
class JoinOptions:
    """What `ftis-node join` was told, beside the settings."""

    home: Path
    task: str | None = None
    data: Path | None = None
    eval_data: Path | None = None
    peers: tuple[str, ...] = ()
    run: Path | None = None
    name: str = ""


class Node:
    """One daemon. `run` returns when it was stopped or has taken its steps."""

    def __init__(self, options: JoinOptions, settle: Callable[[str], Settings]) -> None:
        """
        Args:
            settle: the settings for a task; which task that is may only be known once a peer has sent its run.
        """
        self.options = options
        self.settings = settle(options.task or "arithmetic")
        self._settle = settle
        self.home = Home(options.home)
        self.state, self.reason = "LOADING", "The node is starting."
        self._stopping = asyncio.Event()
        self._exit_code = 0
        self._stack = contextlib.AsyncExitStack()
        self._facts: dict[str, Any] = {}
        self._run_file: RunFile | None = None
        self._swarm: Swarm | None = None
        self._stepper: Stepper | None = None
        self._addresses: list[str] = []
        self._worker = Worker()
        self._restarts = self._failures = 0
        self._started = time.time()

    async def run(self) -> int:
        """Starts everything, trains until stopped, and ends everything in the opposite order.

        Returns the exit code: 0, or 130 after Ctrl-C.

        Raises:
            UserError: something that a person can mend keeps the node from starting or going on.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        loop.add_signal_handler(signal.SIGINT, self.stop, 130)
        try:
            async with self._stack:
                if await self._start_unless_stopped():
                    await self._train()
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"The home {self.home.path} cannot be written or read: {error}.",
                "Make room on its disk and start the same command again; it goes on from the last checkpoint.",
            ) from error
        return self._exit_code

    def stop(self, exit_code: int = 0) -> None:
        """Asks the node to finish its step, save and end; a second call ends it at once."""
        if self._stopping.is_set():
            logger.warning("Second request to stop: ending at once; the last checkpoint stands.")
            raise SystemExit(130)
        self._exit_code = exit_code
        self._set_state("STOPPING", "The node was asked to stop.")
        self._stopping.set()

    # --- starting -------------------------------------------------------------------------------------------------

    async def _start_unless_stopped(self) -> bool:
        """Starts; a request to stop meanwhile cuts it short, for loading a large model takes its time."""
        starting = asyncio.create_task(self._start())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return False
        starting.result()
        return not self._stopping.is_set()

    async def _start(self) -> None:
        self.home.open()
        self._stack.callback(self.home.close)
        bootstraps = [parse_address(text)[0] for text in self.options.peers]
        identity = Identity.load_or_create(self.home.key)
        runtime = self.home.make_runtime()
        self._runtime = runtime
        listening = listening_of(self.settings, self.home.key, runtime)
        if bootstraps and await somebody_else(listening, identity.author, bootstraps, DUPLICATE_SECONDS):
            raise UserError(
                f"Another node with the key of {self.home.path} is running somewhere: {identity.peer_id}.",
                "Stop that one first, or give this one a --home of its own.",
            )
        transport = await Transport.start(listening, self._note_p2pd)
        self._stack.push_async_callback(transport.close)
        self._addresses = await transport.addresses()
        api = Api({"/status": self.status, "/peers": self.peers}, {"/stop": self._api_stop})
        await api.start(runtime / "api.sock")
        self._stack.push_async_callback(api.close)
        self._run_file = await self._find_run(transport, bootstraps)
        self.settings = self._settle(self._task())
        self._learned = LearnedSizes(self.home.plan, self.settings.model)
        await self._start_worker()
        if self._run_file is None:
            self._run_file = RunFile(run=run_for(self._facts))
        run = self._run_file.run
        refuse_horizontal(run)
        check_fit(run, self._facts, self.settings.model)
        replace_text(self.home.run_file, dump_run_file(self._run_file))
        self._note_children()
        opened = await self._worker.call("open", run=run.model_dump(mode="json"))
        self._store = store = PacketStore(self.home.store, run.id, self.settings.packet_quota_mb << 20)
        self._stack.callback(store.close)
        store.skip_round()
        self._metrics = MetricsLog(self.home.metrics)
        self._stack.callback(self._metrics.close)
        model = labelled(self.settings.model, self._facts["kind"])
        self._saving = Saving(self.home.checkpoints, model, self._facts["plan"]["optimiser"], self._metrics)
        self._context = context = AdmissionContext(run=run, prompt_digests=opened["prompt_digests"])
        standing = Standing(time.monotonic, self.settings.defences)
        self._books = Books(self.home.standing, standing)
        self._stepper = Stepper(
            context=context,
            standing=standing,
            own_only=opened["own_only"],
            identity=identity,
            settings=self.settings,
            store=store,
            worker=self._worker,
        )
        self._swarm = self._stepper.swarm = Swarm(
            transport=transport,
            identity=identity,
            run_file=self._run_file,
            context=context,
            store=store,
            standing=standing,
            exchange_peers=self.settings.exchange_peers,
            max_age=self.settings.max_age,
            want=self._stepper.want,
            on_groups=self._stepper.on_groups,
            peer_cache=self.home.path / "peers.json",
            upload_bytes=self.settings.upload_mbit * 1e6 / 8,
        )
        self._go_on_from(await self._saving.restore(self._worker))
        self._set_state("JOINING", "Looking for peers.")
        hints = self._run_file.hints.bootstraps
        await self._swarm.start([*bootstraps, *(hints if self.options.run is not None else ())], hints)
        self._stack.push_async_callback(self._swarm.close)
        self._check_peers(bootstraps)
        self._refill_pool()
        logger.info("Run %s; this node is %s", run.id.hex(), " ".join(self._addresses))

    def _note_p2pd(self, pid: int) -> None:
        self._p2pd = pid
        self._note_children()

    def _note_children(self) -> None:
        """For the reaper of the next start, should this process be killed."""
        children = (self._p2pd, self._worker.pid)
        self.home.record_runtime(self._runtime, tuple(pid for pid in children if pid is not None))

    async def _find_run(self, transport: Transport, bootstraps: Sequence[str]) -> RunFile | None:
        """The run of a previous start, of --run, or of a peer; None if this node is to start one."""
        found = known_run(self.home, self.options.run)
        if found is None and bootstraps:
            self.reason = "Asking the peers for their run."
            found = await fetch_run(transport, bootstraps, self.settings.patience)
            logger.info("The peers' run is %s:\n%s", found.run.id.hex(), dump_run_file(found))
        return found

    def _check_peers(self, bootstraps: Sequence[str]) -> None:
        """Peers that all belong to another run than the home's are not what the person wanted."""
        assert self._swarm is not None and self._run_file is not None
        refused = self._swarm.membership.refused
        if bootstraps and self.options.run is None and all(parse_address(text)[1] in refused for text in bootstraps):
            raise UsageError(
                f"The --peers are all in another run than the home {self.home.path}, which belongs to run "
                f"{self._run_file.run.id.hex()}.",
                "Name a fresh --home to join their run, or leave out --peers.",
            )

    async def _start_worker(self) -> None:
        """Spawns the compute process and loads task and model in it."""
        self.reason = f"Loading {self.settings.model}."
        logger.info(self.reason)
        await self._worker.start()
        self._stack.push_async_callback(self._worker.stop)
        self._facts = await self._worker.call(
            "load",
            settings=self.settings.model_dump(mode="json"),
            task=self._task(),
            **self._data(),
            caps=self._caps(),
            remembered=self._learned.sizes | settled(self.home.checkpoints, self.settings.model),
        )
        plan = self._facts["plan"]
        for reason in plan["reasons"]:
            (logger.info if plan["fits"] else logger.warning)("%s", reason)

    def _data(self) -> dict[str, str | None]:
        """The task's files, where they were named."""
        files = {"data": self.options.data, "eval_data": self.options.eval_data}
        return {name: str(path.resolve()) if path else None for name, path in files.items()}

    def _caps(self) -> dict[str, int]:
        """What the run says of sizes, if it is known yet."""
        run = self._run_file.run if self._run_file is not None else None
        return {name: getattr(run, name) for name in ("prompt_tokens", "completion_tokens", "group")} if run else {}

    def _task(self) -> str:
        if self.options.task is not None:
            return self.options.task
        return self._run_file.run.task if self._run_file is not None else "arithmetic"

    def _go_on_from(self, restored: Progress | None) -> None:
        """Takes up a checkpoint's progress, and writes down all that `lab replay` must know of this start."""
        assert self._stepper is not None and self._run_file is not None
        self._stepper.progress = restored or self._stepper.progress
        self._metrics.write(
            "started",
            step=self._stepper.progress.step,
            fresh=restored is None,  # with the model's own weights
            directory=str(Path.cwd()),  # which relative paths in the settings are relative to
            task=self._task(),
            **self._data(),
            run=self._run_file.run.id.hex(),
            kind=self._facts["kind"],
            settings=self._facts["settings"],
            plan=self._facts["plan"],
            device=self._facts["device"],
            threads=self._facts["threads"],
            versions=versions(),
        )

    def _refill_pool(self) -> None:
        """Groups that were admitted before a restart and neither scored nor trained on are scored again."""
        assert self._stepper is not None and self._swarm is not None
        for author, body, held in self._store.waiting(self.settings.max_age):
            verdict = admit(self._context, author, body)
            if not isinstance(verdict, Rejection):
                self._stepper.score_later(verdict, time.monotonic() - held)

    # --- training -------------------------------------------------------------------------------------------------

    async def _train(self) -> None:
        while not self._stopping.is_set() and not self._done():
            self._look_around()
            try:
                await self._unless_stopped(self._go_on())
            except (WorkerDied, WorkerFault) as fault:
                await self._unless_stopped(self._revive_worker(fault))
        await self._finish()
        self._books.write()

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Does the work; after a request to stop, what is not done within the grace is given up."""
        task, stopping = asyncio.create_task(work), asyncio.create_task(self._stopping.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not task.done():
            await asyncio.wait({task}, timeout=GRACE_SECONDS)
        if task.done():
            return task.result()
        logger.warning("The compute process is busy for longer than %.0f s; its work is given up.", GRACE_SECONDS)
        task.cancel()
        await asyncio.wait({task})
        await self._worker.stop()

    async def _go_on(self) -> None:
        """The first evaluation, or the next step."""
        assert self._stepper is not None
        if self._stepper.progress.pass_at_1 is None:
            await self._evaluate()
            await self._saving.checkpoint(self._worker, self._stepper.progress)
            await self._wait_for_peers()
        elif await self._stepper.step(self._stopping) is not None:
            await self._after_step()

    def _done(self) -> bool:
        assert self._stepper is not None
        return self.settings.steps is not None and self._stepper.progress.step >= self.settings.steps

    async def _wait_for_peers(self) -> None:
        """With `min_peers`, does not take the first steps without them (for swarms that are started all at once)."""
        assert self._swarm is not None
        while len(self._swarm.membership.view) < self.settings.min_peers and not self._stopping.is_set():
            self._set_state("JOINING", f"Waiting for {self.settings.min_peers} peers before the first step.")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), 0.2)

    async def _after_step(self) -> None:
        assert self._stepper is not None and self._swarm is not None
        progress, last = self._stepper.progress, self._stepper.last
        self._failures = 0
        for warning in last["warnings"]:
            logger.warning("%s", warning)
        plan = self._facts["plan"]
        if last["memory_retries"]:
            self._learned.learn(plan["budget"], micro_batch_tokens=last["micro_batch_tokens"])
        if self._stepper.generation_batch < plan["generation_batch"]:
            self._learned.learn(plan["budget"], generation_batch=self._stepper.generation_batch)
        if progress.step % self.settings.eval_every == 0:
            await self._evaluate()
        self._metrics.write(
            "step",
            state=self.state,
            peers=len(self._swarm.membership.view),
            pool=len(self._stepper.pool),
            bytes_in=self._swarm.traffic.bytes_in,
            bytes_out=self._swarm.traffic.bytes_out,
            **last,
        )
        await self._saving.after_step(self._worker, progress, last)
        self._books.after_step()

    async def _evaluate(self) -> None:
        assert self._stepper is not None
        result = await self._worker.call("evaluate")
        progress = self._stepper.progress
        progress.pass_at_1, progress.pass_at_1_step = result["pass_at_1"], progress.step
        if progress.pass_at_1_before is None:
            progress.pass_at_1_before = result["pass_at_1"]
        self._metrics.write("evaluation", step=progress.step, since_start=time.time() - self._started, **result)
        logger.info("Step %d: pass@1 %.3f (format %.3f)", progress.step, result["pass_at_1"], result["formatted"])

    async def _finish(self) -> None:
        """The last checkpoint and evaluation; if the worker does not answer in time, what was saved before stands."""
        assert self._stepper is not None
        progress = self._stepper.progress
        try:
            async with asyncio.timeout(FINISH_SECONDS):
                if progress.pass_at_1 is not None and self._saving.saved_step != progress.step:
                    await self._saving.checkpoint(self._worker, progress)
                await self._saving.settle()
                if progress.pass_at_1_step != progress.step:
                    await self._evaluate()
        except (TimeoutError, WorkerDied, WorkerFault) as error:
            logger.warning(
                "The end was cut short (%s); step %d was saved last.", _reason(error), self._saving.saved_step
            )

    async def _revive_worker(self, fault: FtisError) -> None:
        """After a GPU fault or an out-of-memory kill: a new compute process, from the last checkpoint."""
        assert self._stepper is not None and self._run_file is not None
        self._set_state("LOADING", "The compute process failed and is being started again.")
        while True:
            self._restarts += 1
            self._failures += 1
            if self._failures > WORKER_FAILURES:
                raise UserError(
                    f"The compute process failed {self._failures} times in a row, at last with: {fault}",
                    f"Look into {self.home.log}; if it was out of memory, give a smaller micro_batch_tokens.",
                )
            logger.error("The compute process failed (%s); starting a new one.", fault)
            await self._saving.settle()
            await self._worker.stop()
            await asyncio.sleep(min(2.0**self._failures, 30.0))
            self._worker = Worker()
            try:
                await self._start_worker()
                await self._worker.call("open", run=self._run_file.run.model_dump(mode="json"))
                restored = await self._saving.restore(self._worker, older=self._failures > FAILURES_OF_NEWEST)
                self._go_on_from(restored)
            except (WorkerDied, WorkerFault) as error:
                fault = error
                continue
            self._stepper.worker = self._worker  # only now: an engine without a run could score nothing
            self._note_children()
            self._refill_pool()
            return

    # --- looking around -------------------------------------------------------------------------------------------

    def _look_around(self) -> None:
        """Sets the state by what is true now, and says so when it changes."""
        assert self._swarm is not None
        membership = self._swarm.membership
        if membership.view:
            state, how = _REACHED[membership.reachability()]
            self._set_state(state, f"Training with {len(membership.view)} peers{how}.")
        else:
            self._set_state("ALONE", "No peers: training alone, and looking for some.")

    def _set_state(self, state: str, reason: str) -> None:
        if state != self.state:
            logger.info("%s: %s", state, reason)
        self.state, self.reason = state, reason

    def _api_stop(self) -> dict[str, Any]:
        if not self._stopping.is_set():
            self.stop()
        return {"state": self.state}

    def status(self) -> dict[str, Any]:
        """What `ftis-node status --json` shows."""
        return {
            "name": self.options.name,
            "state": self.state,
            "reason": self.reason,
            "model": self.settings.model,
            "kind": self._facts.get("kind"),
            "plan": self._facts.get("plan"),
            "parameters": self._facts.get("parameters"),
            "addresses": self._swarm.membership.own_addresses if self._swarm is not None else self._addresses,
            "run": self._run_file.run.id.hex() if self._run_file is not None else None,
            "uptime": time.time() - self._started,
            "worker_restarts": self._restarts,
        } | (training_status(self._stepper, self._swarm) if self._stepper and self._swarm else {})

    def peers(self) -> dict[str, Any]:
        """What `ftis-node peers --json` shows."""
        if self._stepper is None or self._swarm is None:
            return {"peers": [], "left_out": []}
        return peers_report(self._stepper, self._swarm)


def known_run(home: Home, file: Path | None) -> RunFile | None:
    """The run of a file that was named, or of a previous start of the home; None if there is neither.

    Raises:
        UsageError: they are two different runs, or a file cannot be read.
    """
    known = load_run_file(home.run_file) if home.run_file.exists() else None
    given = load_run_file(file) if file is not None else None
    if known is not None and given is not None and known.run.id != given.run.id:
        raise UsageError(
            f"The home {home.path} belongs to run {known.run.id.hex()}, not to {given.run.id.hex()}.",
            "Name another --home for the other run.",
        )
    return given or known


def _reason(error: BaseException) -> str:
    return str(error) or "out of time"
