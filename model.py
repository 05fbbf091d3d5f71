"""GPT: a decoder-only Transformer language model.

Read it from top to bottom: one Head, MultiHeadAttention as a list of heads plus a projection, FeedForward,
Block, GPT. Shapes are written with these letters:

    B batch   T time (positions)   D d_model   H heads   K head_dim = D / H   F d_ff   V vocabulary   L layers
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPSILON = 1e-6
ROPE_BASE = SINUSOID_BASE = 10_000.0
LONGEST_CONTEXT = 2**24  # beyond any use: tables of positions are made before weights are looked at
LONGEST_PLAIN = 512  # positions up to which a CPU's bfloat16 attention holds all T × T weights
WORTH_PACKING = 2**18  # elements of a weight; measured, smaller ones come from the processor's cache in any layout
LOGITS_AT_ONCE = 2**25  # elements of (rows, V) float32 logits that may exist at one time: 128 MiB


@dataclass(frozen=True)
class ModelConfig:
    """What a GPT is made of. The defaults are today's recipe for small models."""

    vocab_size: int = 0  # Tokens in the vocabulary; 0: as many as the tokenizer has. More pads it.
    context_length: int = 128  # The most tokens that attention looks back over.
    num_layers: int = 3  # Transformer blocks.
    num_heads: int = 3  # Attention heads in each block.
    d_model: int = 192  # Width of the residual stream.
    d_ff: int = 0  # Width of the feed-forward layer; 0: four times d_model.
    dropout: float = 0.0  # Probability of dropping an activation while training.
    bias: bool = False  # Whether linear layers and layer norms have a bias.
    position: Literal["rope", "learned", "sinusoidal"] = "rope"  # How a token's position is told.
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"  # RMSNorm has no parameters; it also follows the embedding.
    norm_placement: Literal["pre", "post"] = "pre"  # Before each sub-layer, or after its residual sum (2017).
    activation: Literal["relu2", "gelu", "relu", "swiglu"] = "relu2"  # Non-linearity of the feed-forward layer.
    qk_norm: bool = True  # RMS-normalise queries and keys, after RoPE.
    tie_embeddings: bool = False  # Use the token embedding as the output head too.
    scale_embeddings: bool = False  # Multiply token embeddings by the square root of d_model (2017).
    logit_softcap: float = 0.0  # Squash logits smoothly into ± this; 0: off.

    @property
    def head_dim(self) -> int:
        return self.d_model // self.num_heads

    @property
    def feed_forward_width(self) -> int:
        return self.d_ff or 4 * self.d_model

    def __post_init__(self):
        for name in ("context_length", "num_layers", "num_heads", "d_model"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.context_length > LONGEST_CONTEXT:
            raise ValueError(f"context_length is {self.context_length}; it must be at most {LONGEST_CONTEXT}")
        if self.d_model % self.num_heads:
            raise ValueError(f"d_model {self.d_model} does not divide into {self.num_heads} heads; change one of them")
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"RoPE turns pairs, but d_model / num_heads is {self.head_dim}; make it even")
        if self.position == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"sinusoidal positions come in pairs, but d_model is {self.d_model}; make it even")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must be at least 0 and below 1")


def make_norm(config: ModelConfig) -> nn.Module:
    """Root-mean-square norm without parameters, or layer norm with a weight and, if asked, a bias."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, eps=NORM_EPSILON, elementwise_affine=False)
    return nn.LayerNorm(config.d_model, bias=config.bias)


def angles_of(length: int, width: int, base: float) -> Tensor:
    """Position times frequency, (length, width / 2), the frequencies falling from 1 to about 1 / base."""
    with torch.device("cpu"):  # values even where the model has none yet, on the meta device
        frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        return torch.outer(torch.arange(length, dtype=torch.float32), frequencies)


def rotation_table(length: int, head_dim: int) -> Tensor:
    """Cosines and sines of RoPE's angles, (2, length, head_dim / 2); Su et al. 2021, eq. 34."""
    angles = angles_of(length, head_dim, ROPE_BASE)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turn each pair (i, i + K/2) of the last dimension by its position's angle. x (…, T, K), rotation (2, T, K/2)."""
    cos, sin = rotation.to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos + second * sin, second * cos - first * sin), dim=-1)


def sinusoidal_table(length: int, d_model: int) -> Tensor:
    """Fixed position vectors, (length, d_model); Vaswani et al. 2017, section 3.5."""
    angles = angles_of(length, d_model, SINUSOID_BASE)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class PackedLinear(nn.Module):
    """A linear layer that only predicts, on a CPU: oneDNN keeps its weight in the order in which it reads it.

    With few rows, as in decoding, a product costs reading its weight. This reads 30 to 40 GB/s where F.linear reads
    7 to 20, measured on two cores of a Zen 4.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether there is such a layer for this weight, and it pays."""
        known = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
        return known and weight.numel() >= WORTH_PACKING and torch.backends.mkldnn.is_available()


class LayerCache:
    """One attention layer's memory while decoding: its joined weights, and every key and value so far."""

    def __init__(self, attention: "MultiHeadAttention", batch_size: int, length: int, like: Tensor):
        self.joined = attention.packed or attention.joined()
        shape = (2, batch_size, len(attention.heads), length, attention.heads[0].query.out_features)
        self.keys_values = like.new_empty(shape)  # (2, B, H, length, K)

    def append(self, key: Tensor, value: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Store (B, H, T, K) keys and values at positions start…start+T; return all up to there."""
        end = start + key.shape[2]
        self.keys_values[0, :, :, start:end] = key
        self.keys_values[1, :, :, start:end] = value
        return self.keys_values[0, :, :, :end], self.keys_values[1, :, :, :end]


class KVCache:
    """What decoding remembers, so that each new token costs one position's work and no more.

    Made by :meth:`GPT.new_cache`. It holds the weights as they were then: train on, and it is out of date.
    """

    def __init__(self, layers: list[LayerCache], length: int):
        self.layers = layers
        self.length = length  # positions it can hold
        self.used = 0  # positions it holds


class Head(nn.Module):
    """One attention head: Vaswani et al. 2017, eq. 1, with its own query, key and value projections."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.qk_norm = config.qk_norm
        self.query = nn.Linear(config.d_model, config.head_dim, bias=config.bias)
        self.key = nn.Linear(config.d_model, config.head_dim, bias=config.bias)
        self.value = nn.Linear(config.d_model, config.head_dim, bias=config.bias)

    def attention(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Who attends to whom: (B, T, T), each row a distribution over the positions up to its own."""
        query, key = (
            place(self.query(x), rotation, self.qk_norm),
            place(self.key(x), rotation, self.qk_norm),
        )  # (B, T, K)
        scores = query @ key.transpose(-2, -1) / math.sqrt(key.shape[-1])  # (B, T, T)
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(dim=-1)

    def forward(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """The written-out definition, (B, T, D) → (B, T, K); MultiHeadAttention computes it for all heads at once."""
        return self.attention(x, rotation) @ self.value(x)


def place(x: Tensor, rotation: Tensor | None, qk_norm: bool) -> Tensor:
    """Give queries or keys (…, T, K) their positions (RoPE), then, if asked, unit root mean square."""
    if rotation is not None:
        x = rotate(x, rotation)
    return F.rms_norm(x, x.shape[-1:], eps=NORM_EPSILON) if qk_norm else x


def plain_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    """Causal attention as three operations, (B, H, T, K) → (B, H, T, K).

    PyTorch's fused one on a CPU is slow going back in bfloat16: measured, this takes a third to a half of its time.
    """
    future = torch.full((query.shape[-2], key.shape[-2]), -math.inf, dtype=query.dtype).triu(1)
    weights = torch.softmax(query / math.sqrt(query.shape[-1]) @ key.mT + future, dim=-1)  # (B, H, T, T)
    return F.dropout(weights, dropout) @ value


class MultiHeadAttention(nn.Module):
    """A list of heads, and a projection that mixes what they found.

    The heads' weights are joined and applied as one matrix product, and all heads attend in one fused call:
    the same numbers as :meth:`loop`, many times faster.
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.heads = nn.ModuleList(Head(config) for _ in range(config.num_heads))
        self.projection = nn.Linear(config.d_model, config.d_model, bias=config.bias)
        self.dropout = config.dropout
        self.qk_norm = config.qk_norm
        self.packed: PackedLinear | None = None  # all heads joined, once the model is packed for decoding

    def join_heads(self) -> tuple[Tensor, Tensor | None]:
        """All heads' weights as one (3·D, D) matrix, queries first, then keys, then values; likewise the biases."""
        linears = [getattr(head, part) for part in ("query", "key", "value") for head in self.heads]
        bias = torch.cat([linear.bias for linear in linears]) if self.projection.bias is not None else None
        return torch.cat([linear.weight for linear in linears]), bias

    def joined(self) -> Callable[[Tensor], Tensor]:
        """The product with all heads' weights, joined now once for all calls: (…, D) → (…, 3·D)."""
        weight, bias = self.join_heads()
        return lambda x: F.linear(x, weight, bias)

    def forward(self, x: Tensor, rotation: Tensor | None, cache: LayerCache | None = None, start: int = 0) -> Tensor:
        """(B, T, D) → (B, T, D). With a cache, x holds positions start…start+T and sees those before through it."""
        B, T, D = x.shape
        joined = (cache.joined if cache else self.joined())(x)
        joined = joined.view(B, T, 3, len(self.heads), -1).permute(2, 0, 3, 1, 4)  # (3, B, H, T, K)
        query, key = place(joined[:2], rotation, self.qk_norm)  # (B, H, T, K) each
        value = joined[2]
        mask = None
        if cache:
            key, value = cache.append(key, value, start)
            if start and T > 1:  # a later piece of a prompt: each position sees all before it, not just this piece
                mask = torch.ones(T, start + T, dtype=torch.bool, device=x.device).tril(start)
        dropout = self.dropout if self.training else 0.0
        causal = T > 1 and not start
        if causal and x.device.type == "cpu" and query.dtype == torch.bfloat16 and T <= LONGEST_PLAIN:
            mixed = plain_attention(query, key, value, dropout)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal=causal)
        mixed = mixed.transpose(1, 2).reshape(B, T, D)  # heads side by side again
        return F.dropout(self.projection(mixed), self.dropout, self.training)

    def loop(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Attention as the papers write it, head after head, (B, T, D) → (B, T, D). Without dropout."""
        return self.projection(torch.cat([head(x, rotation) for head in self.heads], dim=-1))


class FeedForward(nn.Module):
    """Two linear layers with a non-linearity between, at each position on its own."""

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
        if self.activation == "relu2":  # So et al. 2021, Primer
            hidden = F.relu(hidden).square()
        elif self.activation == "gelu":  # Hendrycks & Gimpel 2016; the tanh form is GPT-2's
            hidden = F.gelu(hidden, approximate="tanh")
        elif self.activation == "relu":
            hidden = F.relu(hidden)
        else:  # Shazeer 2020, SwiGLU
            hidden = F.silu(self.gate(x)) * hidden
        return F.dropout(self.contract(hidden), self.dropout, self.training)


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to the residual stream."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.post_norm = config.norm_placement == "post"
        self.attention_norm = make_norm(config)
        self.attention = MultiHeadAttention(config)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotation: Tensor | None, cache: LayerCache | None = None, start: int = 0) -> Tensor:
        """(B, T, D) → (B, T, D)."""
        if self.post_norm:
            x = self.attention_norm(x + self.attention(x, rotation, cache, start))
            return self.feed_forward_norm(x + self.feed_forward(x))
        x = x + self.attention(self.attention_norm(x), rotation, cache, start)
        return x + self.feed_forward(self.feed_forward_norm(x))


def soft_cap(logits: Tensor, cap: float) -> Tensor:
    """Squash logits smoothly into ± cap (Gemma Team 2024); 0 leaves them."""
    return cap * torch.tanh(logits.float() / cap) if cap else logits


class CrossEntropyInPieces(torch.autograd.Function):
    """Mean cross-entropy of soft_cap(x @ weight.T) against targets, a few rows of logits at a time.

    The gradients are computed while a piece's logits are there: memory is bounded, and nothing is computed twice.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, cap: float, rows: int) -> Tensor:
        """x (N, D), weight (V, D), targets (N,), -1 where not scored."""
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        w, scored, total = weight.to(dtype), (targets >= 0).sum(), 0.0
        x_gradient, weight_gradient = [], torch.zeros_like(weight)
        for piece, target in zip(x.to(dtype).split(rows), targets.split(rows), strict=True):
            logits = soft_cap((piece @ w.T).float(), cap)  # (rows, V)
            total += F.cross_entropy(logits, target, ignore_index=-1, reduction="sum")
            gradient = logits.softmax(dim=-1)
            gradient.scatter_add_(1, target.clamp(min=0)[:, None], -torch.ones_like(gradient[:, :1]))
            gradient *= (target >= 0)[:, None] / scored
            gradient = (gradient * (1 - (logits / cap) ** 2) if cap else gradient).to(dtype)
            x_gradient.append(gradient @ w)
            weight_gradient += gradient.T @ piece
        ctx.save_for_backward(torch.cat(x_gradient).to(x.dtype), weight_gradient)
        return total / scored

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x_gradient, weight_gradient = ctx.saved_tensors
        return x_gradient * gradient, weight_gradient * gradient, None, None, None


class GPT(nn.Module):
    """Token ids in, logits of the next token out."""

    def __init__(self, config: ModelConfig):
        """Raises ValueError for a vocabulary size that is not positive."""
        super().__init__()
        if config.vocab_size < 1:
            raise ValueError(f"vocab_size is {config.vocab_size}; a model needs the size of its tokenizer's vocabulary")
        self.config = config
        self.seed = int(torch.randint(2**62, (), device="cpu"))
        D, V, T = config.d_model, config.vocab_size, config.context_length
        self.token_embedding = nn.Embedding(V, D)
        self.position_embedding = nn.Embedding(T, D) if config.position == "learned" else None
        if config.position == "sinusoidal":
            self.register_buffer("sinusoids", sinusoidal_table(T, D), persistent=False)
        rotation = rotation_table(T, config.head_dim) if config.position == "rope" else None
        self.register_buffer("rotation", rotation, persistent=False)
        # Keeps rare and frequent tokens at one scale; a tied embedding is kept there by its other use.
        normed = config.norm == "rmsnorm" and not config.tie_embeddings
        self.embedding_norm = make_norm(config) if normed else nn.Identity()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = make_norm(config) if config.norm_placement == "pre" else nn.Identity()
        self.head = None if config.tie_embeddings else nn.Linear(D, V, bias=False)
        if not self.token_embedding.weight.is_meta:
            for parameter, value in zip(self.parameters(), self.initial_values(), strict=True):
                parameter.data.copy_(value)

    def initial_values(self) -> Iterator[Tensor]:
        """Every parameter's first value, in order, made one at a time: on the CPU, wherever the parameters are."""
        generator = torch.Generator().manual_seed(self.seed)
        for name, parameter in self.named_parameters():
            value = torch.empty(parameter.shape, device="cpu")
            initialise(name, value, self.config, generator)
            yield value

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def pack_for_decoding(self) -> "GPT":
        """Lay weights out as decoding reads them quickest where the model is, in place: it can't train any more."""
        if PackedLinear.fits(self.head_weight()):
            self.head = PackedLinear(self.head_weight(), None)
        for block in self.blocks:
            joined = block.attention.join_heads()
            block.attention.packed = PackedLinear(*joined) if PackedLinear.fits(joined[0]) else None
            for parent in (block.attention, block.feed_forward):
                for name, child in list(parent.named_children()):
                    if isinstance(child, nn.Linear) and PackedLinear.fits(child.weight):
                        setattr(parent, name, PackedLinear(child.weight, child.bias))
        return self

    def new_cache(self, batch_size: int, length: int | None = None) -> KVCache:
        """An empty cache for decoding batch_size sequences of up to length (default: context_length) tokens."""
        length = length or self.config.context_length
        like = self.token_embedding.weight
        layers = [LayerCache(block.attention, batch_size, length, like) for block in self.blocks]
        return KVCache(layers, length)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Logits (B, T, V); or, given targets, the mean loss in float32, in nats per target.

        tokens and targets are (B, T) integers; a target of -1 is not scored. With a cache, tokens continue what it
        holds, and the logits are those of the last position only, (B, 1, V): all that decoding needs.
        Raises ValueError for more positions than context_length, or than the cache holds.
        """
        start = cache.used if cache else 0
        end = start + tokens.shape[1]
        room = cache.length if cache else self.config.context_length
        if end > room:
            raise ValueError(
                f"{end} tokens are more than the {room} that fit; give the last {room}, or raise context_length"
            )
        x = self.embed(tokens, start)
        rotation = None if self.rotation is None else self.rotation[:, start:end]
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, cache.layers[index] if cache else None, start)
        if cache:
            cache.used = end
            x = x[:, -1:]
        x = self.final_norm(x)
        return self.logits(x) if targets is None else self.loss(x, targets)

    def embed(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Token ids (B, T), the first at position start → the residual stream's first state (B, T, D)."""
        x = self.token_embedding(tokens)
        if self.config.scale_embeddings:
            x = x * math.sqrt(self.config.d_model)
        end = start + tokens.shape[1]
        if self.position_embedding is not None:
            x = x + self.position_embedding.weight[start:end]
        elif self.config.position == "sinusoidal":
            x = x + self.sinusoids[start:end]
        return F.dropout(self.embedding_norm(x), self.config.dropout, self.training)

    def logits(self, x: Tensor) -> Tensor:
        """(…, D) → (…, V), soft-capped if the model is."""
        logits = self.head(x) if self.head is not None else F.linear(x, self.token_embedding.weight)
        return soft_cap(logits, self.config.logit_softcap)

    def head_weight(self) -> Tensor:
        return self.token_embedding.weight if self.head is None else self.head.weight

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of (B, T, D) states against (B, T) targets, in float32."""
        x, targets = x.flatten(0, 1), targets.flatten()
        rows = max(1, LOGITS_AT_ONCE // self.config.vocab_size)
        if len(x) <= rows:
            return F.cross_entropy(self.logits(x).float(), targets, ignore_index=-1)
        return CrossEntropyInPieces.apply(x, self.head_weight(), targets, self.config.logit_softcap, rows)

    @torch.no_grad()
    def attention_maps(self, tokens: Tensor) -> Tensor:
        """Every head's attention over one sequence, computed by the heads themselves: (T,) ids → (L, H, T, T)."""
        x = self.embed(tokens[None])
        rotation = None if self.rotation is None else self.rotation[:, : len(tokens)]
        maps = []
        for block in self.blocks:
            seen = x if block.post_norm else block.attention_norm(x)
            maps.append(torch.stack([head.attention(seen, rotation)[0] for head in block.attention.heads]))
            x = block(x, rotation)
        return torch.stack(maps)


def initialise(name: str, parameter: Tensor, config: ModelConfig, generator: torch.Generator) -> None:
    """Fill one parameter's tensor by the rule for its name; ValueError for a name that has none.

    A model with its own output head starts from nothing said: the head and each sub-layer's last matrix are zero,
    so every block is the identity and the first loss is ln V. With tied embeddings that cannot be (a token would
    predict itself), so GPT-2's rule holds: Radford et al. 2019, section 2.3.
    """
    part, kind = name.split(".")[-2:]
    last = part in ("projection", "contract")
    if kind == "bias":
        nn.init.zeros_(parameter)
    elif part.endswith("norm"):
        nn.init.ones_(parameter)
    elif part == "head" or (last and not config.tie_embeddings):
        nn.init.zeros_(parameter)
    elif part.endswith("embedding"):
        # RMSNorm takes an embedding's scale away; what is left of it is how fast AdamW turns it.
        std = 0.02 if config.tie_embeddings or config.norm == "layernorm" else 0.1
        nn.init.normal_(parameter, std=std, generator=generator)
    elif part in ("query", "key", "value", "expand", "gate", "projection", "contract"):
        std = parameter.shape[1] ** -0.5
        std = std / math.sqrt(2 * config.num_layers) if last else std
        nn.init.normal_(parameter, std=std, generator=generator)
    else:
        raise ValueError(f"no rule to initialise the parameter {name}; add one to initialise() in model.py")
