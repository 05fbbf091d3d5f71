"""GPT: a decoder-only Transformer language model.

Read from top to bottom: Head, MultiHeadAttention, FeedForward, Block, GPT, and the specs of all
parameters. This is the definition; engine/nn has fast implementations of the same mathematics.

    B batch  T time (positions)  D d_model  H heads  G head groups  K head_dim  F d_ff  V vocabulary
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.nn import bounds
from engine.nn.attention import Context, Contexts, attend
from engine.nn.bounds import AUTO, Auto
from engine.nn.layers import FusedLinear, dropout, make_embedding, make_norm, make_qk_norm
from engine.nn.loss import soft_cap, training_loss, validation_loss
from engine.nn.positions import rotate, rotations, sinusoids, token_positions
from engine.nn.specs import ParameterSpec, draw_initial_values, match_specs


@dataclass(frozen=True)
class ModelConfig:
    """Architecture and size of a modern GPT, which sets the sizes that are None."""

    vocab_size: Auto[bounds.Width] = AUTO  # Number of tokens, padding included; None: the data's.
    # Most tokens of a training row, and the context of a new model. None: fits the examples, or
    # that of the base model's rows; else 256, or chosen with the size.
    context_length: Auto[bounds.Width] = AUTO
    num_layers: Auto[bounds.Count] = AUTO  # Transformer blocks. None: 2, or chosen with the size.
    num_heads: Auto[bounds.Count] = AUTO  # Heads of a block. None: 2, or chosen with the size.
    d_model: Auto[bounds.Width] = AUTO  # Width of the stream. None: 128, or from the size.
    # Probability of zeroing an activation during training. None: 0, or chosen with the size.
    dropout: Auto[bounds.Probability] = AUTO
    num_kv_heads: bounds.Count | None = None  # Key-value heads (grouped-query); None: num_heads.
    head_dim: bounds.Width | None = None  # Width of a head; None: d_model / num_heads.
    windows: bounds.Windows | None = None  # Tokens of each layer's window, repeated; 0: no window.
    d_ff: bounds.Width | None = None  # Feed-forward width; None: 4 d_model, or about 8/3 in SwiGLU.
    bias: bool = False  # Add a bias to linear layers and layer norms.
    qkv_bias: bool = False  # Add a bias to queries, keys and values.
    position: Literal["rope", "learned", "sinusoidal"] = "rope"  # Position encoding.
    rope_base: bounds.Base | None = None  # Base of RoPE's frequencies; None: 10,000.
    rope_scaling: bounds.Factors | None = None  # FACTOR, or FACTOR LOW HIGH LENGTH (Llama 3.1).
    # Normalization layer; rmsnorm is the one without a weight.
    norm: Literal["rmsnorm", "weighted_rmsnorm", "layernorm"] = "rmsnorm"
    # Added to the mean square; None: 1e-6, or 1e-5 (layernorm).
    norm_epsilon: bounds.Epsilon | None = None
    norm_placement: Literal["pre", "post"] = "pre"  # Before each sub-layer, or after it (2017).
    activation: Literal["swiglu", "relu2", "gelu", "relu"] = "swiglu"  # Feed-forward activation.
    qk_norm: bool = True  # Normalize queries and keys with an RMSNorm, before RoPE.
    tie_embeddings: bool = False  # Use the token embedding as the output head too.
    scale_embeddings: bool = False  # Multiply token embeddings by √d_model (2017).
    logit_softcap: bounds.Cap = 0.0  # Largest absolute logit, by a smooth bound; 0: no bound.
    attention: Literal["fused", "loop"] = "fused"  # All heads at once, or Head.forward of each.

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
        if self.norm_epsilon is not None:
            return self.norm_epsilon
        return 1e-5 if self.norm == "layernorm" else 1e-6

    @property
    def feed_forward_width(self) -> int:
        """By default SwiGLU's three matrices have as many weights as two: Shazeer 2020, sec. 3."""
        if self.d_ff is not None:
            return self.d_ff
        if self.activation == "swiglu":
            return 32 * math.ceil(self.d_model / 12)  # a multiple of 32
        return 4 * self.d_model

    def __post_init__(self) -> None:
        bounds.check_model_config(self)


class Head(nn.Module):
    """Attention head with its own query, key and value projections: Vaswani et al. 2017, eq. 1.

    With grouped-query attention (Ainslie et al. 2023), the heads of a group share one key and one
    value projection, those of its first head. All heads of a block share the norms and the window
    of its first head.
    """

    def __init__(self, config: ModelConfig, window: int, starts_group: bool, starts_block: bool):
        super().__init__()
        has_bias = config.bias or config.qkv_bias
        make_linear = partial(nn.Linear, config.d_model, config.head_width, bias=has_bias)
        self.query = make_linear()
        if starts_group:
            self.key = make_linear()
            self.value = make_linear()
        if starts_block:
            self.query_norm = make_qk_norm(config)
            self.key_norm = make_qk_norm(config)
            self.window = window  # the last positions that each position sees; 0: all
        self.dropout = config.dropout

    def attention(
        self, x: Tensor, rotation: Tensor | None, group_head: "Head", block_head: "Head"
    ) -> Tensor:
        """Return attention weights, (B, T, D) → (B, T, T): each row is a distribution.

        group_head and block_head are the first heads of this head's group and block.
        """
        q = rotate(block_head.query_norm(self.query(x)), rotation)  # (B, T, K)
        k = rotate(block_head.key_norm(group_head.key(x)), rotation)
        scores = q @ k.mT / math.sqrt(k.shape[-1])  # (B, T, T)
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
        if block_head.window:
            mask = mask.triu(1 - block_head.window)  # Beltagy et al. 2020
        return scores.masked_fill(~mask, -math.inf).softmax(dim=-1)

    def forward(
        self, x: Tensor, rotation: Tensor | None, group_head: "Head", block_head: "Head"
    ) -> Tensor:
        """Return the weighted mean of the values, (B, T, D) → (B, T, K)."""
        weights = self.attention(x, rotation, group_head, block_head)
        values = group_head.value(x)
        return dropout(weights.to(values.dtype), self.dropout, self.training) @ values


class MultiHeadAttention(nn.Module):
    """List of heads and a projection that mixes their outputs: Vaswani et al. 2017, section 3.2.2.

    :meth:`loop` is the definition; by default, :meth:`forward` computes all heads at once.
    """

    def __init__(self, config: ModelConfig, window: int = 0):
        super().__init__()
        self.group_size = config.num_heads // config.num_groups
        self.heads = nn.ModuleList(
            Head(config, window, index % self.group_size == 0, index == 0)
            for index in range(config.num_heads)
        )
        heads_width = config.num_heads * config.head_width
        self.projection = nn.Linear(heads_width, config.d_model, bias=config.bias)
        self.fused_qkv = FusedLinear(self.qkv_layers)
        self.config = config

    def qkv_layers(self) -> list[nn.Module]:
        """Return the projections to queries, keys and values, as they are now."""
        heads = cast(list[Head], list(self.heads))
        group_heads = heads[:: self.group_size]
        queries = [head.query for head in heads]
        keys = [head.key for head in group_heads]
        return [*queries, *keys, *[head.value for head in group_heads]]

    def heads_with_shared(self) -> Iterator[tuple[Head, Head, Head]]:
        """Yield each head, with the first heads of its group and of the block."""
        heads = cast(list[Head], list(self.heads))
        for index, head in enumerate(heads):
            yield head, heads[index - index % self.group_size], heads[0]

    def loop(self, x: Tensor, rotation: Tensor | None) -> Tensor:
        """Compute one head after the other, (B, T, D) → (B, T, D)."""
        outputs = [head(x, rotation, *shared) for head, *shared in self.heads_with_shared()]
        mixed = torch.cat(outputs, dim=-1)
        return dropout(self.projection(mixed), self.config.dropout, self.training)

    def forward(self, x: Tensor, rotation: Tensor | None, context: Context | None = None) -> Tensor:
        """Compute all heads, (B, T, D) → (B, T, D). x follows the positions of a context."""
        if self.config.attention == "loop":
            return self.loop(x, rotation)
        B, T, _ = x.shape
        qkv = self.fused_qkv(x).view(B, T, -1, self.config.head_width).transpose(1, 2)
        q, k, v = qkv.split((len(self.heads), *[self.config.num_groups] * 2), dim=1)
        block_head = cast(Head, self.heads[0])
        q = rotate(block_head.query_norm(q), rotation)  # (B, H, T, K)
        k = rotate(block_head.key_norm(k), rotation)  # (B, G, T, K)
        if context is None:
            dropout_p = self.config.dropout if self.training else 0.0
            mixed = attend(q, k, v, dropout_p, block_head.window)
        else:
            mixed = context.attend(q, k, v)  # to all visible positions
        mixed = mixed.transpose(1, 2).reshape(B, T, -1)  # (B, H, T, K) → (B, T, H·K)
        return dropout(self.projection(mixed), self.config.dropout, self.training)


class FeedForward(nn.Module):
    """Two linear layers with a non-linearity or a gate between them, at each position."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        make_linear = partial(nn.Linear, bias=config.bias)
        width = config.feed_forward_width
        self.gate = make_linear(config.d_model, width) if config.activation == "swiglu" else None
        self.expand = make_linear(config.d_model, width)
        self.contract = make_linear(width, config.d_model)
        self.activation = config.activation
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers: (B, T, D) → (B, T, D)."""
        hidden = self.expand(x)  # (B, T, F)
        if self.gate is not None:  # SwiGLU: Shazeer 2020
            hidden = F.silu(self.gate(x)) * hidden
        elif self.activation == "relu2":  # Primer: So et al. 2021
            hidden = F.relu(hidden)
            hidden = hidden * hidden
        elif self.activation == "gelu":  # Hendrycks & Gimpel 2016; the tanh form is GPT-2's
            hidden = F.gelu(hidden, approximate="tanh")
        else:
            hidden = F.relu(hidden)
        return dropout(self.contract(hidden), self.dropout, self.training)


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, config: ModelConfig, window: int = 0):
        super().__init__()
        self.post_norm = config.norm_placement == "post"
        self.attention_norm = make_norm(config)
        self.attention = MultiHeadAttention(config, window)
        self.feed_forward_norm = make_norm(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotation: Tensor | None, context: Context | None = None) -> Tensor:
        """Apply both sub-layers: (B, T, D) → (B, T, D). x follows the positions of a context."""
        if self.post_norm:
            x = self.attention_norm(x + self.attention(x, rotation, context))
            return self.feed_forward_norm(x + self.feed_forward(x))
        x = x + self.attention(self.attention_norm(x), rotation, context)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """Decoder-only Transformer: token ids in, logits of the next token out."""

    def __init__(self, config: ModelConfig):
        """Raise ValueError for a parameter without exactly one spec."""
        super().__init__()
        config = bounds.set_default_sizes(config)
        self.config = config
        # Draw the seed first: on some devices, constructing a layer draws random numbers.
        self.seed = int(torch.randint(2**62, (), device="cpu"))
        self.token_embedding = make_embedding(config.vocab_size, config.d_model)
        self.position_embedding = None
        if config.position == "learned":
            self.position_embedding = make_embedding(config.context_length, config.d_model)
        tied = config.tie_embeddings  # as the output head, the embedding keeps its scale: no norm
        has_embedding_norm = config.norm == "rmsnorm" and not tied
        self.embedding_norm = make_norm(config) if has_embedding_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(config, window) for window in config.layer_windows)
        self.final_norm = make_norm(config) if config.norm_placement == "pre" else nn.Identity()
        self.head = None if tied else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.training_loss = training_loss
        self.num_parameters = sum(parameter.numel() for parameter in self.parameters())
        self.specs = parameter_specs(config, [name for name, _ in self.named_parameters()])
        if not self.token_embedding.weight.is_meta:
            self.load_state_dict(dict(self.initial_values()))

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, contexts: Contexts = (), last: int = 1
    ) -> Tensor:
        """Return logits (B, T, V), or, with targets, the loss summed over the counted targets.

        tokens and targets are (B, T) integers; a target of -1 is not counted. The loss is the
        training loss, or in evaluation mode the validation loss. With contexts, one for each block,
        tokens follow their positions, and only the logits of the ``last`` positions are
        returned, (B, last, V). Raises ValueError for too many positions.
        """
        positions = token_positions(tokens, contexts, self.config.context_length)
        x = self.embed(tokens, positions)
        rotation = self.rotation(positions)
        for index, block in enumerate(self.blocks):
            x = block(x, rotation, contexts[index] if contexts else None)
        x = self.final_norm(x[:, -last:] if contexts and targets is None else x)
        cap = self.config.logit_softcap
        if targets is not None:
            loss = self.training_loss if self.training else validation_loss
            return loss(x.flatten(0, 1), self.head_weight(), targets.flatten(), cap)
        logits = F.linear(x, self.head_weight()) if self.head is None else self.head(x)
        return soft_cap(logits, cap)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the first block's input for tokens at positions (T,) or (B, T): (B, T, D)."""
        x = self.token_embedding(tokens)
        if self.config.scale_embeddings:
            x = x * math.sqrt(self.config.d_model)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        elif self.config.position == "sinusoidal":
            x = x + sinusoids(positions, self.config.d_model).to(x.dtype)
        return dropout(self.embedding_norm(x), self.config.dropout, self.training)

    def rotation(self, positions: Tensor) -> Tensor | None:
        """Return RoPE's cosines and sines of positions (T,) or (B, T)."""
        config = self.config
        if config.position != "rope":
            return None
        return rotations(positions, config.head_width, config.rope_base, config.rope_scaling)

    def head_weight(self) -> Tensor:
        """Return the weight of the output layer, (V, D)."""
        return self.token_embedding.weight if self.head is None else self.head.weight

    def initial_values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and initial value of each parameter, on the CPU, drawn with self.seed."""
        return draw_initial_values(self.named_parameters(), self.specs, self.seed)


def parameter_specs(config: ModelConfig, names: Iterable[str]) -> dict[str, ParameterSpec]:
    """Return the spec of each parameter. Raises ValueError unless its name matches exactly one.

    With an untied head, the head and the last matrix of each sub-layer are zero. Every block is the
    identity, and the initial loss is ln V. The other matrices have half the std that preserves
    variance. Tied embeddings follow GPT-2: Radford et al. 2019, section 2.3.
    """
    tied = config.tie_embeddings
    # A norm follows an untied embedding, so its std only sets the relative size of AdamW's steps.
    embedding_std = 0.02 if tied or config.norm == "layernorm" else 0.1
    embedding = ParameterSpec("head" if tied else "embedding", embedding_std)
    hidden = ParameterSpec("matrix", config.d_model**-0.5 * (1 if tied else 0.5))
    depth = math.sqrt(2 * config.num_layers)
    attention_std = (config.num_heads * config.head_width) ** -0.5 / depth if tied else 0.0
    feed_forward_std = config.feed_forward_width**-0.5 / depth if tied else 0.0
    specs = {
        "token_embedding.weight": embedding,
        "position_embedding.weight": embedding,
        "*.query.weight": hidden,
        "*.key.weight": hidden,
        "*.value.weight": hidden,
        "*.attention.projection.weight": ParameterSpec("matrix", attention_std),
        "*.feed_forward.gate.weight": hidden._replace(stack="gate_and_expand"),
        "*.feed_forward.expand.weight": hidden._replace(stack="gate_and_expand"),
        "*.feed_forward.contract.weight": ParameterSpec("matrix", feed_forward_std),
        "head.weight": ParameterSpec("head"),
        "*_norm.weight": ParameterSpec("vector", mean=1.0),
        "*.bias": ParameterSpec("vector"),
    }
    return match_specs(specs, names)
