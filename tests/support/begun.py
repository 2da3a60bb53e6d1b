"""A home that has taken steps."""

from pathlib import Path

from ftis_node.store.checkpoints import Checkpoints, labelled
from ftis_node.store.home import Home
from ftis_node.worker.restore import Checkpoint, find_checkpoint


def checkpoint_of(home: Path) -> Checkpoint:
    """The one that a home goes on from."""
    found = find_checkpoint(str(home))
    assert found is not None
    return found


def begun(home: Path, step: int, model: str, kind: str, **files: str):
    """Leaves a checkpoint of a model in the home; files: of these names, which end with `.safetensors`."""
    checkpoints = Checkpoints(Home(home).checkpoints)
    directory = checkpoints.begin(step)
    for name, text in files.items():
        (directory / f"{name}.safetensors").write_text(text)
    checkpoints.commit(
        directory,
        {
            "model": labelled(model, kind),
            "optimiser": "adamw",
            "progress": {"step": step},
        },
    )


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of all files below a folder, by their names there."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
