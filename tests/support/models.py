"""Small random models, and where the real data lie."""

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ftis_node.tasks.templates import REASONING
from tests.support.tokenizers import CHATML, speaker

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
real_data = pytest.mark.skipif(not (DATA / "gsm8k_train.jsonl").exists(), reason=f"the GSM8K files are not in {DATA}")


def random_speaker(path: Path, *, hidden: int, layers: int, seed: int) -> Path:
    """A random Llama of 262 ids, a byte each, that is asked in a chat, saved as a folder."""
    torch.manual_seed(seed)
    tokenizer = speaker(CHATML)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def taught(
    path: Path,
    questions: list[str],
    *,
    seed: int,
    answers: Sequence[str] = "23456789",
    template: str = REASONING,
    later: Sequence[str] = (),
    steps: int = 150,
    learning_rate: float = 1e-2,
) -> Path:
    """The model of a folder, shown the answer format: its guesses are now and then right, and rewards differ.

    Every second time it is shown in an answer to a message of `later`, which follows a first answer.

    The softmax runs over the few words in use, all others counted as a constant: 152 thousand logits a token would
    take minutes.
    """
    from ftis_node.config.settings import Settings
    from ftis_node.policy.load import load_policy
    from ftis_node.tokenizer.asking import prompt_ids
    from ftis_node.tokenizer.chat import chat_wanted, frame_of

    policy = load_policy(Settings(model=str(path), device="cpu"))
    chance = random.Random(seed)
    encode = policy.tokenizer.encode
    chat = chat_wanted(policy.tokenizer, template, "auto", thinking=False)
    end = policy.tokenizer.eos_token
    texts = [encode(f"<think>so</think><answer>{given}</answer>{end}") for given in answers]
    words = torch.tensor(sorted({token for text in texts for token in text}))
    decoder = policy.model.get_decoder()
    rows = policy.model.get_input_embeddings().weight
    others = torch.full((1,), float(np.log(len(rows))))
    optimiser = torch.optim.Adam(policy.model.parameters(), lr=learning_rate)
    for step in range(steps):
        prompt = prompt_ids(policy.tokenizer, template, chance.choice(questions), chat)
        text = chance.choice(texts)
        if later and step % 2:
            frame = frame_of(policy.tokenizer, template, chat)
            prompt = [*prompt, *chance.choice(texts), *frame.later(chance.choice(later))]
        state = decoder(input_ids=torch.tensor([prompt + text])).last_hidden_state[0, len(prompt) - 1 : -1]
        logits = torch.cat([state @ rows[words].T, others.expand(len(text), 1)], 1)
        loss = torch.nn.functional.cross_entropy(logits, torch.searchsorted(words, torch.tensor(text)))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    policy.model.save_pretrained(path)
    return path
