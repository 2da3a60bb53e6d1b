"""What `ftis-node join` would do with the same flags, found out without doing it: nothing is written, no port kept."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ftis_node.doctor.place import check_page, checkpoint_bytes, standing
from ftis_node.errors import UserError
from ftis_node.joining import JoinOptions, known_run, quotas
from ftis_node.policy.geometry import geometry
from ftis_node.policy.hub import ask_hub, described
from ftis_node.policy.load import load_tokenizer
from ftis_node.policy.memory import Workload
from ftis_node.policy.tokenizer import end_ids, fingerprint
from ftis_node.run import RUN_DEFAULTS, Run, RunFile, check_fit, check_named, refuse_horizontal, run_for
from ftis_node.saving import LearnedSizes, refuse_other_model, settled
from ftis_node.settings import Settings
from ftis_node.store.checkpoints import labelled, newest_facts
from ftis_node.swarm.addresses import check_port, listen_addresses, parse_address
from ftis_node.swarm.handshake import fetch_run
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.p2pd import listening_of
from ftis_node.swarm.transport import Transport
from ftis_node.tasks import Task, load_task
from ftis_node.tasks.download import cache_dir, sha256_of
from ftis_node.tasks.gsm8k import TRAIN
from ftis_node.text import GB
from ftis_node.upgrading import pending, with_remembered
from ftis_node.worker.engine import choose_objective
from ftis_node.worker.planning import settle as plan_memory
from ftis_node.worker.planning import told

PATIENCE = 5.0  # seconds for peers to tell their run; a node that starts waits for `patience`

Settle = Callable[[str], tuple[Settings, Mapping[str, str]]]


class DryRun:
    """`report` is what would be; `problems` what `join` would end with, in the order in which they were found."""

    def __init__(self, options: JoinOptions, settle: Settle) -> None:
        """
        Args:
            settle: settings and their origins for a task.
        """
        self.home = options.home
        self.options = with_remembered(options, self.home)
        self.report: dict[str, Any] = {}
        self.problems: list[UserError] = []
        self._settle = settle
        self._run_file: RunFile | None = None
        self._refused = False  # the run asks for what its owner has to name: it is not opened
        self._task: Task | None = None
        self._settings, self._origins = settle(options.task or "arithmetic")

    def look(self) -> DryRun:
        """Finds everything out; a few seconds, most of them for importing torch."""
        for part in (self._look_at_home, self._look_for_run, self._look_for_data, self._look_at_model, self._listen):
            with self._noting():
                part()
        defaults = Settings()
        self.report["settings"] = {
            name: {"value": value, "origin": self._origins[name]}
            for name, value in self._settings.model_dump(mode="json").items()
            if value != defaults.model_dump(mode="json")[name]
        }
        self.report["leaves"] = self._leaves()
        self.report["problems"] = [{"what": one.what, "fix": one.fix} for one in self.problems]
        return self

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except UserError as error:
            self.problems.append(error)

    def _look_at_home(self) -> None:
        facts = newest_facts(self.home.checkpoints)
        step = facts["progress"]["step"] if facts is not None else None
        key = Identity.load(self.home.key).peer_id if self.home.key.exists() else None
        self.report["home"] = {"path": str(self.home.path), "new": not self.home.path.exists(), "step": step, "id": key}
        parent = standing(self.home.path)
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise UserError(f"The home {self.home.path} cannot be used: {parent} is not yours.", "Name another --home.")
        if self.home.in_use():
            raise self.home.taken()
        pending(self.home)

    def _look_for_run(self) -> None:
        found, origin = known_run(self.home, self.options.run), "home" if self.home.run_file.exists() else "file"
        if found is None and self.options.peers:
            found, origin = asyncio.run(self._ask_peers()), "peers"
        self._run_file = found
        self.report["run"] = None if found is None else _in_short(found.run) | {"from": origin}
        self._settings, self._origins = self._settle(self.options.task_of(found))
        if found is not None:
            refuse_horizontal(found.run)
            self._refused = True
            options, ours = self.options, origin == "home"
            check_named(found.run, task=options.task, reward=options.reward, ours=ours, data=options.data)
            self._refused = False

    async def _ask_peers(self) -> RunFile:
        """By a network daemon that listens nowhere and has a key of its own."""
        bootstraps = [parse_address(text)[0] for text in self.options.peers]
        with tempfile.TemporaryDirectory(prefix="ftis-") as scratch:
            key = Path(scratch) / "key"
            Identity(os.urandom(32)).keep(key)
            dialling = self._settings.model_copy(update={"listen": False, "announce": (), "port": 0})
            transport = await Transport.start(listening_of(dialling, key, Path(scratch)))
            try:
                return await fetch_run(transport, bootstraps, min(PATIENCE, self._settings.patience))
            finally:
                await transport.close()

    def _look_for_data(self) -> None:
        options = self.options
        name = options.task_of(self._run_file)
        self.report["task"] = told = {"name": name, "found": False, "rows": None, "held_out": None, "bytes": None}
        if self._refused:
            return
        if name == "gsm8k" and options.data is None:
            file = cache_dir() / "gsm8k-train.jsonl"
            if sha256_of(file) != TRAIN.sha256:
                told |= {"bytes": TRAIN.size, "source": TRAIN.url}
                return
        reward, code = options.reward_of(self._run_file), options.task is not None
        self._task = task = load_task(name, data=options.data, eval_data=options.eval_data, reward=reward, code=code)
        files = [path for path in (options.data, Path(name) if name.endswith(".jsonl") else None) if path is not None]
        told |= {"found": True, "rows": len(task.train), "held_out": len(task.held_out), "sha256": task.data}
        told["bytes"] = files[0].stat().st_size if files else None

    def _look_at_model(self) -> None:
        settings = self._settings
        with described(settings.model, hub := ask_hub()) as folder:
            shape = dataclasses.replace(geometry(folder), name=settings.model)
        remembered = LearnedSizes(self.home.plan, settings.model).sizes | settled(self.home.checkpoints, settings.model)
        with self._noting():
            choose_objective(settings, self._task.name if self._task else "", self._workload().completion_tokens)
        _, plan = plan_memory(settings, self._workload(), remembered, shape)
        kind = "lora" if plan.lora else "full"
        self.report["model"] = {"name": settings.model, "parameters": shape.parameters, "kind": kind, **told(plan)}
        with self._noting():
            quotas(settings, checkpoint_bytes(plan, shape))
        facts = newest_facts(self.home.checkpoints)
        with self._noting():
            if facts is not None:
                refuse_other_model(self.home.checkpoints, facts["model"], labelled(settings.model, kind))
        with described(settings.model, hub, tokenizer=True) as folder:
            self._compare(load_tokenizer(folder))

    def _workload(self) -> Workload:
        group = RUN_DEFAULTS["group"]
        caps = (512, 256)
        if self._run_file is not None:
            run = self._run_file.run
            caps, group = (run.prompt_tokens, run.completion_tokens), run.group
        elif self._task is not None:
            caps = (self._task.prompt_tokens, self._task.completion_tokens)
        return Workload(*caps, group, self._settings.batch_groups)

    def _compare(self, tokenizer: Any) -> None:
        """With the run that would be joined; or else the run that would be started, as far as it can be known."""
        task = self._task
        facts = {"tokenizer": fingerprint(tokenizer), "vocabulary": len(tokenizer), "eos": end_ids(tokenizer)}
        if self._run_file is not None:
            run = self._run_file.run
            data = {name: getattr(task or run, name) for name in ("data", "reward")}
            data["task"] = task.name if task is not None else run.task
            check_fit(run, facts | data, self._settings.model)
        elif task is not None:
            shared = ("data", "template", "reward", "prompt_tokens", "completion_tokens")
            facts |= {"task": task.name} | {name: getattr(task, name) for name in shared}
            self.report["run"] = _in_short(run_for(facts)) | {"from": "this node, which would start it"}

    def _listen(self) -> None:
        settings = self._settings
        for text in self.options.peers:
            parse_address(text)
        how = listening_of(settings, self.home.key, self.home.path)
        listening = listen_addresses(settings.host, settings.port, quic=settings.quic) if settings.listen else []
        self.report["network"] = {
            "listens": listening,
            "announces": list(how.announce),
            "relays": list(how.relays),
            "dials": list(self.options.peers),
        }
        with self._noting():
            if settings.page:
                check_page(settings)
        if settings.listen:
            check_port(settings.host, settings.port)

    def _leaves(self) -> str:
        limit = f"up to {self._settings.upload_mbit:g} Mbit/s" if self._settings.upload_mbit else "without a limit"
        what = "the token ids and log-probs that the model samples for the run's public prompts"
        if self._settings.own_share == 0:
            what = "what other nodes sampled, passed on (this node samples nothing of its own)"
        return f"Its network address, and {what}, {limit}. Never the model, its gradients or files."


def _in_short(run: Run) -> dict[str, Any]:
    return {"id": run.id.hex(), **run.model_dump(mode="json", exclude={"template", "packet"})}


def in_words(report: Mapping[str, Any]) -> str:
    """The report for people; each line is escaped by who prints it."""
    home, run, task = report.get("home"), report.get("run"), report.get("task")
    model, network = report.get("model"), report.get("network")
    lines = ["Nothing was started and nothing was written. Without --dry-run:", ""]
    lines += [f"settings  {name} = {one['value']} ({one['origin']})" for name, one in report["settings"].items()]
    lines += [] if report["settings"] else ["settings  all by default"]
    if home is not None:
        state = "it would be made" if home["new"] else "begun, without a checkpoint"
        state = state if home["step"] is None else f"goes on from step {home['step']}"
        lines += [f"home      {home['path']}: {state}" + (f"; {home['id']}" if home["id"] else "")]
    if run is not None:
        lines += [
            f"run       {run['id']} (from {run['from']}): {run['task']}, {run['group']} completions of "
            f"{run['completion_tokens']} tokens a prompt"
        ]
    if task is not None:
        rows = f"{task['rows']:,} rows and {task['held_out']:,} held out" if task["found"] else "not here"
        rest = "" if task["found"] or task["bytes"] is None else f"; {task['bytes'] / 1e6:.1f} MB would be downloaded"
        lines += [f"task      {task['name']}: {rows}{rest}"]
    if model is not None:
        need, budget = model["memory_bytes"] / GB, model["budget"] / GB
        fits = "fits" if model["fits"] else "does not fit"
        lines += [f"model     {model['name']}, {model['parameters']:,} parameters, {model['kind']}, {model['dtype']}"]
        lines += [f"memory    {need:.1f} of {budget:.1f} GB: it {fits}"]
        lines += [f"          {reason}" for reason in model["reasons"]]
    if network is not None:
        lines += [f"listens   {text}" for text in network["listens"] or ["nowhere: it only dials"]]
        lines += [f"tells     {text}" for text in network["announces"]]
        lines += [f"relay     {text}" for text in network["relays"]]
        lines += [f"dials     {text}" for text in network["dials"]]
    lines += [f"leaves    {report['leaves']}"]
    lines += [f"problem   {one['what']} {one['fix']}" for one in report["problems"]]
    return "\n".join(lines)
