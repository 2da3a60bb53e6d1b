"""The report of `join --dry-run`: what would be, and what would leave the machine; as JSON, or in words."""

from collections.abc import Iterator
from contextlib import suppress

from ftis_node.config.run import Run
from ftis_node.config.settings import Settings
from ftis_node.errors import UserError
from ftis_node.preflight.case import Case
from ftis_node.swarm.addresses import listen_addresses
from ftis_node.swarm.known_addresses import KnownAddresses
from ftis_node.swarm.roster import read_book
from ftis_node.tasks.task import told_if_few
from ftis_node.tasks.templates import shown
from ftis_node.text import rounded

_ORIGINS = {"the home": "home", "--run": "file", "--peers": "peers"}
_SHOWN = 8  # addresses of one kind, in text
Report = dict[str, object]  # as JSON


def as_json(case: Case, *, whole: bool) -> Report:
    """The report in plain values.

    Args:
        whole: all checks of the dry run were made; else those of `join` alone, and they may have found wrong settings.
    """
    run = _run(case)
    home = case.home.path
    own = case.own_task
    file = str(case.options.own_data)
    report: Report = {
        "run": run and _facts(*run),
        "task": _task(case),
        "own_data": own and {"file": file, "rows": len(own.train), "held_out": len(own.held_out)},
        "home": {"path": str(home), "new": not home.exists(), "step": case.step, "id": case.peer_id},
        "problems": [{"what": one.what, "fix": one.fix} for one in case.problems],
    }
    if case.plan is not None and case.shape is not None:
        from ftis_node.worker.messages import plan_row

        model = {"name": case.settings.model, "parameters": case.shape.parameters, "kind": case.plan.kind}
        report["model"] = model | plan_row(case.plan)
    with suppress(UserError):  # wrong settings are among the problems
        report["network"] = _network(case)
        if whole:
            report |= {"settings": _chosen(case), "leaves": _leaves(case)}
    return report


def dry_run_lines(case: Case) -> Iterator[str]:
    """Yield the report for people, line by line."""
    chosen = _chosen(case)
    task = case.task
    plan = case.plan
    if plan is not None and not plan.lora:
        chosen = {name: one for name, one in chosen.items() if not name.startswith("lora_")}
    yield "Nothing was started, and nothing but caches was written. Without --dry-run:"
    yield ""
    for name, one in chosen.items():
        yield f"settings  {name} = {one['value']} ({one['origin']})"
    if not chosen:
        yield "settings  all by default"
    state = "it would be made"
    if case.step is not None:
        state = f"goes on from step {case.step}"
    elif case.home.path.exists():
        state = "begun, without a checkpoint"
    if case.peer_id:
        state += f"; {case.peer_id}"
    yield f"home      {case.home.path}: {state}"
    run = _run(case)
    if run is not None:
        found, known, origin = run
        sizes = f"{found.group} completions of {found.completion_tokens} tokens a prompt"
        if found.text:
            sizes += ", for models of any tokenizer"
        if case.private:
            sizes += ", private"
        known = known or "a new one, whose id will follow from this home's key"
        yield f"run       {known} (from {origin}): {found.task}, {sizes}"
        yield f"template  {shown(found.template)}; judged by {found.reward}"
    if case.task_known and task is not None:
        yield f"task      {case.task_name}: {len(task.train):,} rows and {len(task.held_out):,} held out"
        few = told_if_few(len(task.held_out))
        if few:
            yield f"          {few}"
    elif case.task_known:
        rest = ""
        if case.download:
            rest = f"; {rounded(case.download[0])} would be downloaded"
        yield f"task      {case.task_name}: not here{rest}"
    own = case.own_task
    if own is not None:
        share = f"{len(own.train):,} rows and {len(own.held_out):,} held out, {case.settings.own_data_share:.0%}"
        yield f"own data  {case.options.own_data}: {share} of each batch; no byte of it leaves this machine"
    if plan is not None and case.shape is not None:
        sizes = f"{case.shape.parameters:,} parameters, {plan.kind}, {plan.dtype}"
        if plan.quantisation == "nf4":
            sizes += ", weights in NF4"
        fits = "does not fit"
        if plan.fits:
            fits = "fits"
        yield f"model     {case.settings.model}, {sizes}"
        yield f"memory    {rounded(plan.memory.total)} of {rounded(plan.budget)}: it {fits}"
        for reason in plan.reasons:
            yield f"          {reason}"
    network = _network(case)
    network["listens"] = network["listens"] or ["nowhere: it only dials"]
    for key, word in {"listens": "listens", "announces": "tells", "relays": "relay", "dials": "dials"}.items():
        for text in network[key][:_SHOWN]:
            yield f"{word:9} {text}"
        more = len(network[key]) - _SHOWN
        if more > 0:
            yield f"          and {more} more"
    yield f"leaves    {_leaves(case)}"


def _run(case: Case) -> tuple[Run, str, str] | None:
    """The run that would be joined or started; its id, empty if that hangs on a key still to be made; its origin."""
    run = case.to_start
    origin = "this node, which would start it"
    if case.runs:
        origin = _ORIGINS[case.runs[0][0]]
        run = case.runs[0][1].run
    if run is None:
        return None
    if case.options.private and not run.founder:
        return run, "", origin
    return run, run.id.hex(), origin


def _facts(run: Run, known: str, origin: str) -> Report:
    """The fields of a run; the template as people are shown it."""
    return run.model_dump(mode="json") | {"template": shown(run.template), "id": known or None, "from": origin}


def _task(case: Case) -> Report | None:
    if not case.task_known:
        return None
    about = {"name": case.task_name, "found": False, "rows": None, "held_out": None, "bytes": None}
    if case.download is not None:
        about["bytes"], about["source"] = case.download
    if case.task is not None:
        about |= {"found": True, "rows": len(case.task.train), "held_out": len(case.task.held_out)}
        about["sha256"] = case.task.data
        about["bytes"] = next((file.stat().st_size for file in case.source.files), about["bytes"])
    return about


def _chosen(case: Case) -> dict[str, Report]:
    """The settings that differ from their defaults, with their origins."""
    defaults = Settings().model_dump(mode="json")
    return {name: told for name, told in case.explained().items() if told["value"] != defaults[name]}


def _network(case: Case) -> dict[str, list[str]]:
    """Addresses to listen on, to announce, of relays, and to dial."""
    settings = case.settings
    port = case.settings.port or case.home.last_port()
    listens = []
    if settings.listen:
        listens = listen_addresses(settings.host, port, quic=settings.quic)
    options = case.options
    book = read_book(case.home.members)
    tried = KnownAddresses.read(case.home.peers).tried(settings, book, options.peers)
    dialled = (*options.bootstraps, *(text for text, why in tried if not why))
    told = {"announces": list(settings.announce), "relays": list(settings.relays)}
    return {"listens": listens, **told, "dials": list(dict.fromkeys(dialled))}


def _leaves(case: Case) -> str:
    settings = case.settings
    whose = "Its"
    public = "public "
    if case.private:
        whose = "To members of the private run alone: its"
        public = ""
    sampled = "token ids"
    if case.run_file is not None and case.run_file.run.text:
        sampled = "text"
    what = f"the {sampled} and log-probs that the model samples for the run's {public}prompts"
    if settings.own_share == 0:
        what = "what other nodes sampled, passed on (this node samples nothing of its own)"
    limit = f"up to {settings.upload_mbit:g} Mbit/s" if settings.upload_mbit else "without a limit"
    leaves = f"{whose} network address, and {what}, {limit}"
    if settings.tells_of_itself(private=case.private):
        leaves += "; a self-report a minute (the model's name, figures, and --name if given)"
    if settings.lan and not case.private:
        leaves += "; its run's name to the local network"
    return f"{leaves}. Never the model, its gradients or files."
