"""The built-in models with more work in them: what they say stays the same, and a step takes longer."""

from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from ftis_node.policy.names import resolve


def widened(name: str, times: int, folder: Path) -> Path:
    """A built-in model whose feed-forward layers are so many times as wide, saved in `folder`; returns that.

    What is added is 0: it adds nothing to any logit, and as both of its factors are 0 it gets no gradient either.
    """
    source = resolve(name)
    narrow = AutoModelForCausalLM.from_pretrained(source, dtype="float32")
    config = AutoConfig.from_pretrained(source)
    config.intermediate_size *= times
    wide = AutoModelForCausalLM.from_config(config)
    weights = {key: value.new_zeros(wide.state_dict()[key].shape) for key, value in narrow.state_dict().items()}
    for key, value in narrow.state_dict().items():
        weights[key][tuple(slice(size) for size in value.shape)] = value
    wide.load_state_dict(weights)
    wide.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder
