"""The node's own business: model, optimiser, objective, hardware and network, in layers.

defaults < task profile < home (its earlier flags) < file < environment (``FTIS_WAIT=…``) < flags.
Nothing here is shared with peers; what they must agree on is the run (`config.run`). `docs/settings.md` is made from
this class.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from ftis_node.config.consistency import check
from ftis_node.config.hours import read_hours
from ftis_node.config.profiles import TASKS
from ftis_node.config.reading import read_toml
from ftis_node.errors import UsageError, UserError, did_you_mean, raise_all
from ftis_node.methods.choices import PART_LIMITS, PART_NAMES
from ftis_node.methods.removed import refusals

ENVIRONMENT_PREFIX = "FTIS_"
HOME_VARIABLE = "FTIS_HOME"  # has the prefix and is no setting; any other such name is taken for a misspelt one


@dataclass(frozen=True)
class Flag:
    """A setting's own flag of `join`, beside --set; its help is the setting's text. spelling: where it is not the
    setting's name with dashes; several are separated by a space."""

    spelling: str = ""


_Beta = Annotated[float, Field(ge=0, lt=1)]


class Settings(BaseModel):
    """Everything that a node decides for itself.

    The text below each setting says what it does, its unit first in brackets. A `Flag` makes it an option of `join`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    GROUPS: ClassVar[Mapping[str, str]] = {
        "model": "The model",
        "objective": "The objective",
        "learning_rate": "The step",
        "defences": "Samples that look wrong",
        "eval_every": "Evaluation",
        "host": "The network",
        "hours": "The machine",
        "self_report": "What it shows",
    }
    """The groups of the settings, by the first setting of each."""

    model: Annotated[str, Flag()] = "tiny-a"
    """A short name (qwen2.5-3b), a hub id, a folder, a GGUF file, or tiny-a, -b, -c."""
    lora: Annotated[bool | None, Flag("--lora/--full")] = None
    """Train LoRA layers only (true) or everything (false). Default: what fits; on a CPU LoRA, but for tiny models."""
    lora_rank: int = Field(128, ge=1)
    """Rank of the LoRA layers."""
    lora_alpha: int = Field(256, ge=1)
    """LoRA layers are scaled by alpha / rank."""
    lora_targets: tuple[str, ...] = ("q_proj", "v_proj")
    """Linear modules that get LoRA layers, or `all-linear`: every one but the output head."""
    device: Annotated[str, Flag("--device --devices")] = "auto"
    """cpu, cuda, cuda:1, …, or auto: a GPU if there is one. Several train one model together: cuda:0,cuda:1."""
    sharded: bool | None = None
    """Each of several devices keeps a part of the layers' weights and of their state: full training beyond one card.
    Default: where it does not fit otherwise."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the weights. Default: float32; of a larger model bfloat16, but on a GPU before Ampere float16, on a
    CPU that emulates bfloat16 float32."""
    quantisation: Literal["none", "nf4"] | None = None
    """nf4 holds frozen weights in four bits, beside LoRA layers; needs bitsandbytes. Default: on a GPU, if LoRA would
    not fit or crawl otherwise."""
    vram_gb: Annotated[float | None, Flag("--vram")] = Field(None, gt=0, allow_inf_nan=False)
    """[GB] Memory of the GPU that the node may use (on a CPU main memory). Default: what is free at the start."""
    vram_share: float | None = Field(None, gt=0, le=1)
    """In place of vram_gb: a share of all memory there is, and no more than is free."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of keeping them. Default: if it does not fit otherwise."""
    micro_batch_tokens: int | None = Field(None, ge=64)
    """[tokens] Size of a micro-batch. Default: what fits."""
    generation_batch: int | None = Field(None, ge=1)
    """[completions] Number generated side by side. Default: what fits."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Whether questions are messages in the model's own chat template (always), or plain text (never); auto: a chat for
    instruct models. A run of one tokenizer decides it for all."""
    thinking: bool = False
    """Value of a chat template's switch `enable_thinking`. Models that think need long completions."""
    engine: Literal["native", "vllm"] = "native"
    """Engine that generates: this node's own loop; or a vLLM server of yours (vllm, LoRA only), while it answers."""
    vllm_url: str = "http://127.0.0.1:8000"
    """Address of the vLLM server. Off this machine it needs a key, which this node takes from VLLM_API_KEY."""
    vllm_folder: str | None = None
    """Folder of this node alone in which the vLLM server finds its weights. Default: vllm in the home."""
    seed: Annotated[int, Flag()] = Field(0, ge=0, lt=1 << 63)
    """Seed of sampling and of the LoRA layers' first values."""

    objective: Annotated[str, Flag()] = "ftis"
    """The loss: a preset. Other settings replace parts of it."""
    advantage: str | None = None
    """How rewards of a group become advantages. Default of this and all further parts: the preset's, or the task's."""
    divergence: str | None = None
    """The filter's estimate of the divergence between generator and learner."""
    reduction: str | None = None
    """How tokens' divergences become a sample's."""
    threshold: float | Literal["none"] | None = None
    """Samples without advantage and with at least this divergence are dropped; none: no filter. In nats, but
    of k3_reverse (the default), which has no unit."""
    gate: float | Literal["none"] | None = None
    """Foreign successes below this quantile of the own successes' likelihood are dropped; 0: below their least."""
    importance: str | None = None
    """How ρ, a token's importance ratio, weighs: not, with its gradient, or as min(ρ, C)."""
    truncation: float | None = None
    """Upper limit of truncated importance ratios."""
    epsilon: float | Literal["none"] | None = None
    """ε of the clip; none: no clip."""
    ratio: str | None = None
    """The ratio of policies: a token's, the sample's geometric mean (sequence), or a weight beside log π (detached)."""
    aggregation: str | None = None
    """Divisor of a sample's terms: its tokens, the batch's tokens, or the run's cap on a completion (fixed)."""
    inner_steps: int | None = None
    """[steps] Optimiser steps on each batch."""

    learning_rate: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Default: the task's, for tiny-a, -b, -c arithmetic's; else 1e-6 for full training, 1e-4 for LoRA."""
    warmup_steps: int = Field(5, ge=0)
    """[updates] The learning rate rises to its value within so many; steps without a signal make none."""
    optimiser: Literal["adamw", "adamw8bit"] | None = None
    """adamw8bit needs bitsandbytes; on a CPU it is slow. Default: what fits."""
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)
    """The two betas of AdamW."""
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Weight decay of AdamW."""
    gradient_clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    """Largest norm of a gradient; a longer one is scaled down to it."""
    batch_groups: int = Field(24, ge=1, le=4096)
    """[groups] Size of a step's batch, own and foreign. A group is a prompt with all its completions."""
    own_share: Annotated[float | None, Flag()] = Field(None, ge=0, le=1)
    """Part of each batch that is generated here; 0 only listens. Default: 1/n among n nodes, at least a quarter."""
    own_data_share: float = Field(0.25, gt=0, le=0.9, allow_inf_nan=False)
    """Part of each batch on rows of --own-data, if there are any."""
    wait: float = Field(10.0, ge=0)
    """[s] Longest wait for others' groups at each step; never longer than making them here would take."""
    steps: Annotated[int | None, Flag()] = Field(None, ge=1)
    """[steps] The node ends after so many in all. Default: never."""

    # Defences: against authors see `swarm.reputation`, against their samples `learner.trust`
    defences: tuple[Literal["claims", "newcomers", "likelihood", "length"], ...] = ("claims", "newcomers")
    """Checks on authors (claims, newcomers) and on samples (likelihood, length)."""

    eval_every: int = Field(5, ge=1)
    """[steps] Distance of two evaluations."""
    eval_prompts: int = Field(256, ge=1)
    """[prompts] Most held-out prompts of an evaluation."""

    host: Annotated[str, Flag()] = "0.0.0.0"
    """The IP address to listen on for peers; 0.0.0.0: on all, of IPv6 too."""
    port: Annotated[int, Flag()] = Field(0, ge=0, le=65535)
    """TCP and UDP port to listen on for peers; 0: any that is free."""
    quic: bool = True
    """Listen on QUIC beside TCP."""
    listen: bool = True
    """Let peers dial this node. Off: it only dials."""
    announce: Annotated[tuple[str, ...], Flag()] = ()
    """Addresses (/ip4/…/tcp/…) to announce in place of those that the node sees itself."""
    relays: Annotated[tuple[str, ...], Flag("--relay")] = ()
    """Nodes (/ip4/…/tcp/…/p2p/…) to be reached through if nobody can dial this one."""
    lan: Annotated[bool, Flag()] = False
    """Find nodes of the run on the local network by mDNS, and announce this one there; of a private run to members."""
    relay_for_others: bool = False
    """Pass on what others send to nodes that nobody can dial, beside upload_mbit: for 16 nodes, 4 circuits each of 256
    MiB and 30 minutes. The rate has no limit."""
    upload_mbit: Annotated[float, Flag("--upload")] = Field(20.0, ge=0, allow_inf_nan=False)
    """[Mbit/s] Limit of the payload that this node sends to peers; 0: none."""
    min_peers: int = Field(0, ge=0, le=64)
    """[peers] The first step waits for so many."""
    patience: float = Field(20.0, ge=0)
    """[s] How long a first start asks peers for the run; half an hour while one of them loads its model."""
    max_age: float = Field(600.0, gt=0)
    """[s] Age at which announcements and foreign groups expire. What a slow node has pulled waits for three of its own
    steps, at most an hour."""
    packet_quota_mb: int = Field(1024, ge=1)
    """[MB] Limit of packets on disk; the oldest go first."""

    hours: Annotated[str, Flag()] = ""
    """Local hours in which the node trains, else it pauses: 22-07, 22:30-06:15, or mon-fri 19-07,sat-sun. Default:
    always."""
    idle_only: Annotated[bool, Flag("--idle-only/--always")] = False
    """Pause while the machine runs on its battery, and while another program uses this node's GPU."""
    nice: Annotated[int, Flag()] = Field(0, ge=0, le=19)
    """Scheduling priority of the compute process; at 19 it gives way to everything else. Peers are answered at once."""
    disk_gb: float | None = Field(None, gt=0, allow_inf_nan=False)
    """[GB] Limit of checkpoints, packets and logs; damaged checkpoints come on top. Default: none."""
    checkpoint_minutes: float | None = Field(None, ge=0, allow_inf_nan=False)
    """[min] Time between checkpoints; a kill costs that and two steps at most. 0: after every step. Default: 5; for
    large ones up to 60, so that at most 10 GB an hour are written."""

    self_report: Literal["always", "private", "never"] = "always"
    """Report to the swarm once a minute: model, tokenizer, step, pass@1, groups, traffic, authors learned from, and
    --name if there is one. private: in private runs only."""
    track: Annotated[
        Literal["none", "trackio", "wandb", "tensorboard"],
        Flag(),
    ] = "none"
    """Write curves for one of these trackers into the home's folder `track`; docs/metrics.md lists the figures."""
    page: bool = True
    """Serve a page about this node, and its metrics."""
    http_host: str = "127.0.0.1"
    """Address or name at which page and metrics are served. The page needs its token, the metrics nothing."""
    http_port: int = Field(0, ge=0, le=65535)
    """TCP port of page and metrics; 0: any that is free."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least important messages in the log."""
    log_format: Annotated[Literal["text", "json"], Flag()] = "text"
    """Log lines for people (text), or one JSON object each for programs."""

    @field_validator("lora_targets", "announce", "relays", "defences", "betas", mode="before")
    @classmethod
    def _comma_list(cls, value: Any) -> Any:
        """Values as the command line and the environment write them: with commas between."""
        if not isinstance(value, str):
            return value
        return tuple(part for part in map(str.strip, value.split(",")) if part)

    @field_validator("hours")
    @classmethod
    def _readable(cls, value: str) -> str:
        read_hours(value)
        return value

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of all devices."""
        return tuple(self.device.split(","))

    def effective_learning_rate(self, task: str, *, lora: bool) -> float:
        """The learning rate: a person's, else the task's, else the paper's: 1e-6 for full training, 1e-4 for LoRA. The
        built-in models, of a few hundred kilobytes, have that of the built-in task everywhere."""
        if self.learning_rate is not None:
            return self.learning_rate
        if re.fullmatch("tiny-(a|b|c|bpe|chars|numbers)", self.model):
            task = "arithmetic"
        full_rate = 1e-6
        lora_rate = 1e-4
        if task in TASKS:
            full_rate = TASKS[task].learning_rate
            lora_rate = TASKS[task].lora_learning_rate
        if lora:
            return lora_rate
        return full_rate

    def tells_of_itself(self, *, private: bool) -> bool:
        """Whether the node sends self-reports in such a run."""
        return self.self_report == "always" or (private and self.self_report == "private")

    def objective_parts(self, task: str, *, filters: bool) -> dict[str, object]:
        """The parts of the objective that a person or the task chose, by name; "none" has become None where it says so.

        Args:
            task: whose own constants of the filter stand in for a preset's, if that one filters as the paper does.
            filters: whether it does.
        """
        parts: dict[str, object] = {}
        if filters and task in TASKS:
            parts |= TASKS[task].filter
        for name in OBJECTIVE_PARTS:
            value = getattr(self, name)
            if value is not None:
                parts[name] = value
            if value == "none" and name in _NONE_MEANS_OFF:
                parts[name] = None
        return parts


def group_of(name: str) -> str:
    """The group of a setting, as `GROUPS` divides them."""
    group = ""
    for one in Settings.model_fields:
        group = Settings.GROUPS.get(one, group)
        if one == name:
            break
    return group


FLAGS: Mapping[str, Flag] = {
    name: one for name, field in Settings.model_fields.items() for one in field.metadata if isinstance(one, Flag)
}
"""The flags of `join` that give a setting, by its name."""

OBJECTIVE_PARTS = tuple(name for name in (*PART_NAMES, *PART_LIMITS) if name in Settings.model_fields)
"""The settings that replace parts of an objective."""

LIVE_CONSTANTS = ("threshold", "gate", "truncation", "epsilon")
LIVE = (
    "own_share",
    "own_data_share",
    "wait",
    "steps",
    "eval_every",
    "upload_mbit",
    "checkpoint_minutes",
    "self_report",
    "page",
    "log_level",
    "hours",
    "idle_only",
    *LIVE_CONSTANTS,
)
"""The settings that a running node can change; the constants of its objective count from the next step."""

_NONE_MEANS_OFF = ("threshold", "gate", "epsilon")  # `none` is an importance like others

RETIRED: Mapping[str, object] = {
    **dict.fromkeys(("cuda_graphs", "cudnn_attention", "eval_share", "exchange_peers"), ...),
    **dict.fromkeys(("stall_seconds", "vllm_folder_there", "mask", "profile"), ...),
    **dict.fromkeys(("by_need", "dead_groups", "foreign", "needed_age"), ...),  # a log names the groups of each step
    **dict.fromkeys(("count_dropped", "count_end", "divisor", "epsilon_high", "floor")),
    **dict.fromkeys(("imitation", "mask_high", "mask_low", "trust")),
    "author_weight": "equal",
}
"""Settings of earlier versions, which do nothing where a home keeps them. A training in logs can be taken again if it
had the value here, which is what holds now; …: any will do."""

# Two ways to say one thing. A home's gives way to what is said now; two that are said are a mistake.
_INSTEAD = {"vram_gb": "vram_share", "vram_share": "vram_gb"}

HOME = "home"
"""The origin of what a home keeps."""


class Layers:
    """Values collected layer by layer; later layers win, and every value remembers where it came from."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.origins: dict[str, str] = {name: "default" for name in Settings.model_fields}
        self._unknown: list[UserError] = []

    def add(self, origin: str, values: Mapping[str, Any]) -> None:
        """Add a layer; keys with value None are taken as not given, unknown ones are reported when it is settled."""
        for key, value in values.items():
            if key not in Settings.model_fields:
                unknown = UsageError(f"Unknown setting {key!r} in {origin}.", _nearest(key))
                self._unknown.append(next(refusals({key: value}, origin), unknown))
            elif value is not None:
                self.values[key] = value
                self.origins[key] = origin
                other = _INSTEAD.get(key, "")
                if self.origins.get(other) == HOME:
                    del self.values[other]
                    self.origins[other] = "default"

    def settle(self) -> Settings:
        """The settings that the layers add up to.

        Raises:
            UsageError: a key is unknown (the message names the nearest one), a value is of the wrong type or out of its
            range, or two contradict each other. The message names their origins.
        """
        try:
            settings = Settings(**self.values)
        except ValidationError as error:
            by_place: dict[tuple[str | int, ...], list[ErrorDetails]] = {}  # key, and which of a list's values
            for found in error.errors():  # one for each form that a value may have
                key, *within = found["loc"]
                by_place.setdefault((key, *(part for part in within if isinstance(part, int))), []).append(found)
            raise_all([*self._unknown, *(self._wrong(str(place[0]), forms) for place, forms in by_place.items())])
            raise
        raise_all(self._unknown)
        check(settings.model_dump(), self.origins)
        return settings

    def _wrong(self, key: str, forms: Sequence[ErrorDetails]) -> UsageError:
        message = ", or: ".join(found["msg"].removeprefix("Value error, ") for found in forms)
        choices = re.findall(r"'([^']+)'", " ".join(found.get("ctx", {}).get("expected", "") for found in forms))
        given = forms[0]["input"]
        what = f"Setting {key!r} from {self.origins[key]} is wrong: {message} (got {given!r})."
        leave = "leave it out for its default"
        if self.origins[key] == HOME:
            leave = f"make this home forget it with --set {key}=default"
        return UsageError(what, f"{did_you_mean(str(given), choices)}Give {key!r} a valid value, or {leave}.")


def collect(
    *,
    task: str,
    flags: Mapping[str, Any],
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    home: Mapping[str, Any] | None = None,
) -> tuple[Settings, dict[str, str]]:
    """Settle all layers; return the settings and the origin of each.

    Args:
        task: name of the task, whose profile (if it has one) is the layer above the defaults.
        flags: values from the command line, None where a flag was not given.
        file: a TOML file of settings.
        environment: by default the process's own.
        home: values of earlier command lines, which the home keeps.

    Raises:
        UsageError: unknown keys, wrong or contradictory values, or a file that cannot be read.
    """
    kept = {name: value for name, value in (home or {}).items() if name not in RETIRED}
    given = [(HOME, kept)]
    if file is not None:
        given.append((f"file {file}", read_toml(file, "settings file")))
    given += _from_environment(os.environ if environment is None else environment)
    given.append(("flags", dict(flags)))
    layers = Layers()
    if task in TASKS:
        layers.add(f"task {task}", TASKS[task].settings)
    for origin, values in given:
        layers.add(origin, values)
    return layers.settle(), layers.origins


def recorded(values: Mapping[str, Any]) -> Settings:
    """The settings that this version or an earlier one has recorded.

    Raises:
        ValidationError: one is unknown, or is none any more and had a value that holds no more.
    """
    known = {}
    for name, value in values.items():
        holds_still = name in RETIRED and RETIRED[name] in (..., value)
        if not holds_still and (name, value) != ("engine", "hf"):  # which sampled as the default does
            known[name] = value
    return Settings(**known)


def changed(settings: Settings, values: Mapping[str, str], first: Settings) -> Settings:
    """The settings of a running node with other values, as text; `default`: the value in `first`, of its start.

    Raises:
        UsageError: a setting is unknown, cannot be changed while the node runs, or has no such value.
    """
    layers = Layers()
    layers.add("default or start", settings.model_dump())
    layers.add("set", {name: None if text == "default" else text for name, text in values.items()})
    for name, text in values.items():
        if name in Settings.model_fields and name not in LIVE:
            raise UsageError(
                f"{name} cannot be changed while the node runs.",
                f"Stop the node and start it with --set {name}=…; these can be changed: {', '.join(LIVE)}.",
            )
        if text == "default" and name in LIVE:
            layers.values[name] = getattr(first, name)
    return layers.settle()


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[str, dict[str, object]]]:
    """`FTIS_WAIT=3` sets `wait`. Yield a layer for each variable, so that each is named as where its value came from.

    Raises:
        UsageError: a name has the prefix but is neither a setting nor `HOME_VARIABLE`.
    """
    for name, text in environment.items():
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if key in Settings.model_fields or key in RETIRED:
            yield f"environment {name}", {key: text}  # as it is: pydantic reads numbers from text
        elif name != HOME_VARIABLE:
            known = [HOME_VARIABLE, *(ENVIRONMENT_PREFIX + field.upper() for field in Settings.model_fields)]
            raise UsageError(f"The variable {name} is no setting.", f"{did_you_mean(name, known)}Unset it or mend it.")


def _nearest(key: str) -> str:
    from ftis_node.config.run import Run

    if key in Run.model_fields:
        return (
            "It is the run's, and the same on all its nodes: `ftis-node run new` writes it into the file of a new run."
        )
    close = did_you_mean(key, Settings.model_fields).rstrip()
    return close or "`ftis-node config show` lists all."
