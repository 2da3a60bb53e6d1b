"""The process that runs a tracker's library; `tracking` starts this file as a script in the tracker's folder.

It imports nothing of this package. Lines of JSON with a step and its figures come through stdin until that is closed.
Nothing leaves the machine unless the owner's environment says so: WANDB_MODE=online, TRACKIO_SPACE_ID.
"""

import json
import os
import signal
import sys
from collections.abc import Callable

PROJECT = "ftis-node"
Log = Callable[[int, dict[str, float]], None]


def tensorboard(name: str) -> tuple[Log, Callable[[], None]]:
    """Functions that write figures of a step into files of the folder `name`, and that end it."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(name)

    def log(step: int, figures: dict[str, float]) -> None:
        for key, value in figures.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    return log, writer.close


def wandb(name: str) -> tuple[Log, Callable[[], None]]:
    """As `tensorboard`, of a run of this name; offline unless WANDB_MODE says otherwise, without code or machine."""
    import wandb

    settings = wandb.Settings(
        mode=os.environ.get("WANDB_MODE", "offline"),
        console="off",
        disable_code=True,
        disable_git=True,
        disable_job_creation=True,
        save_code=False,
        silent=True,
        host=PROJECT,
        program=PROJECT,
        x_disable_meta=True,
        x_disable_machine_info=True,
        x_disable_stats=True,
        x_save_requirements=False,
    )
    run = wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), name=name, dir=".", settings=settings)
    run.define_metric("*", step_metric="global_step")
    return lambda step, figures: run.log({"global_step": step, **figures}), run.finish


def trackio(name: str) -> tuple[Log, Callable[[], None]]:
    """As `wandb`; local unless TRACKIO_SPACE_ID names a space. Sets TRACKIO_DIR to this folder by default."""
    os.environ.setdefault("TRACKIO_DIR", os.getcwd())
    import trackio

    trackio.init(
        project=os.environ.get("TRACKIO_PROJECT", PROJECT),
        name=name,
        space_id=os.environ.get("TRACKIO_SPACE_ID"),
        resume="allow",
        auto_log_gpu=False,
        auto_log_cpu=False,
    )
    return lambda step, figures: trackio.log(figures, step=step), trackio.finish


def main(kind: str, name: str) -> None:
    """Write each line of stdin (JSON: step, figures) with a tracker until it ends."""
    log, finish = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}[kind](name)
    for line in sys.stdin:
        told = json.loads(line)
        log(told["step"], told["figures"])
    signal.alarm(30)  # seconds for the library's own end; whoever would end this process may be gone
    finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
