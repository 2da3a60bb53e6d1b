"""The model card: what a model is and how it came about, with front matter for the hub."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ftis_node.config.settings import OBJECTIVE_PARTS, Settings, recorded
from ftis_node.export.record import TrainingRecord
from ftis_node.node.progress import OTHERS
from ftis_node.observe.provenance import versions
from ftis_node.policy.gguf.folder import told_of
from ftis_node.policy.names import resolve
from ftis_node.text import counted
from ftis_node.tokenizer.asking import message_of
from ftis_node.worker.restore import Checkpoint

PAPER = "2605.22537"
F_TIS = "ftis"
_BESIDE_GGUF = (
    "`adapter_config.json` names the file alone. Before a program loads the base model by that, as `AutoPeftModel` "
    "does (which wants `gguf_file` as above, too), write the file's folder there as `base_model_name_or_path`."
)
UNROUNDED = "these layers belong to the unrounded ones here, which answer otherwise: measure pass@1 anew"
_LOAD = {
    "adapter": """import transformers, peft

base = transformers.AutoModelForCausalLM.from_pretrained({base})
model = peft.PeftModel.from_pretrained(base, FOLDER)
tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)""",
    "model": """import transformers

model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)
tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)""",
}


def card(
    checkpoint: Checkpoint,
    settings: Settings,
    record: TrainingRecord,
    *,
    base: str,
    kind: str,
    dtype: str,
    chat: bool,
    bare: bool,
) -> str:
    """Markdown.

    Args:
        settings: what the checkpoint was loaded with; base: the base model's public name; kind: full, merged, adapter.
        chat: whether questions were messages of a chat. bare: whether they were without what the tokenizer puts in
            front of a text.
    """
    task = checkpoint.task if record.run is None else record.run.task
    objective = _cell(record.settings.get("objective", F_TIS))
    method = cited = f"the objective {objective}"
    if objective == F_TIS:
        method = "F-TIS"
        cited = f"F-TIS ([arXiv {PAPER}](https://arxiv.org/abs/{PAPER}))"
    title = f"# {_cell(base)}, trained with {method}"
    if task:
        title += f" on {_cell(task)}"
    rows = dict(_rows(checkpoint, settings, record, task, base=base, kind=kind, dtype=dtype))
    source = json.dumps(base)
    beside = []
    if base.endswith(".gguf"):
        source = f"FOLDER_OF_THE_FILE, gguf_file={source}"
        if kind == "adapter":
            beside = [_BESIDE_GGUF]
    load = _LOAD.get(kind, _LOAD["model"]).replace("{base}", source)
    parts = [
        _front_matter(base, kind, objective),
        title,
        "A node of a peer-to-peer swarm trained this model by reinforcement learning, on completions of its own and of "
        f"other people's different models, with {cited}.",
        "| | |\n|---|---|\n" + "\n".join(f"| {key} | {_cell(value)} |" for key, value in rows.items()),
        "## Loading it",
        _fenced(load, "python"),
        *beside,
        *_prompt(record, chat=chat, bare=bare),
        "## Licence",
        f"These weights are derived from {_cell(base)}: the licence of that model applies to them too. What its "
        "outputs, or the data of the task, were licensed under may add to that.",
    ]
    return "\n\n".join(parts) + "\n"


def _front_matter(base: str, kind: str, objective: str) -> str:
    tags = ["reinforcement-learning", "ftis-node"]
    if objective == F_TIS:
        tags += ["f-tis", f"arxiv:{PAPER}"]
    if kind != "full":
        tags.append("lora")
    relation, library = ("adapter", "peft") if kind == "adapter" else ("finetune", "transformers")
    facts = {
        "base_model": base,
        "base_model_relation": relation,
        "library_name": library,
        "pipeline_tag": "text-generation",
        "tags": tags,
    }
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in facts.items()), "---"])  # JSON is YAML


def _rows(
    checkpoint: Checkpoint, settings: Settings, record: TrainingRecord, task: str, *, base: str, kind: str, dtype: str
) -> Iterator[tuple[str, str]]:
    run = record.run
    yield "base model", ", ".join(filter(None, [base, told_of(Path(resolve(settings.model)))]))
    yield "trained", _trained(settings, kind)
    if checkpoint.quantisation == "nf4":
        yield "trained beside", f"base weights in four bits (NF4); {UNROUNDED}"
    yield "dtype of these weights", dtype
    if run is not None:
        yield "run", run.id.hex()
        yield "task", f"{run.task}; reward `{run.reward}`; sha256 of the data {run.data[:16]}…"
    elif task:
        yield "task", task
    if checkpoint.step is not None:
        yield "steps", f"{checkpoint.step:,}"
    if "own_groups_used" in checkpoint.progress:
        yield "groups trained on", _groups(checkpoint.progress)
    told = _pass_at_1(checkpoint, record)
    if told is not None:
        yield "greedy pass@1, held-out questions", told
    yield from _settings(record, task, lora=checkpoint.lora)
    if run is not None:
        yield "sampling", f"{run.group} completions a prompt, temperature {run.temperature:g}"
    if record.versions:
        yield "trained by", _versions(record.versions)
    yield "exported by", _versions(versions())


def _trained(settings: Settings, kind: str) -> str:
    if kind == "full":
        return "in full"
    targets = ", ".join(sorted({name.rpartition(".")[2] for name in settings.lora_targets}))
    place = "as an adapter" if kind == "adapter" else "merged into the base model"
    return f"LoRA layers on {targets}, rank {settings.lora_rank}, alpha {settings.lora_alpha}; {place}"


def _groups(progress: Mapping[str, Any]) -> str:
    foreign: Mapping[str, int] = progress.get("foreign_groups_used") or {}
    told = f"{progress['own_groups_used']:,} of its own, {sum(foreign.values()):,} foreign"
    if OTHERS in foreign:
        told += f", of at least {len(foreign)} other authors"
    elif foreign:
        told += f", of {counted(len(foreign), 'other author')}"
    return told


def _pass_at_1(checkpoint: Checkpoint, record: TrainingRecord) -> str | None:
    """By the home's log, which has intervals, or by the checkpoint's own facts."""
    if record.evaluations:
        ends = record.evaluations[:1]
        if len(record.evaluations) > 1:
            ends = [*ends, record.evaluations[-1]]
        return "; ".join(f"{_rate(one)} at step {one['step']}" for one in ends)
    before = checkpoint.progress.get("pass_at_1_before")
    now = checkpoint.progress.get("pass_at_1")
    if before is None or now is None:
        return None
    return f"{before:.1%} before; {now:.1%} at step {checkpoint.progress.get('pass_at_1_step', '?')}"


def _rate(evaluation: Mapping[str, Any]) -> str:
    told = f"{evaluation.get('pass_at_1', 0.0):.1%}"
    if evaluation.keys() >= {"low", "high", "prompts"}:
        told += f" (95 %: {evaluation['low']:.1%} to {evaluation['high']:.1%}, n = {evaluation['prompts']})"
    return told


def _settings(record: TrainingRecord, task: str, *, lora: bool) -> Iterator[tuple[str, str]]:
    if not record.settings:
        return
    try:
        settings = recorded(record.settings)
    except ValidationError:  # of another version
        return
    told = {name: record.settings.get(name) for name in (*OBJECTIVE_PARTS, "mask")}  # a mask: of an earlier version
    parts = ", ".join(f"{name} {value}" for name, value in told.items() if value is not None)
    yield "objective", " with ".join(filter(None, [settings.objective, parts]))
    rate = settings.effective_learning_rate(task, lora=lora)
    yield (
        "optimiser",
        f"{settings.optimiser or 'adamw'}, learning rate {rate:g}, {settings.batch_groups} groups a step, weights in "
        f"{settings.dtype or 'float32'}, seed {settings.seed}",
    )


def _prompt(record: TrainingRecord, *, chat: bool, bare: bool) -> list[str]:
    if record.run is None:
        return []
    if chat:
        form = _fenced(message_of(record.run.template, "{question}"))
        return ["The questions were put to it as messages of a user, in its chat template:", form]
    special = ", and `add_special_tokens=False`" if bare else ""
    return [f"The questions were put to it in this form, by `tokenizer(text{special})`:", _fenced(record.run.template)]


def _versions(of: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in of.items())


def _cell(text: object) -> str:
    """Plain text in Markdown, on one line."""
    line = "".join(character if character.isprintable() else "?" for character in str(text))
    return re.sub(r"([|<>\[\]*\\])", r"\\\1", line)


def _fenced(text: str, language: str = "") -> str:
    """As it is: the fence is longer than any in the text, which may be a stranger's template."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"
