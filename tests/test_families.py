"""Families of models whose weights are not here, as small random models with their structure; a family is one row."""

import json
from typing import NamedTuple

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ftis_node.config.run import check_fit, run_for
from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError
from ftis_node.fit.context import Context, refuse_prompts
from ftis_node.policy.load import load_policy
from ftis_node.policy.policy import Policy
from ftis_node.tasks import Example, load_task
from ftis_node.tasks.templates import REASONING
from ftis_node.tokenizer.asking import facts_for, message_of, prompt_ids, refuse_rows, usual_end
from ftis_node.tokenizer.chat import chat_wanted


class Family(NamedTuple):
    """special: tokens that the tokenizer marks so; words: added ones that are not. front: before a plain text.

    ids, rows: of the tokenizer and of the embedding. turn: around a message, {} and before the answer; end: of it.
    ends: the generation config's. source: of these facts.
    """

    special: dict[str, int]
    ids: int
    rows: int
    front: tuple[str, ...]
    ends: tuple[int, ...]
    eos: str
    begin: str
    user: str
    answer: str
    end: str
    tied: bool
    source: str
    words: tuple[tuple[str, int], ...] = ()


_CHATML = ("<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n", "<|im_end|>\n")
FAMILIES = {
    "Llama-3.2": Family(
        {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|start_header_id|>": 128006,
         "<|end_header_id|>": 128007, "<|eom_id|>": 128008, "<|eot_id|>": 128009},
        128256, 128256, ("<|begin_of_text|>",), (128001, 128008, 128009), "<|eot_id|>", "<|begin_of_text|>",
        "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>", True, "compose-rl 28 (ends); else from memory",
    ),
    "Qwen3": Family(
        {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}, 151669, 151936, (), (151643, 151645),
        "<|im_end|>", "", *_CHATML, True, "gpustack 2074 (no BOS, end); else from memory",
    ),
    "SmolLM2": Family(
        {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}, 49152, 49152, (), (2,), "<|im_end|>", "", *_CHATML,
        True, "Safe-Synthesizer 286, mlx-examples 900; tied: from memory",
    ),
    "Phi-4": Family(
        {"<|endoftext|>": 100257, "<|im_start|>": 100264, "<|im_end|>": 100265, "<|im_sep|>": 100266,}, 100352, 100352,
        (), (100257, 100265), "<|endoftext|>", "", "<|im_start|>user<|im_sep|>{}<|im_end|>",
        "<|im_start|>assistant<|im_sep|>", "<|im_end|>", False,
        "torchtune 2197 (ids), dotnet/machinelearning 7337 (template, rows)",
    ),
    "Mistral": Family(
        {"<s>": 1, "</s>": 2, "[INST]": 3, "[/INST]": 4}, 32768, 32768, ("<s>",), (2,), "</s>", "<s>",
        "[INST] {}[/INST]", "", "</s>", False, "mistral-common issue 3 (template); ids and untied: from memory",
    ),
    "GLM-4": Family(
        {"<|endoftext|>": 151329, "[gMASK]": 151331, "<sop>": 151333, "<|user|>": 151336, "<|assistant|>": 151337,
         "<|observation|>": 151338}, 151343, 151552, ("[gMASK]", "<sop>"), (151329, 151336, 151338), "<|endoftext|>",
        "[gMASK]<sop>", "<|user|>\n{}", "<|assistant|>\n", "", False,
        "transformers, configuration_glm.py (ends); else from memory",
    ),
    "Gemma-3-it": Family(
        {"<eos>": 1, "<bos>": 2, "<start_of_turn>": 105, "<end_of_turn>": 106, "<image_soft_token>": 262144,}, 262145,
        262144, ("<bos>",), (1, 106), "<eos>", "<bos>", "<start_of_turn>user\n{}<end_of_turn>\n",
        "<start_of_turn>model\n", "<end_of_turn>\n", True, "the GGUF of gemma-3-270m; transformers issue 37011",
        (("</s>", 212),),
    ),
}  # fmt: skip


def _template(family):
    user, answer = (json.dumps(text) for text in (family.user, family.answer))
    return (
        f"{{{{ {json.dumps(family.begin)} }}}}{{% for m in messages %}}{{% if m.role == 'user' %}}"
        f"{{{{ {user}.replace('{{}}', m.content) }}}}{{% else %}}{{{{ {answer} + m.content + "
        f"{json.dumps(family.end)} }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {answer} }}}}{{% endif %}}"
    )


class Model(NamedTuple):
    """A small model of a family: its folder, and what the product loads from there."""

    family: Family
    path: str
    policy: Policy


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory) -> Model:
    family = FAMILIES[request.param]
    path = tmp_path_factory.mktemp(request.param)
    taken = family.special | dict(family.words)
    names = {place: token for token, place in taken.items()}
    letters = iter(sorted(pre_tokenizers.ByteLevel.alphabet()))
    words = [names.get(place) or next(letters, f"filler {place}") for place in range(family.ids)]
    backend = Tokenizer(BPE({word: place for place, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(family.special))
    backend.add_tokens([word for word, _ in family.words])
    if family.front:
        front = [(token, taken[token]) for token in family.front]
        backend.post_processor = processors.TemplateProcessing([*family.front, "$A"], special_tokens=front)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=family.eos)
    tokenizer.chat_template = _template(family)
    tokenizer.save_pretrained(path)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    config = LlamaConfig(vocab_size=family.rows, tie_word_embeddings=family.tied, **sizes)
    LlamaForCausalLM(config).save_pretrained(path)
    GenerationConfig(eos_token_id=list(family.ends)).save_pretrained(path)
    return Model(family, str(path), load_policy(Settings(model=str(path), device="cpu")))


def test_a_family_is_asked_and_ends_as_its_own_files_say(model):
    family = model.family
    path = model.path
    tokenizer = model.policy.tokenizer
    chat = chat_wanted(tokenizer, REASONING, "auto", thinking=False)
    assert chat.end in family.ends
    assert usual_end(tokenizer, None) == chat.end
    assert prompt_ids(tokenizer, "Q: {question}\n", "2+2?") == tokenizer("Q: 2+2?\n")["input_ids"]
    turn = [{"role": "user", "content": message_of(REASONING, "2+2?")}]
    rendered = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
    assert prompt_ids(tokenizer, REASONING, "2+2?", chat) == rendered
    assert tokenizer.eos_token_id not in prompt_ids(tokenizer, "{question}", family.eos), "a row's is plain text"
    task = load_task("arithmetic")
    facts = task.facts() | facts_for(tokenizer, None, 1) | {"text_refusal": ""}
    run = run_for(facts)
    named = {family.special[name] for name in ("<|endoftext|>", "<|im_end|>") if name in family.special}
    assert set(family.ends) | named == set(run.eos)
    assert run.vocabulary == family.ids
    assert run.prefix == tuple(family.special[token] for token in family.front)
    assert (b'"prefix"' in run.canonical_json()) is bool(family.front)
    check_fit(run, facts, path)
    bare = run.model_copy(update={"prefix": (), "eos": (run.vocabulary - 1,)})
    with pytest.raises(UsageError) as caught:
        check_fit(bare, facts, path)
    wrong = str(caught.value)
    assert all(f"(id {end})" in wrong for end in family.ends)
    assert all(token in wrong for token in family.front)
    check_fit(run.model_copy(update={"eos": bare.eos}), facts, path, begun=True)


def test_a_family_samples_the_ids_that_it_names_and_has_rows_for(model):
    family = model.family
    policy = model.policy
    assert policy.vocabulary == min(family.ids, family.rows)
    context = Context(100, rows=family.rows)
    rows = [Example("?", "1")]
    refuse_prompts("it", context, [[family.rows - 1]], rows, "data", 1)
    with pytest.raises(UsageError, match=f"id {family.rows}\\), for which it has no row"):
        refuse_prompts("it", context, [[family.rows]], rows, "data", 1)
    with pytest.raises(UsageError, match="cannot write"):
        refuse_rows(policy.tokenizer, family.ids // 2, "it")
