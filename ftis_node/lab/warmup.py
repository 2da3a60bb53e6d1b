"""Makes the built-in models from nothing: `python -m ftis_node.lab.warmup --out DIR`.

Reinforcement learning can only sharpen what a model sometimes does. So each model is first taught by a teacher that
knows the right procedure and often prefers a wrong one, with mistakes of its own: afterwards the model gets a third to
a half of the prompts right, and learns the rest from rewards, its own and its peers'. The prompts that the task holds
out are never shown. The same seed gives the same bytes on the same machine.
"""

import argparse
import functools
import hashlib
import json
import math
import platform
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from ftis_node.lab.parity import demonstrations
from ftis_node.lab.recipes import RECIPES, Recipe
from ftis_node.lab.teacher import Teacher
from ftis_node.lab.vocabularies import TOKENIZERS
from ftis_node.tasks import Example, Task, load_task, score

SEED = 2
_IGNORED = -100


def build_model(recipe: Recipe, tokenizer: Any) -> Any:
    """An untrained model (fp32); the weights come from torch's global generator.

    It is a Qwen2 where it has words, else a Llama: AutoTokenizer gives every Qwen2 model Qwen2's own pre-tokenizer.
    """
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": recipe.width,
        "intermediate_size": recipe.mlp,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.05,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if recipe.tokenizer == "words":
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


def warm_up(
    recipe: Recipe,
    task: Task,
    seed: int | str = SEED,
    *,
    stopping: Callable[[], bool] = lambda: False,
) -> tuple[Any, Any] | None:
    """Make a model, and teach it by supervised learning on what the recipe's teacher, or its demonstrations, say.

    It seeds torch's global generator. The same seed gives the same weights on as many threads; the callers set one.

    Args:
        task: its training rows are shown, its held-out rows never.
        stopping: asked before each step.

    Returns:
        Model and tokenizer; None if `stopping` said so.
    """
    rng = random.Random(f"{seed}/{recipe.name}")
    torch.manual_seed(rng.getrandbits(63))
    tokenizer = TOKENIZERS[recipe.tokenizer]()
    model = build_model(recipe, tokenizer)
    lessons = _lessons(recipe, task, rng)
    if not teach(model, tokenizer, lessons, recipe, stopping=stopping):
        return None
    return model, tokenizer


def teach(
    model: Any,
    tokenizer: Any,
    lessons: Callable[[], list[tuple[str, str]]],
    recipe: Recipe,
    *,
    stopping: Callable[[], bool] = lambda: False,
) -> bool:
    """Teach a model in place by supervised learning; what of it needs no gradient stays. Afterwards it is in evaluation
    mode.

    Args:
        lessons: draws the next batch of prompts and completions.
        recipe: its steps and learning rate; the rest of it is not looked at.
        stopping: asked before each step.

    Returns:
        Whether it came to the end; not if `stopping` said so.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.rate)
    model.train()
    for step in range(recipe.steps):
        if stopping():
            return False
        for group in optimiser.param_groups:
            group["lr"] = _rate(recipe, step)
        ids, labels = _batch(tokenizer, lessons())
        logits = model(input_ids=ids, use_cache=False).logits
        predicted = logits[:, :-1].flatten(0, 1)
        loss = cross_entropy(predicted, labels[:, 1:].flatten(), ignore_index=_IGNORED)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
    model.eval()
    return True


def _rate(recipe: Recipe, step: int) -> float:
    """The learning rate of a step: it rises over the first ones, and falls to 0 as half a cosine."""
    risen = min(1.0, (step + 1) / recipe.rise)
    fallen = (1 + math.cos(math.pi * step / recipe.steps)) / 2
    return risen * recipe.rate * fallen


def _lessons(recipe: Recipe, task: Task, rng: random.Random) -> Callable[[], list[tuple[str, str]]]:
    """A function that draws the next batch of prompts and completions, `recipe.batch` pairs, from `rng`.

    The teacher is drawn here, once. A recipe with `long` has no teacher, and needs a task of `lab.parity`.
    """
    if recipe.long is not None:
        return functools.partial(demonstrations, task, recipe.long, rng, recipe.batch)
    teacher = Teacher(
        rng,
        recipe.forgetful,
        weak=recipe.weak,
        style=recipe.style,
        errors=recipe.errors,
    )
    beyond: tuple[Example, ...] = ()
    if recipe.harder:
        beyond = load_task("arithmetic-4").train
    hard = round(recipe.harder * recipe.batch)

    def taught() -> list[tuple[str, str]]:
        """A batch of the teacher's; the harder examples come last."""
        examples = rng.choices(task.train, k=recipe.batch - hard)
        examples += rng.choices(beyond, k=hard)
        return [(task.prompt(e), teacher.completion(e.question)) for e in examples]

    return taught


def _batch(tokenizer: Any, pairs: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [N, T], padded on the right, and labels [N, T] with −100 for prompts and padding. Each answer gets the
    end's id. Labels are not shifted: the caller compares position t with label t + 1."""
    prompts = tokenizer([prompt for prompt, _ in pairs])["input_ids"]
    answers = tokenizer([answer for _, answer in pairs], add_special_tokens=False)["input_ids"]
    sequences = []
    targets = []
    for prompt, answer in zip(prompts, answers, strict=True):
        answered = [*answer, tokenizer.eos_token_id]
        sequences.append(torch.tensor([*prompt, *answered]))
        ignored = [_IGNORED] * len(prompt)
        targets.append(torch.tensor([*ignored, *answered]))
    ids = pad_sequence(sequences, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
    labels = pad_sequence(targets, batch_first=True, padding_value=_IGNORED)
    return ids, labels


@torch.no_grad()
def greedy_pass_at_1(
    model: Any,
    tokenizer: Any,
    task: Task,
    examples: tuple[Example, ...],
    completion_tokens: int | None = None,
) -> float:
    """The share of `examples` that the model's most likely completion gets right, in the strict format.

    `completion_tokens` is the cap; None: the task's own, of token runs. All examples are generated as one batch, and
    there must be one at least. The tokenizer must pad on the left.
    """
    prompts = list(map(task.prompt, examples))
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=False,
        max_new_tokens=completion_tokens or task.completion_tokens,
    )
    prompt_tokens = inputs["input_ids"].shape[1]
    texts = tokenizer.batch_decode(output[:, prompt_tokens:], skip_special_tokens=True)
    right = 0.0
    for text, example in zip(texts, examples, strict=True):
        right += score(task.reward, text, example.answer).reward
    return right / len(texts)


def save(
    recipe: Recipe,
    model: Any,
    tokenizer: Any,
    task: Task,
    out: Path,
) -> dict[str, Any]:
    """Write the model's folder under `out`; returns its entry of the manifest, with pass@1 on the held-out rows, which
    is measured here."""
    folder = out / recipe.name
    cap = None
    if recipe.tokenizer != "words":
        cap = task.text.completion_tokens
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.chmod(0o644)
    pass_at_1 = greedy_pass_at_1(model, tokenizer, task, task.held_out, cap)
    return {
        "parameters": model.num_parameters(),
        "steps": recipe.steps,
        "pass_at_1": round(pass_at_1, 4),
        "sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }


def main(argv: list[str] | None = None) -> None:
    """Make all models and write the manifest."""
    parser = argparse.ArgumentParser(prog="python -m ftis_node.lab.warmup", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write to")
    out = parser.parse_args(argv).out
    torch.set_num_threads(1)  # more threads would change the order of sums, and are slower at this size
    transformers.utils.logging.disable_progress_bar()
    task = load_task("arithmetic")
    models = {}
    for recipe in RECIPES:
        started = time.monotonic()
        made = warm_up(recipe, task)
        assert made is not None  # nothing stops it
        facts = save(recipe, *made, task, out)
        models[recipe.name] = facts
        print(f"{recipe.name}: pass@1 {facts['pass_at_1']}, {time.monotonic() - started:.0f} s", flush=True)
    versions = {
        "python": platform.python_version(),
        "tokenizers": tokenizers.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    manifest = {
        "seed": SEED,
        "task_data": task.data,
        "versions": versions,
        "models": models,
    }
    text = json.dumps(manifest, indent=2)
    (out / "manifest.json").write_text(f"{text}\n")


if __name__ == "__main__":
    main()
