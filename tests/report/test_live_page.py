"""The page of a model in a browser: its figures are the library's, and nothing is lost."""

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
from helpers import SMALL, random_model
from page_reference import Reference

import prepare
from engine.data.dataset import open_dataset
from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.data.tokenizer_json import SPECIAL_TOKENS
from engine.generation.text_generator import TextGenerator
from engine.report.model_page import make_page, save_page
from model import ModelConfig

pytestmark = pytest.mark.browser
LETTERS = CharTokenizer("".join(map(chr, range(ord("!"), ord("!") + SMALL.vocab_size))))
NAME = "<b>small</b>"
PROMPT = "<B>&1'*2+,$-"
FILTERS = {"temperature": 0.8, "top_k": None, "top_p": 0.95}
SETTINGS = {**FILTERS, "seed": 1, "max_new_tokens": 20}
SMALL_MODEL = TextGenerator(random_model(SMALL), LETTERS, [0])


def chat_model() -> TextGenerator:
    tokenizer = ByteTokenizer().with_special(SPECIAL_TOKENS)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_length=64, d_model=16)
    return TextGenerator(random_model(config), tokenizer, [0], is_chat_model=True)


def expect(locator: Any) -> Any:
    return pytest.importorskip("playwright.sync_api").expect(locator)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(SMALL_MODEL)


@pytest.fixture
def open_page(page, tmp_path) -> Callable[..., Any]:
    """Open the page of a model."""

    def open_page(generator: TextGenerator, *prompts: str) -> Any:
        text = make_page(generator, {**SETTINGS, "name": NAME, "text": ""}, prompts)
        save_page(text, tmp_path / "model.html")
        page.goto((tmp_path / "model.html").as_uri())
        return page

    return open_page


@pytest.fixture
def live(open_page) -> Any:
    """The page, which has opened with a text."""
    page = open_page(SMALL_MODEL, PROMPT)
    wait(page)
    return page


def wait(page: Any) -> None:
    """Wait until the text is complete, with its tables and its attention."""
    expect(page.locator("#status")).to_contain_text("bits each on average")
    expect(page.locator("#tokens .next")).to_be_attached()
    expect(page.locator("#looks")).to_contain_text("looks at")


def read_tokens(page: Any) -> str:
    return "".join(page.locator("#tokens [role=option]:not(.next)").all_inner_texts())


def read_ids(page: Any) -> list[int]:
    return LETTERS.encode(read_tokens(page)).tolist()


def continue_text(reference: Reference, text: str) -> str:
    """Return a text and what the model writes after it."""
    ids = LETTERS.encode(text).tolist()
    options = {**FILTERS, "seed": SETTINGS["seed"]}
    return text + LETTERS.decode(reference.write(ids, SETTINGS["max_new_tokens"], **options))


def percent(value: float) -> str:
    if value == 0:
        return "–"
    return f"{100 * value:.2f}%" if value >= 0.0001 else "<0.01%"


def test_it_opens_with_a_text_the_cursor_in_it_and_a_surprising_token_selected(live, reference):
    assert read_tokens(live) == continue_text(reference, PROMPT)
    assert live.locator("#name").inner_text() == NAME and live.locator("b").count() == 0
    assert live.evaluate("document.activeElement.id") == "typed"
    tokens = reference.read(read_ids(live))["tokens"]
    bits = [token["bits"][1] for token in tokens[len(PROMPT) :]]
    index = len(PROMPT) + bits.index(max(bits))
    assert live.locator("#token-title").inner_text().startswith(f"Token {index + 1}:")
    assert f"({max(bits):.2f} bits)" in live.locator("#probability").inner_text()
    text = read_tokens(live) + "!!"
    live.fill("#typed", "!!")
    live.press("#typed", "Enter")
    expect(live.locator("#tokens [role=option]")).to_have_count(55)
    assert read_tokens(live) == continue_text(reference, text)
    live.locator("#tokens [role=option]").nth(9).click()
    live.locator("#temperature").fill("0.2")  # bars follow the sliders at once
    table = reference.read(read_ids(live)[:10], **FILTERS | {"temperature": 0.2})["tokens"][9]
    expected = [percent(row[-1]) for row in table["likely"]]
    last_cells = live.locator("#likely td:last-child")
    expect(last_cells.first).to_have_text(expected[0])
    assert last_cells.all_inner_texts() == expected


def test_an_alternative_begins_a_branch_and_each_branch_can_be_returned_to(live, reference):
    first = read_tokens(live)
    live.locator("#tokens [role=option]").nth(14).click()
    button = live.locator("#likely button").nth(3)
    label = button.inner_text()
    button.click()
    expect(live.locator("#branches button")).to_have_count(2)
    wait(live)
    assert read_tokens(live) == continue_text(reference, first[:14] + label)
    assert live.locator("#token-title").inner_text().startswith("Token 15:")
    live.locator("#branches button").first.click()
    expect(live.locator("#tokens [role=option]").nth(14)).to_have_text(first[14])
    assert read_tokens(live) == first


def test_attention_follows_the_selection_in_every_color(live):
    ids = read_ids(live)
    live.locator("#heads [role=gridcell]").nth(4).click()
    for color, index in itertools.product(("surprise", "attention", "change"), (20, 9)):
        live.check(f"input[value={color}]")
        live.locator("#tokens [role=option]").nth(index).click()
        text = f"“{chr(33 + ids[index])}”\u200e (token {index + 1}) looks at"
        expect(live.locator("#looks")).to_contain_text(text)
        expect(live.locator("#looks")).to_contain_text("layer 2, head 2")
    live.locator("#tokens [aria-selected=true]").press("ArrowRight")
    expect(live.locator("#looks")).to_contain_text("(token 11) looks")


def test_heads_are_switched_off_in_the_grid_and_the_table_shows_before_and_after(live, reference):
    ids = read_ids(live)
    live.locator("#tokens [role=option]").nth(9).click()
    live.locator("#heads [role=gridcell]").first.press("ArrowRight")
    live.locator("#heads [aria-selected=true]").press(" ")
    expect(live.locator("#status")).to_contain_text("with all heads")
    assert live.is_checked("input[value=change]")
    read = reference.read(ids, [[1, 2]], **FILTERS)
    expected = [[label, *map(percent, p)] for _, label, *p in read["tokens"][9]["likely"]]
    expect(live.locator("#likely tbody td").nth(0)).to_have_text(expected[0][1])
    rows = live.locator("#likely tbody tr").all()
    assert [row.locator("th, td").all_inner_texts() for row in rows] == expected
    assert "→" in live.locator("#probability").inner_text()
    live.get_by_role("button", name="Switch all on").click()
    expect(live.locator("#status")).not_to_contain_text("with all heads")
    assert live.is_checked("input[value=surprise]")


def test_all_heads_are_measured_and_texts_are_kept_over_a_reload(live, reference):
    _, *bits = reference.measure(read_ids(live))
    best = max(range(6), key=lambda head: bits[head])
    live.get_by_role("button", name="Measure all heads").click()
    text = f"All 6 heads measured. The text needs most: layer {best // 3 + 1}, head {best % 3 + 1}"
    expect(live.locator("#measure-status")).to_contain_text(text)
    live.locator("#tokens [role=option]").nth(14).click()
    live.locator("#likely button").nth(2).click()
    wait(live)
    assert not any(live.locator("#heads .bits").all_text_contents())
    live.locator("#branches button").first.click()
    expect(live.locator("#heads .bits:not(:empty)")).to_have_count(6)
    live.fill("#typed", "not sent")
    before = read_tokens(live)
    live.reload()
    wait(live)
    assert read_tokens(live) == before and live.input_value("#typed") == "not sent"
    assert live.locator("#branches button").count() == 2


def test_work_is_stopped(live):
    live.fill("#max_new_tokens", "4000")
    live.get_by_role("button", name="Generate").click()
    expect(live.locator("#stop")).to_be_enabled()
    live.get_by_role("button", name="Stop", exact=True).click()
    expect(live.locator("#status")).to_have_text("Stopped.")
    live.click("#measure")
    live.get_by_role("button", name="Stop measuring").click()
    expect(live.locator("#measure-status")).to_have_text("Stopped.")
    assert live.locator("#measure").inner_text() == "Measure all heads"


def test_scripts_keep_their_direction_and_characters_of_several_tokens_are_one(open_page):
    config = ModelConfig(vocab_size=257, context_length=64, num_layers=1, d_model=16)
    page = open_page(TextGenerator(random_model(config), ByteTokenizer(), [0]), "abc\nسلام\né")
    wait(page)
    assert page.locator("#tokens .shared b").all_inner_texts()[:5] == [*"سلام", "é"]
    page.locator("#tokens [role=option]").nth(4).click()
    page.locator("#tokens [aria-selected=true]").press("ArrowLeft")  # on in this line
    assert "Token 6:" in page.locator("#token-title").inner_text()


def send(page: Any, text: str) -> None:
    page.fill("#draft", text)
    page.press("#draft", "Enter")


def test_a_chat_is_retried_corrected_saved_to_train_on_and_looked_into(open_page, tmp_path):
    generator = chat_model()
    reference = Reference(generator)
    page = open_page(generator)

    def chat(turns: list[str], seed: int = 1) -> str:
        return reference.chat(turns, **SETTINGS | {"seed": seed})["text"]

    send(page, "Hello?")
    assert not page.locator("#inside").is_visible()
    text = chat(["Hello?"])
    expect(page.locator("#turns p")).to_have_text(["Hello?", text])
    send(page, "<b>two</b>")
    turns = ["Hello?", text, "<b>two</b>"]
    expect(page.locator("#turns p")).to_have_text([*turns, chat(turns)])
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("#turns p")).to_have_text([*turns, chat(turns, seed=2)])
    page.locator("#turns p").nth(3).fill("Better.\nMuch.")
    with page.expect_download() as download:
        page.click("#save-chat")
    path = tmp_path / "chats.jsonl"
    line = download.value.path().read_text()
    messages = json.loads(line)["messages"]
    assert [message["content"] for message in messages] == [*turns, "Better.\nMuch."]
    path.write_text("".join(line.replace("Hello", f"Hello {n}") for n in range(20)))
    prepare.main([str(path), "--chat", "--tokenizer", "byte", "--out", str(tmp_path / "data")])
    assert open_dataset(tmp_path / "data").manifest["statistics"]["documents"] == 20
    page.get_by_role("button", name="Look inside").click()  # an edited answer has none
    wait(page)
    page.reload()
    wait(page)
    page.get_by_role("button", name="Chat", exact=True).click()
    expect(page.locator("#turns p")).to_have_text([*turns, "Better.\nMuch."])
    assert page.locator("#turns b").count() == 0
    send(page, "x" * 64)
    expect(page.locator("#talk-status")).to_contain_text("longer than the context")
    assert page.input_value("#draft") == "x" * 64 and page.locator("#turns p").count() == 4


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_page_is_accessible_and_fits_a_phone(open_page, is_chat, check_accessibility):
    page = open_page(chat_model() if is_chat else SMALL_MODEL, PROMPT)
    if is_chat:
        send(page, "Hello?")
        expect(page.locator("#talk-status")).to_contain_text("Done")
    else:
        wait(page)
        page.locator("#heads input").first.uncheck()
        expect(page.locator("#status")).to_contain_text("with all heads")
        page.click("#measure")
        expect(page.locator("#measure-status")).to_contain_text("measured")
    check_accessibility()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    if not is_chat:  # the token's table comes right after the text
        tops = [page.locator(f"#{name}").bounding_box()["y"] for name in ("typed", "likely", "map")]
        assert tops == sorted(tops)


def test_a_text_of_ones_own_is_read_or_continued(live, reference):
    before = read_tokens(live)
    live.click("#edit")
    assert live.input_value("#typed") == before and read_tokens(live) == ""
    live.fill("#typed", "(&1'*2")
    live.click("#read")
    wait(live)
    mean, *_ = reference.measure(LETTERS.encode("(&1'*2").tolist())
    assert read_tokens(live) == "(&1'*2"
    assert f"{mean:.2f} bits each" in live.locator("#status").inner_text()
    live.click("#edit")
    live.fill("#typed", PROMPT[:5])
    live.press("#typed", "Enter")
    expect(live.locator("#tokens [role=option]")).to_have_count(5 + SETTINGS["max_new_tokens"] + 1)
    wait(live)
    assert read_tokens(live) == continue_text(reference, PROMPT[:5])
    live.locator("#branches button").first.click()
    expect(live.locator("#tokens [role=option]").first).to_have_text(before[0])
