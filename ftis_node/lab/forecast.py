"""The resources of an experiment, before anything is loaded: the plan of every node, its memory, and hours.

Hours are arithmetic on a card of given rates (`step_seconds`), no measurement. Prompts and completions are taken at
half of their caps.
"""

import math
from collections import defaultdict
from typing import Any

from ftis_node.config.run import RUN_DEFAULTS
from ftis_node.config.settings import Settings
from ftis_node.fit.geometry import Geometry
from ftis_node.fit.memory import Workload
from ftis_node.fit.plan import Plan, plan
from ftis_node.lab import step_seconds
from ftis_node.lab.experiment import Experiment, NodeSpec
from ftis_node.lab.recipes import COSTS
from ftis_node.lab.spec import TrialSpec, own_share, trials
from ftis_node.lab.starts import starts
from ftis_node.lab.step_seconds import Card, Work
from ftis_node.policy.measure import geometry
from ftis_node.tasks.task import CAPS
from ftis_node.text import GB
from ftis_node.worker.planning import wishes

_LENGTH_SHARE = 0.5
_UNKNOWN_CAPS = (512, 256)  # of a .jsonl task that names none
# A step of a built-in model on one core, measured with `lab run`; overhead, not arithmetic.
TINY_STEP_SECONDS = 0.15
WARM_UP_SECONDS = 40.0


def forecast(experiment: Experiment, card: Card) -> dict[str, Any]:
    """Plans, memory and hours of an experiment, in plain values: what `lab run --dry-run --json` prints. It reads
    models' geometries, not their weights. Raises UserError for a model that is not known."""
    specs = {spec.id: spec for spec in trials(experiment)}
    plans = {}
    largest = 0.0
    fits = True
    seconds = 0.0
    for start in starts(list(specs.values())):
        seconds += COSTS.get(start.recipe.name, 1.0) * WARM_UP_SECONDS
    for spec in specs.values():
        together: dict[str, float] = defaultdict(float)  # GB by device
        for member in spec.learners:
            if member.warm is not None:
                cost = COSTS.get(member.warm.recipe, 1.0)
                seconds += _steps(spec, member) * cost * TINY_STEP_SECONDS
                continue
            settings = spec.settings_of(member)
            shape, chosen = _planned(spec, member, card)
            together[settings.device] += chosen.memory.total / GB
            fits = fits and chosen.fits
            seconds += _seconds(spec, member, shape, chosen, card)
            plans[f"{member.name} {member.model} batch {settings.batch_groups}"] = _told(chosen)
        largest = max([largest, *together.values()])
    return {
        "experiment": experiment.name,
        "trials": len(specs),
        "steps": experiment.steps,
        "nodes": plans,
        "memory_gb_together": round(largest, 1),
        "vram_gb": card.vram,
        "fits_together": largest <= card.vram and fits,
        "hours": round(seconds / 3600, 2),
    }


def _caps(spec: TrialSpec) -> tuple[int, int]:
    """The caps of a prompt and of a completion in tokens: the run's, else the task's, else a guess."""
    prompt, completion = CAPS.get(spec.task, _UNKNOWN_CAPS)
    return spec.run.get("prompt_tokens", prompt), spec.run.get("completion_tokens", completion)


def _group(spec: TrialSpec) -> int:
    """Completions of a prompt."""
    return int(spec.run.get("group", RUN_DEFAULTS["group"]))


def _planned(spec: TrialSpec, member: NodeSpec, card: Card) -> tuple[Geometry, Plan]:
    """The geometry of a member's model, and the plan of its work on the card."""
    settings = spec.settings_of(member)
    shape = geometry(member.model)
    share = settings.vram_share or 1 / len(spec.members)
    limit = settings.vram_gb or card.vram * share
    workload = Workload(*_caps(spec), _group(spec), settings.batch_groups)
    return shape, plan(shape, round(limit * GB), workload, wishes(settings), card.device, False)


def _own(spec: TrialSpec, settings: Settings) -> int:
    """The groups of a batch that a node makes itself."""
    if spec.collaboration == "alone" or settings.objective == "grpo":
        return settings.batch_groups
    return math.ceil(own_share(spec, settings) * settings.batch_groups)


def _steps(spec: TrialSpec, member: NodeSpec) -> int:
    """The steps that a node takes: those of the trial, or as many as there are simulated seconds for."""
    if spec.seconds is None:
        return spec.steps
    settings = spec.settings_of(member)
    generating = _own(spec, settings) * spec.clock.generate
    training = settings.batch_groups * spec.clock.train
    in_time = spec.seconds * member.speed / (generating + training)
    return min(spec.steps, math.ceil(in_time))


def _seconds(
    spec: TrialSpec,
    member: NodeSpec,
    shape: Geometry,
    chosen: Plan,
    card: Card,
) -> float:
    """Real seconds of one node's work in a whole trial, on the card: all steps and evaluations."""
    settings = spec.settings_of(member)
    prompt, cap = _caps(spec)
    step = Work(settings.batch_groups, _group(spec), _LENGTH_SHARE * prompt, _LENGTH_SHARE * cap, cap)
    own = step._replace(groups=_own(spec, settings))
    evaluated = step._replace(groups=settings.eval_prompts, group=1)
    evaluations = spec.steps // settings.eval_every + 1
    seconds = spec.steps * step_seconds.training(shape, chosen, step, card)
    seconds += spec.steps * step_seconds.generating(shape, chosen, own, card)
    seconds += evaluations * step_seconds.generating(shape, chosen, evaluated, card)
    for also in spec.evaluate:
        longer = Work(also.prompts or 500, 1, step.prompt, 4 * step.completion, 4 * cap)
        seconds += 2 * step_seconds.generating(shape, chosen, longer, card)
    return seconds


def _told(chosen: Plan) -> dict[str, Any]:
    """A plan in plain values."""
    return {
        "kind": chosen.kind,
        "dtype": chosen.dtype,
        "optimiser": chosen.optimiser,
        "gradient_checkpointing": chosen.gradient_checkpointing,
        "micro_batch_tokens": chosen.micro_batch_tokens,
        "generation_batch": chosen.generation_batch,
        "memory_gb": round(chosen.memory.total / GB, 1),
        "budget_gb": round(chosen.budget / GB, 1),
        "fits": chosen.fits,
        "reasons": list(chosen.reasons),
    }


def forecast_text(report: dict[str, Any]) -> str:
    """What `forecast` gave, for people."""
    lines = [f"{report['experiment']}: {report['trials']} trials of {report['steps']} steps"]
    for name, node in report["nodes"].items():
        checkpointing = ""
        if node["gradient_checkpointing"]:
            checkpointing = ", gradient checkpointing"
        lines.append(
            f"  {name}: {node['kind']}, {node['dtype']}, {node['optimiser']}{checkpointing}, micro-batches of "
            f"{node['micro_batch_tokens']} tokens; {node['memory_gb']} of {node['budget_gb']} GB"
        )
        lines += [f"    {reason}" for reason in node["reasons"]]
    if report["nodes"]:
        verdict = "do not fit"
        if report["fits_together"]:
            verdict = "fit"
        lines.append(
            f"All nodes of a trial that share a device, together: {report['memory_gb_together']} GB; "
            f"they {verdict} {report['vram_gb']:g} GB."
        )
    lines.append(f"About {report['hours']:g} hours in all, one trial after another (arithmetic, not a measurement).")
    return "\n".join(lines)
