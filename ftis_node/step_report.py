"""The reports of a step: the learner's, and the one that a node writes into `metrics.jsonl`; and what compute processes
tell of their GPU and of their work, and what a node knows of p2pd and of clocks. Imports no torch."""

from typing import Any

import msgspec

from ftis_node.text import duration

SURE_SECONDS = 2.0  # an estimate from less says little

OWN = "own"
"""The source of a node's own samples; other sources are peer ids."""

Figures = dict[str, float]
"""The figures of some samples by name; `objective.diagnostics.Diagnostics.summary` says what each is."""

BETS = (0.9, 0.5, 0.25, 0.12, 0.06, 0.03, 0.01, 0.003)
"""λ of the bets against an author's claims, see `swarm.claims`: the figures `bet_λ` and `chunk_bet_λ` of a source."""


class StepFigures(msgspec.Struct, frozen=True):
    """Figures of a step's samples: of all of them, of those that other nodes made, and of each source.

    A source is a peer id, or `OWN`.
    """

    overall: Figures = {}
    foreign: Figures = {}
    sources: dict[str, Figures] = {}


class DeviceSeconds(msgspec.Struct, frozen=True):
    """Seconds from the end of one step to the end of the next, as the compute process spent them.

    generate, train, evaluate   the compute device had work of this kind
    score                       the node's own text was scored, which is part of `idle`
    idle                        `total` less the three kinds of work
    """

    total: float = 0.0
    generate: float = 0.0
    train: float = 0.0
    evaluate: float = 0.0
    score: float = 0.0
    idle: float = 0.0


class GpuFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU's bytes: in all, used by all processes, in the node's tensors, held by torch. utilization: 0 to 1.
    graphs: whether generation uses CUDA graphs."""

    name: str = ""
    total_bytes: int
    used_bytes: int
    allocated_bytes: int
    reserved_bytes: int = 0
    utilization: float | None = None
    graphs: bool = False


class Health(msgspec.Struct, frozen=True):
    """The health of p2pd. reachability: AutoNAT's finding: unknown, public or private. connections: the open ones of
    both directions."""

    reachability: str = "unknown"
    connections: int = 0
    memory_bytes: int = 0
    cpu_seconds: float = 0.0
    open_files: int = 0


class ClockDifference(msgspec.Struct, frozen=True):
    """The difference between a node's clock and its peers'. behind: seconds that the node is behind their median;
    negative: ahead. peers: the number that sent their time."""

    behind: float
    peers: int


class Doing(msgspec.Struct, frozen=True):
    """What a process is doing now.

    what    a present participle: "generating", "loading the model"
    done    how many are done, `of` so many (None: not known), of `unit`
    tokens  how many were made for it so far
    seconds since it began; left: seconds that the rest will take at this pace, None: not known yet
    """

    what: str
    done: int = 0
    of: int | None = None
    unit: str = ""
    tokens: int = 0
    seconds: float = 0.0
    left: float | None = None

    def sentence(self) -> str:
        """The same for people: "Generating: 12 of 48 completions, 61 tokens a second, about 40 s left"."""
        parts = []
        if self.of is not None:
            parts.append(f"{self.done} of {self.of} {self.unit}")
        if self.tokens and self.seconds > 0:
            parts.append(f"{self.tokens / self.seconds:.0f} tokens a second")
        if self.left is not None and self.seconds > SURE_SECONDS:
            parts.append(f"about {duration(self.left)} left")
        elif not parts:
            parts.append(duration(self.seconds))
        return f"{self.what[:1].upper()}{self.what[1:]}: {', '.join(parts)}"


class Watched(msgspec.Struct, frozen=True):
    """What is seen of a compute process from outside; None: it has no GPU, or does nothing.

    facts: what a new run is made from, see `config.run.run_for`, while the model is loading.
    """

    gpu: GpuFigures | None = None
    doing: Doing | None = None
    facts: dict[str, Any] | None = None


class Generator(msgspec.Struct, frozen=True):
    """A server that samples for this node.

    away      why this node sampled by itself, if it did
    mismatch  root mean square of log π − log μ over own tokens, in nats: of the learner, and as the generator told it
    """

    away: str | None
    mismatch: float | None


class StepReport(msgspec.Struct, frozen=True):
    """The report of one step.

    seconds             the learner's own time
    skipped             why the weights were left as they were, if they were
    bad_steps           how many steps in a row, up to this one, had no finite loss or gradient
    diverged            so many that an older checkpoint should come back
    warnings            what a person should know of a peer's samples, in words
    micro_batch_tokens  the budget that was used in the end
    memory_retries      how often memory was short, so that the gradient was begun anew
    generator           with engine=vllm what the server did
    columns             of extra columns of verdicts since the last step the mean, or the commonest text
    own_data_groups     groups on rows of the owner's own; own_data_reward: their mean reward
    threads             of the CPU, on whose number the order of sums depends
    """

    loss: float
    gradient_norm: float
    tokens: int
    seconds: float
    skipped: str | None = None
    bad_steps: int = 0
    diverged: bool = False
    warnings: list[str] = []
    micro_batch_tokens: int = 0
    memory_retries: int = 0
    generator: Generator | None = None
    columns: dict[str, str | float] = {}
    own_data_groups: int = 0
    own_data_reward: float | None = None
    threads: int | None = None
    diagnostics: StepFigures = StepFigures()
    device: DeviceSeconds = DeviceSeconds()


class Digests(msgspec.Struct, frozen=True):
    """The packets of a batch, sha256 in hex, in the order in which they were trained on."""

    own: list[str]
    foreign: list[str]


class BatchReport(msgspec.Struct, frozen=True):
    """The groups of a step: how many, of which authors (groups by peer id), their mean rewards, their packets."""

    own_groups: int
    foreign_groups: int
    authors: dict[str, int]
    own_reward: float | None
    foreign_reward: float | None
    batch: Digests


class StepSeconds(msgspec.Struct, frozen=True):
    """Seconds of a node's step: generating, waiting for others' groups, training, and from its begin to its end."""

    generate: float
    wait: float
    train: float
    total: float


class TakenStep(msgspec.Struct, frozen=True):
    """A step that a node took.

    foreign_age  seconds, mean over the foreign groups; None without any
    weights      what an author's samples counted in the loss, by peer id, where that was not 1 for all of them
    """

    step: int
    batch: BatchReport
    foreign_age: float | None
    report: StepReport
    seconds: StepSeconds
    weights: dict[str, float] | None = None

    def row(self) -> dict[str, Any]:
        """The fields of its line in `metrics.jsonl`; `seconds` are the node's."""
        row = {"step": self.step, **msgspec.to_builtins(self.batch), "foreign_age": self.foreign_age}
        row |= msgspec.to_builtins(self.report) | {"seconds": msgspec.to_builtins(self.seconds)}
        return row | ({"weights": self.weights} if self.weights is not None else {})
