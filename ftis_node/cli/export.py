"""``ftis-node export``: a checkpoint as a model for everything else."""

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer
from msgspec.structs import asdict

from ftis_node.cli.common import (
    BaseOption,
    JsonOption,
    held_checkpoint,
    note,
    parse_pairs,
    print_json,
    tell_choice,
)
from ftis_node.cli.local import saved
from ftis_node.errors import UsageError
from ftis_node.policy.names import source_of
from ftis_node.store.checkpoints import newest_facts, parse_label
from ftis_node.store.home import DEFAULT_HOME, Home
from ftis_node.text import rounded, say


def export(
    checkpoint: Annotated[str, typer.Option(help="A checkpoint, or a node's home (its newest one).")] = str(
        DEFAULT_HOME
    ),
    to: Annotated[Path | None, typer.Option(help="The folder to write; it must not be there yet, or be empty.")] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="Instead: the file to write, for llama.cpp, Ollama and LM Studio.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter/--merged", help="LoRA layers alone, or merged.")] = False,
    dtype: Annotated[
        Literal["float32", "bfloat16", "f16", "q8_0"] | None,
        typer.Option(help="Default: as trained; of a GGUF file f16. q8_0 takes half of it."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a model that lies there.")] = False,
    model: BaseOption = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="lora_alpha=…, if the checkpoint lacks it.")] = None,
    no_save: Annotated[
        bool, typer.Option("--no-save", help="Of a running node: its last checkpoint; else it saves first.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Write a trained model as a folder for plain transformers, an adapter for peft, or a GGUF file.

    The node may be running. The folder is complete: weights (safetensors), tokenizer, generation config, card.
    LoRA layers are merged, or alone with --adapter.
    """
    if (to is None) == (gguf is None):
        raise UsageError(
            "One place to write to is wanted: a folder, or a GGUF file.",
            "Name --to FOLDER, or --gguf FILE; either goes to the hub by `hf upload ORG/NAME PATH`.",
        )
    if gguf is None and dtype in ("f16", "q8_0"):
        raise UsageError(f"--dtype {dtype} is for --gguf.", "Use float32 or bfloat16 for a folder.")
    place = Path(checkpoint).expanduser()
    if adapter:  # before anything large is saved or read
        label = parse_label((newest_facts(place / "checkpoints") or {}).get("model"))
        if label is not None and label[1] == "full":
            raise UsageError(f"{place} was trained in full: there is no adapter.", "Leave out --adapter.")
    if not no_save:
        save_first(place)
    with ExitStack() as stack:
        held = held_checkpoint(stack, checkpoint)
        if held is None:
            what = f"{checkpoint} is a model and no checkpoint: there is nothing trained in it to export."
            if not place.exists() and source_of(checkpoint) == checkpoint and checkpoint.count("/") != 1:
                what = f"There is no checkpoint {checkpoint}, and no such folder."
            raise UsageError(what, "Name a checkpoint (HOME/checkpoints/step-…) or a node's home.")
        from ftis_node.export.gguf import export_gguf
        from ftis_node.export.model import export as write
        from ftis_node.observe.terminal import shown_work
        from ftis_node.worker.restore import settings_for

        # On the CPU, because the GPU is the running node's.
        flags = parse_pairs(set_)
        flags["device"] = "cpu"
        if dtype and to:
            flags["dtype"] = dtype
        settings, origins = settings_for(held, model or held.model, flags, "")
        tell_choice(held, settings, origins)
        with shown_work():
            if gguf is not None:
                file = gguf.expanduser()
                written = export_gguf(held, settings, file, dtype=dtype, adapter=adapter, overwrite=overwrite)
            if to is not None:
                written = write(held, settings, to.expanduser(), adapter=adapter, overwrite=overwrite)
    if json:
        print_json(asdict(written))
        return
    what = {"full": "model", "merged": "model with its LoRA layers merged", "adapter": "LoRA adapter"}[written.kind]
    if written.step is not None:
        what += f" of step {written.step}"
    say(f"{written.to}: {what}, {written.dtype}, {rounded(written.bytes)}")
    if held.quantisation == "nf4":
        note("It was trained beside weights in NF4; beside the unrounded ones here it answers otherwise: eval it.")
    if to is not None:
        say(f"What it is and how to load it: {to / 'README.md'}")


def save_first(path: Path) -> None:
    """Let the node that trains on a home save what it has learned; nothing happens where none runs."""
    place = Home(path)
    trains = place.run_file.is_file() and not place.observes
    if trains and place.in_use():
        say("The running node saves first; --no-save takes its last checkpoint.", error=True)
        saved(path)
