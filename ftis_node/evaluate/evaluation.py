"""The figures of an evaluation. Imports no torch."""

import msgspec


class Evaluation(msgspec.Struct, frozen=True):
    """Greedy pass@1 and its 95 % interval, other rates from 0 to 1, and the counts they come from.

    formatted, lenient, finished  rates of answers in the form, right by a lenient reading, and ended by the model
    mean_tokens                   of an answer; seconds: of all; batch: answers generated side by side
    """

    pass_at_1: float
    low: float
    high: float
    formatted: float
    lenient: float
    finished: float
    correct: int
    prompts: int
    mean_tokens: float
    seconds: float
    batch: int


class PairedFigures(msgspec.Struct, frozen=True):
    """Two policies on the same questions.

    difference, low, high                    of pass@1, first minus second, and its 95 % interval
    p                                        by McNemar's exact test
    both, only_checkpoint, only_base, neither   how many questions were right by whom
    """

    difference: float
    low: float
    high: float
    p: float
    both: int
    only_checkpoint: int
    only_base: int
    neither: int
