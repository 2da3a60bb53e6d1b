"""From what a training left behind back to a policy: a checkpoint's weights in the model they belong to."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ftis_node.config.run import load_run_file
from ftis_node.config.settings import Settings, collect
from ftis_node.errors import UsageError, UserError
from ftis_node.fit.plan import SMALL_MODEL
from ftis_node.policy.load import choose_device, load_policy
from ftis_node.policy.measure import geometry
from ftis_node.policy.policy import Policy
from ftis_node.store.checkpoints import CheckpointError, parse_label, verify
from ftis_node.worker.engine import ALPHA, WEIGHTS

_STEP = re.compile(r"step-(\d{8,})")
_ADAPTER = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_A\.default\.weight")
_NO_CHECKPOINT = "Name a checkpoint (HOME/checkpoints/step-…), a node's home, a model's folder, or a model by its name."


@dataclass(frozen=True)
class Checkpoint:
    """A sound checkpoint: of which model, at which step (None: it does not say), and of which task, if that is known.

    `shapes` are those of the trained tensors; `skipped` are newer checkpoints that are damaged; `progress` is what the
    node had done by then (`Progress.facts`), as far as it says so. `held` are the weights where they cannot be
    removed (see `hold`).
    """

    path: Path
    model: str
    step: int | None
    task: str
    shapes: Mapping[str, tuple[int, ...]]
    alpha: int | None
    skipped: tuple[Path, ...] = ()
    progress: Mapping[str, Any] = field(default_factory=dict)
    held: Path | None = None

    @property
    def weights(self) -> Path:
        """The file with its trained tensors."""
        return self.held or self.path / WEIGHTS

    @property
    def home(self) -> Path | None:
        """The node's home that it lies in, if it lies in one."""
        home = self.path.resolve().parent.parent
        return home if (home / "run.toml").is_file() else None

    @property
    def lora(self) -> bool:
        return any(_ADAPTER.fullmatch(name) for name in self.shapes)

    @property
    def lora_targets(self) -> tuple[str, ...]:
        """The modules that have LoRA layers."""
        return tuple(found["module"] for name in self.shapes if (found := _ADAPTER.fullmatch(name)))

    def lora_settings(self) -> dict[str, int | tuple[str, ...]]:
        """Rank and targets of its LoRA layers, and alpha if it says so."""
        rank = next(shape[0] for name, shape in self.shapes.items() if _ADAPTER.fullmatch(name))
        known = {} if self.alpha is None else {"lora_alpha": self.alpha}
        return {"lora_rank": rank, "lora_targets": self.lora_targets, **known}


def find_checkpoint(name: str) -> Checkpoint | None:
    """The checkpoint that `name` means: a checkpoint's directory, or a home or directory of them, whose newest it is.

    None where `name` means a model. Nothing on disk is changed: a daemon may be at work there.

    Raises:
        UsageError: it is a directory of something else, or there is no such checkpoint.
        UserError: there is none yet, or it is damaged.
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
    directory = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = sorted((d for d in directory.iterdir() if _STEP.fullmatch(d.name)), key=_step, reverse=True)
    for place, candidate in enumerate(found):
        try:
            return _read(candidate, tuple(found[:place]))
        except CheckpointError:
            continue
    if found:
        raise UserError(f"Every checkpoint under {directory} is damaged.", "Name another directory, or the model.")
    if directory != path or (path / "run.toml").exists():
        raise UserError(f"The home {path} has no checkpoint yet.", "Wait for the first step, or name the model itself.")
    raise UsageError(f"The folder {path} holds neither a model nor a checkpoint.", _NO_CHECKPOINT)


@contextmanager
def hold(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """The checkpoint with weights that stay while the context lasts: a running node soon removes older ones.

    Raises:
        UserError: it is gone already.
    """
    try:
        file = checkpoint.weights.open("rb")
    except OSError as error:
        raise gone(checkpoint, error) from error
    with file:  # what is open stays, whoever removes its name
        yield replace(checkpoint, held=Path(f"/proc/self/fd/{file.fileno()}"))


def settings_for(
    checkpoint: Checkpoint | None, model: str, flags: Mapping[str, Any], task: str
) -> tuple[Settings, dict[str, str]]:
    """The settings to load a model, or a checkpoint's model, with, and where each is from.

    Rank and targets of LoRA are read off the checkpoint; alpha is the one it names, else that of the profile of the
    task it was trained on. dtype is bfloat16 for a larger model on a GPU, as in training.

    Args:
        flags: what a person sets, before all else.
        task: whose profile counts where the checkpoint's own is not known.

    Raises:
        UsageError: a setting is unknown or wrong.
    """
    read: dict[str, bool | int | tuple[str, ...]] = {"lora": False}
    if checkpoint is not None:
        task = checkpoint.task or task
        read["lora"] = checkpoint.lora
        if checkpoint.lora:
            read |= checkpoint.lora_settings()
    given = {key: value for key, value in flags.items() if value is not None}
    settings, origins = collect(task=task, flags={**read, **given, "model": model})
    origins |= {key: "checkpoint" for key in read if key not in given}
    if settings.dtype is None and choose_device(settings.device).type == "cuda":
        large = geometry(settings.model).parameters >= SMALL_MODEL
        settings = settings.model_copy(update={"dtype": "bfloat16" if large else "float32"})
    return settings, origins


def load_trained(settings: Settings, checkpoint: Checkpoint | None) -> Policy:
    """The model of the settings, with the weights of the checkpoint in it.

    Raises:
        UsageError: the checkpoint is of another model.
        UserError: weights cannot be found or read.
    """
    policy = load_policy(settings)
    if checkpoint is not None:
        _restore(policy, checkpoint)
    return policy


def _restore(policy: Policy, checkpoint: Checkpoint) -> None:
    trainable = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    wanted = {name: tuple(parameter.shape) for name, parameter in trainable.items()}
    if wanted != checkpoint.shapes:
        odd = sorted(set(wanted.items()) ^ set(checkpoint.shapes.items()))[0][0]
        raise UsageError(
            f"The checkpoint {checkpoint.path} does not fit {policy.name}: they differ in {odd}.",
            "Name the model it was trained from with --model, and leave LoRA's rank and targets to the checkpoint.",
        )
    try:
        with safe_open(checkpoint.weights, "pt") as file, torch.no_grad():
            for name, parameter in trainable.items():  # one at a time: all may be as large as the model
                value: Tensor = file.get_tensor(name)
                parameter.copy_(value)
    except (OSError, SafetensorError) as error:
        raise gone(checkpoint, error) from error


def gone(checkpoint: Checkpoint, error: Exception) -> UserError:
    """What to tell of a checkpoint that was sound a moment ago: a running daemon removes older ones."""
    return UserError(
        f"The checkpoint {checkpoint.path} cannot be read any more: {error}.",
        "Try again: a running node keeps its newest checkpoints only.",
    )


def _read(path: Path, skipped: tuple[Path, ...] = ()) -> Checkpoint:
    """Raises CheckpointError for one that is damaged, and UserError for one that is not of a model."""
    facts = verify(path)
    progress = facts.get("progress")
    step = progress.get("step") if isinstance(progress, dict) else None
    label = parse_label(facts.get("model"))
    try:
        with safe_open(path / WEIGHTS, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            alpha = (file.metadata() or {}).get(ALPHA)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"The weights of the checkpoint {path} cannot be read: {error}") from error
    if label is None:
        raise UserError(f"The checkpoint {path} does not say of which model it is.", _NO_CHECKPOINT)
    return Checkpoint(
        path=path,
        model=label[0],
        step=step if isinstance(step, int) else None,
        task=_task_of(path),
        shapes=shapes,
        alpha=int(alpha) if alpha is not None and alpha.isdecimal() else None,
        skipped=skipped,
        progress=progress if isinstance(progress, dict) else {},
    )


def _task_of(path: Path) -> str:
    """The task of the home that a checkpoint lies in; empty if it lies elsewhere."""
    run_file = path.resolve().parent.parent / "run.toml"
    try:
        return load_run_file(run_file).run.task if run_file.is_file() else ""
    except UsageError:
        return ""


def _step(directory: Path) -> int:
    return int(directory.name.removeprefix("step-"))
