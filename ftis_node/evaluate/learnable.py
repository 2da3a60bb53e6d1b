"""What a model makes of a task's rows when it samples: from which of them it could learn, and why not from others.

A group whose completions all earn the same teaches nothing (GRPO's advantages are 0), so the share of groups with a
signal is the share of a node's work that is of use.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from ftis_node.evaluate.judging import Judged, judge
from ftis_node.evaluate.playing import sampled
from ftis_node.host.doing import doing
from ftis_node.policy.generate.sampling import Sampling
from ftis_node.policy.policy import Policy
from ftis_node.policy.room import Room
from ftis_node.tasks import Task, scoring

FEW = 0.2  # a share of groups below which little can be learned

_TOGETHER_SECONDS = 60.0  # for rows that are begun together


class TriedRow(msgspec.Struct, frozen=True):
    """One row's completions: how many earned 1, were formatted, were right in any format, ended by themselves; their
    tokens in all, and whether their rewards differ."""

    row: int
    samples: int
    right: int
    formatted: int
    lenient: int
    finished: int
    tokens: int
    signal: bool

    @classmethod
    def of(cls, row: int, judged: Sequence[Judged]) -> "TriedRow":
        """Sum up the completions of one row."""
        return cls(
            row=row,
            samples=len(judged),
            right=sum(each.score.reward == 1.0 for each in judged),
            formatted=sum(each.score.formatted for each in judged),
            lenient=sum(each.score.lenient for each in judged),
            finished=sum(each.finished for each in judged),
            tokens=sum(each.tokens for each in judged),
            signal=len({each.score.reward for each in judged}) > 1,
        )

    @property
    def pass_rate(self) -> float:
        """The share of completions that earned 1."""
        return self.right / self.samples


class Learnable(msgspec.Struct, frozen=True):
    """Rates over all rows that were tried; tokens: mean of a completion; seconds: of sampling and judging."""

    rows: int
    samples: int
    right: float
    formatted: float
    lenient: float
    cut_off: float
    groups_with_signal: float
    tokens: float
    seconds: float

    @classmethod
    def of(cls, tried: Sequence[TriedRow], seconds: float) -> "Learnable":
        """Sum up at least one row."""
        samples = sum(one.samples for one in tried)

        def share(name: str) -> float:
            counts: list[int] = [getattr(one, name) for one in tried]
            return sum(counts) / samples

        return cls(
            rows=len(tried),
            samples=samples,
            right=share("right"),
            formatted=share("formatted"),
            lenient=share("lenient"),
            cut_off=1 - share("finished"),
            groups_with_signal=sum(one.signal for one in tried) / len(tried),
            tokens=share("tokens"),
            seconds=seconds,
        )

    def advice(self) -> list[str]:
        """What to change where little can be learned, most useful first; empty where enough can."""
        if self.groups_with_signal >= FEW:
            return []
        found = []
        if self.cut_off > FEW:
            found.append("Many answers are cut off: allow longer ones (`run new --completion-tokens`).")
        if self.formatted < 0.5 and self.lenient > 2 * self.right:
            found.append("Right answers come in another form than earns: word the template or the prompts otherwise.")
        elif self.formatted < 0.5:
            found.append("Most answers lack the form that earns: use an instruct model, or word the prompts otherwise.")
        if self.right > 1 - FEW:
            found.append("The model knows these rows: take harder ones.")
        else:
            found.append("Take rows that it solves at times (`ftis-node task filter`), easier ones, or a larger model.")
        return found


@dataclass(frozen=True)
class Subject:
    """A loaded model with the prompts of some rows of a task, as token ids by the rows' numbers.

    room: how many completions are generated side by side.
    """

    policy: Policy
    task: Task
    prompts: Mapping[int, Sequence[int]]
    sampling: Sampling
    room: Room

    def tried(self, rows: Sequence[int], samples: int, seconds: float = float("inf")) -> Iterator[TriedRow]:
        """Sample so many completions of each row's prompt and judge them; yield the rows as they are done.

        Args:
            seconds: after these no other rows are begun. Rows are begun together where that is done in time, and
                within a minute: what is not done is lost where somebody has no patience.

        Raises:
            FtisError: a single group does not fit into memory, or the weights have diverged.
        """
        task = self.task
        ends = time.monotonic() + seconds
        done = 0
        together = 1
        with scoring(task.reward, task.scorer) as scorer, doing("sampling", samples * len(rows), "completions"):
            while done < len(rows) and (done == 0 or time.monotonic() < ends):
                began = time.monotonic()
                some = rows[done : done + together]
                prompts = [self.prompts[row] for row in some]
                groups = sampled(self.policy, prompts, self.sampling, self.room, group=samples)
                for row, group in zip(some, groups, strict=True):
                    scorer.begin()
                    judged = [judge(self.policy.tokenizer, one, task.train[row], scorer) for one in group]
                    yield TriedRow.of(row, judged)
                done += len(some)
                now = time.monotonic()
                a_row = max(now - began, 1e-6) / len(some)
                in_time = int(min(ends - now, _TOGETHER_SECONDS) / a_row)
                together = max(1, min(self.room.size // samples, in_time))
