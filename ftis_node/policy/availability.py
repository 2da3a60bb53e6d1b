"""Whether a model is here already, and whether the hub would give it. Nothing of a model's weights is downloaded."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants, get_session, get_token, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError

from ftis_node.errors import UserError, first_line
from ftis_node.policy.kinds import json_object
from ftis_node.policy.load import unloadable
from ftis_node.policy.measure import known_config
from ftis_node.policy.names import resolve

HUB_SECONDS = 3.0  # that the hub may take to answer one request
_CONFIG = "config.json"
_TOKENIZER = "tokenizer.json"
_WEIGHTS = "model.safetensors"
_INDEX = f"{_WEIGHTS}.index.json"
_ELSEWHERE = "download it elsewhere, copy the folder here and pass --model FOLDER"


@dataclass(frozen=True)
class Hub:
    """The result of one request to the hub.

    answers: whether it did. switched_off: HF_HUB_OFFLINE is set, so it was not asked. trouble: why it did not answer.
    """

    answers: bool
    switched_off: bool = False
    trouble: str = ""


def ask_hub() -> Hub:
    """Send the hub one HEAD request. Any answer in `HUB_SECONDS` counts; nothing is raised."""
    if constants.HF_HUB_OFFLINE:
        return Hub(False, switched_off=True)
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as error:  # no name service, no route, a refusal, silence: as many kinds as there are layers
        return Hub(False, trouble=first_line(error))
    return Hub(True)


def cached(source: str, *files: str) -> Path | None:
    """The folder in the hub's cache that holds config.json and these files of a hub id; None if one is missing.

    No network is used. files: by default all that a node needs.
    """
    found = _in_cache(source, _CONFIG)
    if found is None:
        return None
    needed = list(files) or [_TOKENIZER, *_weights(source)]
    if all(_in_cache(source, name) is not None for name in needed):
        return found.parent
    return None


def offered(source: str, seconds: float = HUB_SECONDS) -> None:
    """Return if the hub would give this model, by one request for config.json with the owner's token.

    Args:
        source: a hub id. seconds: how long the hub may take.

    Raises:
        UserError: it would not, or does not answer.
    """
    url = f"{constants.ENDPOINT}/{source}/resolve/main/{_CONFIG}"
    token = get_token()
    headers = {}
    if token:
        headers = {"authorization": f"Bearer {token}"}
    try:
        answer = get_session().head(
            url,
            headers=headers,
            timeout=seconds,
            follow_redirects=False,
        )
        code = answer.status_code
    except Exception as error:  # as above
        raise unloadable(source, source, error) from error
    if code == 404:
        raise UserError(f"The hub has no model {source!r}, or none with a {_CONFIG}.", "Check the name, or its page.")
    if code in (401, 403):
        asker = "the anonymous"
        also = ", and log in with `hf auth login` or HF_TOKEN"
        if token:
            asker = "the token that is set here"
            also = ""
        raise UserError(
            f"The hub does not give {source!r} to {asker}: it is gated, private, or does not exist.",
            f"Accept its terms on its page{also}; or {_ELSEWHERE}.",
        )
    if code >= 400:
        raise UserError(f"The hub answers {code} for {source!r}.", f"Try again later, or {_ELSEWHERE}.")


@contextlib.contextmanager
def described(name: str, hub: Hub, *, tokenizer: bool = False) -> Iterator[str]:
    """A folder with the configuration of a model, and its tokenizer if wanted; the hub's cache is left as it is.

    Where neither is here, files of a few kilobytes (a few megabytes with the tokenizer) are fetched into another
    folder, which is removed when the context ends.

    Args:
        hub: the result of `ask_hub`, a moment ago.

    Raises:
        UsageError: the name is unknown.
        UserError: it is not here, and the hub does not give it.
    """
    source = resolve(name)
    if Path(source).is_dir():
        yield source
        return
    files = [_CONFIG]
    if tokenizer:
        files += [_TOKENIZER, "tokenizer_config.json"]
    here = cached(source, *files[:2])
    if here is not None:
        yield str(here)
        return
    with tempfile.TemporaryDirectory(prefix="ftis-") as scratch:
        config = known_config(name)
        if config is not None and not tokenizer:
            config.save_pretrained(scratch)
        elif not hub.answers:
            why = hub.trouble
            if hub.switched_off:
                why = "HF_HUB_OFFLINE is set"
            raise unloadable(name, source, OSError(f"it is not in the cache, and the hub was not reached ({why})"))
        else:
            offered(source)
            try:
                for file in files:
                    hf_hub_download(source, file, local_dir=scratch)
                if tokenizer:
                    for file in ("chat_template.jinja", "generation_config.json"):
                        with contextlib.suppress(EntryNotFoundError):  # of older models both are in other files
                            hf_hub_download(source, file, local_dir=scratch)
            except Exception as error:  # as above
                raise unloadable(name, source, error) from error
        yield scratch


def _weights(source: str) -> list[str]:
    """The names of the files that a hub id's weights lie in, by the index in the cache; without one it is one file."""
    index = _in_cache(source, _INDEX)
    if index is None:
        return [_WEIGHTS]
    named = json_object(index).get("weight_map")
    if not isinstance(named, dict):
        return [_WEIGHTS]
    return sorted({str(file) for file in named.values()})


def _in_cache(source: str, file: str) -> Path | None:
    """The place of one file of a hub id in the cache; None: it is not there."""
    found = try_to_load_from_cache(source, file)
    if isinstance(found, str):
        return Path(found)
    return None
