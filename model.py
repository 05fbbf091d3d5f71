"""GPT: a decoder-only Transformer language model.

Read it from top to bottom: one Head, MultiHeadAttention as a list of heads plus a projection, FeedForward, Block, GPT;
then positions, and first values. This is the definition: quicker ways to the same numbers are in engine/nn.

    B batch  T time (positions)  D d_model  H heads  G groups of heads  K head_dim  F d_ff  V vocabulary  L layers
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.nn.attention import attend, drop
from engine.nn.loss import output_loss, soft_cap

BASE = 10_000.0  # of the frequencies of positions, RoPE's unless the settings say otherwise, and the sinusoids'


@dataclass(frozen=True)
class ModelConfig:
    """What a GPT is made of. The defaults are today's recipe for small models."""

    vocab_size: int | None = None  # Tokens in the vocabulary; None: as many as the tokenizer has. More pads it.
    context_length: int = 256  # The most tokens that attention looks back over.
    num_layers: int = 2  # Transformer blocks.
    num_heads: int = 2  # Attention heads in each block.
    num_kv_heads: int | None = None  # Key-value heads (grouped-query attention); None: one for each head.
    head_dim: int | None = None  # Width of a head; None: d_model / num_heads.
    windows: tuple[int, ...] | None = None  # Sliding windows of layers, repeated over them; 0: sees all. None: all do.
    d_model: int = 128  # Width of the residual stream.
    d_ff: int | None = None  # Width of the feed-forward layer; None: 4 times d_model, of SwiGLU 8/3 (in whole 32s).
    dropout: float = 0.0  # Probability of dropping an activation while training.
    bias: bool = False  # Whether linear layers and layer norms have a bias.
    position: Literal["rope", "learned", "sinusoidal"] = "rope"  # How the model knows a token's position.
    rope_base: float | None = None  # RoPE's frequencies fall from 1 to about 1 / this; None: 10,000.
    # Plain RMSNorm has no parameters, and also follows the embedding; the others have weights, and do not.
    norm: Literal["rmsnorm", "weighted_rmsnorm", "layernorm"] = "rmsnorm"
    norm_epsilon: float | None = None  # What a norm adds to the mean square; None: 1e-6, for layer norm 1e-5.
    norm_placement: Literal["pre", "post"] = "pre"  # Before each sub-layer, or after its residual sum (2017).
    activation: Literal["swiglu", "relu2", "gelu", "relu"] = "swiglu"  # Non-linearity of the feed-forward layer.
    qk_norm: bool = True  # RMS-normalise queries and keys, before RoPE.
    tie_embeddings: bool = False  # Use the token embedding as the output head too.
    scale_embeddings: bool = False  # Multiply token embeddings by the square root of d_model (2017).
    logit_softcap: float = 0.0  # Squash logits smoothly into ± this; 0: off.

    head_width = property(lambda self: self.head_dim or self.d_model // self.num_heads)
    num_groups = property(lambda self: self.num_kv_heads or self.num_heads)
    layer_windows = property(lambda self: list((self.windows or (0,)) * self.num_layers)[: self.num_layers])
    epsilon = property(lambda self: self.norm_epsilon or (1e-5 if self.norm == "layernorm" else 1e-6))

    @property
    def feed_forward_width(self) -> int:
        """Of SwiGLU, as many weights in three matrices as of the others in two: Shazeer 2020, section 3."""
        gated = 32 * math.ceil(self.d_model / 12)  # whole 32s: the processor's units of bfloat16
        return self.d_ff or (gated if self.activation == "swiglu" else 4 * self.d_model)

    def __post_init__(self):
        most = {"vocab_size": 2**24, "context_length": 10**7, "num_layers": 10**4, "num_heads": 10**4, "d_model": 10**6}
        most |= {"num_kv_heads": 10**4, "head_dim": 10**6, "rope_base": 10**12}
        for name, high in (most | {"d_ff": 10**7, "logit_softcap": 10**6, "norm_epsilon": 1, "windows": 10**7}).items():
            given, low = getattr(self, name), int(name in most)  # d_ff 0 used to say: not set
            for value in given if isinstance(given, tuple) else (given,):
                if value is not None and not low <= value <= high:
                    raise ValueError(f"{name} is {value}; it must be from {low} to {high}")
        if not self.head_dim and self.d_model % self.num_heads:
            raise ValueError(f"d_model {self.d_model} does not divide into {self.num_heads} heads; change one of them")
        if self.num_heads % self.num_groups:
            raise ValueError(f"{self.num_heads} heads can't share {self.num_groups} num_kv_heads evenly; change one")
        if self.position == "rope" and self.head_width % 2:
            raise ValueError(f"RoPE rotates pairs, but a head is {self.head_width} wide; make that even")
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"sinusoidal positions come in pairs, but d_model is {self.d_model}; make it even")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")


class Head(nn.Module):
    """One attention head: Vaswani et al. 2017, eq. 1, with its own query, key and value projections.

    With grouped queries (Ainslie et al. 2023) a group of heads has one key and one value: the same two layers stand in
    each of its heads. So do, in all heads of a block, the norms of queries and keys.
    """

    def __init__(self, config: ModelConfig, before: Sequence["Head"] = (), window: int = 0):
        """``before`` are the block's heads up to this one, with whom it shares what is shared."""
        super().__init__()
        self.window = window
        make = partial(nn.Linear, config.d_model, config.head_width, bias=config.bias)
        self.query = make()
        if len(before) % (config.num_heads // config.num_groups) == 0:  # the first of its group
            self.key, self.value = make(), make()
        else:  # around nn.Module's own ways: a parameter has one name, and is saved once
            self.__dict__ |= {"key": before[-1].key, "value": before[-1].value}
        if not before:
            self.query_norm, self.key_norm = make_qk_norm(config), make_qk_norm(config)
        else:
            self.__dict__ |= {"query_norm": before[0].query_norm, "key_norm": before[0].key_norm}

    def attention(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Who attends to whom: (B, T, D) → (B, T, T), each row a distribution over the positions up to its own."""
        query = rotate(self.query_norm(self.query(x)), rotation)  # (B, T, K)
        key = rotate(self.key_norm(self.key(x)), rotation)
        scores = query @ key.mT / math.sqrt(key.shape[-1])  # (B, T, T)
        seen = torch.ones_like(scores, dtype=torch.bool).tril()
        seen = seen.triu(1 - self.window) if self.window else seen  # the last ones alone: Beltagy et al. 2020
        return scores.masked_fill(~seen, -math.inf).softmax(dim=-1)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """The written-out definition, (B, T, D) → (B, T, K); MultiHeadAttention computes it for all heads at once."""
        return self.attention(x, rotation) @ self.value(x)


class MultiHeadAttention(nn.Module):
    """A list of heads, and a projection that mixes what they found: Vaswani et al. 2017, section 3.2.2.

    The heads' weights are joined and applied as one matrix product, and all heads attend in one call: the same numbers
    as :meth:`loop`, many times faster.
    """

    def __init__(self, config: ModelConfig, window: int = 0):
        super().__init__()
        self.heads, self.window = nn.ModuleList(), window
        for _ in range(config.num_heads):
            self.heads.append(Head(config, self.heads, window))
        self.projection = nn.Linear(config.num_heads * config.head_width, config.d_model, bias=config.bias)
        self.dropout, self.num_groups, self.head_width = config.dropout, config.num_groups, config.head_width
        self.joined: Callable[[Tensor], Tensor] | None = None  # all heads as one layer, in a copy that only decodes

    def loop(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Attention as the papers write it, head after head, (B, T, D) → (B, T, D). Without dropout."""
        return self.projection(torch.cat([head(x, rotation) for head in self.heads], dim=-1))

    def join_heads(self) -> tuple[Tensor, Tensor | None]:
        """All heads' weights as one ((H + 2·G)·K, D) matrix: queries, then keys, then values; likewise the biases."""
        owners = self.heads[:: len(self.heads) // self.num_groups]
        linears = [head.query for head in self.heads] + [head.key for head in owners] + [head.value for head in owners]
        bias = torch.cat([linear.bias for linear in linears]) if self.projection.bias is not None else None
        return torch.cat([linear.weight for linear in linears]), bias

    def forward(self, x: Tensor, rotation: Tensor | None, cache: Any = None) -> Tensor:
        """(B, T, D) → (B, T, D); with a cache, x holds the positions after those in it, and sees them too."""
        B, T, _ = x.shape
        joined = self.joined(x) if self.joined is not None else F.linear(x, *self.join_heads())
        joined = joined.view(B, T, -1, self.head_width).transpose(1, 2)  # (B, H + 2·G, T, K)
        query, key, value = joined.split((len(self.heads), self.num_groups, self.num_groups), dim=1)
        query, key = self.heads[0].query_norm(query), self.heads[0].key_norm(key)
        query, key = rotate(query, rotation), rotate(key, rotation)
        if cache is not None:
            key, value = cache.append(key, value)  # (B, G, all positions so far that can be seen, K) each
        mixed = attend(query, key, value, self.dropout if self.training else 0.0, self.window)  # (B, H, T, K)
        mixed = mixed.transpose(1, 2).reshape(B, T, -1)  # heads side by side again
        return drop(self.projection(mixed), self.dropout, self.training)


class FeedForward(nn.Module):
    """Two linear layers with a non-linearity between, or one that gates another; at each position on its own."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.feed_forward_width
        self.activation = config.activation
        self.gate = nn.Linear(config.d_model, width, bias=config.bias) if config.activation == "swiglu" else None
        self.expand = nn.Linear(config.d_model, width, bias=config.bias)
        self.contract = nn.Linear(width, config.d_model, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        hidden = self.expand(x)  # (B, T, F)
        if self.activation == "swiglu":  # Shazeer 2020
            hidden = F.silu(self.gate(x)) * hidden
        elif self.activation == "relu2":  # So et al. 2021, Primer
            hidden = F.relu(hidden).square()
        elif self.activation == "gelu":  # Hendrycks & Gimpel 2016; the tanh form is GPT-2's
            hidden = F.gelu(hidden, approximate="tanh")
        else:
            hidden = F.relu(hidden)
        return drop(self.contract(hidden), self.dropout, self.training)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to the residual stream."""

    def __init__(self, config: ModelConfig, window: int = 0):
        super().__init__()
        self.post_norm = config.norm_placement == "post"
        self.attention_norm = make_norm(config)
        self.attention = MultiHeadAttention(config, window)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotation: Tensor | None, cache: Any = None) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        if self.post_norm:
            x = self.attention_norm(x + self.attention(x, rotation, cache))
            return self.feed_forward_norm(x + self.feed_forward(x))
        x = x + self.attention(self.attention_norm(x), rotation, cache)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Embedding(nn.Embedding):
    """A vector for each token; the model gives their first values, as PyTorch's way to them may import the compiler."""

    def reset_parameters(self) -> None:
        pass


class GPT(nn.Module):
    """Token ids in, logits of the next token out."""

    def __init__(self, config: ModelConfig):
        """Raises ValueError without a vocabulary size, or if a parameter has no rule in :func:`parameter_rules`."""
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is None; a model needs the size of its tokenizer's vocabulary")
        self.config = config
        self.seed = int(torch.randint(2**62, (), device="cpu"))  # now: layers draw of their own on some devices
        self.token_embedding = Embedding(config.vocab_size, config.d_model)
        learned = config.position == "learned"
        self.position_embedding = Embedding(config.context_length, config.d_model) if learned else None
        normed = config.norm == "rmsnorm" and not config.tie_embeddings  # a tied one is kept at scale by its other use
        self.embedding_norm = make_norm(config) if normed else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, window) for window in config.layer_windows)
        self.final_norm = make_norm(config) if config.norm_placement == "pre" else nn.Identity()
        self.head = None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        self.rules = parameter_rules(config, [name for name, _ in self.named_parameters()])
        if not self.token_embedding.weight.is_meta:
            self.load_state_dict(dict(self.initial_values()))

    def forward(self, tokens: Tensor, targets: Tensor | None = None, caches: Sequence | None = None) -> Tensor:
        """Logits (B, T, V); or, given targets, the loss in nats summed over those that count, in float32.

        tokens and targets are (B, T) integers; a target of -1 does not count. With caches, one for each block, tokens
        continue what these hold, and the logits are those of the last position only, (B, 1, V): all that decoding
        needs. Raises ValueError for more positions than context_length, or than the caches hold.
        """
        start, room = (caches[0].filled, caches[0].length) if caches else (0, self.config.context_length)
        end = start + tokens.shape[1]
        if end > room:
            raise ValueError(f"{end} tokens are more than the {room} that fit; give the last {room}")
        x, rotation = self.embed(tokens, start), self.rotation(start, end)
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, caches[index] if caches else None)
        x = self.final_norm(x[:, -1:] if caches else x)
        if targets is not None:
            return output_loss(x.flatten(0, 1), self.head_weight(), targets.flatten(), self.config.logit_softcap)
        logits = self.head(x) if self.head is not None else F.linear(x, self.token_embedding.weight)
        return soft_cap(logits, self.config.logit_softcap)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Token ids (B, T), the first at position start → the residual stream's first state (B, T, D)."""
        x = self.token_embedding(tokens)
        if self.config.scale_embeddings:
            x = x * math.sqrt(self.config.d_model)
        if self.config.position != "rope":
            x = x + self.positions(start, start + tokens.shape[1])
        return drop(self.embedding_norm(x), self.config.dropout, self.training)

    def positions(self, start: int, end: int) -> Tensor:
        """What is added to the embeddings at positions start…end, (T, D): learned, or Vaswani et al. 2017, 3.5."""
        if self.position_embedding is not None:
            return self.position_embedding.weight[start:end]
        turns = angles(start, end, self.config.d_model, BASE, self.token_embedding.weight.device)
        return torch.stack((turns.sin(), turns.cos()), dim=-1).flatten(1)

    def rotation(self, start: int, end: int) -> Tensor | None:
        """RoPE's cosines and sines at positions start…end, (2, T, K / 2), or None; Su et al. 2021, eq. 34."""
        if self.config.position != "rope":
            return None
        base, device = self.config.rope_base or BASE, self.token_embedding.weight.device
        turns = angles(start, end, self.config.head_width, base, device)
        return torch.stack((turns.cos(), turns.sin()))

    def head_weight(self) -> Tensor:
        return self.token_embedding.weight if self.head is None else self.head.weight

    def initial_values(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and first value, one at a time, on the CPU; ``torch.manual_seed`` decides them all."""
        generator = torch.Generator().manual_seed(self.seed)
        for name, parameter in self.named_parameters():
            rule, value = self.rules[name], torch.empty(parameter.shape, device="cpu")
            yield name, value.normal_(rule.mean, rule.std, generator=generator) if rule.std else value.fill_(rule.mean)


def make_norm(config: ModelConfig) -> nn.Module:
    """Root-mean-square norm, with a weight or without parameters, or layer norm with a weight and, if asked, a bias."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.d_model, eps=config.epsilon, bias=config.bias)
    return make_rms_norm(config, config.d_model)


def make_rms_norm(config: ModelConfig, width: int) -> nn.Module:
    return RMSNorm(width, config.epsilon, elementwise_affine=config.norm == "weighted_rmsnorm")


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm (Zhang & Sennrich 2019), in the dtype of what it norms."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def make_qk_norm(config: ModelConfig) -> nn.Module:
    """Root-mean-square norm of a head's queries or keys, or nothing: Henry et al. 2020, as it is used today."""
    return make_rms_norm(config, config.head_width) if config.qk_norm else nn.Identity()


def angles(start: int, end: int, width: int, base: float, device: torch.device) -> Tensor:
    """Position times frequency, (end - start, width / 2), the frequencies falling from 1 to about 1 / base."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    return torch.outer(torch.arange(start, end, dtype=torch.float32, device=device), frequencies)


def rotate(x: Tensor, rotation: Tensor | None) -> Tensor:
    """Rotate each pair (i, i + K / 2) of x's last dimension by its position's angle: (…, T, K), (2, T, K / 2).

    Clockwise, and halves for neighbours, unlike Su et al. 2021, eq. 34: scores are the same.
    """
    if rotation is None:
        return x
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


class ParameterRule(NamedTuple):
    """What the rest of the project must know of a parameter: its optimizer group, and its normal first values."""

    group: Literal["matrix", "embedding", "head", "vector"]  # a tied embedding is of the head's
    std: float = 0.0
    mean: float = 0.0
    joined: int = 1  # how many such matrices in a row Muon takes for one, of all their rows


def parameter_rules(config: ModelConfig, names: Sequence[str]) -> dict[str, ParameterRule]:
    """The rule for each parameter's name. Raises ValueError if there is none.

    A model with its own output head starts from nothing said: the head and each sub-layer's last matrix are zero, so
    every block is the identity and the first loss is ln V; the others are half as large as keeps a variance, which
    trains up to 5% better (docs/recipe.md). With tied embeddings that cannot be (a token would predict itself), so
    GPT-2's rule holds: Radford et al. 2019, section 2.3.
    """
    # RMSNorm takes an embedding's scale away; what is left of it is how fast AdamW moves it.
    std = 0.02 if config.tie_embeddings or config.norm == "layernorm" else 0.1
    embedding = ParameterRule("head" if config.tie_embeddings else "embedding", std)
    inner = ParameterRule("matrix", config.d_model**-0.5 * (1 if config.tie_embeddings else 0.5))
    gated = inner._replace(joined=2 if config.activation == "swiglu" else 1)  # gate and expand are halves of one
    smaller = math.sqrt(2 * config.num_layers) if config.tie_embeddings else math.inf
    by_ending = {
        **dict.fromkeys(("token_embedding.weight", "position_embedding.weight"), embedding),
        **dict.fromkeys([f"{part}.weight" for part in ("query", "key", "value")], inner),
        **dict.fromkeys(("gate.weight", "expand.weight"), gated),
        "projection.weight": ParameterRule("matrix", (config.num_heads * config.head_width) ** -0.5 / smaller),
        "contract.weight": ParameterRule("matrix", config.feed_forward_width**-0.5 / smaller),
        "head.weight": ParameterRule("head"),
        "norm.weight": ParameterRule("vector", mean=1.0),
        ".bias": ParameterRule("vector"),
    }
    rules = {name: rule for name in names for ending, rule in by_ending.items() if name.endswith(ending)}
    if left := [name for name in names if name not in rules]:
        raise ValueError(f"no rule fits the parameter {left[0]}; add one to parameter_rules() in model.py")
    return rules
