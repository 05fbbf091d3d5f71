"""Print every figure of docs/attention.md and draw its pictures.

python docs/attention.py numbers                          what the formulas say, in seconds
python docs/attention.py heads [--run out/pydocs]         the habits of each head, and pictures
python docs/attention.py history [--steps 200 --seeds 1]  what each design choice since 2017 changed
"""

import contextlib
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from annotated_types import Ge
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

from engine.core.cli import run_command
from engine.core.settings import build, parse
from engine.data.dataset import open_dataset
from engine.data.ids import encode_examples
from engine.data.shards.dataset_summary import render_with_targets
from engine.data.split import Tokens, is_target
from engine.data.tokenizer import ByteTokenizer, load_tokenizer
from engine.nn.attention import attend, causal_mask
from engine.nn.positions import rotate, sinusoids
from engine.report.attention_maps import attention_maps, token_label
from engine.runs.checkpoint import load_model
from engine.runs.run_files import find_checkpoint
from model import GPT, ModelConfig
from train import TrainConfig, train

SAMPLE_TEXT = (
    "class Queue:\n    def put(self, item):\n        self.items.append(item)\n        return self\n"
)
HABIT_TITLES = {
    "previous": "previous token",
    "same": "after the same token",  # what followed it: an induction head
    "line": "line start",
    "first": "first token",
}
DECODER_2017 = {
    **{"position": "sinusoidal", "norm": "layernorm", "norm_placement": "post"},
    **{"activation": "relu", "bias": True, "qk_norm": False},
    **{"tie_embeddings": True, "scale_embeddings": True},
}
RECIPE_CHANGES = [  # each adds to those before
    ("the 2017 decoder", {"optimizer": "adamw", "learning_rate": 3e-3}),
    ("norm before each sub-layer", {"norm_placement": "pre"}),
    ("RoPE, embeddings not scaled", {"position": "rope", "scale_embeddings": False}),
    ("GELU", {"activation": "gelu"}),
    ("RMSNorm", {"norm": "rmsnorm"}),
    ("no biases", {"bias": False}),
    ("an output head of its own", {"tie_embeddings": False}),
    ("SwiGLU", {"activation": "swiglu"}),
    ("queries and keys normalized", {"qk_norm": True}),
    ("Muon: today's recipe", {"optimizer": "muon", "learning_rate": 1e-2}),
]


@dataclass(frozen=True)
class AttentionConfig:
    """Print the figures of docs/attention.md, and draw its pictures."""

    what: tyro.conf.Positional[Literal["numbers", "heads", "history"]]  # What to print.
    run: Path = Path("out/pydocs")  # The run whose heads are shown.
    # Dataset to read with heads, to train on with history; None: that of the guide.
    data: Path | None = None
    # Habits whose best heads are drawn.
    habits: tuple[Literal["previous", "same", "line", "first"], ...] = tuple(HABIT_TITLES)
    text: str = SAMPLE_TEXT  # The text in these pictures.
    out: Path = Path(__file__).parent  # The folder for the pictures.
    steps: Annotated[int, Ge(11)] = 200  # Optimizer steps of each run of the history.
    seeds: Annotated[int, Ge(1)] = 1  # Runs whose mean is a row of the history.
    layers: Annotated[int, Ge(1)] = 2  # Layers of the models of the history.
    width: Annotated[int, Ge(8)] = 64  # Their d_model; they have 4 heads.


def main(arguments: list[str] | None = None) -> None:
    """Print, or draw, what the command line names."""
    config = parse(AttentionConfig, arguments)
    print({"numbers": numbers, "heads": heads, "history": history}[config.what](config))


def numbers(config: AttentionConfig) -> str:
    """Return every quick figure of the guide; they are the same on each machine."""
    sections = (scale, stable_softmax, mask, list_of_heads, cross, examples, positions, window)
    sections += (norms, tying, dropout)
    return "\n\n".join(f"{section.__name__.replace('_', ' ')}\n{section()}" for section in sections)


def make_model(**settings: Any) -> GPT:
    """Make a model in float64, with random matrices that keep a variance."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocab_size=64, **settings)).double()
    for name, parameter in model.named_parameters():
        std = parameter.shape[-1] ** -0.5
        if not parameter.any():
            nn.init.normal_(parameter, std=std)
        elif model.specs[name].group == "matrix":
            parameter.data *= std / model.specs[name].std
    return model


def random_tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def align(*rows: Sequence) -> str:
    """Return rows of cells as lines with aligned columns."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        lines.append("  ".join(f"{cell!s:>{w}}" for cell, w in zip(row, widths, strict=True)))
    return "\n".join(lines)


def scale() -> str:
    """Compare scores and their softmax with and without division by √d_k."""
    titles = ("variance", "largest weight", "gradient")
    rows = [("d_k", *titles, f"scaled {titles[0]}", *titles[1:])]
    for width in (4, 16, 64, 256):
        model = make_model(d_model=256, num_heads=1, head_dim=width, qk_norm=False)
        head = model.blocks[0].attention.heads[0]
        x = torch.randn(64, 64, 256, dtype=torch.float64)
        cells = [str(width)]
        for divisor in (1, math.sqrt(width)):
            scores = head.query(x) @ head.key(x).mT / divisor
            weights = scores.softmax(dim=-1)
            gradient = (weights * (1 - weights)).sum(dim=-1).mean()  # the Jacobian's diagonal
            values = (scores.var(), weights.amax(dim=-1).mean(), gradient)
            cells += [f"{value:.2f}" for value in values]
        rows.append(tuple(cells))
    return align(*rows)


def stable_softmax() -> str:
    """Compute the softmax of large scores as it is written, and as it is computed."""
    scores = torch.tensor([100.0, 101.0, 102.0])
    rows = [("s", *(f"{score:.0f}" for score in scores))]
    exponentials = {"exp(s) / sum": scores.exp(), "exp(s - max) / sum": (scores - 102).exp()}
    exponentials["torch.softmax(s)"] = scores.softmax(dim=-1)
    for name, values in exponentials.items():
        rows.append((name, *(f"{weight:.4f}" for weight in values / values.sum())))
    return align(*rows)


def mask(window: int = 0) -> str:
    """Return one head's attention over five tokens, a row for each; window 0 is all positions."""
    weights = attention_maps(make_model(num_heads=4, windows=(window,)), torch.arange(1, 6))[0, 0]
    rows = []
    for i, row in enumerate(weights, 1):
        rows.append((f"row {i}", *(f"{weight:.2f}" for weight in row), f"sum {row.sum():.2f}"))
    return align(*rows)


def list_of_heads() -> str:
    """Compare the joined heads with the loop over the list, and with PyTorch's module."""
    model = make_model(num_heads=4, position="learned", qk_norm=False)
    attention = model.blocks[0].attention
    module = nn.MultiheadAttention(128, 4, bias=False, batch_first=True, dtype=torch.float64)
    module.in_proj_weight.data = torch.cat([layer.weight for layer in attention.qkv_layers()]).data
    module.out_proj.weight = attention.projection.weight
    x = torch.randn(2, 10, 128, dtype=torch.float64)
    hidden = ~causal_mask(10, 10)
    outputs = {
        "the loop over the list": attention.loop(x, None),
        "nn.MultiheadAttention": module(x, x, x, attn_mask=hidden, need_weights=False)[0],
    }
    rows = []
    for name, output in outputs.items():
        difference = (attention(x, None) - output).abs().max()
        rows.append((f"joined heads - {name}", f"{difference:.12f}"))
    return align(*rows)


def cross() -> str:
    """Compose attention to prompt and completion from attention to each."""
    query, key, value = random_tensor(3, 1, 1, 12, 16)
    scores = (query @ key.mT / 4).masked_fill(~causal_mask(12, 12), -math.inf)
    scores = scores[..., 8:, :]  # of the last four: the completion
    to_prompt = scores[..., :8].softmax(dim=-1) @ value[..., :8, :]
    to_completion = scores[..., 8:].softmax(dim=-1) @ value[..., 8:, :]
    weight = scores.softmax(dim=-1)[..., :8].sum(dim=-1, keepdim=True)
    composed = weight * to_prompt + (1 - weight) * to_completion
    difference = (attend(query, key, value)[..., 8:, :] - composed).abs().max()
    weights = "  ".join(f"{w:.2f}" for w in weight.flatten())
    return (
        f"weight on the prompt, of 8 tokens  {weights}\n"
        f"attention - (w · cross + (1 - w) · self)  {difference:.12f}"
    )


def examples() -> str:
    """Render an example for training: brackets enclose the targets that count."""
    tokenizer = ByteTokenizer()
    turns = [("prompt", "the 9th of June 1999\n"), ("completion", "1999-06-09")]
    example = encode_examples(tokenizer, turns)[0]
    rendered = render_with_targets(tokenizer, example)
    return f"{rendered}\ntokens  {len(example)}\ntargets that count  {is_target(example).sum()}"


def positions() -> str:
    """Compute scores of one query and one key at different positions."""
    query, key = random_tensor(2, 128)
    rope = make_model(num_heads=1, context_length=128).rotation(torch.arange(128))
    rotated = rotate(query.expand(128, -1), rope) @ rotate(key.expand(128, -1), rope).T
    model = make_model(num_heads=1, context_length=128, position="learned")
    learned = model.position_embedding(torch.arange(128))
    learned = learned / learned.std()  # as large as the vectors that they are added to
    fixed = sinusoids(torch.arange(128), model.config.d_model)
    rows = [("query at, key at", "RoPE", "sinusoids", "learned")]
    for i, j in ((5, 2), (50, 47), (103, 100), (50, 20)):
        scores = [rotated[i, j], *((query + p[i]) @ (key + p[j]) for p in (fixed, learned))]
        rows.append((f"{i}, {j}", *(f"{score:.3f}" for score in scores)))
    return align(*rows)


def window() -> str:
    """Return attention to the last two positions, and how many scores windows save."""
    scores, in_windows = (causal_mask(2048, 2048, size).sum() for size in (0, 256))
    return f"{mask(2)}\nscores of 2,048 tokens: {scores:,}, in windows of 256: {in_windows:,}"


def tying() -> str:
    with torch.device("meta"):
        untied, tied = (
            GPT(ModelConfig(vocab_size=4096, tie_embeddings=tied)) for tied in (False, True)
        )
    return f"untied {untied.num_parameters:,}, tied {tied.num_parameters:,}"


def norms() -> str:
    """Compare the residual stream and gradients of pre-norm and post-norm before training."""
    titles = ("size after block 1", "after 12", "cosine with the first", "gradient in block 1")
    rows = [("norm", *titles, "in block 12")]
    for placement in ("pre", "post"):
        model = make_model(num_layers=12, num_heads=2, norm_placement=placement)
        states: list[Tensor] = []
        for block in model.blocks:
            block.register_forward_hook(lambda *call, states=states: states.append(call[-1]))
        inputs, targets = torch.randint(64, (4, 65)).unfold(1, 64, 1).unbind(1)
        model(inputs, targets).backward()
        values = [states[i].square().mean().sqrt() for i in (0, -1)]
        embedded = model.embed(inputs, torch.arange(inputs.shape[1]))
        values.append(torch.cosine_similarity(embedded, states[-1], dim=-1).mean())
        values += [model.blocks[i].feed_forward.contract.weight.grad.norm() for i in (0, -1)]
        rows.append((placement, *(f"{value:.2f}" for value in values)))
    return align(*rows)


def dropout() -> str:
    """Apply dropout to rows of equal weights."""
    torch.manual_seed(0)
    zeros = torch.zeros(1, 10_000, 10, 10)
    value = torch.eye(10).expand(1, 10_000, 10, 10)
    rows = attend(zeros, zeros, value, dropout_p=0.1)[0, :, -1]  # (10,000, 10) weights
    dropped = (rows == 0).float().mean()
    sums = rows.sum(dim=-1)
    return f"dropped {dropped:.2f}, others 0.100 → {rows.max():.3f}, mean sum {sums.mean():.2f}"


def habit_masks(tokens: Tensor, texts: Sequence[str]) -> dict[str, Tensor]:
    """Return the positions where each habit looks, bool (T, T), in (T,) ids with their texts.

    engine/report/web/habits.js has the same habits.
    """
    T = len(tokens)
    position = torch.arange(T)
    earlier = torch.ones(T, T, dtype=torch.bool).tril(-1)
    is_same = (tokens[:, None] == tokens) & earlier
    last_same = torch.where(is_same, position, -2).amax(dim=1, keepdim=True)
    line_starts = [True]  # a line's indentation, and its first word
    for text in texts[:-1]:
        line_starts.append("\n" in text or (line_starts[-1] and text.isspace()))
    masks = {
        "previous": position == position[:, None] - 1,
        "same": position == last_same + 1,
        "line": torch.tensor(line_starts).expand(T, T),
        "first": (position == 0).expand(T, T),
    }
    return {name: mask & earlier for name, mask in masks.items()}


def sum_habits(maps: Tensor, tokens: Tensor, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Sum the weights of maps (H, T, T) where each habit looks: (habits, H + 1).

    The last column is of equal weights. Also count the rows with somewhere to look: (habits, 1).
    """
    T = len(tokens)
    equal_weights = torch.ones(1, T, T).tril() / torch.arange(1, T + 1)[:, None]
    masks = torch.stack([*habit_masks(tokens, texts).values()])
    sums = torch.einsum("hij,nij->nh", torch.cat((maps, equal_weights)), masks.float())
    return sums, masks.any(dim=-1).sum(dim=-1, keepdim=True)


@torch.no_grad()
def score_heads(
    model: GPT, tokens: Tokens, texts: Sequence[str], num_windows: int = 32
) -> tuple[Tensor, Tensor]:
    """Return the mean weight of each habit in each head, (habits, L, H), and with equal weights.

    The mean is over the positions, of evenly spread windows, where the habit has somewhere to look.
    """
    length = model.config.context_length
    sums = torch.zeros(())
    counts = torch.zeros(())
    for start in np.linspace(0, len(tokens) - length, num_windows).astype(int).tolist():
        ids = torch.from_numpy(tokens[start : start + length].astype(np.int64))
        maps = attention_maps(model, ids).flatten(0, 1)
        window_texts = [texts[token] for token in ids.tolist()]
        window_sums, window_counts = sum_habits(maps, ids, window_texts)
        sums = sums + window_sums
        counts = counts + window_counts
    scores = sums / counts
    return scores[:, :-1].unflatten(1, (model.config.num_layers, -1)), scores[:, -1]


def heads(config: AttentionConfig) -> str:
    """Return a table of every head's habits, and draw the best head of each chosen habit."""
    checkpoint = find_checkpoint(config.run)
    model = load_model(checkpoint)
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    data = open_dataset(config.data or Path(checkpoint.state.settings["data"][0]))
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    scores, equal_scores = score_heads(model, data.val.tokens, texts)
    tokens = torch.from_numpy(tokenizer.encode(config.text).astype(np.int64))
    tokens = tokens[: model.config.context_length]
    labels = [token_label(tokenizer, token) for token in tokens.tolist()]
    maps = attention_maps(model, tokens).flatten(0, 1)
    masks = habit_masks(tokens, [texts[token] for token in tokens.tolist()])
    rows = []
    for layer, head in np.ndindex(scores.shape[1:]):
        cells = [f"{score:.3f}" for score in scores[:, layer, head]]
        rows.append([f"layer {layer + 1}, head {head + 1}", *cells])
    rows.append(["all alike", *(f"{score:.3f}" for score in equal_scores)])
    for column, (name, habit) in enumerate(HABIT_TITLES.items(), 1):
        best = int(scores[column - 1].argmax())
        title = f"{rows[best][0]}: {habit}, mean weight {rows[best][column]}"
        if name in config.habits:
            path = config.out / f"attention-{name}.png"
            draw(maps[best], masks[name], labels, title, path)
        rows[best][column] = f"**{rows[best][column]}**"
    table = [["", *HABIT_TITLES.values()], ["---"] * len(rows[0]), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in table)


def draw(weights: Tensor, mask: Tensor, labels: list[str], title: str, path: Path) -> None:
    """Draw one head's attention (T, T) as a PNG, with the positions of a habit outlined."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 6.8), layout="constrained")
    axes = figure.add_subplot(xlabel="looked at", ylabel="looks", title=title)
    visible = weights.masked_fill(~causal_mask(*weights.shape), math.nan).numpy()
    image = axes.imshow(visible, "cividis", vmin=0, vmax=1)
    rows, columns = mask.nonzero(as_tuple=True)
    style = {"marker": "s", "facecolors": "none", "edgecolors": "#d55e00"}
    axes.scatter(columns, rows, 45, label="this habit", **style)
    names = [label[:8] for label in labels]
    for axis, angle in ((axes.xaxis, 90), (axes.yaxis, 0)):
        axis.set_ticks(range(len(names)), names, rotation=angle, fontsize=9, parse_math=False)
    axes.legend(loc="upper right")
    figure.colorbar(image, ax=axes, shrink=0.6, label="attention weight")
    figure.savefig(path, dpi=120)


def history(config: AttentionConfig) -> str:
    """Return a table of validation losses from the 2017 decoder to today's recipe."""
    settings: dict[str, Any] = {
        **DECODER_2017,
        "data": (config.data or Path("data/shakespeare-char"),),
        **{"num_layers": config.layers, "num_heads": 4, "d_model": config.width},
        **{"context_length": 64, "batch_size": 12, "dtype": "float32"},
        **{"steps": config.steps, "eval_every": config.steps, "warmup_steps": config.steps // 10},
    }
    lines = ["| | flags | loss | change |", "| --- | --- | --- | --- |"]
    previous = math.nan
    for title, changes in RECIPE_CHANGES:
        settings.update(changes)
        losses = []
        for seed in range(1, config.seeds + 1):
            with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
                values = {**settings, "seed": seed, "out": Path(folder) / "run"}
                losses.append(train(build(TrainConfig, values)).evaluation["val_loss"])
        loss = fmean(losses)
        change = "" if math.isnan(previous) else f"{loss - previous:+.3f}"
        lines.append(f"| {title} | `{format_flags(changes)}` | {loss:.3f} | {change} |")
        print(lines[-1], file=sys.stderr)
        previous = loss
    return "\n".join(lines)


def format_flags(changes: dict[str, Any]) -> str:
    """Return settings as flags of a command line."""
    flags = []
    for name, value in changes.items():
        prefix = "--no-" if value is False else "--"
        flags.append(f"{prefix}{name}" if isinstance(value, bool) else f"--{name} {value}")
    return " ".join(flags).replace("_", "-")


if __name__ == "__main__":
    run_command(main)
