"""One token further: the forward pass of Llama, Mistral, Qwen2, Qwen3 and Gemma 3 on the model's own weights.

A pass of transformers' modules over some hundred rows of a small model spends most of its time around the matrix
products. This one has nothing but them, and keeps no copy of any weight: what training changes is used as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Gemma3ForCausalLM, LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from ftis_node.fit.context import rotaries
from ftis_node.policy.adapters import LoraLinear
from ftis_node.policy.generate.cache import SharedCache, Size
from ftis_node.policy.generate.sampler import blocks_of
from ftis_node.policy.nf4 import NF4Linear

_FAMILIES = (
    Gemma3ForCausalLM,
    LlamaForCausalLM,
    MistralForCausalLM,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
_NORMS = (
    "LlamaRMSNorm",
    "MistralRMSNorm",
    "Qwen2RMSNorm",
    "Qwen3RMSNorm",
)
_EMBEDDINGS = ("Embedding", "Gemma3TextScaledWordEmbedding")

# Kinds of rotary embedding whose frequencies do not change with the length of what is read.
_ROTARY = ("default", "linear", "llama3", "yarn")


_PART = 1024  # outputs at a time: MKL is slow at few rows by a matrix of 17 MB


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
        """The parts of a module, which are used where they lie. Raises NotUnderstoodError for other kinds of modules.

        A LoRA layer that is switched off, or merged into its weight, is left out.
        """
        plain = (nn.Linear, NF4Linear)
        kind = type(module)
        if kind in plain:
            return cls(_weight(module), module.bias)
        if kind is not LoraLinear or type(module.base_layer) not in plain:
            raise NotUnderstoodError(kind.__name__)
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
        return cls(
            weight,
            bias,
            module.lora_A[name].weight,
            up.weight,
            module.scaling[name],
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x `[rows, inputs]` → `[rows, outputs]`, in memory of its own."""
        if isinstance(self.weight, Tensor):
            out = _product(x, self.weight, self.bias)
        else:
            out = self.weight.product(x, self.bias)
        if self.down is None:
            return out
        return self.adapt(out, x)

    def add_to(self, total: Tensor, x: Tensor) -> None:
        """Add its output to `total` `[rows, outputs]`, in place. x: `[rows, inputs]`."""
        if isinstance(self.weight, Tensor):
            total.addmm_(x, self.weight.T)
        else:
            total.add_(self.weight.product(x))
        if self.bias is not None:
            total.add_(self.bias)
        if self.down is not None:
            self.adapt(total, x)

    def adapt(self, out: Tensor, x: Tensor) -> Tensor:
        """Add to `out`, in place, what the LoRA layer makes of x, and return it. Only where there is such a layer."""
        assert self.down is not None and self.up is not None
        low = functional.linear(x, self.down)
        return out.addmm_(low, self.up.T, alpha=self.scale)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As `functional.linear`, to the last bit; in parts where a CPU takes 1.4 to 1.8 times as long for the whole.

    x `[rows, inputs]`, weight `[outputs, inputs]`, bias `[outputs]` → `[rows, outputs]`.
    With one thread: several wait for one another after each part, which is long where the machine is busy.
    """
    alone = x.device.type == "cpu" and torch.get_num_threads() == 1
    outputs = len(weight)
    narrow = outputs < 4 * _PART
    if narrow or bias is not None or x.dtype != torch.float32 or not alone:
        return functional.linear(x, weight, bias)
    out = x.new_empty(len(x), outputs)
    for first in range(0, outputs, _PART):
        some = slice(first, first + _PART)
        torch.mm(x, weight[some].T, out=out[:, some])
    return out


def _weight(module: Any) -> Any:
    """What a linear module multiplies by: its weight, or of four bits the module itself."""
    if type(module) is NF4Linear:
        return module
    return module.weight


@dataclass(frozen=True, eq=False)
class _Norm:
    """RMS norm over the last dimension. Gemma multiplies by 1 + weight, all of it in fp32."""

    weight: Tensor
    epsilon: float
    gemma: bool

    @classmethod
    def of(cls, module: Any) -> _Norm:
        """The parts of a module. Raises NotUnderstoodError for other kinds of modules."""
        name = type(module).__name__
        if name == "Gemma3RMSNorm":
            return cls(module.weight, module.eps, gemma=True)
        if name not in _NORMS:
            raise NotUnderstoodError(name)
        return cls(module.weight, module.variance_epsilon, gemma=False)

    def __call__(self, x: Tensor) -> Tensor:
        """x `[…, n]` → the same shape and dtype."""
        shape = self.weight.shape
        if self.gemma:
            return functional.rms_norm(x.float(), shape, 1.0 + self.weight.float(), self.epsilon).to(x.dtype)
        return functional.rms_norm(x, shape, self.weight, self.epsilon)


@dataclass(frozen=True, eq=False)
class _Layer:
    """The parts of one layer.

    kind                        which rotary embedding it has, if they have several
    window                      how many tokens it sees, with the newest; None: all
    query_norm, key_norm        in Qwen3 and Gemma 3
    after_attention, after_mlp  norms of what is added to the residual stream, in Gemma 3
    """

    kind: str
    window: int | None
    before_attention: _Norm
    query: _Linear
    key: _Linear
    value: _Linear
    query_norm: _Norm | None
    key_norm: _Norm | None
    out: _Linear
    scaling: float
    after_attention: _Norm | None
    before_mlp: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear
    activation: Callable[[Tensor], Tensor]
    after_mlp: _Norm | None

    @classmethod
    def of(cls, layer: Any, config: Any) -> _Layer:
        """The parts of a layer of transformers' model. Raises NotUnderstoodError for one of another kind.

        `post_attention_layernorm` is the norm before the MLP, but in Gemma 3 the one after attention.
        """
        attention = layer.self_attn
        mlp = layer.mlp
        query_norm = None
        key_norm = None
        if getattr(attention, "q_norm", None) is not None:
            query_norm = _Norm.of(attention.q_norm)
            key_norm = _Norm.of(attention.k_norm)
        before_mlp = _Norm.of(layer.post_attention_layernorm)
        after_attention = None
        after_mlp = None
        if hasattr(layer, "pre_feedforward_layernorm"):
            after_attention = before_mlp
            before_mlp = _Norm.of(layer.pre_feedforward_layernorm)
            after_mlp = _Norm.of(layer.post_feedforward_layernorm)
        return cls(
            kind=getattr(attention, "layer_type", ""),
            window=getattr(attention, "sliding_window", getattr(config, "sliding_window", None)),
            before_attention=_Norm.of(layer.input_layernorm),
            query=_Linear.of(attention.q_proj),
            key=_Linear.of(attention.k_proj),
            value=_Linear.of(attention.v_proj),
            query_norm=query_norm,
            key_norm=key_norm,
            out=_Linear.of(attention.o_proj),
            scaling=attention.scaling,
            after_attention=after_attention,
            before_mlp=before_mlp,
            gate=_Linear.of(mlp.gate_proj),
            up=_Linear.of(mlp.up_proj),
            down=_Linear.of(mlp.down_proj),
            activation=mlp.act_fn,
            after_mlp=after_mlp,
        )


@dataclass(frozen=True, eq=False)
class _Weights:
    """The parts of a model that the pass needs; nothing is copied.

    scale   of the embedding, `[]`; None: it has none
    rotary  transformers' module for the positions of a kind of layers
    """

    embedding: Tensor
    scale: Tensor | None
    layers: Sequence[_Layer]
    norm: _Norm
    head: Tensor
    head_bias: Tensor | None
    rotary: Callable[..., tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, model: Any) -> _Weights:
        """The parts of transformers' model. Raises NotUnderstoodError for one of another kind."""
        decoder = model.model
        head = model.lm_head
        embedding = decoder.embed_tokens
        if type(embedding).__name__ not in _EMBEDDINGS or type(head) is not nn.Linear:
            raise NotUnderstoodError("an embedding or head of another kind")
        layers = [_Layer.of(layer, model.config) for layer in decoder.layers]
        return cls(
            embedding=embedding.weight,
            scale=getattr(embedding, "embed_scale", None),
            layers=layers,
            norm=_Norm.of(decoder.norm),
            head=head.weight,
            head_bias=head.bias,
            rotary=decoder.rotary_emb,
        )


def understood(model: Any) -> bool:
    """Whether the pass knows every part of this transformers model; one on the device "meta" will do.

    `ready` then tries whether it computes the same.
    """
    if type(model) not in _FAMILIES:
        return False
    config = model.config
    if getattr(config, "final_logit_softcapping", None) or getattr(config, "use_bidirectional_attention", False):
        return False
    for rotary in rotaries(config):
        if rotary.get("rope_type") not in _ROTARY or rotary.get("partial_rotary_factor", 1.0) != 1.0:
            return False
    try:
        _Weights.of(model)
    except NotUnderstoodError:
        return False
    return True


class Decoder:
    """Completions of some prompts under way, on the weights as they are at each step, in the places of `cache`.

    narrowest: how many tokens the layer sees that sees fewest; inf: all see all.
    """

    def __init__(
        self,
        model: Any,
        vocabulary: int,
        size: Size,
        *,
        static: bool,
    ) -> None:
        """
        Args:
            size: positions up to its width and tokens together are prepared.
            static: each token takes the same kernels on the same memory, which a CUDA graph can replay, until the
                cache's `grow` says otherwise.
            vocabulary: ids from here on are never drawn.

        Raises:
            NotUnderstoodError: see `understood`.
        """
        self._weights = _Weights.of(model)
        self._at = _memory_of(self._weights)  # now: a tensor can get other memory
        self._vocabulary = vocabulary
        embedding = self._weights.embedding
        layers = self._weights.layers
        self._turns = {layer.kind: self._turns_of(layer.kind, size) for layer in layers}
        self._windows = {layer.window for layer in layers}
        self.narrowest = min((window for window in self._windows if window is not None), default=math.inf)
        self._dim = next(iter(self._turns.values())).shape[-1] // 2
        self.cache = SharedCache(
            size,
            len(layers),
            model.config.num_key_value_heads,
            embedding.new_empty(0, self._dim),
            static=static,
        )
        self._logits: Tensor | None = None
        if static:
            self._logits = embedding.new_full((size.rows, blocks_of(vocabulary)), -torch.inf)

    def _turns_of(self, kind: str, size: Size) -> Tensor:
        """What turns queries and keys of a kind of layers by each position: cos, then sin with the sign of each half,
        `[positions, 2 · head_dim]`. A head x becomes x · cos + (x with its halves exchanged) · sin."""
        weights = self._weights
        positions = torch.arange(size.width + size.tokens, device=weights.embedding.device)[None]
        which = []
        if hasattr(weights.rotary, f"{kind}_inv_freq"):
            which = [kind]
        cos, sin = weights.rotary(weights.embedding, positions, *which)  # [1, positions, head_dim]
        first, second = sin[0].chunk(2, -1)
        return torch.cat([cos[0], -first, second], -1)

    def uses(self, model: Any) -> bool:
        """Whether a decoder made now would read the same memory and do the same with it.

        A step changes weights in place, which makes no difference; another LoRA layer, or another device, does.
        """
        return bool(_memory_of(_Weights.of(model)) == self._at)

    def step(self, tokens: Tensor) -> Tensor:
        """Give each row its next token, int64 `[rows]`, after the cache's `grow`.

        Return logits of the one after it, `[rows, ≥ V]`. The next call overwrites them. The token is in the cache then,
        which has advanced by one. Nothing here counts on the host, so that a CUDA graph of it can be replayed.
        """
        weights = self._weights
        positions = self.cache.positions()
        turns = {kind: table.index_select(0, positions)[:, None] for kind, table in self._turns.items()}
        biases = {window: self.cache.bias(window) for window in self._windows}
        x = functional.embedding(tokens, weights.embedding)
        if weights.scale is not None:
            x = x * weights.scale.to(x.dtype)
        for index, layer in enumerate(weights.layers):
            found = self._attention(
                index,
                layer,
                layer.before_attention(x),
                turns[layer.kind],
                biases[layer.window],
            )
            _add(x, layer.out, found, layer.after_attention)
            h = layer.before_mlp(x)
            gate = layer.activation(layer.gate(h))
            _add(x, layer.down, gate.mul_(layer.up(h)), layer.after_mlp)
        self.cache.advance()
        x = weights.norm(x)
        head = weights.head[: self._vocabulary]
        bias = None
        if weights.head_bias is not None:
            bias = weights.head_bias[: self._vocabulary]
        if self._logits is None:
            return _product(x, head, bias)
        logits = self._logits[: len(x)]
        valid = logits[:, : self._vocabulary]
        torch.mm(x, head.T, out=valid)
        if bias is not None:
            valid.add_(bias)
        return logits

    def _attention(
        self,
        index: int,
        layer: _Layer,
        h: Tensor,
        turns: Tensor,
        bias: Tensor,
    ) -> Tensor:
        """What attention finds, before the layer's output matrix: h `[rows, hidden]` → `[rows, heads · head_dim]`.

        Args:
            index: the layer's number. turns: see `_turns_of`, `[rows, 1, 2 · head_dim]`. bias: see `SharedCache.bias`.

        Writes the token's keys and values to the cache.
        """
        shape = (len(h), -1, self._dim)
        key_heads = self.cache.heads
        query = layer.query(h).view(shape)
        key = layer.key(h).view(shape)
        if layer.query_norm is not None and layer.key_norm is not None:
            query = layer.query_norm(query)
            key = layer.key_norm(key)
        heads = torch.cat([query, key, layer.value(h).view(shape)], 1)
        cos, sin = turns.chunk(2, -1)
        turned = heads[:, :-key_heads]  # all but values, in place
        halves = turned.roll(self._dim // 2, -1)
        turned.mul_(cos).addcmul_(halves, sin)
        new = heads[:, -2 * key_heads :].view(len(h), 2, key_heads, -1)  # keys and values
        self.cache.put(index, new)
        return self.cache.attend(index, heads[:, : -2 * key_heads], layer.scaling, bias)


def _add(total: Tensor, linear: _Linear, x: Tensor, norm: _Norm | None) -> None:
    """Add a linear module's output to `total`, in place, by way of a norm if there is one."""
    if norm is None:
        linear.add_to(total, x)
    else:
        total.add_(norm(linear(x)))


def _memory_of(part: Any) -> Any:
    """Where the tensors among parts of a model lie, and what else makes two of them the same: compare it by ==."""
    if isinstance(part, Tensor):
        return part.untyped_storage().data_ptr(), part.storage_offset(), part.shape
    if isinstance(part, NF4Linear):
        return _memory_of(part.packed)
    if isinstance(part, (list, tuple)):
        return tuple(map(_memory_of, part))
    if is_dataclass(part):
        return tuple(map(_memory_of, vars(part).values()))
    return part
