"""One token further: the forward pass of Llama, Mistral, Qwen2 and Qwen3 on the model's own weights.

A pass of transformers' modules over some hundred rows of a small model spends most of its time around the matrix
products. This one has nothing but them, and keeps no copy of any weight: what training changes is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from ftis_node.policy.adapters import LoraLinear
from ftis_node.policy.generate.cache import Ids, SharedCache
from ftis_node.policy.joint import joint
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
        if type(module) in (nn.Linear, NF4Linear):
            return cls(_weight(module), module.bias)
        if type(module) is not LoraLinear or type(module.base_layer) not in (nn.Linear, NF4Linear):
            raise NotUnderstoodError(type(module).__name__)
        weight, bias = _weight(module.base_layer), module.base_layer.bias
        active = [name for name in module.active_adapters if name in module.lora_A]
        if module.disable_adapters or module.merged or not active:
            return cls(weight, bias)
        (name, *others) = active
        up = module.lora_B[name]
        if (
            others
            or module.lora_variant
            or module.fan_in_fan_out
            or up.bias is not None
            or up.weight.dtype != weight.dtype
        ):
            raise NotUnderstoodError("a LoRA layer of another kind")
        return cls(weight, bias, module.lora_A[name].weight, up.weight, module.scaling[name])

    def __call__(self, x: Tensor) -> Tensor:
        return self.adapt(functional.linear(x, self._dense(), self.bias), x)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add its output to `total`."""
        total.addmm_(x, self._dense().T)
        if self.bias is not None:
            total.add_(self.bias)
        self.adapt(total, x)

    def _dense(self) -> Tensor:
        return self.weight if isinstance(self.weight, Tensor) else self.weight.dense()

    def adapt(self, out: Tensor, x: Tensor) -> Tensor:
        """Add what the LoRA layer, if there is one, makes of `x`."""
        if self.down is None or self.up is None:
            return out
        return out.addmm_(functional.linear(x, self.down), self.up.T, alpha=self.scale)


@dataclass(frozen=True, eq=False)
class _Linears:
    """Linear modules of one input. whole: all of them as one, if they lie so in memory, without LoRA layers."""

    parts: Sequence[_Linear]
    whole: _Linear | None

    @classmethod
    def of(cls, *modules: Any) -> _Linears:
        parts = [_Linear.of(module) for module in modules]
        weights = [part.weight for part in parts if isinstance(part.weight, Tensor)]
        biases = [part.bias for part in parts if part.bias is not None]
        weight = joint(weights) if len(weights) == len(parts) else None
        bias = joint(biases) if weight is not None and len(biases) == len(parts) else None
        if weight is None or (biases and bias is None):
            return cls(parts, None)
        return cls(parts, _Linear(weight, bias))

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if self.whole is None:
            return [part(x) for part in self.parts]
        sizes = [len(part.weight) for part in self.parts if isinstance(part.weight, Tensor)]
        outs = torch.split(self.whole(x), sizes, -1)
        for part, out in zip(self.parts, outs, strict=True):
            part.adapt(out, x)
        return outs


def _weight(module: Any) -> Any:
    return module if type(module) is NF4Linear else module.weight


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
    heads: _Linears  # of queries, keys and values
    query_norm: _Norm | None
    key_norm: _Norm | None
    out: _Linear
    scaling: float
    before_mlp: _Norm
    gate_up: _Linears
    down: _Linear
    activation: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        query_norm, key_norm = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        return cls(
            before_attention=_Norm.of(layer.input_layernorm),
            heads=_Linears.of(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm=None if query_norm is None else _Norm.of(query_norm),
            key_norm=None if key_norm is None else _Norm.of(key_norm),
            out=_Linear.of(attention.o_proj),
            scaling=attention.scaling,
            before_mlp=_Norm.of(layer.post_attention_layernorm),
            gate_up=_Linears.of(mlp.gate_proj, mlp.up_proj),
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
        decoder, head = model.model, model.lm_head
        if type(decoder.embed_tokens) is not nn.Embedding or type(head) is not nn.Linear:
            raise NotUnderstoodError("an embedding or head of another kind")
        layers = [_Layer.of(layer) for layer in decoder.layers]
        return cls(
            decoder.embed_tokens.weight, layers, _Norm.of(decoder.norm), head.weight, head.bias, decoder.rotary_emb
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
    """Completions of some prompts under way, on the weights as they are now."""

    gaps = 0.125  # closing a gap moves one row

    def __init__(self, model: Any, vocabulary: int, cache: SharedCache, lengths: Tensor, tokens: int) -> None:
        """
        Args:
            vocabulary: logits of further ids are left out.
            lengths: of the prompts, int64 `[prompts]`.
            tokens: each row will be given so many at most.
        """
        self._weights = _Weights.of(model)
        self._vocabulary = vocabulary
        self._cache = cache
        self._lengths = lengths
        positions = torch.arange(int(lengths.max()) + tokens, device=lengths.device)
        cos, sin = self._weights.rotary(self._weights.embedding, positions[None])  # [1, positions, head_dim]
        self._half = sin.shape[-1] // 2
        self._cos, self._sin = cos[0], torch.cat([-sin[0, :, : self._half], sin[0, :, self._half :]], -1)

    def grow(self) -> tuple[int, int]:
        """Make room for a token; the answer changes when the shapes of `step` do."""
        return self._cache.grow()

    def step(self, tokens: Tensor) -> Tensor:
        """Give each row its next token, int64 `[rows]`, and return logits of the one after it, `[rows, V]`."""
        weights = self._weights
        self._cache.begin()
        positions = self._lengths.index_select(0, self._cache.owner) + self._cache.place
        cos, sin = (table.index_select(0, positions)[:, None] for table in (self._cos, self._sin))
        x = functional.embedding(tokens, weights.embedding)
        for index, layer in enumerate(weights.layers):
            layer.out.add_to(x, self._attention(index, layer, layer.before_attention(x), cos, sin))
            gate, up = layer.gate_up(layer.before_mlp(x))
            layer.down.add_to(x, layer.activation(gate).mul_(up))
        self._cache.end()
        bias = weights.head_bias
        return functional.linear(
            weights.norm(x), weights.head[: self._vocabulary], None if bias is None else bias[: self._vocabulary]
        )

    def keep(self, order: Ids) -> None:
        """Keep these rows, in an order that `cache.closing_up` gave."""
        self._cache.keep(order)

    def _attention(self, index: int, layer: _Layer, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (len(h), -1, cos.shape[-1])
        query, key, value = (part.view(shape) for part in layer.heads(h))
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = layer.query_norm(query), layer.key_norm(key)
        heads = query.shape[1]
        turned = torch.cat([query, key], 1)
        halves = torch.cat([turned[..., self._half :], turned[..., : self._half]], -1)
        turned = turned.mul_(cos).addcmul_(halves, sin)
        self._cache.put(index, turned[:, heads:], value)
        return self._cache.attend(index, turned[:, :heads], layer.scaling)
