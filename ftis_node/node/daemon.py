"""The daemon: it connects the rooms and owns the life cycle, from an empty home to a clean end."""

import asyncio
import contextlib
import functools
import logging
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ftis_node.config.run import RunFile, check_fit, dump_run_file, in_short, run_file_as_json, run_for
from ftis_node.config.settings import Settings, changed
from ftis_node.errors import UserError
from ftis_node.host.clocks import boot_seconds
from ftis_node.host.descriptors import raise_limit
from ftis_node.host.files import replace_text
from ftis_node.host.loops import end, forever, listen
from ftis_node.node import assembly
from ftis_node.node.assembly import Components
from ftis_node.node.commands import Commands, Schedule
from ftis_node.node.compute import ComputeProcess
from ftis_node.node.condition import Condition, Signs, Telling, condition
from ftis_node.node.dashboard import Dashboard
from ftis_node.node.options import JoinOptions
from ftis_node.node.run_source import remember_files, run_to_join, with_remembered
from ftis_node.node.status import joined, peers_row, resident_bytes, self_report, signs, status_row
from ftis_node.node.training import FINISH_SECONDS, GRACE_SECONDS, Training, until_stopped
from ftis_node.observe.answers import State, Status
from ftis_node.observe.logs import set_level
from ftis_node.observe.notify import Notifier
from ftis_node.policy.names import public_name
from ftis_node.swarm.addresses import parse_address
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.overview import Overview
from ftis_node.swarm.wire.libp2p import Libp2p
from ftis_node.worker.messages import Open

logger = logging.getLogger(__name__)

STALL_SECONDS = 7200.0  # that the compute process may owe an answer; then watchdogs act


class Node:
    """One daemon, in the event loop of the network process. `run`, called once, returns when it is stopped or has taken
    its steps. Signals, the local API and the page call the other public methods meanwhile."""

    def __init__(self, options: JoinOptions, settings_for: Callable[[str], Settings]) -> None:
        """settings_for: returns the settings for a task, which may be known only after a peer has sent its run; raises
        UsageError. It is called here, and again when the run is known."""
        self.options = options
        self.settings = settings_for(options.task or "arithmetic")
        self.home = options.home  # may be open already
        self.overview: Overview | None = None  # of the swarm; None before the node has joined it
        self._first = self.settings  # before the owner changed any
        self._settings_for = settings_for
        self._exit_code = 0
        self._stack = contextlib.AsyncExitStack()
        self._run_file: RunFile | None = None
        self._transport: Libp2p | None = None
        self._training: Training | None = None
        self._addresses: list[str] = []
        self._started = boot_seconds()
        self._compute = ComputeProcess(options)
        self._commands = Commands(Schedule(lambda: self.settings, self._compute.gpu_pids), paused=options.paused)
        self._telling = Telling(self._condition_of_training, self._commands.stopping.is_set)
        self._page = Dashboard(self)

    @property
    def components(self) -> Components | None:
        """The node's parts; None before it has its run and its model, and kept until the process ends."""
        if self._training is None:
            return None
        return self._training.components

    async def run(self) -> int:
        """Start everything, train until stopped, and end everything in the opposite order.

        Returns the exit code: 0, or 130 after Ctrl-C.

        Raises:
            UserError: an error that a person can fix prevents the start or the training.
            TimeoutError, ConnectionError: the network or p2pd failed.
            SystemExit: a second request to stop came.
        """
        raise_limit()
        listen(self.stop)
        try:
            async with self._stack:
                starting = await until_stopped(self._start(), self._commands)  # loading a large model takes long
                if starting.done():
                    training = starting.result()
                    if not self._commands.stopping.is_set():
                        await training.run()
                await end({starting})
        except (TimeoutError, ConnectionError):
            raise  # network errors; the home is fine
        except (OSError, sqlite3.Error) as error:
            raise self.home.failed(error) from error
        return self._exit_code

    # --- the owner's requests -------------------------------------------------------------------------------------

    def stop(self, exit_code: int = 0) -> None:
        """Finish the step, save and end within half a minute; a second call ends the node at once.

        It returns at once, at any moment of the node's life. Raises SystemExit: it is the second call.
        """
        if self._commands.stopping.is_set():
            logger.warning("Second request to stop: ending at once; the last checkpoint remains.")
            raise SystemExit(130)
        self._exit_code = exit_code
        self._telling.set_apart(State.STOPPING, "The node was asked to stop.")
        self._commands.stop(GRACE_SECONDS + FINISH_SECONDS)

    def finish(self) -> None:
        """Stop without a time limit for the running step; before the first step, the same as `stop`."""
        if self._training is None:
            return self.stop()
        self._commands.finish()

    async def change(self, values: Mapping[str, str]) -> dict[str, object]:
        """Change settings of the running node, until it ends; return their new values. The next start has the old ones.

        Args:
            values: by name, as texts; `default` gives what the node began with.

        Raises:
            UsageError: one is unknown, cannot be changed while the node runs, or has no such value.
            UserError: the node is still starting.
        """
        if self._training is None:
            raise UserError("The node is still starting.", "Try again when `ftis-node status` shows a step.")
        await self._page.show(changed(self.settings, values, self._first))  # which may fail: then nothing has changed
        settings = changed(self.settings, values, self._first)
        self.settings = settings
        self._training.change(settings, set(values))
        set_level(settings.log_level)
        await self._commands.look()
        row = settings.model_dump(mode="json")
        new = {name: row[name] for name in values}
        logger.info("Settings changed: %s", ", ".join(f"{name} = {value}" for name, value in new.items()))
        return new

    async def run_file(self, _: Mapping[str, str]) -> dict[str, object]:
        """Answer with the run file, as a peer gets it. Raises UserError: the run is not decided yet."""
        run_file = self._decided()
        if run_file is None:
            raise UserError("The node has no run yet.", "Try again when `ftis-node status` names one.")
        return {"run_file": run_file_as_json(run_file)}

    def _decided(self) -> RunFile | None:
        """The run file; that of a new run from before its model is loaded. None: the run is not known yet."""
        facts = self._compute.watched.facts
        if self._run_file is None and facts is not None:
            return self._new_run(facts)
        return self._run_file

    async def _asked(self, what: Callable[[], None], _: Mapping[str, str]) -> dict[str, object]:
        """Answer a request of the local API by calling `what`; a node that is stopping ignores it."""
        commands = self._commands
        if not commands.stopping.is_set():
            what()
        return {"state": self.condition().state, "pausing": commands.pausing, "finishing": commands.finishing}

    # --- starting -------------------------------------------------------------------------------------------------

    async def _start(self) -> Training:
        """From a home to a node that can train; what is begun on the way ends with the stack. See `run` for errors.

        The order matters: the local API answers before the slow parts; the run file is written only when the model fits
        the run; peers are greeted when the weights are those of the checkpoint.
        """
        runtime = self._open_home()
        await self._begin_to_tell(runtime)
        identity = Identity.load_or_create(self.home.key)
        for text in self.options.bootstraps:
            parse_address(text)  # raises UsageError
        transport = await self._open_network(runtime, identity)
        known = await self._find_run(transport)
        run_file = await self._load(known)
        self._run_file = run_file
        opened = await self._compute.worker.call(Open(run_file.run))
        replace_text(self.home.run_file, dump_run_file(run_file), durable=True)  # the run's rows fit the model
        remember_files(self.options, self.options.task_of(run_file), run_file.run.id)
        components = assembly.build_components(
            self._compute,
            self.settings,
            run_file,
            opened,
            identity=identity,
            transport=transport,
            flush=self._commands.flush,
            describe=lambda: self_report(self.status(), identity.author, run_file.run.id),
        )
        components.swarm.membership.own_addresses = self._addresses  # until it asks p2pd itself
        self._stack.callback(components.close)
        training = Training(components, self._compute, self._commands, self._telling, started=self._started)
        self._training = training
        self._stack.callback(asyncio.create_task(forever(self._commands.keep_hours)).cancel)
        await training.go_on_from()
        await self._greet(components, transport)
        overview = Overview(components.swarm, self.home.swarm_history)
        overview.begin(self._stack)
        self.overview = overview
        assembly.refill_pool(components.stepper)
        logger.info("Run %s: %s", run_file.run.id.hex(), in_short(run_file.run))
        if components.swarm.roster.may_invite:
            logger.info("Others join it with what `ftis-node invite%s` prints", self.home.flag)
        return training

    def _open_home(self) -> Path:
        """Take the home, and complete the options with what it remembers; return the directory of sockets."""
        self.home.open()
        self._stack.callback(self.home.close)
        self.home.mark()
        self.options = with_remembered(self.options)
        self._compute.options = self.options
        return self.home.make_runtime()

    async def _begin_to_tell(self, runtime: Path) -> None:
        """Start the local API, the page and the notifications to a supervisor; they report the state from now on."""
        commands = self._commands
        actions = {"stop": self.stop, "finish": self.finish, "pause": commands.pause, "resume": commands.resume}
        asked = {f"/{name}": functools.partial(self._asked, what) for name, what in actions.items()}
        api = await self._page.api(runtime / "api.sock", {**asked, "/set": self.change, "/run": self.run_file})
        self._stack.push_async_callback(api.close)
        self._stack.push_async_callback(self._page.close)
        await self._page.show(self.settings)
        told = Notifier().start(lambda: "{0.state}: {0.reason}".format(self.condition()), self._stalled)
        self._stack.callback(told.cancel)

    async def _open_network(self, runtime: Path, identity: Identity) -> Libp2p:
        """Start p2pd, and write its port into the home for the next start. See `assembly.open_network` for errors."""
        transport = await assembly.open_network(self.options, self.settings, runtime, identity)
        self._transport = transport
        self._stack.push_async_callback(transport.close)
        replace_text(self.home.port, str(transport.port), durable=True)
        with contextlib.suppress(Exception):  # hivemind raises anything; a loaded machine answers later
            self._addresses = await transport.addresses()
        return transport

    async def _find_run(self, transport: Libp2p) -> RunFile | None:
        """The run of the home, of a file or of a peer; None: this node begins one. Go by the settings for its task. See
        `run_to_join` for errors."""
        seeking = "Looking for its run."
        if self.options.bootstraps:
            patience = f"{self.settings.patience:g} s at most, or half an hour while one of them loads its model"
            seeking = f"Asking the peers for their run, for {patience}."
        self._telling.set_apart(State.LOADING, seeking)
        found = await run_to_join(self.options, transport, self.settings.patience)
        self._run_file = found
        self.settings = self._settings_for(self.options.task_of(found))
        self._first = self.settings
        set_level(self.settings.log_level)
        return found

    async def _load(self, known: RunFile | None) -> RunFile:
        """Load task and model; return the run, a new one for them if none is known.

        Raises:
            UserError: they cannot be loaded, or do not fit the run.
        """
        self._stack.push_async_callback(self._compute.stop)
        self._telling.set_apart(State.LOADING, f"Loading {self.settings.model}.")
        await self._compute.start(self.settings, known)
        shared = self._compute.facts.shared()
        run_file = known or self._new_run(shared)
        check_fit(run_file.run, shared, self.settings.model, begun=self.home.run_file.exists())
        return run_file

    def _new_run(self, facts: Mapping[str, Any]) -> RunFile:
        """A run for what is loaded (`ModelFacts.shared`). The same facts give the same run, whenever this is called."""
        founder = ""
        if self.options.private:
            founder = Identity.load(self.home.key).peer_id
        return RunFile(run=run_for(facts, founder=founder))

    async def _greet(self, components: Components, transport: Libp2p) -> None:
        """Join the swarm, and the nodes of the local network.

        Raises:
            UserError: none of the named peers can work with this node.
        """
        self._telling.set_apart(State.LOADING, "Greeting peers.")
        options = self.options
        swarm = components.swarm
        hints = components.run_file.hints.bootstraps
        swarm.hear_on_lan(options.on_lan)
        given = [*options.given]
        if options.run is not None:
            given += hints
        await swarm.start(options.peers, hints, given)
        self._stack.push_async_callback(swarm.close)
        if self.settings.lan:
            about = {}
            if swarm.reports.telling:
                about = {"model": public_name(self.settings.model), "name": options.name or ""}
            await assembly.open_lan(self._stack, swarm, transport, about)
        if options.run is None:
            assembly.check_peers(swarm.membership, [*options.peers, *options.given], self.home.path)

    # --- what the node says of itself -----------------------------------------------------------------------------

    def condition(self) -> Condition:
        """The node's present condition."""
        return self._telling.condition()

    def _condition_of_training(self) -> Condition:
        """What the signs say now; of none before the training exists."""
        if self._training is None or self._transport is None:
            return condition(Signs())
        return condition(signs(self._training, self._transport.down_seconds(), self._stalled()))

    def _stalled(self) -> float:
        """Seconds since the compute process's oldest unanswered request if that is too long, else 0."""
        owed = self._compute.worker.owing_seconds()
        if owed <= STALL_SECONDS:
            return 0.0
        return owed

    def status(self) -> Status:
        """The node's status; without the training part before the swarm exists."""
        run_file = self._decided()
        loaded = self._compute.loaded
        of_model = {}  # but for its plan, which `row` adds
        if loaded is not None:
            of_model = {name: getattr(loaded, name) for name in ("kind", "parameters", "tokenizer")}
        status = Status(
            name=self.options.name or "",
            **vars(self.condition()),
            stalled=self._stalled() > 0,
            pausing=self._commands.pausing,
            finishing=self._commands.finishing,
            model=self.settings.model,
            addresses=self._addresses,
            run=run_file.run.id.hex() if run_file is not None else None,
            page=self._page.address,
            uptime=boot_seconds() - self._started,
            **of_model,
            objective=self.settings.objective,
            worker_restarts=self._compute.restarts,
            worker_memory_bytes=resident_bytes(self._compute.worker.pid),
            gpu=self._compute.watched.gpu,
            doing=self._compute.watched.doing,
        )
        if self._training is None:
            return status
        return joined(status, self._training)

    def row(self) -> dict[str, Any]:
        """The object that `ftis-node status --json` prints."""
        plan = None
        if self._compute.loaded is not None:
            plan = self._compute.loaded.plan
        return status_row(self.status(), plan)

    def peers(self) -> dict[str, Any]:
        """The object that `ftis-node peers --json` prints: the node's peers, and those that it refuses."""
        if self._training is None:
            return {"peers": [], "left_out": [], "names": {}}
        return peers_row(self._training.components)
