"""A base model's first lessons (`make warm-up`): what it learns of them, and what of it stays."""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.manual.warm_up import lessons_of, main
from tests.support.models import random_speaker

SOLUTIONS = [{"question": f"What is {a} plus 1?", "solution": f"{a} + 1 = {a + 1}.", "answer": a + 1} for a in range(8)]


def surprise(folder, lessons):
    """Mean negative log-prob of what is to follow the prompts, in nats a token; and the embeddings."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt, answer in lessons:
        before = tokenizer(prompt)["input_ids"]
        ids = torch.tensor([before + tokenizer(answer, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
        found.append(-logprobs[len(before) - 1 :].mean().item())
    return sum(found) / len(found), model.get_input_embeddings().weight.bfloat16()


def test_a_model_learns_what_follows_a_prompt_and_goes_on_learning_after_its_first_step(tmp_path):
    solutions = tmp_path / "solutions.jsonl"
    solutions.write_text("".join(json.dumps(row) + "\n" for row in SOLUTIONS))
    lessons = lessons_of(solutions)
    assert lessons[2][0].endswith("Question: What is 2 plus 1?\nReply:")
    assert lessons[2][1] == " <think>2 + 1 = 3.</think> <answer>3</answer>"
    model = random_speaker(tmp_path / "model", hidden=32, layers=2, seed=0)
    before, embeddings = surprise(model, lessons)
    of_epochs = []
    for epochs in (1, 20):
        written = tmp_path / str(epochs)
        main([str(model), str(solutions), "--output", str(written), "--epochs", str(epochs), "--rate", "0.01"])
        after, kept = surprise(written, lessons)
        of_epochs.append(after)
        assert kept.equal(embeddings)
    assert of_epochs[1] < of_epochs[0] - 0.5 < before - 0.5
