"""The built-in models and their warm-ups."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """One model and its warm-up: `steps` of AdamW, each on `batch` examples; the rate is `rate` after `rise` steps.
    Every field is part of `starts.Start.name`: a new one must be left out of it where it is as usual.

    forgetful  its teacher mostly forgets the last operand after so many of the nine first operands
    weak       the sign whose facts it mostly gets wrong, being good at the other; none: both alike
    errors     how often its teacher errs, beside the others'
    style      how it writes its reasoning: `terse` 15 12, `spelled` 8+7=15 15-3=12, `swapped` 7+8=15 3-15=12,
               `backwards` 12 15
    harder     the share of examples that have four operands
    long       the share of long demonstrations; a recipe that has it learns parities (`lab.parity`), without a teacher
    tokenizer  a name of `vocabularies.TOKENIZERS`; `words` makes a Qwen2, the others make a Llama
    """

    name: str
    layers: int
    width: int
    mlp: int
    steps: int
    rate: float
    forgetful: int
    weak: str = ""
    errors: float = 1.0
    style: str = "terse"
    harder: float = 0.0
    long: float | None = None
    tokenizer: str = "words"
    batch: int = 64
    rise: int = 1


LARGER = (
    Recipe("small-1m", 4, 128, mlp=512, steps=1200, rate=3e-3, forgetful=4, errors=0.3, batch=8, rise=20),
    Recipe("small-3m", 6, 192, mlp=768, steps=900, rate=2e-3, forgetful=4, errors=0.3, batch=8, rise=20),
)
"""One and three million parameters, for `lab.sums`; only the lab makes them."""

COSTS = {"small-1m": 3.0, "small-3m": 8.0}  # of a step, and of a warm-up, beside those of a built-in model

RECIPES = (
    Recipe("tiny-a", layers=2, width=64, mlp=128, steps=1400, rate=4e-3, forgetful=4),
    Recipe("tiny-b", layers=3, width=80, mlp=160, steps=1000, rate=3e-3, forgetful=3),
    Recipe("tiny-c", layers=2, width=96, mlp=192, steps=1400, rate=3e-3, forgetful=4),
    Recipe("tiny-chars", 2, width=80, mlp=160, steps=1000, rate=4e-3, forgetful=2, weak="+", tokenizer="chars"),
    Recipe("tiny-numbers", 2, width=80, mlp=160, steps=1400, rate=3e-3, forgetful=3, weak="-", tokenizer="numbers"),
    Recipe("tiny-bpe", 2, width=80, mlp=160, steps=1400, rate=3e-3, forgetful=2, tokenizer="bpe"),
)

NAMED = {recipe.name: recipe for recipe in (*RECIPES, *LARGER)}
