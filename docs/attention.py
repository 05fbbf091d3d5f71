"""Every figure and picture of docs/attention.md, in its order.

python docs/attention.py numbers                          what the formulas say, in seconds
python docs/attention.py heads [--run out/stdlib]         each head's habits, and a picture of each habit's best head
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
from engine.core.settings import parse, with_values
from engine.data.chat import COMPLETION, PROMPT, encode_example, is_target, render_with_targets
from engine.data.dataset import Tokens, open_dataset
from engine.data.tokenizer import ByteTokenizer, load_tokenizer
from engine.generation.attention_maps import attention_maps, token_label
from engine.generation.pictures import save
from engine.nn.attention import attend, causal_mask
from engine.nn.positions import rotate
from engine.training.checkpoint import load_model
from engine.training.run_dir import find_checkpoint
from model import GPT, ModelConfig, MultiHeadAttention
from train import TrainConfig, train

TEXT = "class Queue:\n    def put(self, item):\n        self.items.append(item)\n        return self\n"
HABITS = {"previous": "previous token", "same": "after the same token", "line": "line start", "first": "first token"}
DECODER_2017 = {"position": "sinusoidal", "norm_placement": "post", "norm": "layernorm", "activation": "relu"}
DECODER_2017 |= {"bias": True, "qk_norm": False, "tie_embeddings": True, "scale_embeddings": True}
HISTORY = [  # each adds to those before
    ("the 2017 decoder", {"optimizer": "adamw", "learning_rate": 3e-3}),
    ("norm before each sub-layer", {"norm_placement": "pre"}),
    ("RoPE, embeddings not scaled", {"position": "rope", "scale_embeddings": False}),
    ("GELU", {"activation": "gelu"}),
    ("RMSNorm", {"norm": "rmsnorm"}),
    ("no biases", {"bias": False}),
    ("an output head of its own", {"tie_embeddings": False}),
    ("SwiGLU", {"activation": "swiglu"}),
    ("queries and keys normalised", {"qk_norm": True}),
    ("Muon: today's recipe", {"optimizer": "muon", "learning_rate": 1e-2}),
]


@dataclass(frozen=True)
class AttentionConfig:
    """Print the figures of docs/attention.md, and draw its pictures."""

    what: tyro.conf.Positional[Literal["numbers", "heads", "history"]]  # Which of them.
    run: Path = Path("out/stdlib")  # The trained model whose heads are looked at.
    data: Path | None = None  # A dataset: heads look at its validation text, history trains on it; None: the guide's.
    habits: tuple[Literal["previous", "same", "line", "first"], ...] = tuple(HABITS)  # Whose best heads are drawn.
    text: str = TEXT  # What these heads read.
    out: Path = Path(__file__).parent  # The folder for the pictures.
    steps: Annotated[int, Ge(11)] = 200  # Optimizer steps of each run of the history.
    seeds: Annotated[int, Ge(1)] = 1  # How many runs each row of the history is the mean of.
    layers: Annotated[int, Ge(1)] = 2  # The depth of the history's models.
    width: Annotated[int, Ge(8)] = 64  # Their d_model; they have 4 heads.


def main(arguments: list[str] | None = None) -> None:
    """Print, or draw, what the command line says."""
    config = parse(AttentionConfig, arguments)
    print({"numbers": numbers, "heads": heads, "history": history}[config.what](config))


def numbers(config: AttentionConfig) -> str:
    """Every quick figure of the guide, as sections of a name and lines: the same on each machine."""
    sections = [scale, stable_softmax, mask, list_of_heads, cross, examples, positions, window, norms, tying, dropout]
    return "\n\n".join(f"{section.__name__.replace('_', ' ')}\n{section()}" for section in sections)


def seeded(**shape: Any) -> GPT:
    """A model in float64, for figures that are the same everywhere, with random matrices that keep a variance."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(vocab_size=64, **shape)).double()
    for name, parameter in model.named_parameters():
        std = parameter.shape[-1] ** -0.5
        if not parameter.any():
            nn.init.normal_(parameter, std=std)
        elif model.specs[name].group == "matrix":
            parameter.data *= std / model.specs[name].std
    return model


def columns(*rows: Sequence) -> str:
    """Rows of cells as lines, aligned."""
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell!s:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows)


def scale() -> str:
    """Scores of heads as they are initialised, their softmax over 64 positions, and how much it moves when they do."""
    rows = [("d_k", "variance", "largest weight", "gradient", "scaled variance", "largest weight", "gradient")]
    for width in (4, 16, 64, 256):
        head = seeded(d_model=256, num_heads=1, head_dim=width, qk_norm=False).blocks[0].attention.heads[0]
        x, cells = torch.randn(64, 64, 256, dtype=torch.float64), [width]
        for divisor in (1, math.sqrt(width)):
            scores = head.query(x) @ head.key(x).mT / divisor
            weights = scores.softmax(dim=-1)
            moves = (weights * (1 - weights)).sum(dim=-1).mean()  # the Jacobian's diagonal
            cells += [f"{scores.var():.2f}", f"{weights.amax(dim=-1).mean():.2f}", f"{moves:.2f}"]
        rows.append(cells)
    return columns(*rows)


def stable_softmax() -> str:
    """Softmax of large scores as it is written, and as it is computed."""
    scores = torch.tensor([100.0, 101.0, 102.0])
    ways = {"exp(s) / sum": scores.exp(), "exp(s - max) / sum": (scores - scores.max()).exp()}
    found = {name: e / e.sum() for name, e in ways.items()} | {"torch.softmax(s)": scores.softmax(dim=-1)}
    return columns(("s", *(f"{s:.0f}" for s in scores)), *((n, *(f"{p:.4f}" for p in w)) for n, w in found.items()))


def mask(last: int = 0) -> str:
    """One head's attention over five tokens, a row for each, to all before or so many."""
    rows = attention_maps(seeded(num_heads=4, windows=(last,)), torch.arange(1, 6))[0, 0]
    return columns(*((f"row {i}", *(f"{w:.2f}" for w in row), f"sum {row.sum():.2f}") for i, row in enumerate(rows, 1)))


def list_of_heads() -> str:
    """The most that any output of the joined heads differs from the loop over them, and from PyTorch's own."""
    ours: MultiHeadAttention = seeded(num_heads=4, position="learned", qk_norm=False).blocks[0].attention
    theirs = nn.MultiheadAttention(128, 4, bias=False, batch_first=True, dtype=torch.float64)
    theirs.in_proj_weight.data, theirs.out_proj.weight = ours.fused_qkv.concatenate()[0].data, ours.projection.weight
    x, hidden = torch.randn(2, 10, 128, dtype=torch.float64), torch.ones(10, 10, dtype=torch.bool).triu(1)
    joined, pytorch = ours(x, None), theirs(x, x, x, attn_mask=hidden, need_weights=False)[0]
    pairs = {"the loop over the list": ours.loop(x, None), "nn.MultiheadAttention": pytorch}
    return columns(*((f"joined heads - {name}", f"{(joined - o).abs().max():.12f}") for name, o in pairs.items()))


def cross() -> str:
    """Attention of a completion to prompt and completion, put together from attention to each."""
    query, key, value = torch.randn(3, 1, 1, 12, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = (query @ key.mT / 4).masked_fill(~causal_mask(12, 12), -math.inf)
    scores = scores[..., 8:, :]  # of the last four: the completion
    parts = [(scores[..., some].softmax(-1) @ value[..., some, :]) for some in (slice(0, 8), slice(8, 12))]
    share = scores.softmax(dim=-1)[..., :8].sum(dim=-1, keepdim=True)
    off = (attend(query, key, value)[..., 8:, :] - (share * parts[0] + (1 - share) * parts[1])).abs().max()
    shares = "  ".join(f"{one:.2f}" for one in share.flatten())
    return f"weight on the prompt, of 8 tokens  {shares}\nattention - (w · cross + (1 - w) · self)  {off:.12f}"


def examples() -> str:
    """An example as it is learned: what counts as a target stands between the brackets."""
    tokenizer, turns = ByteTokenizer(), [(PROMPT, "the 9th of June 1999\n"), (COMPLETION, "1999-06-09")]
    example = encode_example(tokenizer, turns)
    rendered = render_with_targets(tokenizer, example)
    return f"{rendered}\ntokens  {len(example)}\ntargets that count  {is_target(example).sum()}"


def positions() -> str:
    """Scores of one query and one key, at one distance from each other and different positions."""
    query, key = torch.randn(2, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rope = seeded(num_heads=1, context_length=128).rotation(0, 128)
    rotated = rotate(query.expand(128, -1), rope) @ rotate(key.expand(128, -1), rope).T
    rows = [("query at, key at", "RoPE", "sinusoids", "learned")]
    added = [seeded(num_heads=1, context_length=128, position=p).positions(0, 128) for p in ("sinusoidal", "learned")]
    added[1] = added[1] / added[1].std()  # as large as what they are added to: first values are small
    for i, j in ((5, 2), (50, 47), (103, 100), (50, 20)):
        sums = (((query + p[i]) @ (key + p[j])).item() for p in added)
        rows.append((f"{i}, {j}", f"{rotated[i, j]:.3f}", *(f"{s:.3f}" for s in sums)))
    return columns(*rows)


def window() -> str:
    """Attention to the last two positions alone, and how many scores windows save."""
    seen = [f"{causal_mask(2048, 2048, last).sum().item():,}" for last in (0, 256)]
    return f"{mask(2)}\nscores of 2,048 tokens: {seen[0]}, in windows of 256: {seen[1]}"


def tying() -> str:
    """Parameters of the default shape."""
    with torch.device("meta"):
        each = {tied: GPT(ModelConfig(vocab_size=4096, tie_embeddings=tied)).num_parameters for tied in (False, True)}
    return f"untied {each[False]:,}, tied {each[True]:,}"


def norms() -> str:
    """The residual stream's size, what is left in it of its first state, and gradients, before any training."""
    rows = [("norm", "size after block 1", "after 12", "cosine with the first", "gradient in block 1", "in block 12")]
    for placement in ("pre", "post"):
        model, states = seeded(num_layers=12, num_heads=2, norm_placement=placement), []
        for block in model.blocks:
            block.register_forward_hook(lambda module, given, out, states=states: states.append(out))
        inputs, targets = torch.randint(64, (4, 65)).unfold(1, 64, 1).unbind(1)
        model(inputs, targets).backward()
        first, last = (block.feed_forward.contract.weight.grad.norm() for block in (model.blocks[0], model.blocks[-1]))
        sizes = [states[i].square().mean().sqrt() for i in (0, -1)]
        kept = torch.cosine_similarity(model.embed(inputs), states[-1], dim=-1).mean()
        rows.append((placement, *(f"{x:.2f}" for x in (*sizes, kept, first, last))))
    return columns(*rows)


def dropout() -> str:
    """What dropout leaves of one row of equal weights."""
    torch.manual_seed(0)
    zeros, value = torch.zeros(1, 10_000, 10, 10), torch.eye(10).expand(1, 10_000, 10, 10)
    rows = attend(zeros, zeros, value, dropout_p=0.1)[0, :, -1]  # (10,000, 10) weights
    return (
        f"dropped {(rows == 0).float().mean():.2f}, others 0.100 → {rows.max():.3f}, mean sum {rows.sum(-1).mean():.2f}"
    )


def habits(tokens: Tensor, texts: Sequence[str]) -> dict[str, Tensor]:
    """Where each habit looks in (T,) ids, bool (T, T); texts (V,) are those of all ids."""
    T = len(tokens)
    place, earlier = torch.arange(T), torch.ones(T, T, dtype=torch.bool).tril(-1)
    last = torch.where((tokens[:, None] == tokens) & earlier, place, -1).amax(dim=1)  # the same token's last position
    starts = [True]  # a line's indentation, and its first word
    for text in (texts[token] for token in tokens[:-1].tolist()):
        starts.append("\n" in text or (starts[-1] and text.isspace()))
    where = {"previous": place == place[:, None] - 1, "same": (place == last[:, None] + 1) & (last >= 0)[:, None]}
    where |= {"line": torch.tensor(starts).expand(T, T), "first": (place == 0).expand(T, T)}
    return {name: cells & earlier for name, cells in where.items()}


@torch.no_grad()
def score_heads(model: GPT, tokens: Tokens, texts: Sequence[str], windows: int = 32) -> tuple[Tensor, Tensor]:
    """Each habit's mean weight in each head, (habits, L, H), and in a head that looks at all alike, (habits,).

    The mean is over those positions of evenly spread windows that have somewhere to look, by that habit.
    """
    length, total = model.config.context_length, 0
    alike = torch.ones(1, length, length).tril() / torch.arange(1, length + 1)[:, None]
    for start in np.linspace(0, len(tokens) - length, windows).astype(int).tolist():
        ids = torch.from_numpy(tokens[start : start + length].astype(np.int64))
        maps = torch.cat((attention_maps(model, ids).flatten(0, 1), alike))  # (L·H + 1, T, T)
        where = torch.stack(list(habits(ids, texts).values()))
        weights = torch.einsum("hij,nij->nh", maps, where.float())
        total = total + torch.cat((weights, where.any(dim=-1).sum(dim=-1, keepdim=True)), dim=1)
    scores = total[:, :-1] / total[:, -1:]
    return scores[:, :-1].unflatten(1, (model.config.num_layers, -1)), scores[:, -1]


def heads(config: AttentionConfig) -> str:
    """A table of every head's habits, and a picture of the best head of each that is asked for."""
    found = find_checkpoint(config.run)
    model, tokenizer = load_model(found), load_tokenizer(found.path / "tokenizer.json")
    data = open_dataset(config.data or Path(found.state["settings"]["data"][0]))
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    scores, alike = score_heads(model, data.val, texts)
    tokens = torch.from_numpy(tokenizer.encode(config.text).astype(np.int64))[: model.config.context_length]
    names = [token_label(tokenizer, token) for token in tokens.tolist()]
    maps, where = attention_maps(model, tokens), habits(tokens, texts)
    named = {f"layer {i + 1}, head {j + 1}": scores[:, i, j] for i, j in np.ndindex(scores.shape[1:])}
    cells = [[name, *(f"{score:.3f}" for score in its)] for name, its in (named | {"all alike": alike}).items()]
    for index, (name, said) in enumerate(HABITS.items()):
        best = scores[index].argmax().item()
        title = f"{cells[best][0]}: {said}, mean weight {cells[best][index + 1]}"
        if name in config.habits:
            draw(maps.flatten(0, 1)[best], where[name], names, title, config.out / f"attention-{name}.png")
        cells[best][index + 1] = f"**{cells[best][index + 1]}**"
    rows = [["", *HABITS.values()], ["---"] * len(cells[0]), *cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(weights: Tensor, where: Tensor, names: list[str], title: str, path: Path) -> None:
    """One head's attention (T, T) as a PNG, with what a habit would look at, bool (T, T), outlined."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 6.8), layout="constrained")
    axes = figure.add_subplot(xlabel="looked at", ylabel="looks", title=title)
    image = axes.imshow(weights.masked_fill(~causal_mask(*weights.shape), math.nan).numpy(), "cividis", vmin=0, vmax=1)
    rows, looked_at = where.nonzero(as_tuple=True)
    axes.scatter(looked_at, rows, 45, marker="s", facecolors="none", edgecolors="#d55e00", label="this habit")
    for axis, angle in ((axes.xaxis, 90), (axes.yaxis, 0)):
        axis.set_ticks(range(len(names)), [name[:8] for name in names], rotation=angle, fontsize=9, parse_math=False)
    axes.legend(loc="upper right")
    figure.colorbar(image, ax=axes, shrink=0.6, label="attention weight")
    save(figure, path)


def history(config: AttentionConfig) -> str:
    """A table of validation losses, nats per token, from the 2017 decoder to today's recipe, one change at a time."""
    common = {"data": (config.data or Path("data/shakespeare-char"),), "num_layers": config.layers, "num_heads": 4}
    common |= {"d_model": config.width, "context_length": 64, "batch_size": 12, "steps": config.steps}
    common |= {"eval_every": config.steps, "warmup_steps": config.steps // 10, "dtype": "float32"}
    values, lines, before = common | DECODER_2017, ["| | flags | loss | change |", "| --- | --- | --- | --- |"], None
    for said, change in HISTORY:
        values, losses = values | change, []
        for seed in range(1, config.seeds + 1):
            with tempfile.TemporaryDirectory() as folder:
                own = {"seed": seed, "out": Path(folder) / "run"}
                with contextlib.redirect_stdout(sys.stderr):
                    losses.append(train(with_values(TrainConfig(), values | own)).val_loss)
        flags = [f"--no-{k}" if v is False else f"--{k}" if v is True else f"--{k} {v}" for k, v in change.items()]
        shown, loss = f"`{' '.join(flags).replace('_', '-')}`" if flags else "", fmean(losses)
        lines.append(f"| {said} | {shown} | {loss:.3f} | {'' if before is None else f'{loss - before:+.3f}'} |")
        print(lines[-1], file=sys.stderr)
        before = loss
    return "\n".join(lines)


if __name__ == "__main__":
    run_command(main)
