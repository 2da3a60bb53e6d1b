"""The weights of a checkpoint in the formats of transformers and peft, with tokenizer, generation config and card."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError
from ftis_node.export.appearing import appearing
from ftis_node.export.card import card
from ftis_node.export.record import TrainingRecord, record_of
from ftis_node.host.doing import doing
from ftis_node.policy.adapters import Conv1D, LoraConfig, inputs_and_outputs, linear_modules
from ftis_node.policy.load import load_policy, load_tokenizer, own_attention, unloadable, where_to_look
from ftis_node.policy.names import public_name, resolve
from ftis_node.tokenizer.asking import end_ids
from ftis_node.tokenizer.declared import front_ids
from ftis_node.worker.formats import asked_in
from ftis_node.worker.restore import Checkpoint, gone, restore

SHARD_BYTES = 4 << 30
_ADAPTER = "adapter_model.safetensors"
_NARROW = (torch.bfloat16, torch.float16)
_OURS = ("config.json", "adapter_config.json")  # one of them is in every folder of a model
# What transformers, peft and the hub put into such a folder.
_SUFFIXES = frozenset((".safetensors", ".json", ".jinja", ".md", ".txt", ".model", ".bin"))
_ANOTHER = "Name another --to."


class Exported(msgspec.Struct, frozen=True):
    """A folder that was written: the object of `export --json`.

    kind         `full`, `merged` (LoRA layers in it) or `adapter`
    dtype        as torch names it; bytes: of all files; files: bytes of each
    """

    to: str
    kind: str
    checkpoint: str
    step: int | None
    base_model: str
    dtype: str
    lora_alpha: int | None
    bytes: int
    files: dict[str, int]


def export(
    checkpoint: Checkpoint,
    settings: Settings,
    to: Path,
    *,
    adapter: bool = False,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write the folder `to`, whole or not at all, and return what is in it.

    Args:
        settings: as `trained.settings_for` gives them. Without a dtype an adapter keeps the checkpoint's, and a model
        the one that it was trained in. Where that is not known, it is fp32 after full training and the base model's
        after LoRA.
        adapter: the LoRA layers alone, for peft; else the whole model.
        overwrite: replaces a model that lies at `to`.
        shard_bytes: no file of weights is larger, unless one tensor is.

    Raises:
        UsageError: the checkpoint has no LoRA layers, is of another model, or `to` must not be written.
        UserError: weights cannot be read, or the folder cannot be written.
    """
    kind = kind_of(checkpoint, adapter=adapter)
    check_target(to, overwrite=overwrite, source=checkpoint.path, base=Path(resolve(settings.model)))
    record = record_of(checkpoint)
    base = public_name(settings.model)
    with appearing(to, "Make room, or name another --to.") as folder:
        folder.mkdir()
        if adapter:
            dtype = _write_adapter(folder, checkpoint, settings, base)
        else:
            dtype = _write_model(folder, checkpoint, settings, record, shard_bytes)
        tokenizer = load_tokenizer(settings.model)
        tokenizer.save_pretrained(folder)
        run = record.run
        ends = end_ids(tokenizer)
        in_chat = bare = False
        if run is not None:
            asked = settings.model_copy(update=record.asked())
            chat, prefix, ends = asked_in(run, tokenizer, run.template, asked)
            in_chat = chat is not None
            bare = bool(front_ids(tokenizer)) and prefix == ()
        _generation(settings.model, ends).save_pretrained(folder)
        text = card(checkpoint, settings, record, base=base, kind=kind, dtype=dtype, chat=in_chat, bare=bare)
        (folder / "README.md").write_text(text, encoding="utf-8")
        _open_to_others(folder)
        files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    return exported(checkpoint, settings, to, base, kind, dtype, files)


def exported(
    checkpoint: Checkpoint, settings: Settings, to: Path, base: str, kind: str, dtype: str, files: dict[str, int]
) -> Exported:
    """Return the report of an export. files: the names of what was written, with their bytes."""
    return Exported(
        to=str(to),
        kind=kind,
        checkpoint=str(checkpoint.path),
        step=checkpoint.step,
        base_model=base,
        dtype=dtype,
        lora_alpha=settings.lora_alpha if checkpoint.lora else None,
        bytes=sum(files.values()),
        files=files,
    )


def kind_of(checkpoint: Checkpoint, *, adapter: bool) -> str:
    """The kind of `Exported`. Raises UsageError where there are no LoRA layers to make an adapter of."""
    if adapter and not checkpoint.lora:
        raise UsageError(f"{checkpoint.path} was trained in full: there is no adapter.", "Leave out --adapter.")
    if adapter:
        return "adapter"
    return "merged" if checkpoint.lora else "full"


def _write_model(
    folder: Path, checkpoint: Checkpoint, settings: Settings, record: TrainingRecord, shard_bytes: int
) -> str:
    model, dtype = merged(checkpoint, settings, record)
    model.set_attn_implementation(own_attention(model.config))  # not the package's own, which nobody else has
    model.config._name_or_path = ""
    model.generation_config = GenerationConfig()  # some that transformers loads it refuses to save; `export` writes it
    with doing("writing the weights"):
        model.save_pretrained(folder, max_shard_size=shard_bytes)
    return dtype


def merged(checkpoint: Checkpoint, settings: Settings, record: TrainingRecord) -> tuple[Any, str]:
    """The model of transformers with what was trained in it, and its dtype.

    Raises:
        UserError: weights cannot be read, or merged.
    """
    dtype = settings.dtype or record.settings.get("dtype") or _unknown_dtype(checkpoint, settings.model)
    # LoRA layers are added to the base model's own weights, not to those of four bits.
    policy = load_policy(settings.model_copy(update={"dtype": dtype, "quantisation": "none"}), texts=None)
    restore(policy, checkpoint)
    model: Any = policy.model
    if checkpoint.lora:
        try:
            with doing("merging the LoRA layers"):
                model = model.merge_and_unload(safe_merge=True)
        except ValueError as error:
            raise UserError(f"{checkpoint.path} cannot be merged: {error}.", "Use an earlier checkpoint.") from error
    return model, str(policy.dtype).removeprefix("torch.")


def _unknown_dtype(checkpoint: Checkpoint, model: str) -> str:
    return "bfloat16" if checkpoint.lora and config_of(model).dtype in _NARROW else "float32"


def _write_adapter(folder: Path, checkpoint: Checkpoint, settings: Settings, base: str) -> str:
    """The LoRA layers; of the base model only its shapes are looked at."""
    targets, transposed = targets_of(checkpoint, settings.model, config_of(settings.model))
    tensors = {}
    for name in checkpoint.shapes:
        value = stored(checkpoint, name)
        if settings.dtype:
            value = value.to(getattr(torch, settings.dtype))
        tensors[name.replace(".default.", ".")] = value  # the name that peft saves it by
    save_file(tensors, folder / _ADAPTER, metadata={"format": "pt"})
    lora = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=targets,
        lora_dropout=0.0,
        fan_in_fan_out=transposed,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        inference_mode=True,
    )
    lora.save_pretrained(folder)
    return str(next(iter(tensors.values())).dtype).removeprefix("torch.")


def stored(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor of the checkpoint's weights. Raises UserError where it cannot be read."""
    try:
        with safe_open(checkpoint.weights, "pt") as file:
            value: Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise gone(checkpoint, error) from error
    return value


def targets_of(checkpoint: Checkpoint, model: str, config: Any) -> tuple[list[str], bool]:
    """The modules with LoRA layers, by the last part of their names if no others end so; and whether their weights are
    `[inputs, outputs]`. config: the model's.

    Raises:
        UsageError: the base model has no such modules.
    """
    try:
        with torch.device("meta"):
            skeleton: Any = AutoModelForCausalLM.from_config(config)
    except ValueError as error:
        raise unloadable(model, resolve(model), error) from error
    modules = linear_modules(skeleton)
    trained = checkpoint.lora_targets
    for name in trained:
        prefix = f"base_model.model.{name}.lora_"
        module = modules.get(name)
        down = checkpoint.shapes.get(f"{prefix}A.default.weight", (0, 0))
        up = checkpoint.shapes.get(f"{prefix}B.default.weight", (0, 0))
        if module is None or inputs_and_outputs(module) != (down[1], up[0]):
            raise UsageError(
                f"The checkpoint {checkpoint.path} does not fit {model}: they differ in {name}.",
                "Name the model it was trained from with --model.",
            )
    last = {name.rpartition(".")[2] for name in trained}
    alike = {name for name, _ in skeleton.named_modules() if name.rpartition(".")[2] in last}
    transposed = any(isinstance(modules[name], Conv1D) for name in trained)
    targets = sorted(last) if alike == set(trained) else list(trained)
    return targets, transposed


def config_of(model: str) -> Any:
    """The configuration of a model (see `resolve`). Raises UserError where it cannot be read."""
    source = resolve(model)
    try:
        return AutoConfig.from_pretrained(source, **where_to_look(source))
    except Exception as error:  # transformers raises a dozen kinds
        raise unloadable(model, source, error) from error


def _generation(model: str, ends: Sequence[int]) -> GenerationConfig:
    """The base model's, with every token that ended a completion in training."""
    source = resolve(model)
    try:
        generation = GenerationConfig.from_pretrained(source, **where_to_look(source))
    except OSError:
        generation = GenerationConfig.from_model_config(config_of(model))
    generation.eos_token_id = ends[0] if len(ends) == 1 else list(ends)
    try:
        generation.validate(strict=True)
    except ValueError:  # sampling parameters beside do_sample=False, as many a hub's model has: it would not be saved
        generation.do_sample = True
    return generation


# --- the folder, which appears whole or not at all, and never in place of something that is no model ------------------


def check_target(to: Path, *, overwrite: bool, source: Path, base: Path | None = None) -> None:
    """Refuses, before anything is loaded, a target that cannot be written or must not be replaced.

    Args:
        source: the checkpoint, which must not lie in what is replaced.
        base: its base model, which must not either, if it is a folder here.

    Raises:
        UsageError: it is not empty (and not a model, with `overwrite`), or not a directory.
    """
    target = to.resolve()
    if source.resolve().is_relative_to(target) or target.is_relative_to(source.resolve()):
        raise UsageError(f"{to} holds the checkpoint itself, or lies in it.", _ANOTHER)
    if base is not None and base.is_dir() and base.resolve().is_relative_to(target):
        raise UsageError(f"{to} holds the base model of the checkpoint.", _ANOTHER)
    try:
        held = sorted(entry.name for entry in to.iterdir()) if to.is_dir() else []
    except OSError as error:
        raise UsageError(f"{to} cannot be read: {error.strerror}.", _ANOTHER) from None
    if not to.is_dir() and (to.exists() or to.is_symlink()):
        raise UsageError(f"{to} is there and is not a directory.", _ANOTHER)
    if held and not overwrite:
        raise UsageError(f"{to} is there and not empty.", "Name another --to, or replace it with --overwrite.")
    if held and (to.is_symlink() or not any(name in held for name in _OURS)):
        raise UsageError(f"{to} does not look like a model, so it is not replaced.", _ANOTHER)
    foreign = [name for name in held if not _of_a_model(to / name)]
    if foreign:
        raise UsageError(f"{to} holds {foreign[0][:80]!a}, no part of a model.", "Move that, or name another --to.")


def _open_to_others(folder: Path) -> None:
    """Give files the mode that the umask leaves: safetensors makes its own 0600, and a model is no secret."""
    umask = os.umask(0o077)
    os.umask(umask)
    for file in folder.iterdir():
        file.chmod(0o666 & ~umask)


def _of_a_model(entry: Path) -> bool:
    return entry.is_file() and not entry.is_symlink() and entry.suffix in _SUFFIXES
