"""The page of a model: a text, its probabilities and its heads, computed in the browser.

The model is in the page, in 8 bits, so that one file needs neither a server nor a network.
"""

import base64
import contextlib
import copy
import itertools
import math
import os
import re
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from engine.core.cli import escape_controls, say, warn
from engine.core.errors import UserError
from engine.core.files import atomic_write, read_json
from engine.data.chats.chat import TurnEnds, chat_format, names_pattern
from engine.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from engine.data.tokenizer_json import portable_regex
from engine.generation.text_batch import banned_tokens
from engine.generation.text_generator import TextGenerator
from engine.nn.inference import MAX_INT8, MIN_SCALE
from engine.nn.layers import is_plain_linear
from engine.nn.positions import FREQUENCY_BASE, angles
from engine.report.page import fill_template
from model import GPT

MAX_PAGE_BYTES = 250_000_000
MAX_SENT_BYTES = 100_000_000  # of a page to send, unless the user agrees to more
NUM_PROBE_TOKENS = 8  # whose logits the page compares with the model's when it opens
MAX_PROBE_LOGITS = 100
PAGE_ADVICE = "Generate text without a page."
SCREEN_VARIABLES = {"DISPLAY", "WAYLAND_DISPLAY"}  # of Linux
TOKENIZER_KINDS = {CharTokenizer: "char", ByteTokenizer: "byte", BPETokenizer: "byte-level BPE"}
# A template is applied by the page if it neither changes nor inspects these texts.
PROBE_TEXTS = ("", "a", " b\n\n", "\tc ", "{{ d }}", "<think>e</think>\n\nf", "<tool_response>")
PROBE_LENGTHS = (1, 3, 5, 7, 41)  # messages
PROBE_TIMES = (datetime(2000, 1, 1), datetime(2021, 11, 30, 13, 47, 58))  # no field is equal
TEXT_MARKS = ("\ufdd2", "\ufdd3", "\ufdd4")  # Unicode noncharacters


@torch.inference_mode()
def make_page(
    generator: TextGenerator, settings: dict[str, Any], prompts: Sequence[str] = ()
) -> str:
    """Return the page of a model with its weights, which get 8 bits, as HTML.

    Settings are those that the page starts with, prompts are texts to begin with. Raises UserError
    for a model or tokenizer that the page's scripts do not compute.
    """
    tokenizer = generator.tokenizer
    model = generator.model
    config = model.config
    check_layers(model)
    num_bytes = sum(p.numel() * (1 if p.ndim == 2 else 4) for p in model.parameters()) * 4 / 3
    if num_bytes > MAX_PAGE_BYTES:
        size = f"at most {MAX_PAGE_BYTES / 1e6:.0f} MB (got {num_bytes / 1e6:,.0f} MB)"
        raise UserError(f"the page: must have {size}. {PAGE_ADVICE}")
    chat = find_chat_pieces(tokenizer) if generator.is_chat_model else None
    if generator.is_chat_model and not chat:
        warn("the page has no chat: its template depends on more than the order of the messages")
    ends = generator.ends if chat else TurnEnds()
    tensors = quantize(model)
    probe = [*range(min(NUM_PROBE_TOKENS, config.vocab_size, config.context_length))]
    logits = dequantize(model, tensors)(torch.tensor([probe]))[0, -1, :MAX_PROBE_LOGITS]
    content = {
        "about": {
            "isChatModel": chat is not None,
            "layers": config.num_layers,
            "heads": config.num_heads,
            "contextLength": config.context_length,
            "maxBits": math.log2(tokenizer.vocab_size),
            "settings": settings,
            "prompts": list(prompts),
        },
        "config": page_config(model),
        "tokenizer": page_tokenizer(tokenizer, config.vocab_size),
        "chat": chat,
        "banned": banned_tokens(tokenizer, model, ends.token_ids),
        "stop_ids": [*tokenizer.stop_token_ids, *ends.token_ids],
        "initial_tokens": generator.initial_tokens,
        "prompt_suffix": tokenizer.prompt_suffix,
        "probe": {"ids": probe, "logits": logits.tolist()},
    }
    weights = base64.b64encode(save(tensors)).decode()
    return fill_template("live.html", content, weights=weights)


def save_page(page: str, path: Path) -> None:
    """Write a page. Raises UserError for a large one, unless the user agrees in the terminal."""
    if len(page) > MAX_SENT_BYTES:
        size = f"at most {MAX_SENT_BYTES / 1e6:.0f} MB to be sent (got {len(page) / 1e6:.0f} MB)"
        problem = f"--save-page: must have {size}"
        if not sys.stdin.isatty() or input(f"{problem}. Write it? [y/N] ").lower() != "y":
            raise UserError(f"{problem}. Confirm it in a terminal, or use --page.")
    atomic_write(path, page.encode())


def open_page(page: str, path: Path) -> None:
    """Write a page and open it in the browser, if there is a screen to show it."""
    atomic_write(path, page.encode())
    has_screen = sys.platform in ("darwin", "win32") or SCREEN_VARIABLES & os.environ.keys()
    if not (has_screen and webbrowser.open(path.resolve().as_uri())):
        say("No browser was found. Open this file in one:", file=sys.stderr)
    print(escape_controls(str(path)))


def read_prompts(path: Path) -> list[str]:
    """Read the prompts of a run, from its folder or that of a checkpoint; an import has none."""
    folders = (path, *path.resolve().parents[:2])
    abouts = (folder / "about.json" for folder in folders)
    about = next((path for path in abouts if path.exists()), None)
    return read_json(about).get("prompts", []) if about else []


def check_layers(model: GPT) -> None:
    """Raise UserError for a layer that is not as model.py makes it."""
    if model.config.attention == "loop":
        raise UserError(f"--attention loop: a page does not run Head.forward. {PAGE_ADVICE}")
    with torch.device("meta"):
        classes = {name: type(layer) for name, layer in GPT(model.config).named_modules()}
    for name, layer in model.named_modules():
        if not is_plain_linear(layer, classes.get(name, GPT)):
            problem = f"a page computes no changed layers (got {type(layer).__name__})"
            raise UserError(f"{name or 'model'}: {problem}. {PAGE_ADVICE}")


def quantize(model: GPT) -> dict[str, Tensor]:
    """Return a model's vectors, float32, and matrices, int8, with scales of their rows."""
    tensors = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().cpu().contiguous()
        if values.ndim == 2:
            scales = values.abs().amax(dim=1).clamp(min=MIN_SCALE) / MAX_INT8
            tensors[f"{name.removesuffix('weight')}scales"] = scales
            values = (values / scales[:, None]).round().to(torch.int8)
        tensors[name] = values
    return tensors


def dequantize(model: GPT, tensors: dict[str, Tensor]) -> GPT:
    """Return a model that computes with the tensors of :func:`quantize`, in float32."""
    model = copy.deepcopy(model).float().cpu()
    for name, parameter in model.named_parameters():
        scales = tensors.get(f"{name.removesuffix('weight')}scales", torch.ones(1))
        parameter.data = tensors[name] * (scales[:, None] if parameter.ndim == 2 else 1)
    return model


def page_config(model: GPT) -> dict[str, Any]:
    """Return a model's config with what follows from it, and the frequencies of its positions."""
    config = model.config
    names = ("head_width", "num_groups", "layer_windows", "epsilon")
    position = torch.ones(())
    frequencies = angles(position, config.d_model, FREQUENCY_BASE)
    if config.position == "rope":
        base = config.rope_base or FREQUENCY_BASE
        frequencies = angles(position, config.head_width, base, config.rope_scaling)
    values = {name: getattr(config, name) for name in names}
    return {**asdict(config), **values, "frequencies": frequencies.tolist()}


def page_tokenizer(tokenizer: Tokenizer, num_ids: int) -> dict[str, Any]:
    """Return what the page's tokenizer needs. Raises UserError for an unknown kind or pattern."""
    kind = TOKENIZER_KINDS.get(type(tokenizer))
    if kind is None:
        problem = f"a page runs {', '.join(TOKENIZER_KINDS.values())} (got {tokenizer.kind})"
        raise UserError(f"tokenizer: {problem}. {PAGE_ADVICE}")
    tokens: list[str | None] = [None] * num_ids
    for number in range(num_ids):
        with contextlib.suppress(KeyError, IndexError):  # the model may have more ids
            tokens[number] = tokenizer.decode_bytes([number]).decode("latin-1")
    pattern = tokenizer.pattern if isinstance(tokenizer, BPETokenizer) else ""
    normalizer = tokenizer.document.get("normalizer") or {}
    markup = sorted(tokenizer.markup, key=len, reverse=True)
    return {
        "kind": kind,
        "tokens": tokens,
        "text_ids": sorted(tokenizer.text_ids),
        "pattern": translate_regex(pattern),
        "merged_ids": tokenizer.merged_ids if isinstance(tokenizer, BPETokenizer) else [],
        "normalization": normalizer.get("type", "").removeprefix("Sequence"),  # of nothing
        "markup": [(name, tokenizer.special_tokens[name]) for name in markup],
        "text_start": tokenizer.text_start,
    }


def translate_regex(pattern: str | None) -> str:
    """Return the regex of a well-known tokenizer in JavaScript's syntax, with its flag u.

    Raises UserError for other syntax than theirs.
    """
    regex = None if pattern is None else portable_regex(pattern)
    if regex is None:
        problem = f"a page cannot run its pattern (got {pattern!r})"
        raise UserError(f"tokenizer: {problem}. {PAGE_ADVICE}")
    return regex.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")


def find_chat_pieces(tokenizer: Tokenizer) -> list[list[str | int]] | None:
    """Return what stands before, after a question, after an answer, and at the end of a chat.

    These are texts and ids of special tokens. None for a template that depends on the date or on
    the texts, and where a text ends an answer.
    """
    template, ends = chat_format(tokenizer)

    def render(texts: Sequence[str], time: datetime) -> str:
        turns = zip(itertools.cycle(("user", "assistant")), texts, strict=False)
        messages = [{"role": role, "content": text} for role, text in turns]
        with contextlib.suppress(UserError):  # of a template that refuses the probe
            return template.render(messages, True, time)
        return ""

    if ends.texts or tokenizer.left_strippers or tokenizer.right_strippers:
        return None
    pieces = re.split("|".join(TEXT_MARKS), render(TEXT_MARKS, PROBE_TIMES[0]))
    for count, start, time in itertools.product(PROBE_LENGTHS, range(7), PROBE_TIMES):
        texts = [PROBE_TEXTS[(start + i) % len(PROBE_TEXTS)] for i in range(count)]
        afters = [*itertools.islice(itertools.cycle(pieces[1:-1]), count - 1), pieces[-1]]
        turns = [text + after for text, after in zip(texts, afters, strict=True)]
        if len(pieces) != 4 or render(texts, time) != pieces[0] + "".join(turns):
            return None
    name = re.compile(f"({names_pattern(tokenizer).pattern})")
    ids = tokenizer.special_tokens
    return [[ids.get(part, part) for part in name.split(piece)] for piece in pieces]
