"""The verdict on a completion."""

from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from ftis_node.evaluate.episodes import Episodes
from ftis_node.packet import Completion
from ftis_node.tasks import Example, Score, Scorer


@dataclass(frozen=True, slots=True)
class Judged:
    """One question, what came of it, and the verdict on it. `tokens` counts sampled ones, an end token too."""

    example: Example
    text: str
    tokens: int
    finished: bool
    score: Score


def judge(
    tokenizer: PreTrainedTokenizerBase,
    completion: Completion,
    example: Example,
    scorer: Scorer,
    episodes: Episodes | None = None,
) -> Judged:
    """The verdict on one completion."""
    text = str(tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))
    if episodes is not None:
        scorer.begin()  # `following` counts a group's answers; each question is a group of its own here
        score = episodes.score(completion, example, scorer) or Score(0.0, formatted=False, lenient=False)
    else:
        score = verdict(text, completion.finished, example, scorer)
    return Judged(example, text, completion.sampled, completion.finished, score)


def verdict(text: str, finished: bool, example: Example, scorer: Scorer) -> Score:
    """The score of a completion's text; an unfinished one earns nothing."""
    score = scorer(text, example.answer)
    if finished:
        return score
    return replace(score, reward=0.0, formatted=False)
