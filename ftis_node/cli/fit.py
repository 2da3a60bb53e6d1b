"""``ftis-node fit``: what fits on a machine, before anything is downloaded."""

import importlib.util
import math
import shlex
import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from ftis_node.cli.common import JsonOption, TokensOption, note, print_json, waiting
from ftis_node.cli.flags import Given, with_settings
from ftis_node.cli.pace import card_here, card_of, seconds_of, step_seconds_text
from ftis_node.cli.run import GroupOption
from ftis_node.config.run import RUN_DEFAULTS
from ftis_node.config.settings import Settings, collect
from ftis_node.errors import UsageError
from ftis_node.fit.geometry import Geometry
from ftis_node.fit.memory import LEAST_RESERVE, RESERVE, Dtype, Workload
from ftis_node.fit.plan import Plan, plan
from ftis_node.host.processor import cpu_dtype
from ftis_node.installed import to_install
from ftis_node.node.checkpointing import checkpoint_seconds, wear
from ftis_node.tasks.task import CAPS, Task
from ftis_node.text import GB, rounded, say

# The parts of `Memory` as the table names them, and when they are there.
_PARTS = {
    "weights": ("weights", "always"),
    "master": ("fp32 master copy", "always"),
    "optimiser": ("optimiser state", "always"),
    "overhead": ("context, fragmentation, reserve", "always"),
    "gradients": ("gradients", "training"),
    "activations": ("activations kept", "training"),
    "one_layer": ("activations of one layer (backward)", "training"),
    "logits": ("logits", "training, before the backward pass"),
    "update": ("the update", "training, after the backward pass"),
    "kv_cache": ("KV cache", "generating"),
    "sampling": ("drawing, reading prompts", "generating"),
}
# Fields of `Plan` that are settings.
_CHOICES = ("dtype", "quantisation", "optimiser")
_BATCHES = ("gradient_checkpointing", "micro_batch_tokens", "generation_batch")


@with_settings("lora")
def fit(
    *,
    model: Annotated[str, typer.Option(help="A short name (qwen2.5-3b), a hub id, a folder, a GGUF file, or tiny-a.")],
    vram: Annotated[str | None, typer.Option(help="GB to plan for (of several: 24,12); else of this machine.")] = None,
    device: Annotated[Literal["cuda", "cpu"] | None, typer.Option(help="Plan for a GPU, or for the CPU.")] = None,
    given: Given,
    task: Annotated[str, typer.Option(help="gsm8k or arithmetic: it sets the caps in tokens.")] = "gsm8k",
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Longest prompt, instead of the task's.")] = None,
    completion_tokens: TokensOption = None,
    completions: GroupOption = 12,
    json: JsonOption = False,
) -> None:
    """Say whether and how a model can be trained in so much memory. Exit code 1: it cannot.

    Reads the model's configuration and nothing else of it. A GB is 2^30 bytes, as on graphics cards.
    """
    from ftis_node.observe.terminal import shown_work
    from ftis_node.policy.names import resolve

    sizes = _sizes(vram)
    prompt, cap = _caps(task, prompt_tokens, completion_tokens)
    with shown_work():
        resolve(model)  # a wrong name is told before anything heavy is imported; a GGUF file is unpacked
    if device is None:
        device = _device_for(sizes)
    smallest = min(sizes, default=None)  # each device has as much to hold
    devices = _devices(device, len(sizes))
    wished = given.with_values(model=model, device=devices, vram_gb=smallest)
    settings, _ = collect(task=task, flags=wished.values, file=wished.file)
    with waiting(f"Reading the configuration of {model}"):
        from ftis_node.fit.context import refuse_run
        from ftis_node.policy.measure import geometry
        from ftis_node.preflight.place import checkpoint_bytes
        from ftis_node.worker.planning import asked_in_chat, chat_expected, memory_limit, wishes

        total = 0
        if smallest is None:
            total = _present(device)
        budget = memory_limit(settings, total) or total
        shape = geometry(model)
        in_chat = completion_tokens is None and task == "gsm8k" and chat_expected(settings)
    refuse_run(model, shape.context, cap)
    bits = _is_there("bitsandbytes")
    fused = _is_there("liger_kernel")

    dtype: Dtype = "bfloat16"
    if device == "cpu":
        dtype = cpu_dtype()

    def planned(cap: int, *, bits: bool = bits, fused: bool = fused) -> tuple[Settings, Plan]:
        """The plan for completions of so many tokens, where these packages are there."""
        work = Workload(prompt, cap, completions, settings.batch_groups)
        wanted = wishes(settings)
        return settings, plan(shape, budget, work, wanted, device, bits, four_bit=bits, fused=fused, dtype=dtype)

    if in_chat:
        usual = Task.by_rule(task, (), (), "", "integer", (prompt, cap))
        asked, _, chosen = asked_in_chat(usual, shape.context, planned)
        cap = asked.completion_tokens
    else:
        chosen = planned(cap)[1]
    workload = Workload(prompt, cap, completions, settings.batch_groups)
    command = _command(model, chosen, task, devices, smallest, given)
    if smallest is None:
        card = card_here(device, chosen, shape)
    else:
        card = card_of(device, smallest)
    seconds = seconds_of(shape, chosen, workload, settings.eval_prompts, card)
    checkpoint = checkpoint_bytes(chosen, shape)
    minutes = settings.checkpoint_minutes
    if json:
        print_json(_as_json(shape, chosen, checkpoint, minutes) | {"seconds": seconds, "command": command})
    else:
        _print(shape, chosen, device, wear(minutes, checkpoint))
        if seconds is not None:
            say(f"- {step_seconds_text(seconds)}")
        say("")
        if chosen.fits:
            say(f"  {command}")
            if completion_tokens or completions != RUN_DEFAULTS["group"]:
                run = f"ftis-node run new --completion-tokens {cap} --group {completions} …"
                note(f"A run holds these caps: make it by `{run}`, and add --run FILE to the line.")
        better = planned(cap, bits=True, fused=True)[1]
        if device == "cuda" and _command(model, better, task, devices, smallest, given) != command:
            note(f"Another plan is possible with bitsandbytes and liger-kernel: {to_install('ftis-node[gpu]')}.")
    if not chosen.fits:
        sys.exit(1)


def _is_there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _sizes(vram: str | None) -> list[float]:
    """GB of each device."""
    if vram is None:
        return []
    try:
        sizes = [float(size) for size in vram.split(",")]
    except ValueError:
        sizes = [math.nan]
    if not all(math.isfinite(size) and size > 0 for size in sizes):
        raise UsageError(f"--vram {vram} is no size.", "Give the memory in GB, for example --vram 24 or --vram 24,12.")
    return sizes


def _devices(device: str, count: int) -> str:
    """The setting `device` for so many devices of a kind; 0 is this machine's one."""
    if count < 2:
        return device
    if device == "cpu":
        return ",".join(["cpu"] * count)
    return ",".join(f"cuda:{index}" for index in range(count))


def _caps(task: str, prompt_tokens: int | None, completion_tokens: int | None) -> tuple[int, int]:
    """Caps of prompt and completion: as given, else the task's."""
    prompt, completion = CAPS.get(task, (0, 0))
    prompt = prompt_tokens or prompt
    completion = completion_tokens or completion
    if not prompt or not completion:
        raise UsageError(f"The caps of {task!r} are not known here.", "Give --prompt-tokens and --completion-tokens.")
    return prompt, completion


def _device_for(sizes: Sequence[float]) -> Literal["cuda", "cpu"]:
    """The kind of device that a person means who names none: a GPU of the sizes given, else what is here."""
    if sizes:
        return "cuda"
    with waiting("Looking for a GPU"):
        import torch

        if torch.cuda.is_available():
            return "cuda"
    note("There is no GPU here, so this is for the CPU; --vram GB plans for a GPU.")
    return "cpu"


def _present(device: str) -> int:
    """Bytes of this machine's GPU, or of its main memory.

    Raises:
        UsageError: there is no GPU.
    """
    if device == "cpu":
        import psutil

        return int(psutil.virtual_memory().total)
    import torch

    if not torch.cuda.is_available():
        raise UsageError("There is no GPU here to ask for its memory.", "Give --vram GB, or --device cpu.")
    return int(torch.cuda.get_device_properties(0).total_memory)


def _command(model: str, plan: Plan, task: str, devices: str, vram: float | None, given: Given) -> str:
    """The command line that does as planned. given: a person's settings, which it names, too."""
    words = ["ftis-node", "join", "--model", model, "--task", task]
    words.append("--lora" if plan.lora else "--full")
    if plan.devices > 1:
        words += ["--devices", devices]
    elif devices != "cuda":
        words += ["--device", devices]
    if vram is not None:
        words += ["--vram", f"{vram:g}"]
    names = [*_CHOICES, *_BATCHES]
    if plan.devices > 1:
        names.append("sharded")
    if given.file is not None:
        words += ["--settings", str(given.file)]
    settings = {name: value for name, value in given.values.items() if name != "lora"}
    settings |= {name: str(getattr(plan, name)).lower() for name in names}
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join(words)


def _as_json(shape: Geometry, plan: Plan, one: int, minutes: float | None) -> dict[str, Any]:
    """one: bytes of a checkpoint. minutes: the setting."""
    between = checkpoint_seconds(minutes, one)
    sizes = {part: getattr(plan.memory, part) for part in (*_PARTS, "training", "generating", "total")}
    return {
        "model": shape.name,
        "parameters": shape.parameters,
        "budget_gb": round(plan.budget / GB, 3),
        **{name: getattr(plan, name) for name in ("fits", "lora", *_CHOICES, "devices", "sharded", *_BATCHES)},
        "memory": {part: round(size / GB, 3) for part, size in sizes.items()},
        "reasons": list(plan.reasons),
        "checkpoint_gb": round(one / GB, 3),
        "checkpoint_minutes": between / 60,
        "checkpoints_gb_a_day": round(one / GB * 86400 / between, 1) if between else None,  # None: one a step
    }


def _print(shape: Geometry, plan: Plan, device: str, written: str) -> None:
    title = f"{shape.name}: {shape.parameters:,} parameters, {rounded(plan.budget)} of memory"
    if plan.devices > 1:
        title += f" in each of {plan.devices} devices"
    say(title, "")
    for part, (name, phase) in _PARTS.items():
        say(f"  {name:36} {rounded(getattr(plan.memory, part)):>9}  {phase}")
    for phase in ("training", "generating"):
        say(f"  {'in all, ' + phase:36} {rounded(getattr(plan.memory, phase)):>9}")
    fits = "It does not fit"
    if plan.fits:
        fits = "It fits"
    where = {"cuda": "a GPU", "cpu": "the CPU"}[device]
    say("", f"{fits} on {where}.")
    for reason in plan.reasons:
        say(f"- {reason}")
    if device == "cuda":
        kept = f"{RESERVE:.0%} and at least {rounded(LEAST_RESERVE)}, as reserve"
        say(f"- Kept free: {kept}; for a card that draws a screen take `--set vram_share=0.9`.")
    say(f"- On disk: {written}.")
