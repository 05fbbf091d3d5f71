"""A saved page: the live page with its model in it, as one file that needs no server."""

import base64
import contextlib
import copy
import itertools
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from engine.core.cli import warn
from engine.core.errors import UserError
from engine.core.files import atomic_write, to_json
from engine.data.chats.chat import TurnEnds, chat_format, names_pattern
from engine.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, Tokenizer
from engine.generation.text_batch import banned_tokens
from engine.nn.inference import MAX_INT8, MIN_SCALE
from engine.nn.layers import is_plain_linear
from engine.nn.lora import merge_lora
from engine.nn.positions import FREQUENCY_BASE, angles
from engine.report.inspector import ModelInspector
from engine.report.page import content_security_policy, read_template
from model import GPT

MAX_PAGE_BYTES = 100_000_000
NUM_PROBE_TOKENS = 8  # whose logits the page compares with the model's when it opens
MAX_PROBE_LOGITS = 100
SAVED_PAGE_POLICY = "worker-src blob:; img-src data:; base-uri 'none'; form-action 'none'"
LONG_S = "\u017f"  # the letter s in a third case
PAGE_ADVICE = "Use --page instead."
TOKENIZER_KINDS = {CharTokenizer: "char", ByteTokenizer: "byte", BPETokenizer: "byte-level BPE"}
# A template is applied by the page if it neither changes nor inspects these texts.
PROBE_TEXTS = ("", "a", " b\n\n", "\tc ", "{{ d }}", "<think>e</think>\n\nf", "<tool_response>")
TEXT_MARKS = ("\ufdd2", "\ufdd3", "\ufdd4")  # Unicode noncharacters


@torch.inference_mode()
def save_page(inspector: ModelInspector, path: Path) -> None:
    """Write the live page of a model with its weights, which get 8 bits, as one HTML file.

    Raises UserError for a model or tokenizer that the page's scripts do not compute.
    """
    generator = inspector.generator
    tokenizer = generator.tokenizer
    model = merge_lora(generator.model)
    config = model.config
    check_layers(model)
    chat = find_chat_pieces(tokenizer) if generator.is_chat_model else None
    if generator.is_chat_model and not chat:
        warn("the page has no chat: its template depends on more than the order of the messages")
    ends = generator.ends if chat else TurnEnds()
    tensors = quantize(model)
    probe = [*range(min(NUM_PROBE_TOKENS, config.vocab_size, config.context_length))]
    logits = dequantize(model, tensors)(torch.tensor([probe]))[0, -1, :MAX_PROBE_LOGITS]
    content = {
        "about": next(inspector.about(None)) | {"is_chat_model": chat is not None},
        "config": describe_config(model),
        "tokenizer": describe_tokenizer(tokenizer, config.vocab_size),
        "chat": chat,
        "banned": banned_tokens(tokenizer, model, ends.token_ids),
        "stop_ids": [*tokenizer.stop_token_ids, *ends.token_ids],
        "initial_tokens": generator.initial_tokens,
        "prompt_suffix": tokenizer.prompt_suffix,
        "probe": {"ids": probe, "logits": logits.tolist()},
    }
    page = read_template("live.html")
    policy = f"{content_security_policy(page)}; {SAVED_PAGE_POLICY}"
    meta = f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
    weights = base64.b64encode(save(tensors)).decode()
    data = read_template("saved.html").replace("{{weights}}", weights)
    data = data.replace("{{content}}", to_json(content).replace("<", "\\u003c"))
    page = page.replace("<title>", f"{meta}\n<title>", 1)
    file = page.replace("</main>", f"</main>\n{data}", 1).encode(errors="replace")
    if len(file) > MAX_PAGE_BYTES:
        size = f"at most {MAX_PAGE_BYTES / 1e6:.0f} MB (got {len(file) / 1e6:.0f} MB)"
        raise UserError(f"--save-page: the file must have {size}. {PAGE_ADVICE}")
    atomic_write(path, file)


def check_layers(model: GPT) -> None:
    """Raise UserError for a layer that is not as model.py makes it."""
    if model.config.attention == "loop":
        raise UserError(f"--attention loop: a saved page does not run Head.forward. {PAGE_ADVICE}")
    with torch.device("meta"):
        classes = {name: type(layer) for name, layer in GPT(model.config).named_modules()}
    for name, layer in model.named_modules():
        if not is_plain_linear(layer, classes.get(name, GPT)):
            problem = f"a saved page computes no changed layers (got {type(layer).__name__})"
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


def describe_config(model: GPT) -> dict[str, Any]:
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


def describe_tokenizer(tokenizer: Tokenizer, num_ids: int) -> dict[str, Any]:
    """Return what the page's tokenizer needs. Raises UserError for an unknown kind or pattern."""
    kind = TOKENIZER_KINDS.get(type(tokenizer))
    if kind is None:
        problem = f"a saved page runs {', '.join(TOKENIZER_KINDS.values())} (got {tokenizer.kind})"
        raise UserError(f"tokenizer: {problem}. {PAGE_ADVICE}")
    tokens: list[str | None] = [None] * num_ids
    for number in range(num_ids):
        with contextlib.suppress(KeyError, IndexError):  # the model may have more ids
            tokens[number] = tokenizer.decode_bytes([number]).decode("latin-1")
    pattern = tokenizer.pattern if isinstance(tokenizer, BPETokenizer) else ""
    markup = sorted(tokenizer.markup, key=len, reverse=True)
    return {
        "kind": kind,
        "tokens": tokens,
        "text_ids": sorted(tokenizer.text_ids),
        "pattern": translate_regex(pattern),
        "is_normalized": tokenizer.document.get("normalizer") is not None,
        "markup": {name: tokenizer.special_tokens[name] for name in markup},
        "text_start": tokenizer.text_start,
    }


def translate_regex(pattern: str) -> str:
    """Return the regex of a well-known tokenizer in JavaScript's syntax, with its flag u.

    Their possessive quantifiers end where nothing that follows could match, like plain ones. Raises
    UserError for other syntax than theirs.
    """
    is_known = {*re.findall(r"\\(.)", pattern)} <= {*"sSpPrn"}
    if not is_known or {*re.findall(r"\(\?(.)", pattern)} - {*":i!"}:
        problem = f"a saved page cannot run its pattern (got {pattern!r})"
        raise UserError(f"tokenizer: {problem}. {PAGE_ADVICE}")
    greedy = re.sub(r"([?*+]|\{[\d,]+\})\+", r"\1", pattern)
    plain = re.sub(r"\(\?i:[^()]*\)", _with_both_cases, greedy)
    return plain.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")


def _with_both_cases(group: re.Match[str]) -> str:
    def make_class(letters: re.Match[str]) -> str:
        text = letters[0].strip("[]")
        return f"[{text}{text.upper()}{LONG_S if 's' in text else ''}]"

    return "(?:" + re.sub(r"\[[a-z]+\]|[a-z]", make_class, group[0].removeprefix("(?i:"))


def find_chat_pieces(tokenizer: Tokenizer) -> list[list[str | int]] | None:
    """Return what stands before, after a question, after an answer, and at the end of a chat.

    These are texts and ids of special tokens. None for a template that depends on the date or on
    the texts, and where a text ends an answer.
    """
    template, ends = chat_format(tokenizer)

    def render(texts: Sequence[str], year: int) -> str:
        turns = zip(itertools.cycle(("user", "assistant")), texts, strict=False)
        messages = [{"role": role, "content": text} for role, text in turns]
        with contextlib.suppress(UserError):  # of a template that refuses the probe
            return template.render(messages, True, datetime(year, 1, 1))
        return ""

    if ends.texts or tokenizer.left_strippers or tokenizer.right_strippers:
        return None
    pieces = re.split("|".join(TEXT_MARKS), render(TEXT_MARKS, 2000))
    for count, start, year in itertools.product((1, 3, 5, 7), range(7), (2000, 2020)):
        texts = [PROBE_TEXTS[(start + i) % len(PROBE_TEXTS)] for i in range(count)]
        afters = [*itertools.islice(itertools.cycle(pieces[1:-1]), count - 1), pieces[-1]]
        turns = [text + after for text, after in zip(texts, afters, strict=True)]
        if len(pieces) != 4 or render(texts, year) != pieces[0] + "".join(turns):
            return None
    name = re.compile(f"({names_pattern(tokenizer).pattern})")
    ids = tokenizer.special_tokens
    return [[ids.get(part, part) for part in name.split(piece)] for piece in pieces]
