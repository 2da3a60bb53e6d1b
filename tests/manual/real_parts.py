"""The parts of `make real` that one model is enough for: what this project makes of it beside plain transformers.

Each takes a model's folder or hub id and a dtype, and gives the name of each check, whether it holds, and its figure.
"""

from __future__ import annotations

import json
import math
import resource
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ftis_node.config.run import Run, RunFile, dump_run_file, run_for
from ftis_node.config.settings import Settings
from ftis_node.export.model import export
from ftis_node.objective import PRESETS, Objective
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.score import completion_logprobs
from ftis_node.tokenizer.asking import message_of
from ftis_node.worker.engine import Engine
from ftis_node.worker.messages import ModelFacts
from ftis_node.worker.restore import find_checkpoint, settings_for
from tests.support.objective_batches import termed
from tests.support.small_models import batch_of, saved_by

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
CLOSE = 0.02  # nats a token, between layouts of one model
ROWS = 300  # of GSM8K
SOLUTIONS = 50
GREEDY_TOKENS = 32
STEP_TOKENS = 24  # the cap of what is sampled for a step
LOSS_GROUPS = 4
LOSS_TOKENS = 48  # of what losses are taken of
MOST_CUT = 0.02  # of the tokens, by rounding alone
STEP_OBJECTIVES = ("ftis", "gated", "gspo")


class Check(NamedTuple):
    """One finding: what was compared, whether it is as it should be, and the figure for the table."""

    check: str
    passed: bool
    figure: str


Part = Callable[..., Iterator[Check]]


def opened(source: str, dtype: str, *, cap: int = STEP_TOKENS, **chosen: Any) -> tuple[Engine, ModelFacts, Run]:
    """A model on the first rows of GSM8K, in a run of its own, as a node opens it."""
    small = {"batch_groups": 2, "eval_prompts": 4, "micro_batch_tokens": 1024}
    settings = Settings(model=source, device="cpu", dtype=dtype, **{"lora": True} | small | chosen)
    engine = Engine()
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "gsm8k-begin.jsonl"
        lines = (DATA / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        data.write_text("".join(lines[:ROWS]), encoding="utf-8")
        facts = engine.load(settings, "gsm8k", data=str(data), caps={"group": 4, "completion_tokens": cap})
    run = run_for(facts.shared(), group=4, completion_tokens=cap)
    engine.open(run)
    return engine, facts, run


# --- asked: ids of prompts and of ends, beside the model's own files -------------------------------------------------


def asked(source: str, dtype: str, *, full: bool) -> Iterator[Check]:
    """Prompts as transformers' own tokenizer and chat template write them, and ends as the generation config has."""
    engine, _, run = opened(source, dtype)
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = range(0, len(engine.prompts), 7)
    equal = 0
    for row in rows:
        equal += engine.prompts[row] == expected_prompt(tokenizer, run, engine.task.train[row])
    how = "chat" if run.chat else "plain text"
    yield Check(f"prompt ids, {how}", equal == len(rows), f"{equal} of {len(rows)} prompts equal")
    named = GenerationConfig.from_pretrained(source).eos_token_id
    ends = {named} if isinstance(named, int) else set(named)
    yield Check("ends", ends == set(run.eos), f"{sorted(run.eos)}, the generation config has {sorted(ends)}")
    policy = engine.policy
    sampled = min(len(tokenizer), policy.causal_lm.get_input_embeddings().num_embeddings)
    yield Check("ids that can be sampled", policy.vocabulary == sampled, f"{policy.vocabulary}")


def expected_prompt(tokenizer: Any, run: Run, example: Any) -> list[int]:
    """The prompt's ids by transformers alone: its chat template, or its tokenizer with what it puts in front."""
    if run.chat:
        message = message_of(run.template, example.question).strip()
        turn = [{"role": "user", "content": message}]
        written = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(written, add_special_tokens=False)["input_ids"]
        return ids
    ids = tokenizer(run.template.replace("{question}", example.question))["input_ids"]
    return ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids


# --- text: log-probs of worked solutions, and greedy text -------------------------------------------------------------


def text(source: str, dtype: str, *, full: bool) -> Iterator[Check]:
    """Nats a token on worked solutions, in the run's template and as plain text; greedy text beside `generate`."""
    engine, facts, run = opened(source, dtype)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype)).eval()
    solutions = solutions_by_question()
    solved = [row for row, example in enumerate(engine.task.train) if example.question in solutions]

    def length(row: int) -> int:
        question = engine.task.train[row].question
        return len(question) + len(solutions[question])

    solved.sort(key=length)
    plain_run = run_for(facts.shared() | {"chat": ""}, group=4, template="{question}", completion_tokens=STEP_TOKENS)
    for name, asked_in in (("in the template", run), ("as plain text", plain_run)):
        engine.open(asked_in)
        ours = []
        theirs = []
        for row in solved[:SOLUTIONS]:
            example = engine.task.train[row]
            solution = tokenizer(solutions[example.question], add_special_tokens=False)["input_ids"]
            ours.append(own_logprobs(engine, engine.prompts[row], solution))
            theirs.append(plain_logprobs(model, expected_prompt(tokenizer, asked_in, example), solution))
        mine = -torch.cat(ours).mean()
        other = -torch.cat(theirs).mean()
        figure = f"{mine:.3f} nats a token, transformers {other:.3f}"
        yield Check(f"{len(ours)} solutions {name}", bool((mine - other).abs() <= CLOSE), figure)
    if dtype == "float32":
        engine.open(run)
        yield greedy(engine, run, model, tokenizer, solved[:4])


def own_logprobs(engine: Engine, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """Log-probs `[T]` of the completion's tokens as a node scores them."""
    prefixed = Prefixed(prompt, [np.array(completion)])
    with torch.no_grad():
        return completion_logprobs(engine.policy, [prefixed], 1.0)[0]


def greedy(engine: Engine, run: Run, model: Any, tokenizer: Any, rows: Sequence[int]) -> Check:
    """The likeliest tokens after some prompts, beside those of `generate` with the same ends.

    The model's own generation config would fill what is not named: Qwen's instruct models have a repetition penalty.
    """
    sampling = Sampling(GREEDY_TOKENS, 1.0, run.eos, greedy=True)
    ours = generate(engine.policy, [engine.prompts[row] for row in rows], group=1, sampling=sampling)
    equal = 0
    config = GenerationConfig(max_new_tokens=GREEDY_TOKENS, do_sample=False, eos_token_id=list(run.eos))
    model.generation_config = config
    for row, (completion,) in zip(rows, ours, strict=True):
        prompt = torch.tensor([expected_prompt(tokenizer, run, engine.task.train[row])])
        everything = torch.ones_like(prompt)
        with torch.no_grad():
            written = model.generate(prompt, generation_config=config, attention_mask=everything)
        theirs = written[0, prompt.shape[1] :]
        equal += completion.token_ids.tolist() == theirs.tolist()
    return Check(f"{GREEDY_TOKENS} greedy tokens", equal == len(rows), f"{equal} of {len(rows)} equal to `generate`")


def solutions_by_question() -> dict[str, str]:
    """GSM8K's worked solutions."""
    lines = (DATA / "gsm8k_train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:ROWS]]
    return {row["question"]: row["answer"] for row in rows}


def plain_logprobs(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> torch.Tensor:
    """Log-probs `[T]` of the completion's tokens by the model's own forward pass, over all of its rows."""
    ids = torch.tensor([[*prompt, *completion]])
    with torch.no_grad():
        logits = model(input_ids=ids, logits_to_keep=len(completion) + 1).logits[0, :-1]
    logprobs = logits.float().log_softmax(-1)
    return logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]


# --- losses: every objective on one recorded batch --------------------------------------------------------------------


def losses(source: str, dtype: str, *, full: bool) -> Iterator[Check]:
    """Each named objective's loss and gradient on own samples made now, before anything moved: finite, and cut by
    nothing. A token is cut if it has no gradient, and has one where the sampler's log-probs are the trainer's."""
    engine, _, run = opened(source, dtype, cap=LOSS_TOKENS)
    rows = list(range(LOSS_GROUPS))
    groups = engine.training_groups(batch_of(rows, engine.generate(rows).groups, uneven=True))
    prefixed = []
    completions = []
    for group in groups:
        made = [one for one in group.parts[0].completions if one is not None]
        prefixed.append(Prefixed(group.prompt_ids, [one.token_ids for one in made]))
        completions += made
    with torch.no_grad():
        trainer, _ = completion_logprobs(engine.policy, prefixed, run.temperature)
    sampler = torch.from_numpy(np.concatenate([one.logprobs for one in completions]))
    lengths = torch.tensor([len(one) for one in completions])
    yield from ratios(trainer - sampler, lengths, 1e-3 if dtype == "float32" else 0.05)
    for name, objective in PRESETS.items():
        yield loss(f"loss `{name}`", objective, trainer, sampler, lengths, 0 if name == "gspo" else MOST_CUT)
        if name == "gspo":
            yield loss(f"loss `{name}`, as a peer's", objective, trainer, sampler, lengths, None)


def loss(
    what: str,
    objective: Objective,
    trainer: torch.Tensor,
    sampler: torch.Tensor,
    lengths: torch.Tensor,
    most: float | None,
) -> Check:
    """An objective's gradient on samples of this node, or of a peer.

    Args:
        trainer, sampler: log-probs, `[T]`. lengths: of the samples, `[N]`. most: the share of tokens that may be cut;
            None: the samples are a peer's, and any may.
    """
    rewards = torch.tensor([0.0, 1.0, 0.0, 1.0])
    advantages = objective.advantages(rewards).repeat(LOSS_GROUPS)
    own = torch.full_like(lengths, most is not None, dtype=torch.bool)

    def slope(claimed: torch.Tensor) -> tuple[float, torch.Tensor]:
        new = trainer.clone().requires_grad_()
        terms = termed(
            objective,
            trainer_logprobs=new,
            start_logprobs=trainer,
            sampler_logprobs=claimed,
            lengths=lengths,
            advantages=advantages,
            own=own,
            gate=-10.0,
        )
        value = -objective.sample_scale(4) * terms.value.sum()
        (found,) = torch.autograd.grad(value, new)
        return value.item(), found

    value, sampled = slope(sampler)
    _, exact = slope(trainer)
    norm = float(sampled.norm())
    cut = (sampled == 0) & (exact != 0)
    whole = [bool(some.all()) for some in cut.split(lengths.tolist())]
    samples = sum(whole) / len(whole)
    tokens = float(cut.float().mean())
    sound = math.isfinite(value) and math.isfinite(norm) and norm > 0
    if most is not None:
        sound = sound and tokens <= most
    figure = f"gradient {norm:.3g}, × {norm / float(exact.norm()):.3f} by rounding"
    return Check(what, sound, f"{figure}; cuts {samples:.1%} of samples, {tokens:.2%} of tokens")


def ratios(log_ratio: torch.Tensor, lengths: torch.Tensor, most: float) -> Iterator[Check]:
    """How far trainer and sampler are apart, `[T]`: of tokens, and of whole samples; `most` nats a token."""
    apart = log_ratio.abs()
    figure = f"{apart.mean():.2g} nats a token, p99 {apart.quantile(0.99):.2g}"
    yield Check("trainer beside sampler", bool(apart.mean() <= most), figure)
    ratio = log_ratio.exp()
    outside = (ratio < 0.5) | (ratio > 5)
    beyond = float(outside.float().mean())
    yield Check("ρ beyond [0.5, 5]", beyond <= MOST_CUT, f"{beyond:.2%} of {len(ratio)} tokens")
    of_samples = torch.stack([piece.sum() for piece in log_ratio.split(lengths.tolist())]).exp()
    for what, values in (("ρ", ratio), ("Π ρ of a sample", of_samples)):
        quantiles = values.quantile(torch.tensor([0.0, 0.01, 0.5, 0.99, 1.0]))
        figures = [f"{value:.3f}" for value in quantiles.tolist()]
        yield Check(f"{what}: least, p1, p50, p99, most", True, ", ".join(figures))


# --- steps: training in both ways, and what export makes of it --------------------------------------------------------


def steps(source: str, dtype: str, *, full: bool) -> Iterator[Check]:
    """Steps by three objectives with LoRA and, where there is room, of all weights; their exports read back."""
    for kind in ("lora", "full") if full else ("lora",):
        lora = kind == "lora"
        engine, facts, run = opened(source, dtype, lora=lora)
        for name in STEP_OBJECTIVES:
            engine.learner.objective = PRESETS[name]
            made = engine.generate([0, 1])
            report = engine.step(batch_of([0, 1], made.groups, uneven=True))
            sound = report.skipped is None and math.isfinite(report.loss) and report.gradient_norm > 0
            yield Check(f"step, {kind}, `{name}`", sound, f"loss {report.loss:.3g}, norm {report.gradient_norm:.3g}")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        yield Check(f"memory, {kind}", True, f"peak {peak:.1f} GB, planned {facts.plan.memory.total / 1e9:.1f}")
        with tempfile.TemporaryDirectory() as folder:
            yield from exports(engine, run, source, Path(folder), lora=lora)
        del engine


def exports(engine: Engine, run: Run, source: str, folder: Path, *, lora: bool) -> Iterator[Check]:
    """A checkpoint's export, read by plain transformers and peft, beside the model that was trained."""
    (folder / "home").mkdir()
    (folder / "home" / "run.toml").write_text(dump_run_file(RunFile(run=run)))
    saved_by(engine, folder / "home", 3, source)
    prompt = engine.prompts[1]
    solution = engine.prompts[0][-24:]
    expected = own_logprobs(engine, prompt, solution)
    dtype = str(engine.policy.dtype).removeprefix("torch.")
    for adapter in (False, True) if lora else (False,):
        found = find_checkpoint(str(folder / "home"))
        assert found is not None
        settings, _ = settings_for(found, source, {"device": "cpu", "dtype": dtype}, "")
        target = folder / f"adapter-{adapter}"
        export(found, settings, target, adapter=adapter)
        if adapter:
            base = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
            plain = PeftModel.from_pretrained(base, target).eval().get_base_model()
        else:
            plain = AutoModelForCausalLM.from_pretrained(target).eval()
        apart = float((plain_logprobs(plain, prompt, solution) - expected).abs().mean())
        what = "adapter, read by peft" if adapter else "export, read by transformers"
        limit = 2e-3 if dtype == "float32" else 0.1
        yield Check(f"{what}, {engine.policy.kind}", apart <= limit, f"{apart:.2g} nats a token apart")
        shutil.rmtree(target)


PARTS: dict[str, Part] = {"asked": asked, "text": text, "losses": losses, "steps": steps}
