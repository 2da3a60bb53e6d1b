"""Loading a policy: weights, tokenizer, LoRA, device and dtype."""

import json
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import constants, get_session
from huggingface_hub.utils.tqdm import enable_progress_bars
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from ftis_node.config.settings import Settings
from ftis_node.errors import UsageError, UserError, first_line
from ftis_node.fit.geometry import modules_meant
from ftis_node.fit.memory import Dtype
from ftis_node.host.doing import doing
from ftis_node.host.processor import cpu_dtype
from ftis_node.host.proxy import refused_proxy
from ftis_node.policy.adapters import Conv1D, LoraConfig, get_peft_model, head_of, linear_modules
from ftis_node.policy.kinds import refuse_config
from ftis_node.policy.names import resolve
from ftis_node.policy.nf4 import quantise
from ftis_node.policy.policy import Policy
from ftis_node.policy.ready import TEXTS, ready
from ftis_node.tokenizer.asking import refuse_rows
from ftis_node.tokenizer.declared import declare_ends

with warnings.catch_warnings(action="ignore"):  # of HF_HUB_DISABLE_PROGRESS_BARS, by which an owner has decided
    disable_progress_bar()  # of transformers, which shows one for work that takes no time; `host.doing` tells of ours
    enable_progress_bars()  # of downloads

_IF_THERE = {f"_raise_exceptions_for_{trouble}": False for trouble in ("missing_entries", "connection_errors")}
_GROWTH = 1 << 14  # by all parts of a tokenizer together
# By kinds of parts: how many times longer each makes a text, at most; what a precompiled table has is not looked at.
_LONGER = {
    "ByteLevel": 4,
    "NFC": 3,
    "NFD": 4,
    "NFKC": 18,
    "NFKD": 18,
    "Precompiled": 100,
    "Metaspace": 2,
    "BPEDecoder": 2,
    "CTC": 2,
    "WordPiece": 2,
}
_TEMPLATE = 1 << 14  # characters of its template

# How long the hub may take to show that it is there.
_HUB_SECONDS = 5.0


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of `name` (see `resolve`), which knows the ends of the generation config beside it.

    Of a hub id its files are downloaded into the hub's cache, if they are not there. It needs no GPU.

    Raises:
        UsageError: there is none, or it makes texts many times longer.
        UserError: it cannot be found or loaded.
    """
    source = resolve(name)
    try:
        where = where_to_look(source)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **where)
        tokenizer.clean_up_tokenization_spaces = False  # or two nodes read one completion as two texts
        ends = _generation_ends(source, where)
    except Exception as error:  # transformers raises a dozen kinds for a missing or damaged file
        raise unloadable(name, source, error) from error
    if len(tokenizer) < 2:  # transformers makes an empty one where there is no file
        raise UsageError(
            f"The model {name!r} ({source}) has no tokenizer.",
            "Copy tokenizer.json and tokenizer_config.json of the model that it was made from into its folder.",
        )
    _refuse_growth(getattr(tokenizer, "backend_tokenizer", None), name)
    declare_ends(tokenizer, ends)
    return tokenizer


def _generation_ends(source: str, where: Mapping[str, bool]) -> list[int]:
    """The ends that transformers' `generate` stops at: those of the generation config, or else of config.json.

    They keep the file's order: `asking.usual_end` takes the first. There are none if neither file names one. where: by
    `where_to_look`. Whatever it raises, `load_tokenizer` makes a UserError of it.
    """
    for name in ("generation_config.json", "config.json"):
        file = cached_file(source, name, **where, **_IF_THERE)
        told = {}
        if file is not None:
            told = json.loads(Path(file).read_text(encoding="utf-8"))
        ends = told.get("eos_token_id", (told.get("text_config") or {}).get("eos_token_id"))
        if ends is not None:
            return [int(end) for end in (ends if isinstance(ends, list) else [ends])]
    return []


def _refuse_growth(backend: Tokenizer | None, name: str) -> None:
    """Raise UsageError for a tokenizer that makes a text far longer: a few bytes in its file are enough for a billion
    times, by parts that each make it longer by a little, or by a long post-processor's template around each text.

    backend: the part of it that is not Python; None: it has none, and passes.
    """
    growth = math.prod(_growth(_state_of(backend, part)) for part in ("normalizer", "pre_tokenizer", "decoder"))
    if growth > _GROWTH or len(json.dumps(_state_of(backend, "post_processor"))) > _TEMPLATE:
        raise UsageError(
            f"The tokenizer of {name!r} makes texts many times longer.", "Use the tokenizer that the model came with."
        )


def _growth(part: Any) -> int:
    """How many times longer a part of a tokenizer can make a text, with all parts in it. part: as JSON has it."""
    if isinstance(part, list):
        return math.prod(map(_growth, part))
    if not isinstance(part, dict):
        return 1
    own = _LONGER.get(str(part.get("type")), 1)
    if part.get("type") == "Replace":
        found = part["pattern"]
        own = max(1, len(part["content"]))
        if "Regex" in found or not found.get("String"):
            own += 1  # it may find nothing at all, before each character
    if part.get("type") == "Prepend":
        own = 1 + len(part["prepend"])
    return own * _growth(list(part.values()))


def _state_of(backend: Tokenizer | None, part: str) -> Any:
    """A part of a tokenizer as JSON has it; None if there is none."""
    found = getattr(backend, part, None)
    if found is None:
        return None
    return json.loads(found.__getstate__())


def load_policy(
    settings: Settings, texts: Sequence[str] | None = TEXTS, tokenizer: PreTrainedTokenizerBase | None = None
) -> Policy:
    """Load model and tokenizer; add LoRA layers if asked to.

    Call it in the thread that computes: it takes seconds to minutes, and downloads what the hub's cache lacks. Settings
    are those that `planning.settle` has completed; without a dtype it is float32. `make_policy` says what it changes
    beside the result.

    texts: see `make_policy`. tokenizer: the model's, if it is loaded already.

    Raises:
        UsageError: the name is unknown, or the architecture is not supported.
        UserError: weights cannot be found or read; the message says what to do.
    """
    source = resolve(settings.model)
    if tokenizer is None:
        tokenizer = load_tokenizer(settings.model)
    choose_device(settings.devices[0])  # a wrong one is told before anything is downloaded
    try:
        where = where_to_look(source)
        config = transformers.AutoConfig.from_pretrained(source, **where)
        refuse_config(config.to_dict(), settings.model)
        refuse_rows(tokenizer, config.get_text_config().vocab_size, settings.model)
        with doing("loading the weights"), _cast_later() as casts:
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                source,
                output_loading_info=True,
                config=config,
                dtype=getattr(torch, settings.dtype or "float32"),
                use_safetensors=True,
                attn_implementation=own_attention(config),
                **where,
            )
        _refuse_gaps(found, settings.model)
    except UserError:
        raise
    except Exception as error:  # as above
        raise unloadable(settings.model, source, error) from error
    return make_policy(model, tokenizer, settings, casts, texts)


def own_attention(config: Any) -> str:
    """The attention that a model is loaded with: PyTorch's ("sdpa"), or its own ("eager") where it knows no other. Not
    what config.json names: it may be code of a hub."""
    kind = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if getattr(kind, "_supports_sdpa", True):
        return "sdpa"
    return "eager"


@contextmanager
def _cast_later() -> Iterator[dict[nn.Module, torch.dtype]]:
    """Within it transformers leaves matrices as their file has them, mapped and not copied; all else is cast.

    By itself it casts a model as a whole, which takes the memory of a whole one. Yields the modules of these matrices,
    and the dtypes that they are to have: empty at first, filled by the load within. transformers itself is changed
    until the context ends, so no other thread may load a model meanwhile.
    """
    plan = PreTrainedModel._get_dtype_plan
    casts = {}

    def later(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype | None]:
        """In place of transformers' own, which loading asks: for parameters by path their dtype; None: the file's."""
        given: dict[str, torch.dtype | None] = plan(model, dtype)
        if given:
            return given
        left: dict[str, torch.dtype | None] = {}
        for path, module in model.named_modules():
            if type(module) in (nn.Linear, nn.Embedding) and module.weight.dtype == dtype:
                casts[module] = dtype
                left[f"{path}.weight"] = None
        return left

    PreTrainedModel._get_dtype_plan = later
    try:
        yield casts
    finally:
        PreTrainedModel._get_dtype_plan = plan


def make_policy(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    settings: Settings,
    casts: dict[nn.Module, torch.dtype] | None = None,
    texts: Sequence[str] | None = TEXTS,
) -> Policy:
    """A model made ready: on its device, with LoRA layers and gradient checkpointing where the settings ask for them.

    `model` itself is changed. So is the process: its random state is seeded, and a GPU becomes the current device.

    Args:
        casts: modules whose weights are to get another dtype on their way, one at a time; taken over and emptied.
        texts: see `ready`; None: nothing is to be generated or scored, so the model is not tried.

    Raises:
        UsageError: there is no such device; LoRA layers, NF4 or gradient checkpointing cannot be had; or `ready`
            refuses the model.
    """
    device = use_device(settings.devices[0])
    torch.manual_seed(settings.seed)
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN's attention, of the whole process
    if casts is None:
        casts = {}
    if settings.lora:
        model = _with_lora(model, settings, casts)
    if settings.quantisation == "nf4":
        base = model.get_base_model() if settings.lora else model
        quantise(model, base.get_output_embeddings(), device, settings.model, casts)
    while casts:
        module, dtype = casts.popitem()
        module.to(device, dtype)
    model.to(device)
    if settings.quantisation == "nf4":
        _out_of_file(model)
    head = model.get_output_embeddings()
    if head is not None:
        head.register_forward_pre_hook(_side_by_side)
    policy = Policy(settings.model, model, tokenizer, device, graphs=device.type == "cuda")
    if texts is not None:
        with doing("checking the fast paths"):
            policy = ready(policy, texts)
    if settings.gradient_checkpointing:
        if not policy.causal_lm.supports_gradient_checkpointing:
            raise UsageError(
                f"{settings.model} has no gradient checkpointing.", "Use --set gradient_checkpointing=false."
            )
        checkpoint_activations(policy.causal_lm)
    return policy


def _out_of_file(model: nn.Module) -> None:
    """Copy weights that are still mapped from a file: a single one would keep all of the file in memory."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def _side_by_side(head: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Copy the last positions of prompts out of all: rows of bf16 that lie apart take a CPU 300 times as long.

    A hook that torch calls before each forward pass of the head; what it returns becomes the head's input.
    """
    return tuple(states.contiguous() for states in inputs)


def checkpoint_activations(model: Any) -> None:
    """Make a model of transformers compute its layers again in the backward pass, while it is in training mode."""
    name = "gradient_checkpointing"  # of the method: transformers 5.17 has this one
    if hasattr(model, "activation_checkpointing_enable"):
        name = "activation_checkpointing"
    getattr(model, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})


def _with_lora(model: Any, settings: Settings, casts: Mapping[nn.Module, torch.dtype]) -> Any:
    """Freeze a model, and put new LoRA layers into the modules that the settings mean; return peft's model.

    casts: modules whose weights get another dtype later, and that dtype. While layers are added they have weights of it
    that take no memory, then their own again.

    Raises:
        UsageError: as `modules_meant`.
    """
    paths = linear_modules(model)
    targets = modules_meant(paths, head_of(model), settings.lora_targets, settings.model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    weights: dict[Any, Any] = {module: module.weight for module in casts}
    for module, dtype in casts.items():  # adapters get the dtype that is to be
        module.weight = nn.Parameter(torch.empty((), dtype=dtype).expand_as(weights[module]), requires_grad=False)
    lora = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules=sorted(targets),
        lora_dropout=0.0,
        fan_in_fan_out=any(isinstance(paths[target], Conv1D) for target in targets),
        task_type="CAUSAL_LM",
    )
    # Adapters have the model's dtype: in fp32 each would keep a copy of its input. The masters have the digits.
    model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    for module, weight in weights.items():
        module.weight = weight
    return model


def _refuse_gaps(found: Mapping[str, Collection[str]], name: str) -> None:
    """Raise UserError for weights that a file lacks: transformers fills them with random numbers. found: what it tells
    of a load."""
    missing = sorted(found["missing_keys"])
    if missing:
        more = ""
        if missing[1:]:
            more = f" and {len(missing) - 1} more"
        raise UserError(
            f"The weights of {name} lack {missing[0]}{more}, and would be random there.",
            "Download or copy the model again, whole; or mend its config.json, if that describes another model.",
        )


def where_to_look(source: str) -> dict[str, bool]:
    """Where transformers may look, as options of its `from_pretrained`: for a hub id only into its cache while the hub
    does not answer. Each call asks the hub anew, for up to 5 s; for a folder it asks nothing.

    Otherwise transformers would ask for every file of a model anew, and wait 23 seconds for each.
    """
    if Path(source).is_dir():
        return {}
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception:  # no name service, no route, a refusal, silence, or HF_HUB_OFFLINE: all the same here
        return {"local_files_only": True}
    return {}


def choose_device(wanted: str) -> torch.device:
    """The device of that name, a GPU's with its number; `auto` is a GPU if there is one. Nothing is changed.

    Raises:
        UsageError: there is no such device.
    """
    if wanted == "auto":
        wanted = "cpu"
        if torch.cuda.is_available():
            wanted = "cuda"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise UsageError(f"{wanted!r} is no device.", "Use cpu, cuda, cuda:0 or auto.") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"A node cannot train on the device {wanted!r}.", "Use cpu, cuda, cuda:0 or auto.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "There is no usable CUDA device.", "Use --device cpu; or ask `ftis-node doctor` what is wrong."
        )
    # torch refuses some calls for a card without a number
    if device.type == "cuda":
        return torch.device("cuda", device.index or 0)
    return device


def use_device(wanted: str) -> torch.device:
    """`choose_device`, which becomes the one that is meant where none is named: no other gets a context, of 0.5 GB.

    Call it in the thread that computes. Raises UsageError as `choose_device`.
    """
    device = choose_device(wanted)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def fastest_dtype(device: torch.device) -> Dtype:
    """The dtype that a device multiplies fastest: bfloat16 where it is not emulated; before Ampere it is float16."""
    if device.type == "cpu":
        return cpu_dtype()
    if torch.cuda.get_device_capability(device) >= (8, 0):
        return "bfloat16"
    return "float16"


def unloadable(name: str, source: str, error: Exception) -> UserError:
    """Return the error for a person when a model, or a part of it, cannot be had; the caller raises it.

    name: as the owner named it. source: what `resolve` made of it. error: what the library raised.
    """
    proxy = refused_proxy()
    if proxy is not None and not Path(source).exists():
        return UserError(f"The model {name!r} ({source}) cannot be loaded: {proxy.what}", proxy.fix)
    return UserError(
        f"The model {name!r} ({source}) cannot be loaded: {first_line(error, 300)}",
        "Check the name and the network; or download it elsewhere, copy the folder here and pass --model FOLDER.",
    )
