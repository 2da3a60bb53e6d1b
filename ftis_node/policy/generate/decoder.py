"""One token further: the forward pass of Llama, Mistral, Qwen2 and Qwen3 on the model's own weights.

A pass of transformers' modules over some hundred rows of a small model spends most of its time around the matrix
products. This one has nothing but them, and keeps no copy of any weight: what training changes is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from ftis_node.policy.adapters import LoraLinear
from ftis_node.policy.generate.cache import SharedCache, Size
from ftis_node.policy.generate.sampler import blocks_of
from ftis_node.policy.nf4 import NF4Linear

_FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")

# Kinds of rotary embedding whose frequencies do not change with the length of what is read.
_ROTARY = ("default", "linear", "llama3", "yarn")


class NotUnderstoodError(Exception):
    """The model has something that this pass does not know."""


@dataclass(frozen=True, eq=False)
class _Linear:
    """A linear module, with a LoRA layer of rank r or without.

    weight `[outputs, inputs]`, bias `[outputs]`; down `[r, inputs]`, up `[outputs, r]`, scale.
    """

    weight: Tensor | NF4Linear
    bias: Tensor | None
    down: Tensor | None = None
    up: Tensor | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, module: Any) -> _Linear:
        """Raise NotUnderstoodError for other kinds of modules."""
        plain = (nn.Linear, NF4Linear)
        if type(module) in plain:
            return cls(_weight(module), module.bias)
        if type(module) is not LoraLinear or type(module.base_layer) not in plain:
            raise NotUnderstoodError(type(module).__name__)
        weight = _weight(module.base_layer)
        bias = module.base_layer.bias
        active = [name for name in module.active_adapters if name in module.lora_A]
        if module.disable_adapters or module.merged or not active:
            return cls(weight, bias)
        (name, *others) = active
        up = module.lora_B[name]
        unlike = up.bias is not None or up.weight.dtype != weight.dtype
        if others or module.lora_variant or module.fan_in_fan_out or unlike:
            raise NotUnderstoodError("a LoRA layer of another kind")
        return cls(weight, bias, module.lora_A[name].weight, up.weight, module.scaling[name])

    def __call__(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            out = functional.linear(x, self.weight, self.bias)
        else:
            out = self.weight.product(x, self.bias)
        if self.down is None:
            return out
        return self.adapt(out, x)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add its output to `total`."""
        if isinstance(self.weight, Tensor):
            total.addmm_(x, self.weight.T)
        else:
            total.add_(self.weight.product(x))
        if self.bias is not None:
            total.add_(self.bias)
        if self.down is not None:
            self.adapt(total, x)

    def adapt(self, out: Tensor, x: Tensor) -> Tensor:
        """Add what the LoRA layer adds."""
        assert self.down is not None and self.up is not None
        low = functional.linear(x, self.down)
        return out.addmm_(low, self.up.T, alpha=self.scale)


def _weight(module: Any) -> Any:
    if type(module) is NF4Linear:
        return module
    return module.weight


@dataclass(frozen=True, eq=False)
class _Joined:
    """Linear modules of one input."""

    parts: Sequence[_Linear]

    @classmethod
    def of(cls, *modules: Any) -> _Joined:
        return cls([_Linear.of(module) for module in modules])

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs of all side by side, `[rows, Σ outputs]`."""
        return torch.cat(self.split(x), 1)

    def split(self, x: Tensor) -> list[Tensor]:
        """The output of each, `[rows, outputs]`."""
        return [part(x) for part in self.parts]


@dataclass(frozen=True, eq=False)
class _Norm:
    """RMS norm over the last dimension."""

    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> _Norm:
        if type(module).__name__ not in _NORMS:
            raise NotUnderstoodError(type(module).__name__)
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.epsilon)


@dataclass(frozen=True, eq=False)
class _Layer:
    """The parts of one layer; queries and keys have a norm in Qwen3 only."""

    before_attention: _Norm
    reading: _Joined  # query, key, value
    query_norm: _Norm | None
    key_norm: _Norm | None
    out: _Linear
    scaling: float
    before_mlp: _Norm
    widening: _Joined  # gate, up
    down: _Linear
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        attention = layer.self_attn
        mlp = layer.mlp
        query_norm = None
        key_norm = None
        if getattr(attention, "q_norm", None) is not None:
            query_norm = _Norm.of(attention.q_norm)
            key_norm = _Norm.of(attention.k_norm)
        return cls(
            before_attention=_Norm.of(layer.input_layernorm),
            reading=_Joined.of(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=query_norm,
            key_norm=key_norm,
            out=_Linear.of(attention.o_proj),
            scaling=attention.scaling,
            before_mlp=_Norm.of(layer.post_attention_layernorm),
            widening=_Joined.of(mlp.gate_proj, mlp.up_proj),
            down=_Linear.of(mlp.down_proj),
            activation=mlp.act_fn,
        )


@dataclass(frozen=True, eq=False)
class _Weights:
    """The parts of a model that the pass needs; nothing is copied."""

    embedding: Tensor
    layers: Sequence[_Layer]
    norm: _Norm
    head: Tensor
    head_bias: Tensor | None
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, model: Any) -> _Weights:
        decoder = model.model
        head = model.lm_head
        if type(decoder.embed_tokens) is not nn.Embedding or type(head) is not nn.Linear:
            raise NotUnderstoodError("an embedding or head of another kind")
        layers = [_Layer.of(layer) for layer in decoder.layers]
        return cls(
            embedding=decoder.embed_tokens.weight,
            layers=layers,
            norm=_Norm.of(decoder.norm),
            head=head.weight,
            head_bias=head.bias,
            rotary=decoder.rotary_emb,
        )


def understood(model: Any) -> bool:
    """Whether the pass knows every part of this transformers model."""
    if type(model) not in _FAMILIES:
        return False
    rotary = getattr(model.config, "rope_parameters", None) or {}
    if rotary.get("rope_type") not in _ROTARY or rotary.get("partial_rotary_factor", 1.0) != 1.0:
        return False
    try:
        _Weights.of(model)
    except NotUnderstoodError:
        return False
    return True


def reach(model: Any) -> float:
    """How many tokens a sequence may have before a sliding window hides its first ones."""
    return getattr(model.config, "sliding_window", None) or float("inf")


class Decoder:
    """Completions of some prompts under way, on the weights as they are now, in the places of `cache`."""

    def __init__(self, model: Any, vocabulary: int, size: Size, *, static: bool) -> None:
        """
        Args:
            static: whether the device does the same for a token as for the one before, until the cache's `grow` says
                otherwise.
            vocabulary: logits of further ids are -inf.
        """
        self._weights = _Weights.of(model)
        self._at = _places(self._weights)  # now: a tensor can get other memory
        self._vocabulary = vocabulary
        embedding = self._weights.embedding
        heads = model.config.num_key_value_heads
        positions = torch.arange(size.width + size.tokens, device=embedding.device)
        cos, sin = self._weights.rotary(embedding, positions[None])  # [1, positions, head_dim]
        self._half = sin.shape[-1] // 2
        first = sin[0, :, : self._half]
        second = sin[0, :, self._half :]
        self._turns = torch.cat([cos[0], -first, second], -1)
        like = embedding.new_empty(0, cos.shape[-1])
        self.cache = SharedCache(size, len(self._weights.layers), heads, like, static=static)
        self._logits: Tensor | None = None
        if static:
            self._logits = embedding.new_full((size.rows, blocks_of(vocabulary)), -torch.inf)

    def uses(self, model: Any) -> bool:
        """Whether a decoder made now would read the same memory and do the same with it."""
        return bool(_places(_Weights.of(model)) == self._at)

    def step(self, tokens: Tensor) -> Tensor:
        """Give each row its next token, int64 `[rows]`, after the cache's `grow`.

        Return logits of the one after it, `[rows, ≥ V]`. The next call overwrites them. Nothing here counts on the
        host, so that a CUDA graph of it can be replayed.
        """
        weights = self._weights
        turns = self._turns.index_select(0, self.cache.positions())
        cos, sin = turns[:, None].chunk(2, -1)
        x = functional.embedding(tokens, weights.embedding)
        for index, layer in enumerate(weights.layers):
            layer.out.add_to(x, self._attention(index, layer, layer.before_attention(x), cos, sin))
            gate, up = layer.widening.split(layer.before_mlp(x))
            layer.down.add_to(x, layer.activation(gate).mul_(up))
        self.cache.advance()
        x = weights.norm(x)
        head = weights.head[: self._vocabulary]
        bias = None
        if weights.head_bias is not None:
            bias = weights.head_bias[: self._vocabulary]
        if self._logits is None:
            return functional.linear(x, head, bias)
        logits = self._logits[: len(x)]
        valid = logits[:, : self._vocabulary]
        torch.mm(x, head.T, out=valid)
        if bias is not None:
            valid.add_(bias)
        return logits

    def _attention(self, index: int, layer: _Layer, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (len(h), -1, cos.shape[-1])
        keys = self.cache.heads
        if layer.query_norm is None or layer.key_norm is None:
            heads = layer.reading(h).view(shape)  # those of queries, of keys, of values
        else:
            query, key, value = [part.view(shape) for part in layer.reading.split(h)]
            heads = torch.cat([layer.query_norm(query), layer.key_norm(key), value], 1)
        turned = heads[:, :-keys]
        halves = torch.cat([turned[..., self._half :], turned[..., : self._half]], -1)
        turned.mul_(cos).addcmul_(halves, sin)
        self.cache.put(index, heads[:, -2 * keys :].view(len(h), 2, keys, -1))
        return self.cache.attend(index, heads[:, : -2 * keys], layer.scaling)


def _places(part: Any) -> Any:
    """Where the tensors among parts of a model lie, and what else makes two of them the same."""
    if isinstance(part, Tensor):
        return part.untyped_storage().data_ptr(), part.storage_offset(), part.shape
    if isinstance(part, NF4Linear):
        return _places(part.packed)
    if isinstance(part, (list, tuple)):
        return tuple(map(_places, part))
    if is_dataclass(part):
        return tuple(map(_places, vars(part).values()))
    return part
