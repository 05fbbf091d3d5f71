"""GPT: a decoder-only Transformer language model.

Read it from top to bottom: one Head, MultiHeadAttention as a list of heads plus a projection,
FeedForward, Block, GPT, and the initialization of every parameter. This is the definition. Fast
implementations of the same mathematics are in engine/nn.

    B batch  T time (positions)  D d_model  H heads  G head groups  K head_dim  F d_ff  V vocabulary
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.nn.attention import Cache, Caches, attend
from engine.nn.layers import FusedLinear, LayerPair, RMSNorm, dropout, make_embedding, make_norm
from engine.nn.loss import soft_cap, training_loss, validation_loss
from engine.nn.positions import FREQUENCY_BASE, rotate, rotations, sinusoids
from engine.nn.specs import ParameterSpec, draw_initial_values, match_specs


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a GPT. The defaults are today's recipe for small models."""

    vocab_size: int | None = None  # Tokens in the vocabulary; None: the tokenizer's. More pad it.
    context_length: int = 256  # Largest number of positions that attention spans.
    num_layers: int = 2  # Transformer blocks.
    num_heads: int = 2  # Attention heads in each block.
    num_kv_heads: int | None = None  # Key-value heads (grouped-query attention); None: num_heads.
    head_dim: int | None = None  # Width of a head; None: d_model / num_heads.
    windows: tuple[int, ...] | None = None  # Sliding windows of layers, repeated; 0 or None: none.
    d_model: int = 128  # Width of the residual stream.
    d_ff: int | None = None  # Width of the feed-forward layer; None: 4 d_model, of SwiGLU 8/3.
    dropout: float = 0.0  # Probability of zeroing an activation during training.
    bias: bool = False  # Whether linear layers and layer norms have a bias.
    position: Literal["rope", "learned", "sinusoidal"] = "rope"  # Encoding of positions.
    rope_base: float | None = None  # RoPE's frequencies fall from 1 to 1 / this; None: 10,000.
    norm: Literal["rmsnorm", "weighted_rmsnorm", "layernorm"] = "rmsnorm"  # rmsnorm: no weight.
    norm_epsilon: float | None = None  # Added to the mean square; None: 1e-6, for layernorm 1e-5.
    norm_placement: Literal["pre", "post"] = "pre"  # Before a sub-layer, or after its sum (2017).
    activation: Literal["swiglu", "relu2", "gelu", "relu"] = "swiglu"  # Of the feed-forward layer.
    qk_norm: bool = True  # RMS-normalize queries and keys, before RoPE.
    tie_embeddings: bool = False  # Use the token embedding as the output head too.
    scale_embeddings: bool = False  # Multiply token embeddings by √d_model (2017).
    logit_softcap: float = 0.0  # Squash logits smoothly into ± this; 0: off.

    @property
    def head_width(self) -> int:
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def num_groups(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def layer_windows(self) -> list[int]:
        pattern = self.windows or (0,)
        return [pattern[layer % len(pattern)] for layer in range(self.num_layers)]

    @property
    def epsilon(self) -> float:
        return self.norm_epsilon or (1e-5 if self.norm == "layernorm" else 1e-6)

    @property
    def feed_forward_width(self) -> int:
        """SwiGLU's three matrices have as many weights as others' two: Shazeer 2020, section 3."""
        if self.activation == "swiglu":
            return self.d_ff or 32 * math.ceil(self.d_model / 12)  # a multiple of 32
        return self.d_ff or 4 * self.d_model

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and value <= 0:
                raise ValueError(f"{name} must be positive (got {value})")
        heads = self.num_heads
        if self.head_dim is None and self.d_model % heads:
            raise ValueError(f"num_heads must divide d_model {self.d_model} (got {heads})")
        if heads % self.num_groups:
            raise ValueError(f"num_kv_heads must divide num_heads {heads} (got {self.num_groups})")
        if self.position == "rope" and self.head_width % 2:
            raise ValueError(f"head_dim must be even for RoPE (got {self.head_width})")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1 (got {self.dropout})")


class Head(nn.Module):
    """One attention head: Vaswani et al. 2017, eq. 1, with its own query, key and value.

    With grouped queries (Ainslie et al. 2023) the heads of a group share one key and one value
    projection. All heads of a block share the norms of queries and keys.
    """

    def __init__(self, config: ModelConfig, window: int, key_value: LayerPair, qk_norms: LayerPair):
        """key_value and qk_norms are the layers of an earlier head to share, or () for its own."""
        super().__init__()
        make_linear = partial(nn.Linear, config.d_model, config.head_width, bias=config.bias)
        weighted = config.norm == "weighted_rmsnorm"
        make_rms_norm = partial(RMSNorm, config.head_width, config.epsilon, weighted)
        make_qk_norm = make_rms_norm if config.qk_norm else nn.Identity
        self.query = make_linear()
        if not key_value:
            self.key = make_linear()
            self.value = make_linear()
        if not qk_norms:
            self.query_norm = make_qk_norm()
            self.key_norm = make_qk_norm()
        # A tuple refers to layers without registering them: each is saved once, in its first head.
        self.key_value = key_value or (self.key, self.value)
        self.qk_norms = qk_norms or (self.query_norm, self.key_norm)
        self.window = window

    def attention(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Attention weights, (B, T, D) → (B, T, T): each row is a distribution over the past."""
        key, _ = self.key_value
        query_norm, key_norm = self.qk_norms
        q = rotate(query_norm(self.query(x)), rotation)  # (B, T, K)
        k = rotate(key_norm(key(x)), rotation)
        scores = q @ k.mT / math.sqrt(k.shape[-1])  # (B, T, T)
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
        if self.window:
            mask = mask.triu(1 - self.window)  # Beltagy et al. 2020
        return scores.masked_fill(~mask, -math.inf).softmax(dim=-1)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """The definition, (B, T, D) → (B, T, K)."""
        _, value = self.key_value
        return self.attention(x, rotation) @ value(x)


class MultiHeadAttention(nn.Module):
    """A list of heads, and a projection that mixes their outputs: Vaswani et al. 2017, 3.2.2.

    :meth:`loop` is the definition. :meth:`forward` computes the same for all heads at once.
    """

    def __init__(self, config: ModelConfig, window: int = 0):
        super().__init__()
        group_size = config.num_heads // config.num_groups
        heads: list[Head] = []
        for index in range(config.num_heads):
            key_value = heads[-1].key_value if index % group_size else ()
            heads.append(Head(config, window, key_value, heads[0].qk_norms if heads else ()))
        self.heads = nn.ModuleList(heads)
        width = config.num_heads * config.head_width
        self.projection = nn.Linear(width, config.d_model, bias=config.bias)
        keys = [head.key for head in heads[::group_size]]
        values = [head.value for head in heads[::group_size]]
        self.fused_qkv = FusedLinear([head.query for head in heads] + keys + values)
        self.qk_norms = heads[0].qk_norms
        self.window = window
        self.num_groups = config.num_groups
        self.head_width = config.head_width
        self.attention_dropout = config.dropout
        self.dropout = config.dropout

    def loop(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Attention head after head, (B, T, D) → (B, T, D), without dropout."""
        return self.projection(torch.cat([head(x, rotation) for head in self.heads], dim=-1))

    def forward(self, x: Tensor, rotation: Tensor | None, cache: Cache | None = None) -> Tensor:
        """(B, T, D) → (B, T, D). With a cache, x continues the positions that it holds."""
        B, T, _ = x.shape
        qkv = self.fused_qkv(x).view(B, T, -1, self.head_width).transpose(1, 2)
        q, k, v = qkv.split((len(self.heads), self.num_groups, self.num_groups), dim=1)
        query_norm, key_norm = self.qk_norms
        q = rotate(query_norm(q), rotation)  # (B, H, T, K)
        k = rotate(key_norm(k), rotation)  # (B, G, T, K)
        if cache is not None:
            k, v = cache.append(k, v)  # those of all visible positions
        mixed = attend(q, k, v, self.attention_dropout if self.training else 0.0, self.window)
        mixed = mixed.transpose(1, 2).reshape(B, T, -1)  # (B, H, T, K) → (B, T, H·K)
        return dropout(self.projection(mixed), self.dropout, self.training)


class FeedForward(nn.Module):
    """Two linear layers with a non-linearity or a gate between, at each position separately."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        make_linear = partial(nn.Linear, bias=config.bias)
        sizes = (config.d_model, config.feed_forward_width)
        self.gate = make_linear(*sizes) if config.activation == "swiglu" else None
        self.expand = make_linear(*sizes)
        self.contract = make_linear(*reversed(sizes))
        self.activation = config.activation
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        hidden = self.expand(x)  # (B, T, F)
        if self.gate is not None:  # SwiGLU: Shazeer 2020
            hidden = F.silu(self.gate(x)) * hidden
        elif self.activation == "relu2":  # Primer: So et al. 2021
            hidden = F.relu(hidden).square()
        elif self.activation == "gelu":  # Hendrycks & Gimpel 2016; the tanh form is GPT-2's
            hidden = F.gelu(hidden, approximate="tanh")
        else:
            hidden = F.relu(hidden)
        return dropout(self.contract(hidden), self.dropout, self.training)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to the residual stream."""

    def __init__(self, config: ModelConfig, window: int = 0):
        super().__init__()
        self.post_norm = config.norm_placement == "post"
        norm = (config.norm, config.d_model, config.epsilon, config.bias)
        self.attention_norm = make_norm(*norm)
        self.attention = MultiHeadAttention(config, window)
        self.feed_forward_norm = make_norm(*norm)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotation: Tensor | None, cache: Cache | None = None) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        if self.post_norm:
            x = self.attention_norm(x + self.attention(x, rotation, cache))
            return self.feed_forward_norm(x + self.feed_forward(x))
        x = x + self.attention(self.attention_norm(x), rotation, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Token ids in, logits of the next token out."""

    def __init__(self, config: ModelConfig):
        """Raises ValueError without a vocab_size, or for a parameter without exactly one spec."""
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size must be set (got None)")
        self.config = config
        # Drawn first: the constructors of linear layers draw numbers on some devices only.
        self.seed = int(torch.randint(2**62, (), device="cpu"))
        self.token_embedding = make_embedding(config.vocab_size, config.d_model)
        length = config.context_length if config.position == "learned" else 0
        self.position_embedding = make_embedding(length, config.d_model) if length else None
        norm = (config.norm, config.d_model, config.epsilon, config.bias)
        tied = config.tie_embeddings  # its use as the head keeps a tied embedding at scale
        normed = config.norm == "rmsnorm" and not tied
        self.embedding_norm = make_norm(*norm) if normed else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, window) for window in config.layer_windows)
        self.final_norm = make_norm(*norm) if config.norm_placement == "pre" else nn.Identity()
        self.head = None if tied else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        self.specs = parameter_specs(config, [name for name, _ in self.named_parameters()])
        if not self.token_embedding.weight.is_meta:
            self.load_state_dict(dict(self.initial_values()))

    def forward(self, tokens: Tensor, targets: Tensor | None = None, caches: Caches = ()) -> Tensor:
        """Logits (B, T, V), or, with targets, the loss summed over the counted ones.

        tokens and targets are (B, T) integers; a target of -1 is not counted. In evaluation mode
        the loss is that of validation. With caches, one for each block, tokens continue what they
        hold, and the logits (B, 1, V) are of the last position. ValueError for too many positions.
        """
        start = caches[0].filled if caches else 0
        max_length = caches[0].length if caches else self.config.context_length
        end = start + tokens.shape[1]
        if end > max_length:
            raise ValueError(f"tokens must have at most {max_length} positions (got {end})")
        x = self.embed(tokens, start)
        rotation = self.rotation(start, end)
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, caches[index] if caches else None)
        x = self.final_norm(x[:, -1:] if caches else x)
        cap = self.config.logit_softcap
        if targets is not None:
            loss = training_loss if self.training else validation_loss
            return loss(x.flatten(0, 1), self.head_weight(), targets.flatten(), cap)
        logits = F.linear(x, self.head_weight()) if self.head is None else self.head(x)
        return soft_cap(logits, cap)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Input of the first block: token ids (B, T), the first at position start → (B, T, D)."""
        x = self.token_embedding(tokens)
        if self.config.scale_embeddings:
            x = x * math.sqrt(self.config.d_model)
        if self.config.position != "rope":
            x = x + self.positions(start, start + tokens.shape[1])
        return dropout(self.embedding_norm(x), self.config.dropout, self.training)

    def positions(self, start: int, end: int) -> Tensor:
        """Embeddings of positions start…end, (T, D): learned or sinusoidal."""
        if self.position_embedding is not None:
            return self.position_embedding.weight[start:end]
        return sinusoids(start, end, self.config.d_model, self.token_embedding.weight.device)

    def rotation(self, start: int, end: int) -> Tensor | None:
        """RoPE's cosines and sines at positions start…end, (2, T, K / 2); None without RoPE."""
        if self.config.position != "rope":
            return None
        base = self.config.rope_base or FREQUENCY_BASE
        device = self.token_embedding.weight.device
        return rotations(start, end, self.config.head_width, base, device)

    def head_weight(self) -> Tensor:
        """The weight of the output layer, (V, D)."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def initial_values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter's name and initial value, on the CPU; self.seed determines them."""
        return draw_initial_values(self.named_parameters(), self.specs, self.seed)


def parameter_specs(config: ModelConfig, names: Iterable[str]) -> dict[str, ParameterSpec]:
    """Find the one spec of each parameter by the end of its name, or raise ValueError.

    With an untied head, the head and the last matrix of each sub-layer are zero: every block is the
    identity, and the initial loss is ln V. The other matrices have half of the std that preserves
    variance (docs/recipe.md). With tied embeddings GPT-2's rule holds: Radford et al. 2019, 2.3.
    """
    tied = config.tie_embeddings
    # A norm removes the scale of an embedding. It remains the inverse of AdamW's relative step.
    embedding_std = 0.02 if tied or config.norm == "layernorm" else 0.1
    embedding = ParameterSpec("head" if tied else "embedding", embedding_std)
    hidden = ParameterSpec("matrix", config.d_model**-0.5 * (1 if tied else 0.5))
    depth = math.sqrt(2 * config.num_layers)
    attention_std = (config.num_heads * config.head_width) ** -0.5 / depth if tied else 0.0
    feed_forward_std = config.feed_forward_width**-0.5 / depth if tied else 0.0
    specs = {
        "token_embedding.weight": embedding,
        "position_embedding.weight": embedding,
        "query.weight": hidden,
        "key.weight": hidden,
        "value.weight": hidden,
        "attention.projection.weight": ParameterSpec("matrix", attention_std),
        "feed_forward.gate.weight": hidden._replace(stack="gate_and_expand"),
        "feed_forward.expand.weight": hidden._replace(stack="gate_and_expand"),
        "feed_forward.contract.weight": ParameterSpec("matrix", feed_forward_std),
        "head.weight": ParameterSpec("head"),
        "norm.weight": ParameterSpec("vector", mean=1.0),
        ".bias": ParameterSpec("vector"),
    }
    return match_specs(specs, names)
