"""The daemon: it connects the rooms and owns the life cycle, from an empty home to a clean end."""

import asyncio
import contextlib
import functools
import logging
import math
import os
import sqlite3
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ftis_node.config.run import RunFile, check_fit, dump_run_file, in_short, run_for
from ftis_node.config.settings import LIVE_CONSTANTS, Settings, changed
from ftis_node.errors import FtisError, UserError
from ftis_node.host.clocks import boot_seconds
from ftis_node.host.descriptors import raise_limit, wait_for_room
from ftis_node.host.files import replace_text
from ftis_node.host.loops import end, forever, listen
from ftis_node.node import assembly
from ftis_node.node.assembly import Components
from ftis_node.node.commands import Commands, Schedule
from ftis_node.node.compute import ComputeProcess
from ftis_node.node.condition import Condition, Signs, State, condition
from ftis_node.node.dashboard import Dashboard
from ftis_node.node.evaluation_schedule import EvaluationSchedule
from ftis_node.node.options import JoinOptions
from ftis_node.node.run_source import remember_files, run_to_join, with_remembered
from ftis_node.node.status import StepLog, joined, part, peers_row, resident_bytes, self_report, signs, status_row
from ftis_node.observe.answers import Planned, Status
from ftis_node.observe.logs import set_level
from ftis_node.observe.notify import Notifier
from ftis_node.policy.names import public_name
from ftis_node.step_report import TakenStep
from ftis_node.swarm.addresses import parse_address
from ftis_node.swarm.chronicle import names_in
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.overview import Overview
from ftis_node.swarm.wire.libp2p import Libp2p
from ftis_node.worker.client import WorkerDied, WorkerFault
from ftis_node.worker.messages import Change, Open, plan_row

Result = TypeVar("Result")
logger = logging.getLogger(__name__)

# Time limits after a request to stop: for the running step, then for the last checkpoint and evaluation.
GRACE_SECONDS = 12.0
FINISH_SECONDS = 13.0
STALL_SECONDS = 7200.0  # that the compute process may owe an answer; then watchdogs act


class Node:
    """One daemon. `run` returns when it is stopped or has taken its steps."""

    def __init__(self, options: JoinOptions, settings_for: Callable[[str], Settings]) -> None:
        """settings_for: returns the settings for a task, which may be known only after a peer has sent its run."""
        self.options = options
        self.settings = self._first = settings_for(options.task or "arithmetic")
        self._settings_for = settings_for
        self.home = options.home  # may be open already
        # The condition while the node does not train; None: the condition follows from the signs.
        self._apart: Condition | None = Condition(State.LOADING, "The node is starting.")
        self._logged = (State.LOADING, "")  # the latest state and advice in the log
        self._exit_code = 0
        self._deadline = 0.0  # time by which a stopping node must have ended
        self._stack = contextlib.AsyncExitStack()
        self._run_file: RunFile | None = None
        self._transport: Libp2p | None = None
        self._components: Components | None = None
        self._overview: Overview | None = None
        self._addresses: list[str] = []
        self._compute = ComputeProcess(options, self.home, self._note_children)
        self._commands = Commands(Schedule(lambda: self.settings, self._compute.gpu_pids), paused=options.paused)
        self._runtime: Path | None = None  # the directory of sockets
        self._p2pd: int | None = None  # its process id
        self._page = Dashboard(self.home, self.row, self.peers, lambda: self._components, lambda: self._overview)
        self._sought = 0
        self._evaluations = EvaluationSchedule()
        self._changed: set[str] = set()  # constants of the objective that the compute process has not got yet
        self._started = boot_seconds()
        self._steps = StepLog()

    async def run(self) -> int:
        """Start everything, train until stopped, and end everything in the opposite order.

        Returns the exit code: 0, or 130 after Ctrl-C.

        Raises:
            UserError: an error that a person can fix prevents the start or the training.
        """
        raise_limit()
        listen(self.stop)
        try:
            async with self._stack:
                starting = await self._until_stopped(self._start())  # loading a large model takes long
                if starting.done():
                    components = starting.result()
                    if not self._commands.stopping.is_set():
                        await self._train(components)
                await end({starting})
        except (TimeoutError, ConnectionError):
            raise  # network errors; the home is fine
        except (OSError, sqlite3.Error) as error:
            raise self.home.failed(error) from error
        return self._exit_code

    # --- the owner's requests -------------------------------------------------------------------------------------

    def stop(self, exit_code: int = 0) -> None:
        """Finish the step, save and end within half a minute; a second call ends the node at once."""
        if self._commands.stopping.is_set():
            logger.warning("Second request to stop: ending at once; the last checkpoint remains.")
            raise SystemExit(130)
        self._exit_code = exit_code
        self._set_apart(State.STOPPING, "The node was asked to stop.")
        self._deadline = time.monotonic() + GRACE_SECONDS + FINISH_SECONDS
        self._commands.stop()

    def finish(self) -> None:
        """Stop without a time limit for the running step; before the first step, the same as `stop`."""
        if self._components is None:
            return self.stop()
        self._commands.finish()

    async def change(self, values: Mapping[str, str]) -> dict[str, object]:
        """Change settings of the running node, until it ends; return their new values.

        Raises:
            UsageError: one is unknown, cannot be changed while the node runs, or has no such value.
            UserError: the node is still starting.
        """
        components = self._components
        if components is None:
            raise UserError("The node is still starting.", "Try again when `ftis-node status` shows a step.")
        await self._page.show(changed(self.settings, values, self._first))  # which may fail: then nothing has changed
        self.settings = settings = changed(self.settings, values, self._first)
        self._changed |= values.keys() & set(LIVE_CONSTANTS)
        components.go_by(settings)
        set_level(settings.log_level)
        await self._commands.look()
        new = {name: settings.model_dump(mode="json")[name] for name in values}
        logger.info("Settings changed: %s", ", ".join(f"{name} = {value}" for name, value in new.items()))
        return new

    async def _take_over(self, components: Components) -> None:
        """Give changed constants to the compute process, and write them down for a replay."""
        new = {name: getattr(self.settings, name) for name in self._changed}
        self._changed = set()
        await self._compute.worker.call(Change(self.settings))
        components.metrics.write("changed", step=components.stepper.progress.step, settings=new)

    def _asked(self, what: Callable[[], None]) -> dict[str, object]:
        """Answer a request of the local API; a node that is stopping ignores it."""
        if not (commands := self._commands).stopping.is_set():
            what()
        return {"state": self.condition().state, "pausing": commands.pausing, "finishing": commands.finishing}

    # --- starting -------------------------------------------------------------------------------------------------

    async def _start(self) -> Components:
        self.home.open()
        self._stack.callback(self.home.close)
        self.home.mark()
        self.options = self._compute.options = with_remembered(self.options, self.home)
        self._runtime = runtime = self.home.make_runtime()
        await self._begin_to_tell(runtime)
        if self.settings.nice > os.getpriority(os.PRIO_PROCESS, 0):
            os.setpriority(os.PRIO_PROCESS, 0, self.settings.nice)  # its child processes inherit it
        bootstraps = [parse_address(text)[0] for text in self.options.bootstraps]
        identity = Identity.load_or_create(self.home.key)
        transport = await self._open_network(runtime, identity, bootstraps)
        patience = f"{self.settings.patience:g} s at most, or half an hour while one of them loads its model"
        asking = f"Asking the peers for their run, for {patience}."
        self._set_apart(State.LOADING, asking if bootstraps else "Looking for its run.")
        self._run_file = await run_to_join(self.home, self.options, transport, bootstraps, self.settings.patience)
        self.settings = self._first = self._settings_for(self.options.task_of(self._run_file))
        set_level(self.settings.log_level)
        self._stack.push_async_callback(self._compute.stop)
        self._set_apart(State.LOADING, f"Loading {self.settings.model}.")
        await self._compute.start(self.settings, self._run_file)
        if self._run_file is None:
            founder = ""
            if self.options.private:
                founder = identity.peer_id
            self._run_file = RunFile(run=run_for(self._compute.facts.shared(), founder=founder))
        run = self._run_file.run
        check_fit(run, self._compute.facts.shared(), self.settings.model, begun=self.home.run_file.exists())
        opened = await self._compute.worker.call(Open(run))
        replace_text(self.home.run_file, dump_run_file(self._run_file), durable=True)  # the run's rows fit the model
        remember_files(self.home, self.options, self.options.task_of(self._run_file), run.id)
        self._components = components = assembly.build_components(
            self.home,
            self.settings,
            self._run_file,
            self._compute.facts,
            opened,
            identity=identity,
            transport=transport,
            worker=self._compute.worker,
            flush=self._commands.flush,
            invitation=self.options.invitation,
            describe=lambda: self_report(self.status(), identity.author, run.id),
        )
        components.swarm.membership.own_addresses = self._addresses  # until it asks p2pd itself
        self._stack.callback(components.close)
        self._evaluations.recall(self.home.metrics)
        self._stack.callback(asyncio.create_task(forever(self._commands.keep_hours)).cancel)
        await self._go_on_from(components)
        self._set_apart(State.LOADING, "Greeting peers.")
        options = self.options
        hints = self._run_file.hints.bootstraps
        components.swarm.hear_on_lan(options.on_lan)
        given = [*options.given, *(hints if options.run is not None else ())]
        await components.swarm.start(options.peers, hints, given)
        self._stack.push_async_callback(components.swarm.close)
        if self.settings.lan:
            told = {"model": public_name(self.settings.model), "name": options.name}
            about = {}
            if components.swarm.reports.telling:
                about = told
            await assembly.open_lan(self._stack, components.swarm, run, identity.author, transport, about)
        if self.options.run is None:
            assembly.check_peers(components.swarm.membership, [*options.peers, *options.given], self.home.path, run)
        self._overview = Overview(components.swarm, run, identity.author, self.home.swarm_history)
        self._overview.begin(self._stack)
        assembly.refill_pool(components)
        logger.info("Run %s: %s", run.id.hex(), in_short(run))
        if components.swarm.roster is None or components.swarm.roster.may_invite:
            logger.info("Others join it with what `ftis-node invite%s` prints", self.home.flag)
        return components

    async def _open_network(self, runtime: Path, identity: Identity, bootstraps: Sequence[str]) -> Libp2p:
        self._transport = transport = await assembly.open_network(
            self.home, self.settings, runtime, identity, bootstraps, self.options.peers, self._note_p2pd
        )
        self._stack.push_async_callback(transport.close)
        replace_text(self.home.port, str(transport.port), durable=True)
        with contextlib.suppress(Exception):  # hivemind raises anything; a loaded machine answers later
            self._addresses = await transport.addresses()
        return transport

    async def _begin_to_tell(self, runtime: Path) -> None:
        """Start the local API, the page and the notifications to a supervisor; they report the state from now on."""
        commands = self._commands
        actions = {"stop": self.stop, "finish": self.finish, "pause": commands.pause, "resume": commands.resume}
        asked = {f"/{name}": functools.partial(self._asked, what) for name, what in actions.items()}
        api = await self._page.api(runtime / "api.sock", asked, {"/set": self.change})
        self._stack.push_async_callback(api.close)
        self._stack.push_async_callback(self._page.close)
        await self._page.show(self.settings)
        told = Notifier().start(lambda: "{0.state}: {0.reason}".format(self.condition()), self._stalled)
        self._stack.callback(told.cancel)

    def _stalled(self) -> float:
        """Seconds since the compute process's oldest unanswered request if that is too long, else 0."""
        owed = self._compute.worker.owing_seconds()
        if owed > STALL_SECONDS:
            return owed
        return 0.0

    def _note_p2pd(self, pid: int) -> None:
        self._p2pd = pid
        self._note_children()

    def _note_children(self) -> None:
        """Record the child processes so that the next start can end them if this process is killed."""
        children = (self._p2pd, self._compute.worker.pid)
        if self._runtime is not None:
            self.home.record_runtime(self._runtime, tuple(pid for pid in children if pid is not None))

    # --- training -------------------------------------------------------------------------------------------------

    async def _train(self, components: Components) -> None:
        self._apart = None
        while not self._commands.ending and components.stepper.progress.step < (self.settings.steps or math.inf):
            try:
                await (self._rest(components) if self._commands.hold else self._unless_stopped(self._go_on(components)))
            except (WorkerDied, WorkerFault) as fault:
                await self._recover(components, fault)
            except (OSError, sqlite3.Error) as error:
                await self._recover(components, await wait_for_room(error, self._commands.stopping))
        await self._finish(components)
        components.reputation_file.write()
        await self._compute.stop()  # before its files are closed: it may be scoring still

    async def _until_stopped(self, work: Coroutine[None, None, Result]) -> asyncio.Task[Result]:
        """Run the work; the returned task is not done if a request to stop came first."""
        task = asyncio.create_task(work)
        stopping = asyncio.create_task(self._commands.stopping.wait())
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        return task

    async def _unless_stopped(self, work: Coroutine[None, None, None]) -> None:
        """Run the work; after a request to stop, give it up at the end of the grace period."""
        task = await self._until_stopped(work)
        if not task.done():
            await asyncio.wait({task}, timeout=GRACE_SECONDS)
        if task.done():
            return task.result()
        logger.warning("The compute process is busy for longer than %.0f s; its work is given up.", GRACE_SECONDS)
        if await self._compute.interrupt(task):
            return  # unsaved training is saved afterwards
        task.cancel()
        await asyncio.wait({task})
        if self._components is not None:
            await self._components.saving.wait(self._deadline - time.monotonic())
        await self._compute.stop()

    async def _go_on(self, components: Components) -> None:
        """Take the first evaluation, or the next step."""
        self._note_condition()
        if self._changed:
            await self._take_over(components)
        if components.stepper.progress.pass_at_1 is None:
            await self._evaluate(components)
            await components.saving.checkpoint(self._compute.worker, components.stepper.progress)
            await self._wait_for_peers(components)
        elif (last := await components.stepper.step(self._commands.stopping)) is not None:
            await self._after_step(components, last)

    async def _wait_for_peers(self, components: Components) -> None:
        """Wait for `min_peers` peers before the first step (useful if all nodes of a swarm start at once)."""
        self._sought = self.settings.min_peers
        view = components.swarm.membership.active_view
        while len(view) < self._sought and not self._commands.flush.is_set():
            self._note_condition()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._commands.flush.wait(), 0.2)
        self._sought = 0

    async def _after_step(self, components: Components, last: TakenStep) -> None:
        progress = components.stepper.progress
        for warning in last.report.warnings:
            logger.info("%s", warning)
        self._compute.stepped(last, components.stepper.generation_batch)
        components.metrics.write(
            "step",
            state=self.condition().state,
            peers=len(components.swarm.membership.active_view),
            pool=len(components.stepper.pool),
            bytes_in=components.swarm.traffic.bytes_in,
            bytes_out=components.swarm.traffic.bytes_out,
            **last.row(),
        )
        self._steps.write(last)
        await components.saving.after_step(self._compute.worker, progress, last.report)
        self._compute.saved(components.saving.written)
        components.reputation_file.after_step()
        if progress.step % self.settings.eval_every == 0 and self._evaluations.due():
            await self._evaluate(components)

    async def _evaluate(self, components: Components) -> None:
        since = boot_seconds() - self._started
        await self._evaluations.evaluate(self._compute.worker, components.stepper, components.metrics, since)

    async def _rest(self, components: Components) -> None:
        """Pause: end the compute process, which frees its memory, and only serve peers until a request comes."""
        try:
            await self._unless_stopped(self._save_last(components))
        except (WorkerDied, WorkerFault) as fault:
            logger.warning("Pausing unsaved (%s); step %d was saved last.", fault, components.saving.saved_step)
        await self._compute.stop()
        self._note_children()
        components.stepper.resting = True
        while self._commands.hold and not self._commands.ending:
            why = self._commands.why
            self._set_apart(
                State.PAUSED,
                f"Paused at step {components.stepper.progress.step}: it only serves its peers. {why}".rstrip(),
                f"`ftis-node resume{self.home.flag}` goes on{' now' if why else ''}.",
            )
            await self._commands.next()
        if not self._commands.ending:
            await self._unless_stopped(self._renew(components))

    async def _save_last(self, components: Components) -> None:
        await components.saving.save(self._compute.worker, components.stepper.progress)
        await components.saving.flush()

    async def _finish(self, components: Components) -> None:
        """Take the last checkpoint and evaluation; after a request to stop, only in the time that is left."""
        if components.stepper.resting:
            return
        self._set_apart(State.STOPPING, "Saving, and evaluating for the last time.")
        ending = await self._until_stopped(self._end(components))
        if not ending.done():
            await asyncio.wait({ending}, timeout=max(0.0, self._deadline - time.monotonic()))
        ending.cancel()
        await asyncio.wait({ending})
        fault = asyncio.CancelledError() if ending.cancelled() else ending.exception()
        saved = components.saving.saved_step
        if isinstance(fault, (asyncio.CancelledError, WorkerDied, WorkerFault)):
            logger.warning("The end was cut short (%s); step %d was saved last.", str(fault) or "out of time", saved)
        elif fault is not None:
            raise fault
        elif self._commands.ending:
            logger.info("Step %d is saved; the same command goes on from there.", saved)

    async def _end(self, components: Components) -> None:
        await self._save_last(components)
        if components.stepper.progress.pass_at_1_step != components.stepper.progress.step:
            await self._evaluate(components)

    # --- the compute process --------------------------------------------------------------------------------------

    async def _recover(self, components: Components, fault: FtisError) -> None:
        """Continue from the last checkpoint, and wait again if there are too many open files."""
        try:
            await self._unless_stopped(self._revive(components, fault))
        except (OSError, sqlite3.Error) as error:
            await self._recover(components, await wait_for_room(error, self._commands.stopping))

    async def _revive(self, components: Components, fault: FtisError) -> None:
        """Start a new compute process from the last checkpoint, after a GPU fault or an out-of-memory kill."""
        self._set_apart(State.LOADING, "The compute process failed and is being started again.")
        while not self._commands.stopping.is_set():
            with contextlib.suppress(WorkerDied, WorkerFault):
                await components.saving.flush()
            self._compute.saved(components.saving.written)
            older = await self._compute.failed(fault)
            try:
                return await self._renew(components, older=older)
            except (WorkerDied, WorkerFault) as error:
                fault = error
        await self._compute.stop()  # a failed process saves nothing

    async def _renew(self, components: Components, *, older: bool = False) -> None:
        """Start another compute process with the newest checkpoint (or an older one)."""
        self._set_apart(State.LOADING, f"Loading {self.settings.model}.")
        await self._compute.start(self.settings, self._run_file)
        await self._compute.worker.call(Open(components.run_file.run))
        await self._go_on_from(components, older=older)
        self._evaluations.went_back(components.stepper.progress.step)
        components.stepper.worker = self._compute.worker  # only now: an engine without a run cannot score
        components.stepper.resting = False
        assembly.refill_pool(components)
        if not self._commands.stopping.is_set():
            self._apart = None

    async def _go_on_from(self, components: Components, *, older: bool = False) -> None:
        restored = await components.saving.restore(self._compute.worker, older=older)
        assembly.go_on_from(components, restored, self._compute.facts, self.options)

    # --- condition ------------------------------------------------------------------------------------------------

    def condition(self) -> Condition:
        """The node's present condition."""
        if self._apart is not None:
            return self._apart
        if self._components is None or self._transport is None:
            return condition(Signs())
        down = self._transport.down_seconds()
        return condition(signs(self._components, down, self._compute, self._sought, self._stalled(), self._names()))

    def _names(self) -> dict[str, str]:
        return names_in(self._overview.book if self._overview is not None else None)

    def _note_condition(self, *, changed: bool = False) -> None:
        """Log the condition if its state or advice changed, or more of it."""
        now = self.condition()
        if changed or (now.state, now.advice) != self._logged:
            logger.info("%s: %s%s", now.state, now.reason, f" {now.advice}" if now.advice else "")
            self._logged = (now.state, now.advice)

    def _set_apart(self, state: State, reason: str, advice: str = "") -> None:
        """Set the condition of a node that does not train."""
        if not self._commands.stopping.is_set() or state is State.STOPPING:
            self._apart = Condition(state, reason, advice)
            self._note_condition(changed=True)

    def status(self) -> Status:
        """The node's status; without the training part before the swarm exists."""
        now = self.condition()
        components = self._components
        loaded = self._compute.loaded
        told: dict[str, Any] = {name: getattr(loaded, name, None) for name in ("kind", "parameters", "tokenizer")}
        status = Status(
            name=self.options.name,
            **vars(now),
            stalled=self._stalled() > 0,
            pausing=self._commands.pausing,
            finishing=self._commands.finishing,
            model=self.settings.model,
            addresses=components.swarm.membership.own_addresses if components is not None else self._addresses,
            run=self._run_file.run.id.hex() if self._run_file is not None else None,
            curve=list(self._evaluations.curve),
            pass_at_1_due=self._evaluations.due_seconds(),
            page=self._page.address,
            uptime=boot_seconds() - self._started,
            plan=part(Planned, plan_row(loaded.plan) if loaded is not None else None),
            **told,
            objective=self.settings.objective,
            worker_restarts=self._compute.restarts,
            worker_memory_bytes=resident_bytes(self._compute.worker.pid),
            gpu=self._compute.watched.gpu,
            doing=self._compute.watched.doing,
        )
        if components is None:
            return status
        return joined(status, components.stepper, components.swarm, components.saving.status())

    def row(self) -> dict[str, Any]:
        """The object that `ftis-node status --json` prints."""
        return status_row(self.status(), self._compute.loaded.plan if self._compute.loaded is not None else None)

    def peers(self) -> dict[str, Any]:
        """The node's peers, and the peers that it refuses."""
        if self._components is None:
            return {"peers": [], "left_out": [], "names": {}}
        return peers_row(self._components.stepper, self._components.swarm, self._names())
