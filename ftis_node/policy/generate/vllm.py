"""The engine `vllm`: a server that the owner runs samples with this node's LoRA layers; only HTTP goes between.

They travel as files in a folder that both can read, under a new name for each step: a server that loads a name again
answers from the prefixes that it read with the old weights. If it does not answer, the caller generates by itself.

The API: vLLM's `entrypoints/openai/completion/protocol.py` and `entrypoints/serve/lora`, of version 0.32.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import logging
import math
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np
import torch
from safetensors import SafetensorError

from ftis_node.config.settings import Settings
from ftis_node.errors import FtisError, UsageError
from ftis_node.host.clocks import backoff
from ftis_node.host.interruption import check
from ftis_node.packet import Completion
from ftis_node.policy.generate.sampling import CompletionGroups, Prompts, Sampling
from ftis_node.policy.packing import Prefixed
from ftis_node.policy.policy import Policy
from ftis_node.policy.score import completion_logprobs
from ftis_node.step_report import Generator

T = TypeVar("T")

logger = logging.getLogger(__name__)

FLAGS = "--logprobs-mode processed_logprobs --generation-config vllm"
LORA_FLAGS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve … --enable-lora --max-lora-rank {rank}"
KEY = "VLLM_API_KEY"
ANSWER_SECONDS = 10.0
SAMPLE_SECONDS = 1800.0
LOOK_SECONDS = 0.2
# Seconds in which a server that did not answer is left alone; doubled each time up to the last.
RESTS = (2.0, 60.0)
# Mean |difference| in nats between a server's log-probs and ours for the same weights: above it they are others.
TOLERANCE = {torch.float32: 0.01, torch.bfloat16: 0.15, torch.float16: 0.05}
PROBES = 8
PROBE_TOKENS = 12
PROBE_TEMPERATURE = 2.0  # a sharp model says the same at 0.7 and 1


class AwayError(Exception):
    """The server did not answer, or not as a server that works."""


class RefusedError(Exception):
    """The server refused a request; code: of HTTP, 0 for an answer that makes no sense for this policy."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(eq=False)
class Server:
    """A vLLM server, and which of this node's weights it has.

    Only the thread that computes uses it: `connect` when a run is opened, then `prepare` and `sample` for each
    generation, `changed` when a checkpoint was restored.

    folder  where weights are put for it; the server has it under the same path
    key     the server's --api-key; None: it has none
    away    why this node generates by itself now; None: the server does
    """

    url: str
    folder: Path
    key: str | None = None
    away: str | None = "it was not asked yet"

    def __post_init__(self) -> None:
        self._model = ""
        self._name = ""  # of the weights that it has
        self._step: int | None = None  # of the same; None: it has to get others
        self._known: tuple[Sequence[int], str, int] = ((), "", 0)  # what `connect` was given
        self._in_vain = 0  # failures in a row
        self._until = 0.0  # the monotonic second until which it is left alone

    @classmethod
    def of(cls, url: str, folder: str, key: str | None) -> Server:
        """A server that is not asked yet. url: its address. folder: with `~`, or relative to the current directory.

        Raises:
            UsageError: the address is none, or leads off this machine without a key.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no address of a server.", "Use one like http://127.0.0.1:8000.")
        if not key and not _here(parts.hostname):
            raise UsageError(
                f"The vLLM server {url} is not on this machine, and would load files for anyone who reaches it.",
                f"Start it with --api-key, and give the same key to this node in the environment as {KEY}.",
            )
        return cls(url.rstrip("/"), Path(folder).expanduser().absolute(), key)

    def connect(
        self,
        policy: Policy,
        prompt: Sequence[int],
        text: str,
        tokens: int,
        step: int = 0,
    ) -> None:
        """See whether it is there, has this model, and samples from its distribution; then it is used.

        It gets the policy's weights, and samples some short completions. Without an answer it is `away`, and `prepare`
        asks again.

        Args:
            prompt, text: one of the run's, as token ids and as text; tokens: of the longest prompt and completion.
            step: of the weights.

        Raises:
            UsageError: it is there, and cannot be used as it was started.
        """
        self._known = (prompt, text, tokens)
        try:
            self._same_model(policy, text, tokens)
            self._publish(policy, step)
            self._same_distribution(policy, prompt)
        except AwayError as error:
            self._gone(str(error))
            return
        if self._in_vain:
            logger.warning("The vLLM server %s is back: it samples for this node again.", self.url)
        self.away = None
        self._in_vain = 0

    def prepare(self, policy: Policy, step: int) -> None:
        """Give it the weights of this step, if it is there; to be called before each work for it.

        Where it has them nothing is done. One that is away is tried again once its rest is over, see `RESTS`. A server
        that cannot be used any more is only away: this raises no UsageError.
        """
        if self.away is not None and time.monotonic() < self._until:
            return
        try:
            if self.away is not None:  # it may be another one by now
                self.connect(policy, *self._known, step)
            elif self._step != step:
                self._publish(policy, step)
        except AwayError as error:
            self._gone(str(error))
        except UsageError as error:  # it may pass the next comparison by luck
            self._in_vain = 64  # the longest pause
            self._gone(error.what.rstrip("."))

    def changed(self) -> None:
        """Note that the policy's weights are others than those of any step: `prepare` gives it them anew."""
        self._step = None

    def sample(self, policy: Policy, prompts: Prompts, group: int, sampling: Sampling) -> CompletionGroups | None:
        """As `stream.generate`, with the server's log-probs and random numbers; None if it went away.

        Raises:
            Interrupted: it was asked for.
        """
        if self.away is not None:
            return None
        try:
            return self._sampled(policy, prompts, group, sampling)
        except (AwayError, RefusedError) as error:
            self._gone(str(error))
            return None

    def told(self, own: Mapping[str, float]) -> Generator:
        """What a step's report says of it; own: the step's figures of this node's own samples, none without such."""
        off = None
        if "k2" in own:
            off = math.sqrt(2 * max(0.0, own["k2"]))
        return Generator(self.away, off)

    # --- what is compared at the start ----------------------------------------------------------------------------

    def _same_model(self, policy: Policy, text: str, tokens: int) -> None:
        """See whether it has this model's tokenizer, and room for so many tokens; note its model's name.

        Raises:
            UsageError: it has not. AwayError: it does not answer.
        """
        try:
            models = self._ask("/v1/models")
        except RefusedError as error:
            if error.code == 401:
                raise UsageError(
                    f"The vLLM server {self.url} wants another key.", f"Put its --api-key into the environment: {KEY}."
                ) from None
            raise AwayError(str(error)) from None
        with _sense():
            base = next(model for model in models["data"] if model.get("parent") is None)
            self._model = str(base["id"])
            longest = int(base.get("max_model_len") or tokens)
        if longest < tokens:
            raise UsageError(
                f"The vLLM server {self.url} takes {longest} tokens, and prompt and completion have up to {tokens}.",
                f"Start it with --max-model-len {tokens} or more.",
            )
        told = self._must("/tokenize", {"model": self._model, "prompt": text, "add_special_tokens": False})
        with _sense():
            read = list(told["tokens"])
        if read != policy.tokenizer(text, add_special_tokens=False).input_ids:
            raise UsageError(
                f"The vLLM server {self.url} has the model {self._model}, whose tokenizer is another.",
                "Start it with this node's model.",
            )

    def _same_distribution(self, policy: Policy, prompt: Sequence[int]) -> None:
        """Score short completions of the server's both ways; it has the weights already.

        Raises:
            UsageError: the log-probs are apart, or it refuses to sample. AwayError: it does not answer.
        """
        sampling = Sampling(PROBE_TOKENS, PROBE_TEMPERATURE, ())
        try:
            made = self._sampled(policy, [prompt], PROBES, sampling)[0]
        except RefusedError as error:
            if error.code >= 500:
                raise AwayError(str(error)) from None
            raise UsageError(
                f"The vLLM server {self.url} refused to sample: {error}",
                "Use version 0.32 or newer, with the flags of docs/deploy.md.",
            ) from None
        claimed = np.concatenate([one.logprobs for one in made])
        given = [Prefixed(prompt, [one.token_ids for one in made], [None] * len(made))]
        with torch.no_grad():
            ours = completion_logprobs(policy, given, PROBE_TEMPERATURE)[0].cpu().numpy()
        off = float(np.abs(ours - claimed).mean())
        if off <= TOLERANCE[policy.dtype]:
            return
        raise UsageError(
            f"The log-probs of the vLLM server {self.url} are off by {off:.2g} nats a token.",
            f"Start it with this node's weights and dtype ({str(policy.dtype).removeprefix('torch.')}), and {FLAGS}.",
        )

    # --- weights ------------------------------------------------------------------------------------------------------

    def _publish(self, policy: Policy, step: int) -> None:
        """Give it the policy's LoRA layers, as files in the folder, under a name that is new; remove older ones.

        Raises:
            UsageError: it refuses them. AwayError: it does not answer, or they cannot be written.
        """
        old = self._name
        name = f"ftis-{step}-{uuid.uuid4().hex[:8]}"
        self._clean()
        try:
            policy.model.save_pretrained(self.folder / name, save_embedding_layers=False)  # type: ignore[operator]
        except (OSError, SafetensorError) as error:
            raise AwayError(f"the weights for it cannot be written: {error}") from None
        rank = max(config.r for config in policy.model.peft_config.values())  # type: ignore[operator]
        told = {"lora_name": name, "lora_path": str(self.folder / name)}
        self._must("/v1/load_lora_adapter", told, LORA_FLAGS.format(rank=rank))
        self._name = name
        self._step = step
        if old:
            with contextlib.suppress(RefusedError):  # a server that was started anew does not know it
                self._ask("/v1/unload_lora_adapter", {"lora_name": old})
        self._clean(name)

    def _clean(self, kept: str = "") -> None:
        """Remove older weights from the folder: all but those of this name, and those that the server has."""
        for old in self.folder.glob("ftis-[0-9]*-" + "[0-9a-f]" * 8):  # it may be a folder with other things, too
            if old.name not in (kept, self._name):
                shutil.rmtree(old, ignore_errors=True)

    # --- HTTP ---------------------------------------------------------------------------------------------------------

    def _sampled(self, policy: Policy, prompts: Prompts, group: int, sampling: Sampling) -> CompletionGroups:
        """As `sample`, with the weights that it has.

        Raises:
            AwayError, RefusedError: it gave none. FtisError: log-probs are not finite.
        """
        rows = policy.causal_lm.get_input_embeddings().num_embeddings
        body = body_of(self._name, prompts, group, sampling, range(policy.vocabulary, rows))
        told = self._ask("/v1/completions", body, SAMPLE_SECONDS)
        with _sense():
            choices = sorted(told["choices"], key=lambda choice: int(choice["index"]))
            made = [_completion(choice, sampling, policy.vocabulary) for choice in choices]
        wanted = group * len(prompts)
        if len(made) != wanted:
            raise AwayError(f"{len(made)} completions came in place of {wanted}")
        return [made[start : start + group] for start in range(0, wanted, group)]

    def _must(self, path: str, body: Mapping[str, Any], flags: str = "") -> Any:
        """`_ask`, where a refusal means that it was started in another way, unless it is broken.

        flags: what it should have been started with; empty: nothing special.

        Raises:
            UsageError: it refuses. AwayError: it does not answer, or is broken.
        """
        try:
            return self._ask(path, body, SAMPLE_SECONDS)
        except RefusedError as error:
            if error.code >= 500 and not self._healthy():
                raise AwayError(str(error)) from None
            what = f"The vLLM server {self.url} cannot be used: {error}"
            fix = f"Start it with this node's model and {FLAGS}."
            if flags:
                fix = f"Start it so: {flags} {FLAGS}"
            raise UsageError(what, fix) from None

    def _healthy(self) -> bool:
        """Whether it answers now, and says that it works."""
        with contextlib.suppress(AwayError, RefusedError):
            self._ask("/health")
            return True
        return False

    def _ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        seconds: float = ANSWER_SECONDS,
    ) -> Any:
        """Return the server's answer: parsed JSON, or the text of another one.

        Args:
            body: POSTed as JSON; None: a GET. seconds: how long it may be silent.

        Raises:
            AwayError: there is no answer. RefusedError: its code is not 200. Interrupted: asked for while it waits.
        """
        parts = urlsplit(self.url)
        kind: type[http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            kind = http.client.HTTPSConnection
        connection = kind(parts.hostname or "", parts.port, timeout=seconds)
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        method = "GET"
        data = None
        if body is not None:
            method = "POST"
            data = json.dumps(body).encode()

        def exchanged() -> tuple[int, bytes]:
            """The code and the body of the answer."""
            connection.request(method, parts.path + path, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()

        try:
            code, text = _meanwhile(exchanged)
        except (OSError, http.client.HTTPException) as error:
            raise AwayError(str(error) or type(error).__name__) from None
        finally:
            if connection.sock is not None:  # of an interrupted request, which vLLM then gives up
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
        if code != 200:
            said = " ".join(text.decode(errors="replace").split())[:200]
            raise RefusedError(code, f"it answered {path} with {code} {said}")
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")

    def _gone(self, why: str) -> None:
        """Leave it alone for a while, longer after each failure; this node generates by itself meanwhile."""
        if self.away != why:
            logger.warning("The vLLM server %s samples nothing for now: %s. This node generates itself.", self.url, why)
        self._in_vain += 1
        self.away = why
        self._step = None
        self._until = time.monotonic() + backoff(self._in_vain, *RESTS)


def server_of(settings: Settings) -> Server | None:
    """The server of the settings, not asked yet; None if they name none. Raises UsageError as `Server.of`.

    Where they name no folder, a new one under the system's temporary files is made, and stays.
    """
    if settings.engine != "vllm":
        return None
    folder = settings.vllm_folder or tempfile.mkdtemp(prefix="ftis-vllm-")
    return Server.of(settings.vllm_url, folder, os.environ.get(KEY))


def body_of(
    model: str,
    prompts: Prompts,
    group: int,
    sampling: Sampling,
    padding: Sequence[int],
) -> dict[str, Any]:
    """The question for a group of completions of each prompt, as JSON; it leaves the distribution as the model has it.

    Args:
        model: the name of the weights. padding: ids that have a row but no token.
    """
    body = {
        "model": model,
        "prompt": [list(prompt) for prompt in prompts],
        "n": group,
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.eos),
        "ignore_eos": True,  # only the run's end ids end a completion
        "logprobs": 0,
        "return_token_ids": True,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }
    if padding:
        # Not `allowed_token_ids`: vLLM keeps all of them for each sequence, and its newer runner takes 1,024 at most.
        # -100 is the least that it takes, before the temperature; what is sampled all the same is refused.
        body["logit_bias"] = {str(token): -100.0 for token in padding}
    return body


def _meanwhile(work: Callable[[], T]) -> T:
    """The result of work in a thread of its own, or what it raises.

    Raises:
        Interrupted: as soon as that is asked for. The thread goes on until its work ends, so the caller cuts it short.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    check()
    while not wait([future], LOOK_SECONDS).done:
        check()
    return future.result()


@contextlib.contextmanager
def _sense() -> Iterator[None]:
    """An answer that says something else is no answer: what code within stumbles over becomes AwayError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration, OverflowError) as error:
        raise AwayError(f"it answered nonsense ({error!r:.100})") from None


def _completion(choice: Mapping[str, Any], sampling: Sampling, vocabulary: int) -> Completion:
    """A choice of the server's answer as a completion.

    Raises:
        RefusedError: it is none of this policy's, with code 0. FtisError: the weights have diverged.
    """
    ids = choice.get("token_ids")
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
    if not ids or logprobs is None or len(ids) != len(logprobs):
        raise RefusedError(0, "it told no token ids, or not as many log-probs")
    token_ids = np.asarray(ids, np.uint32)
    values = np.asarray(logprobs, np.float32)
    if len(ids) > sampling.max_new_tokens or token_ids.max() >= vocabulary:
        raise RefusedError(0, "it sampled ids that the model has not, or too many")
    if not np.isfinite(values).all():
        raise FtisError("The server's log-probs are not finite; the weights have diverged.")
    return Completion(token_ids, np.minimum(values, 0.0), bool(ids[-1] in sampling.eos))


def _here(host: str) -> bool:
    """Whether an address is of this machine alone."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
