"""The speed of a whole step on several devices beside one: compute processes as the daemon starts them, in turns."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from ftis_node.config.run import run_for
from ftis_node.config.settings import Settings, collect
from ftis_node.errors import FtisError, UsageError
from ftis_node.lab.bench import Tell, told
from ftis_node.lab.bench.measure import Figures
from ftis_node.lab.bench.model import TEMPERATURE, Size, geometry, rewards, small_config, written
from ftis_node.step_report import OWN
from ftis_node.worker.client import Worker
from ftis_node.worker.messages import Answer, Generate, GroupPart, Load, Open, Request, Step, StepGroup

ANSWER_SECONDS = 600.0  # beyond which a process hangs


class _Node:
    """A compute process on these devices, each CPU with one thread, and a run opened in it. Close it."""

    def __init__(self, model: str, task: Mapping[str, str], devices: Sequence[str], size: Size) -> None:
        """
        Args:
            model, task: see `written`.
        """
        self._size = size
        self._process = Worker()
        self._process.start(threads=len(devices))
        caps = size.caps()
        settings = Settings(
            model=model,
            device=",".join(devices),
            lora=False,
            learning_rate=1e-6,
            batch_groups=size.groups,
            generation_batch=size.completions,
        )
        facts = self._ask(Load(settings=settings, task=task["task"], template=task["template"], caps=caps))
        self.parameters = facts.parameters
        run = run_for(facts.shared() | caps, group=size.group, temperature=TEMPERATURE)
        self._ask(Open(run))
        self._rows = itertools.cycle(range(facts.rows))

    def _ask(self, request: Request[Answer]) -> Answer:
        """Its answer, awaited for ten minutes. Raises FtisError if none comes, or what `Worker.call` raises."""
        try:
            return self._process.ask(request).result(ANSWER_SECONDS)
        except TimeoutError:
            raise FtisError(f"A compute process did not answer to {request.op!r}.") from None

    def step(self) -> dict[str, float]:
        """Seconds of a step and its parts. Every third completion has a reward, as random weights earn none."""
        rows = list(itertools.islice(self._rows, self._size.groups))
        began = time.perf_counter()
        made = self._ask(Generate(rows))
        generated = time.perf_counter()
        groups = []
        for row, one in zip(rows, made.groups, strict=True):
            part = GroupPart(OWN, one.packet, rewards(self._size.group))
            groups.append(StepGroup(row, [part]))
        self._ask(Step(groups))
        ended = time.perf_counter()
        return {"generate": generated - began, "train": ended - generated, "step": ended - began}

    def close(self) -> None:
        """Ends the process at once."""
        self._process.end()


def bench_devices(size: Size, device: str, *, repeats: int, tell: Tell = told) -> Figures:
    """Wall seconds of a step on the first of these devices, and on all of them.

    Returns:
        Medians over `repeats` steps, taken in turns; `speedup_over_one` is one's over all's. Both sample the same
        tokens. Whatever else the machine does counts too.

    Raises:
        UsageError: it is one device, or none.
    """
    devices = collect(task="", flags={"device": device}, environment={})[0].devices
    if len(devices) == 1:
        raise UsageError("One device is nothing to compare.", "Name several, such as --devices cpu,cpu.")
    with tempfile.TemporaryDirectory() as folder:
        config = small_config()
        made = written(Path(folder), config, size)
        on_one = _Node(*made, devices[:1], size)
        on_all = _Node(*made, devices, size)
        try:
            on_one.step()  # to warm up
            on_all.step()
            one_steps = []
            all_steps = []
            for repeat in range(repeats):
                tell(f"step {repeat + 1} of {repeats}")
                one_steps.append(on_one.step())
                all_steps.append(on_all.step())
        finally:
            on_one.close()
            on_all.close()
    one = _medians(one_steps)
    several = _medians(all_steps)
    return {
        "speedup_over_one": one["step"] / several["step"],
        "generate_speedup": one["generate"] / several["generate"],
        "train_speedup": one["train"] / several["train"],
        **{f"one_{part}_s": value for part, value in one.items()},
        **{f"several_{part}_s": value for part, value in several.items()},
        "devices": list(devices),
        "parameters": on_one.parameters,
        "repeats": repeats,
        "model": geometry(config),
        "batch": asdict(size),
    }


def _medians(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each part over the steps."""
    return {part: statistics.median(step[part] for step in steps) for part in steps[0]}
