"""Loading a trained policy: a checkpoint's weights in the model they belong to."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ftis_node.config.run import load_run_file
from ftis_node.config.settings import Settings, collect
from ftis_node.errors import UsageError, UserError
from ftis_node.fit.plan import SMALL_MODEL
from ftis_node.host.doing import doing
from ftis_node.policy.kinds import refuse_folder
from ftis_node.policy.load import choose_device, fastest_dtype, load_policy
from ftis_node.policy.measure import geometry
from ftis_node.policy.policy import Policy
from ftis_node.policy.ready import ready
from ftis_node.store.checkpoints import CheckpointError, parse_label, under, verify
from ftis_node.worker.checkpoint import ALPHA, WEIGHTS

_STEP = re.compile(r"step-(\d{8,})")
_ADAPTER = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_A\.default\.weight")
_NO_CHECKPOINT = "Name a checkpoint (HOME/checkpoints/step-…), a node's home, a model's folder, or a model by its name."


@dataclass(frozen=True)
class Checkpoint:
    """A sound checkpoint with its model, step (None: unknown) and task (empty: unknown).

    shapes: of the trained tensors. skipped: newer checkpoints that are damaged. progress: the node's `Progress.facts`
    at that time, if recorded. quantisation: of the frozen weights beside LoRA layers. held: a path of the weights that
    stays valid after their removal (see `hold`).
    """

    path: Path
    model: str
    step: int | None
    task: str
    shapes: Mapping[str, tuple[int, ...]]
    alpha: int | None
    quantisation: str
    skipped: tuple[Path, ...]
    progress: Mapping[str, Any]
    held: Path | None = None

    @property
    def weights(self) -> Path:
        """The file with the trained tensors."""
        return self.held or self.path / WEIGHTS

    @property
    def home(self) -> Path | None:
        """The node's home that contains it; None outside a home."""
        home = self.path.resolve().parent.parent
        if (home / "run.toml").is_file():
            return home
        return None

    @property
    def lora(self) -> bool:
        return bool(self.lora_targets)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The modules that have LoRA layers."""
        layers = map(_ADAPTER.fullmatch, self.shapes)
        return tuple(layer["module"] for layer in layers if layer is not None)

    def lora_settings(self) -> dict[str, int | tuple[str, ...]]:
        """Rank and targets of its LoRA layers, and alpha if recorded."""
        rank = next(shape[0] for name, shape in self.shapes.items() if _ADAPTER.fullmatch(name))
        known = {} if self.alpha is None else {"lora_alpha": self.alpha}
        return {"lora_rank": rank, "lora_targets": self.lora_targets, **known}


def find_checkpoint(name: str) -> Checkpoint | None:
    """Find the checkpoint that `name` means: a checkpoint's directory, or the newest of a home or directory of them.

    None if `name` means a model. This changes nothing on disk, because a daemon may be running there.

    Raises:
        UsageError: `name` is a directory of something else, or there is no such checkpoint.
        UserError: there is no checkpoint yet, or it is damaged.
    """
    path = Path(name).expanduser()
    if _STEP.fullmatch(path.name) and not path.is_dir():
        raise UsageError(f"There is no checkpoint {path}.", _NO_CHECKPOINT)
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    if (path / "checkpoint.json").is_file() or _STEP.match(path.name):
        try:
            return _read(path)
        except CheckpointError as error:
            raise UserError(str(error), "Name another checkpoint, or the home, for its newest sound one.") from error
    found = under(path)[::-1]
    for place, candidate in enumerate(found):
        try:
            return _read(candidate, tuple(found[:place]))
        except CheckpointError:
            continue
    if found:
        raise UserError(f"Every checkpoint under {path} is damaged.", "Name another directory, or the model.")
    try:
        refuse_folder(path, str(path))
    except UsageError as error:
        raise UsageError(f"{error.what} Nor has it a checkpoint.", f"{error.fix} {_NO_CHECKPOINT}") from None
    return None


@contextmanager
def hold(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Keep a checkpoint's weights readable within the context, although a running node removes older checkpoints.

    Raises:
        UserError: the checkpoint is gone already.
    """
    try:
        file = checkpoint.weights.open("rb")
    except OSError as error:
        raise gone(checkpoint, error) from error
    with file:  # an open file stays readable after its removal
        yield replace(checkpoint, held=Path(f"/proc/self/fd/{file.fileno()}"))


def settings_for(
    checkpoint: Checkpoint | None,
    model: str,
    flags: Mapping[str, Any],
    task: str,
) -> tuple[Settings, dict[str, str]]:
    """The settings for loading a model, or a checkpoint's model, and the origin of each.

    Rank and targets of LoRA come from the checkpoint, and so does alpha if recorded. Otherwise alpha comes from the
    profile of the task it was trained on. A larger model has the dtype that the device multiplies fastest, as in
    training.

    Args:
        flags: a person's settings; they take precedence.
        task: the task whose profile counts if the checkpoint's own is not known.

    Raises:
        UsageError: a setting is unknown or wrong.
    """
    read: dict[str, bool | int | str | tuple[str, ...]] = {"lora": False}
    if checkpoint is not None:
        task = checkpoint.task or task
        read["lora"] = checkpoint.lora
        if checkpoint.lora:
            read |= checkpoint.lora_settings()
            read["quantisation"] = checkpoint.quantisation
    given = {key: value for key, value in flags.items() if value is not None}
    settings, origins = collect(task=task, flags={**read, **given, "model": model})
    origins |= {key: "checkpoint" for key in read if key not in given}
    if settings.dtype is None and geometry(settings.model).parameters >= SMALL_MODEL:
        device = choose_device(settings.devices[0])
        settings = settings.model_copy(update={"dtype": fastest_dtype(device)})
    return settings, origins


def load_trained(settings: Settings, checkpoint: Checkpoint | None) -> Policy:
    """Load the settings' model with the checkpoint's weights, to generate with it.

    Raises:
        UsageError: the checkpoint is of another model.
        UserError: weights cannot be found or read.
    """
    policy = load_policy(settings, texts=None)
    with doing("checking the fast paths"):
        policy = ready(policy, trains=False)
    if checkpoint is not None:
        restore(policy, checkpoint)
    return policy


def restore(policy: Policy, checkpoint: Checkpoint) -> None:
    """Give a policy the checkpoint's weights. Raises as `load_trained` does."""
    trainable = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    wanted = {name: tuple(parameter.shape) for name, parameter in trainable.items()}
    if wanted != checkpoint.shapes:
        unlike = set(wanted.items()) ^ set(checkpoint.shapes.items())
        odd = min(unlike)[0]
        raise UsageError(
            f"The checkpoint {checkpoint.path} does not fit {policy.name}: they differ in {odd}.",
            "Name the model it was trained from with --model, and leave LoRA's rank and targets to the checkpoint.",
        )
    try:
        with safe_open(checkpoint.weights, "pt") as file, torch.no_grad():
            for name, parameter in trainable.items():  # one at a time: all may be as large as the model
                parameter.copy_(file.get_tensor(name))
    except (OSError, SafetensorError) as error:
        raise gone(checkpoint, error) from error


def gone(checkpoint: Checkpoint, error: Exception) -> UserError:
    """The error for a checkpoint that was sound a moment ago, because a running daemon removes older ones."""
    return UserError(
        f"The checkpoint {checkpoint.path} cannot be read any more: {error}.",
        "Try again: a running node keeps its newest checkpoints only.",
    )


def _read(path: Path, skipped: tuple[Path, ...] = ()) -> Checkpoint:
    """Read a checkpoint. Raises CheckpointError if it is damaged, and UserError if it names no model."""
    facts = verify(path)
    progress = facts.get("progress")
    if not isinstance(progress, dict):
        progress = {}
    step = progress.get("step")
    if not isinstance(step, int):
        step = None
    quantisation = "none"
    if facts.get("quantisation") == "nf4":
        quantisation = "nf4"
    label = parse_label(facts.get("model"))
    try:
        with safe_open(path / WEIGHTS, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            noted = (file.metadata() or {}).get(ALPHA, "")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The weights of the checkpoint {path} cannot be read: {error}") from error
    if label is None:
        raise UserError(f"The checkpoint {path} does not say of which model it is.", _NO_CHECKPOINT)
    alpha = None
    if noted.isdecimal():
        alpha = int(noted)
    return Checkpoint(
        path=path,
        model=label[0],
        step=step,
        task=_task_of(path),
        shapes=shapes,
        alpha=alpha,
        quantisation=quantisation,
        skipped=skipped,
        progress=progress,
    )


def _task_of(path: Path) -> str:
    """The task of the home that contains a checkpoint; empty outside a home."""
    run_file = path.resolve().parent.parent / "run.toml"
    try:
        if run_file.is_file():
            return load_run_file(run_file).run.task
        return ""
    except UsageError:
        return ""
