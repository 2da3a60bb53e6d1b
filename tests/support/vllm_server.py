"""A server that speaks as much of vLLM's HTTP as a node asks for, and samples with the weights that it was given.

What is vLLM's own is tested by `make vllm-test`.
"""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from http.server import ThreadingHTTPServer
from typing import Any

import torch
from peft import PeftModel

from ftis_node.config.settings import Settings
from ftis_node.policy.generate.stream import Sampling, generate
from ftis_node.policy.load import load_policy, load_tokenizer
from ftis_node.policy.policy import Policy
from tests.support.served import Quiet
from tests.support.small_models import logprobs_of


class Refused(Exception):
    """An answer with this code and text."""


_loaded = cache(load_policy)


class VllmServer:
    """Started with `start`. The switches are how an owner may have started it wrongly.

    processed  log-probs after the temperature; lora: adapters can be loaded; ids: tells token ids; broken: answers
    everything with 500; cut: ends each answer too early; change: what is done to a choice before it is told
    """

    def __init__(self):
        self.model = "tiny-a"
        self.key = ""
        self.port = 0  # when it has started, the same each time
        self.processed = self.lora = self.ids = True
        self.broken = self.cut = False
        self.slow = threading.Event()  # completions wait while it is set
        self.longest = 192
        self.tokenizer = load_tokenizer(self.model)
        self.adapters: dict[str, Policy] = {}
        self.loaded: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.change: Callable[[dict[str, Any]], dict[str, Any]] = lambda choice: choice
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> VllmServer:
        outer = self

        class Handler(Quiet):
            def do_GET(self):
                self._answer({})

            def do_POST(self):
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: dict[str, Any]):
                code = 200
                answer = {}
                try:
                    if outer.key and self.headers.get("Authorization") != f"Bearer {outer.key}":
                        raise Refused(401, "Unauthorized")
                    if outer.broken:
                        raise Refused(500, "EngineCore encountered an issue.")
                    answer = outer.answer(self.path, body)
                except Refused as refused:
                    code = refused.args[0]
                    answer = {"error": {"message": refused.args[1]}}
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data) + (9 if outer.cut else 0)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self):
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        match path:
            case "/v1/models":
                return {"data": [{"id": self.model, "parent": None, "max_model_len": self.longest}]}
            case "/tokenize":
                return {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False).input_ids}
            case "/v1/completions":
                return self._completions(body)
            case "/v1/load_lora_adapter":
                if not self.lora:
                    raise Refused(500, "LoRA is not enabled. Use --enable-lora to enable LoRA.")
                base = _loaded(Settings(model=self.model, device="cpu", lora=False))
                model = PeftModel.from_pretrained(copy.deepcopy(base.model), body["lora_path"])
                self.adapters[body["lora_name"]] = replace(base, model=model.eval())
                self.loaded.append(body["lora_name"])
            case "/v1/unload_lora_adapter":
                if body["lora_name"] not in self.adapters:
                    raise Refused(404, "no such adapter")
                del self.adapters[body["lora_name"]]
            case "/health":
                pass
            case _:
                raise Refused(404, path)
        return {}

    def _completions(self, body: dict[str, Any]) -> Any:
        self.asked.append(body)
        while self.slow.is_set():
            time.sleep(0.02)
        policy = self.adapters[body["model"]]
        sampling = Sampling(body["max_tokens"], body["temperature"], tuple(body["stop_token_ids"]))
        random = torch.Generator().manual_seed(len(self.asked))
        groups = generate(policy, body["prompt"], group=body["n"], sampling=sampling, generator=random)
        choices = []
        for prompt, group in zip(body["prompt"], groups, strict=True):
            for one in group:
                logprobs = one.logprobs
                if not self.processed:
                    with torch.no_grad():
                        logprobs = logprobs_of(policy, [prompt], [one.token_ids], 1.0).numpy()
                told = {"token_ids": one.token_ids.tolist()} if self.ids else {}
                choice = {
                    "index": len(choices),
                    "logprobs": {"token_logprobs": logprobs.tolist()},
                    **told,
                }
                choices.append(self.change(choice))
        return {"choices": choices[::-1]}
