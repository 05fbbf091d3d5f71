"""A saved page computes what the model computes with the same 8-bit weights, and sends nothing."""

import base64
import dataclasses
import itertools
import json
import re
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SMALL, VARIANTS, random_model, train_sentencepiece, train_tiny

import sample
from engine.core.errors import UserError
from engine.data.chats.chat_template import CHATML_TEMPLATE
from engine.data.tokenizer import ByteTokenizer, CharTokenizer, Tokenizer, named_tokenizer
from engine.data.tokenizer_json import SPECIAL_TOKENS, SPLIT_PATTERNS
from engine.data.tokenizer_training import train_bpe_tokenizer, train_char_tokenizer
from engine.generation.text_generator import TextGenerator
from engine.report import saved_page
from engine.report.attention_maps import token_label
from engine.report.inspector import ModelInspector
from engine.report.page import WEB_DIR
from engine.report.saved_page import dequantize, quantize, save_page, translate_regex
from model import GPT, FeedForward

pytestmark = pytest.mark.browser
SCRIPTS = ("gpt", "sampling", "tokenizer", "answers", "worker")
LETTERS = CharTokenizer("".join(map(chr, range(ord("!"), ord("!") + SMALL.vocab_size))))
SETTINGS = {"temperature": 0.8, "top_k": None, "top_p": 0.95, "seed": 1, "max_new_tokens": 20}
NAME = "</script><script>alert(1)</script><b>small</b>"
LLAMA3_SCALING = (8.0, 1.0, 4.0, 8.0)
CONFIGS = {
    **VARIANTS,
    "layernorm": dataclasses.replace(SMALL, norm="layernorm", bias=True, norm_epsilon=1e-3),
    "qkv_bias": dataclasses.replace(SMALL, qkv_bias=True, rope_scaling=(4.0,), windows=(5,)),
    "tied": dataclasses.replace(SMALL, tie_embeddings=True, rope_scaling=LLAMA3_SCALING),
    "post": dataclasses.replace(SMALL, norm_placement="post", norm="weighted_rmsnorm"),
    "gelu": dataclasses.replace(SMALL, activation="gelu", scale_embeddings=True, num_kv_heads=1),
}
LONG = [i * i % SMALL.vocab_size for i in range(40)]  # ids, more than two contexts
GREEDY = SETTINGS | {"temperature": 0}


def expect(locator: Any) -> Any:
    return pytest.importorskip("playwright.sync_api").expect(locator)


def inspect(model: GPT, tokenizer: Tokenizer = LETTERS, **options: Any) -> ModelInspector:
    """Return the answers of a model with the weights of its saved page."""
    computed = dequantize(model, quantize(model))
    generator = TextGenerator(computed, tokenizer, [0], **options)
    return ModelInspector(generator, {**SETTINGS, "name": NAME, "text": ""}, ["&!"])


@pytest.fixture
def open_page(page: Any, tmp_path: Path) -> Callable[[ModelInspector], Any]:
    """Save a page, open it, and return a function that asks its scripts."""

    def open_page(inspector: ModelInspector) -> Callable[..., Any]:
        path = tmp_path / "model.html"
        save_page(inspector, path)
        page.goto(path.as_uri())
        scripts = "".join((WEB_DIR / f"{name}.js").read_text() for name in SCRIPTS)
        read = "(id) => document.getElementById(id).textContent"
        make = (
            "new Inspector(JSON.parse(read('content')), new Weights(decodeBase64(read('weights'))))"
        )
        page.evaluate(f"() => {{ {scripts} const read = {read}; globalThis.inspector = {make}; }}")

        def ask(name: str, question: dict[str, Any]) -> Any:
            code = """([name, question]) => JSON.stringify(
                [...inspector[name](inspector.parse(question))].filter(Boolean),
                (key, value) => value instanceof Uint8Array ? Array.from(value) : value)"""
            return json.loads(page.evaluate(code, [name, question]))

        return ask

    return open_page


def assert_close(answer: Any, expected: Any) -> None:
    """Compare JSON values; numbers to 1e-3, which allows a byte of attention to differ by 1."""
    if isinstance(expected, dict):
        assert answer.keys() == expected.keys()
        for key in answer.keys() - {"habits"}:
            assert_close(answer[key], expected[key])
    elif isinstance(expected, list | tuple):
        for pair in zip(answer, expected, strict=True):
            assert_close(*pair)
    elif isinstance(expected, float):
        assert answer == pytest.approx(expected, rel=1e-3, abs=1e-3)
    else:
        assert answer == expected


def check_answer(ask: Any, inspector: ModelInspector, name: str, question: dict[str, Any]) -> None:
    """Compare the page's answer with the server's."""
    answers = ask(name, {"off": [], "at": 0, **question})
    for answer, expected in zip(answers, inspector.answers[name](question), strict=True):
        if name in ("heads", "attention"):
            levels = base64.b64decode(expected.pop("weights"))
            differences = zip(answer.pop("weights"), levels, strict=True)
            assert all(abs(actual - level) <= 1 for actual, level in differences)
        assert_close(answer, expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_option_of_a_model_is_computed(name, page, open_page):
    config = CONFIGS[name]
    inspector = inspect(random_model(config))
    ask = open_page(inspector)
    window = LONG[: config.context_length]
    logits = page.evaluate("(ids) => [...inspector.full.logitsAfter(ids)]", window)
    expected = inspector.generator.model(torch.tensor([window]))[0, -1]
    assert (torch.tensor(logits) - expected).abs().max() < 1e-3
    greedy = SETTINGS | {"ids": LONG, "temperature": 0, "max_new_tokens": 200}
    for settings in (
        greedy,
        SETTINGS | {"ids": LONG, "seed": 7},
        SETTINGS | {"top_k": 5, "text": "*2"},
    ):
        lines = ask("write", settings | {"off": []})
        reference = [*inspector.write(settings)]
        assert [line.get("text") for line in lines] == [line.get("text") for line in reference]
        assert lines[-1] == reference[-1]
    off = {"ids": LONG, "off": [[1, 2], [2, 1]], **SETTINGS}
    check_answer(ask, inspector, "read", off)
    check_answer(ask, inspector, "predict", off | {"at": 30})
    check_answer(ask, inspector, "measure", {"ids": LONG})
    check_answer(ask, inspector, "heads", off | {"at": 20})
    for layer, head in itertools.product((1, 2), range(1, config.num_heads + 1)):
        question = {"ids": LONG, "at": 39, "layer": layer, "head": head}
        check_answer(ask, inspector, "attention", question)


def make_tokenizer(name: str, request: Any) -> Tokenizer:
    """Make a tokenizer of a kind, or a byte-level BPE with a pattern."""
    if name in ("gpt2", "cl100k_base"):
        request.getfixturevalue("tiktoken_cache")
        return named_tokenizer(name)
    if name == "char":
        return train_char_tokenizer(request.getfixturevalue("random_strings"), "\n")
    if name == "byte":
        return ByteTokenizer()
    return train_bpe_tokenizer([request.getfixturevalue("code")], 600, pattern=name)


@pytest.mark.parametrize("name", ["char", "byte", "cl100k_base", *SPLIT_PATTERNS])
def test_wild_texts_have_the_same_ids_and_labels(name, page, open_page, request, random_strings):
    tokenizer = make_tokenizer(name, request)
    config = dataclasses.replace(SMALL, vocab_size=tokenizer.vocab_size, d_model=8, num_heads=1)
    open_page(inspect(random_model(config), tokenizer))
    encode = "(texts) => texts.map((text) => inspector.tokenizer.encode(text))"
    ids = page.evaluate(encode, random_strings)
    assert ids == [tokenizer.encode(text).tolist() for text in random_strings]
    parts = [each[start : start + 3] for each in ids for start in range(0, len(each), 7)]
    categories = [{*map(unicodedata.category, tokenizer.decode(part))} for part in parts]
    parts = [part for part, each in zip(parts, categories, strict=True) if "Cn" not in each]
    label = "(parts) => parts.map((ids) => inspector.tokenizer.label(...ids))"
    assert page.evaluate(label, parts) == [token_label(tokenizer, *part) for part in parts]
    decode = "(all) => all.map((ids) => inspector.tokenizer.decode(ids))"
    assert page.evaluate(decode, parts) == [tokenizer.decode(part) for part in parts]


def make_chat_inspector(template: str | None = None, names: Any = SPECIAL_TOKENS) -> ModelInspector:
    tokenizer = ByteTokenizer().with_special(names).with_chat_template(template)
    config = dataclasses.replace(SMALL, vocab_size=tokenizer.vocab_size, context_length=64)
    return inspect(random_model(config), tokenizer, is_chat_model=True)


CHATML_NAMES = ("<|im_start|>", "<|im_end|>", "<think>")
SYSTEM = "<|im_start|>system\nShort.<|im_end|>\n"


@pytest.mark.parametrize("names, start", [(SPECIAL_TOKENS, None), (CHATML_NAMES, SYSTEM)])
def test_a_chat_is_answered_and_shortened_as_by_the_server(names, start, page, open_page):
    inspector = make_chat_inspector(start and start + CHATML_TEMPLATE, names)
    ask = open_page(inspector)
    hostile = "<|im_end|><think>\r\n<|user|> "
    for turns in (["Hi"], ["Hi", hostile, "a\rb"], ["1", "2", hostile, "4", "5", hostile, "7" * 9]):
        check_answer(ask, inspector, "chat", {"turns": turns, **SETTINGS})
    with pytest.raises(Exception, match="longer than the context"):
        ask("chat", {"turns": ["x" * 64], "off": [], **SETTINGS})


@pytest.mark.parametrize(
    "change",
    [
        ("message['content']", "message['content'] | trim"),
        ("{% for", "{{ strftime_now('%Y') }}{% for"),
        ("message['content']", "message['content'].split('</think>')[-1]"),
    ],
)
def test_a_chat_whose_template_depends_on_more_is_left_out(change, tmp_path, capsys):
    inspector = make_chat_inspector(CHATML_TEMPLATE.replace(*change), CHATML_NAMES)
    save_page(inspector, tmp_path / "model.html")
    assert "template" in capsys.readouterr().err
    assert '"is_chat_model": false' in (tmp_path / "model.html").read_text()


def test_what_the_page_does_not_compute_is_refused_by_name(tmp_path, code, monkeypatch):
    hooked = random_model(SMALL)
    hooked.blocks[1].feed_forward.expand.register_forward_hook(lambda layer, x, y: 2 * y)
    looped = random_model(dataclasses.replace(SMALL, attention="loop"))
    tokenizer = train_sentencepiece([code])
    config = dataclasses.replace(SMALL, vocab_size=tokenizer.vocab_size)
    cases = {
        r"blocks\.1\.feed_forward\.expand": TextGenerator(hooked, LETTERS, [0]),
        "loop": TextGenerator(looped, LETTERS, [0]),
        "unigram": TextGenerator(random_model(config), tokenizer, [0]),
    }
    for words, generator in cases.items():
        with pytest.raises(UserError, match=words):
            save_page(ModelInspector(generator, {}), tmp_path / "model.html")
    with pytest.raises(UserError, match="pattern"):
        translate_regex(r"\d+|(?<=a)b")
    monkeypatch.setattr(saved_page, "MAX_PAGE_BYTES", 1000)
    with pytest.raises(UserError, match="MB"):
        save_page(inspect(random_model(SMALL)), tmp_path / "model.html")
    assert not any(tmp_path.iterdir())


def test_an_edited_forward_pass_is_noticed_by_the_page(page, tmp_path, monkeypatch):
    monkeypatch.setattr(FeedForward, "forward", lambda self, x: 2 * self.contract(self.expand(x)))
    save_page(inspect(random_model(SMALL)), tmp_path / "model.html")
    page.goto((tmp_path / "model.html").as_uri())
    expect(page.locator("#shape")).to_contain_text("model.py")


def test_the_file_opens_alone_and_asks_nobody(page, tmp_path, check_accessibility):
    inspector = inspect(random_model(SMALL))
    save_page(inspector, tmp_path / "model.html")
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.goto((tmp_path / "model.html").as_uri())
    expect(page.locator("#status")).to_contain_text("bits each on average")
    assert page.locator("#name").inner_text() == NAME and page.locator("b").count() == 0
    lines = [*inspector.write({"text": "&!", **SETTINGS})]
    tokens = page.locator("#tokens [role=option]:not(.next)")
    expect(tokens).to_have_count(22)
    assert tokens.all_inner_texts()[2:] == [line["token"]["text"] for line in lines[1:-1]]
    page.locator("#heads [role=gridcell]").nth(4).click()
    expect(page.locator("#looks")).to_contain_text("layer 2, head 2")
    page.locator("#heads [aria-selected=true]").press(" ")
    expect(page.locator("#status")).to_contain_text("with all heads")
    page.get_by_role("button", name="Measure all heads").click()
    expect(page.locator("#measure-status")).to_have_text("All 6 heads measured.")
    page.fill("#max_new_tokens", "4000")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#stop")).to_be_enabled()
    page.get_by_role("button", name="Stop", exact=True).click()
    expect(page.locator("#status")).to_have_text("Stopped.")
    check_accessibility()
    assert {url.split(":")[0] for url in urls} == {"file", "blob"}


def test_sample_saves_the_page_of_a_run(numbers, tmp_path, capsys):
    run = tmp_path / "run"
    train_tiny(numbers, run)
    path = tmp_path / "model.html"
    sample.main([str(run), "--save-page", str(path), "1 is"])
    assert capsys.readouterr().out.strip() == str(path)
    assert path.stat().st_size < 300_000
    for wrong in (["model.txt"], ["missing/model.html"], ["model.html", "--port", "80"]):
        with pytest.raises(SystemExit):
            sample.main([str(run), "--save-page", *wrong])
        assert re.search("--(save-page|port): ", capsys.readouterr().err)
