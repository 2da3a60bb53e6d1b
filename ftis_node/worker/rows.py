"""Rows of data in a run: those that are sampled and trained on, and those of an evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass

from ftis_node.config.run import Run
from ftis_node.evaluate import greedy
from ftis_node.evaluate.episodes import Episodes
from ftis_node.evaluate.evaluation import Evaluation
from ftis_node.fit.context import Context, refuse_prompts
from ftis_node.policy.generate.sampling import Sampling
from ftis_node.policy.policy import Policy
from ftis_node.policy.room import Room
from ftis_node.tasks import Example, Scorer, Task, scoring
from ftis_node.worker.formats import Packets


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """The run's rows, or the owner's own: template, examples and their prompts as token ids; how many completions a
    group has; the scorer by their rule; and how their episodes go on."""

    template: str
    examples: Sequence[Example]
    prompts: list[list[int]]
    completions: int
    scorer: Scorer
    episodes: Episodes | None

    def text(self, row: int) -> str:
        """The prompt as text."""
        return self.template.replace("{question}", self.examples[row].question)


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """An evaluation's prompts and their examples, the reward rule and the task's own scorer (see `tasks.scoring`), the
    cap in tokens, and how its episodes go on."""

    prompts: list[list[int]]
    examples: Sequence[Example]
    reward: str
    completion_tokens: int
    episodes: Episodes | None
    scorer: Scorer | None


class Evaluations:
    """Greedy answers of a run's policy, and the sets of questions by name; None: the run's own.

    room: sequences side by side. It is not that of generation, which a shortage here must not shrink.
    """

    def __init__(self, run: Run, packets: Packets, room: Room) -> None:
        self.sets: dict[str | None, EvaluationSet] = {}
        self.room = room
        self._run = run
        self._packets = packets

    def add(
        self,
        name: str,
        task: Task,
        count: int | None,
        policy: Policy,
        context: Context,
    ) -> int:
        """Add so many of a task's held-out questions, or all, and return how many there are.

        Raises:
            UsageError: the model has no room for one.
        """
        examples = task.asked(count)
        cap = max(task.completion_tokens, self._run.completion_tokens)
        ids = [self._packets.prompt(task.template, example.question) for example in examples]
        refuse_prompts(
            policy.name,
            context,
            ids,
            examples,
            name,
            cap,
            spelled=self._packets.spelled,
        )
        episodes = Episodes.of(policy.tokenizer, task.template, self._packets.asked.chat, task.turns)
        self.sets[name] = EvaluationSet(
            ids,
            examples,
            task.reward,
            cap,
            episodes,
            task.scorer,
        )
        return len(examples)

    def evaluate(self, policy: Policy, name: str | None, part: int, parts: int) -> Evaluation:
        """Answer every `parts`-th question of a set, from `part` on."""
        one = self.sets[name]
        sampling = Sampling(
            one.completion_tokens,
            self._run.temperature,
            self._packets.asked.ends,
            greedy=True,
        )
        with scoring(one.reward, one.scorer) as scorer:
            answers = greedy.evaluate(
                policy,
                one.prompts[part::parts],
                one.examples[part::parts],
                scorer,
                sampling,
                episodes=one.episodes,
                room=self.room,
            )
        return answers.figures()
