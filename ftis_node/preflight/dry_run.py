"""What `ftis-node join` would do with the same flags, found out without doing it: nothing is written, no port kept."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftis_node.config.run import RUN_DEFAULTS, RunFile, check_fit, run_for
from ftis_node.config.settings import Settings
from ftis_node.errors import UserError
from ftis_node.fit.context import refuse_prompts, refuse_run
from ftis_node.fit.geometry import Geometry
from ftis_node.fit.memory import Workload
from ftis_node.node.assembly import quotas
from ftis_node.node.checkpointing import LearnedSizes, refuse_other_model, settled
from ftis_node.policy.hub import ask_hub, described
from ftis_node.policy.load import load_tokenizer
from ftis_node.policy.measure import geometry
from ftis_node.policy.tokenizer import end_ids, fingerprint, prompt_ids
from ftis_node.preflight.early import Early, run_report, told
from ftis_node.preflight.place import checkpoint_bytes
from ftis_node.store.checkpoints import labelled, newest_facts
from ftis_node.swarm.addresses import parse_address
from ftis_node.swarm.handshake import fetch_run
from ftis_node.swarm.identity import Identity
from ftis_node.swarm.wire.libp2p import Libp2p
from ftis_node.swarm.wire.p2pd import listening_of
from ftis_node.tasks import load_task
from ftis_node.text import rounded
from ftis_node.worker.engine import choose_objective
from ftis_node.worker.messages import plan_row
from ftis_node.worker.planning import settle as plan_memory
from ftis_node.worker.shortage import refuse_shortage

PATIENCE = 5.0  # seconds for peers to tell their run; a node that starts waits for `patience`


class DryRun:
    """`report` is what would be; `problems` what `join` would end with, in the order in which they were found."""

    def __init__(self, early: Early, settings: Settings) -> None:
        """
        Args:
            early: which found nothing wrong; settings: that it found.
        """
        self.report = early.report
        self.problems: list[UserError] = early.problems
        self._early = early
        self._settings = settings

    def look(self) -> DryRun:
        """Finds out what `early` could not; a few seconds, most of them for importing torch."""
        for part in (self._look_for_run, self._look_for_data, self._look_at_model):
            with self._early.noting():
                part()
        defaults = Settings()
        self.report["settings"] = {
            name: {"value": value, "origin": self._early.origins[name]}
            for name, value in self._settings.model_dump(mode="json").items()
            if value != defaults.model_dump(mode="json")[name]
        }
        self.report["leaves"] = self._leaves()
        self.report["problems"] = told(self.problems)
        return self

    def _look_for_run(self) -> None:
        """Of the peers, where no other is known."""
        early = self._early
        if early.run_file is not None or not early.options.peers:
            return
        found = asyncio.run(self._ask_peers())
        self._settings, early.origins = early.settle(early.options.task_of(found))
        early.take_run(found, "peers")

    async def _ask_peers(self) -> RunFile:
        """By a network daemon that listens nowhere and has a key of its own."""
        bootstraps = [parse_address(text)[0] for text in self._early.options.peers]
        with tempfile.TemporaryDirectory(prefix="ftis-") as scratch:
            key = Path(scratch) / "key"
            Identity(os.urandom(32)).keep(key)
            dialling = self._settings.model_copy(update={"listen": False, "announce": (), "port": 0})
            transport = await Libp2p.start(listening_of(dialling, key, Path(scratch)))
            try:
                return await fetch_run(transport, bootstraps, min(PATIENCE, self._settings.patience))
            finally:
                await transport.close()

    def _look_for_data(self) -> None:
        """Of the peers' run; and of a task that is code, or large."""
        early, options = self._early, self._early.options
        if early.report["task"] is None:
            early.look_for_data()
        about = early.report["task"]
        if about is not None and not (about["found"] or about["bytes"] or early.refused):
            reward, code = options.reward_of(early.run_file), options.task is not None
            name = about["name"]
            early.take_task(load_task(name, data=options.data, eval_data=options.eval_data, reward=reward, code=code))

    def _look_at_model(self) -> None:
        settings = self._settings
        with described(settings.model, hub := ask_hub()) as folder:
            shape = dataclasses.replace(geometry(folder), name=settings.model)
        home, task = self._early.home, self._early.task
        remembered = LearnedSizes(home.plan, settings.model).sizes | settled(home.checkpoints, settings.model)
        with self._early.noting():
            choose_objective(settings, task.name if task else "", self._workload().completion_tokens)
            refuse_run(settings.model, shape.context, self._workload().completion_tokens)
        _, plan = plan_memory(settings, self._workload(), remembered, shape)
        kind = "lora" if plan.lora else "full"
        self.report["model"] = {"name": settings.model, "parameters": shape.parameters, "kind": kind, **plan_row(plan)}
        with self._early.noting():
            refuse_shortage(settings, self._workload(), remembered, plan, shape)
        with self._early.noting():
            quotas(settings, checkpoint_bytes(plan, shape))
        facts = newest_facts(home.checkpoints)
        with self._early.noting():
            if facts is not None:
                refuse_other_model(home.checkpoints, facts["model"], labelled(settings.model, kind))
        with described(settings.model, hub, tokenizer=True) as folder:
            tokenizer = load_tokenizer(folder)
        self._compare(tokenizer)
        with self._early.noting():
            self._look_at_rows(shape, tokenizer)

    def _look_at_rows(self, shape: Geometry, tokenizer: Any) -> None:
        """Whether the model has room for every row that a run could ask; nothing where the task is not known yet."""
        task, caps = self._early.task, self._workload()
        if task is None:
            return
        template = task.template if self._early.run_file is None else self._early.run_file.run.template
        questions = [example.question for example in task.train]
        refuse_prompts(
            self._settings.model,
            shape.context,
            [prompt_ids(tokenizer, template, question) for question in questions],
            questions,
            "the training data",
            completion_tokens=caps.completion_tokens,
            prompt_tokens=caps.prompt_tokens,
        )

    def _workload(self) -> Workload:
        group = RUN_DEFAULTS["group"]
        caps = (512, 256)
        if self._early.run_file is not None:
            run = self._early.run_file.run
            caps, group = (run.prompt_tokens, run.completion_tokens), run.group
        elif self._early.task is not None:
            caps = (self._early.task.prompt_tokens, self._early.task.completion_tokens)
        return Workload(*caps, group, self._settings.batch_groups)

    def _compare(self, tokenizer: Any) -> None:
        """With the run that would be joined; or else the run that would be started, as far as it can be known."""
        task = self._early.task
        facts = {"tokenizer": fingerprint(tokenizer), "vocabulary": len(tokenizer), "eos": end_ids(tokenizer)}
        if self._early.run_file is not None:
            run = self._early.run_file.run
            data = {name: getattr(task or run, name) for name in ("data", "reward")}
            data["task"] = task.name if task is not None else run.task
            check_fit(run, facts | data, self._settings.model)
        elif task is not None:
            shared = ("data", "template", "reward", "prompt_tokens", "completion_tokens")
            facts |= {"task": task.name} | {name: getattr(task, name) for name in shared}
            self.report["run"] = run_report(run_for(facts)) | {"from": "this node, which would start it"}

    def _leaves(self) -> str:
        limit = f"up to {self._settings.upload_mbit:g} Mbit/s" if self._settings.upload_mbit else "without a limit"
        what = "the token ids and log-probs that the model samples for the run's public prompts"
        if self._settings.own_share == 0:
            what = "what other nodes sampled, passed on (this node samples nothing of its own)"
        return f"Its network address, and {what}, {limit}. Never the model, its gradients or files."


def in_words(report: Mapping[str, Any]) -> list[str]:
    """The report for people, line by line."""
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
        rest = "" if task["found"] or task["bytes"] is None else f"; {rounded(task['bytes'])} would be downloaded"
        lines += [f"task      {task['name']}: {rows}{rest}"]
    if model is not None:
        fits = "fits" if model["fits"] else "does not fit"
        lines += [f"model     {model['name']}, {model['parameters']:,} parameters, {model['kind']}, {model['dtype']}"]
        lines += [f"memory    {rounded(model['memory_bytes'])} of {rounded(model['budget'])}: it {fits}"]
        lines += [f"          {reason}" for reason in model["reasons"]]
    if network is not None:
        lines += [f"listens   {text}" for text in network["listens"] or ["nowhere: it only dials"]]
        lines += [f"tells     {text}" for text in network["announces"]]
        lines += [f"relay     {text}" for text in network["relays"]]
        lines += [f"dials     {text}" for text in network["dials"]]
    return [*lines, f"leaves    {report['leaves']}"]
