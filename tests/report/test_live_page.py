"""The live page in a browser: its figures are the library's, and nothing that is done is lost."""

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import SMALL, random_model, serve_page

from engine.data.tokenizer import ByteTokenizer, CharTokenizer
from engine.data.tokenizer_json import SPECIAL_TOKENS
from engine.generation.text_generator import TextGenerator
from engine.report.inspector import ModelInspector
from model import ModelConfig

pytestmark = pytest.mark.browser
LETTERS = CharTokenizer("".join(map(chr, range(ord("!"), ord("!") + SMALL.vocab_size))))
NAME = "<b>small</b>"
PROMPT = "<B>&1'*2+,$-"
SETTINGS = {"temperature": 0.8, "top_k": None, "top_p": 0.95, "seed": 1, "max_new_tokens": 20}


def expect(locator: Any) -> Any:
    return pytest.importorskip("playwright.sync_api").expect(locator)


def make_inspector(config: ModelConfig, tokenizer: Any, prompts: Any, **options: Any) -> Any:
    generator = TextGenerator(random_model(config), tokenizer, [0], **options)
    return ModelInspector(generator, {**SETTINGS, "name": NAME, "text": ""}, prompts)


@pytest.fixture(scope="module")
def inspector() -> ModelInspector:
    return make_inspector(SMALL, LETTERS, [PROMPT])


@pytest.fixture(scope="module")
def server(inspector) -> Iterator[Any]:
    with serve_page(inspector.answers) as server:
        yield server


@pytest.fixture
def live(page, server) -> Any:
    """The page, which has opened with a text."""
    page.goto(server.address)
    wait(page)
    return page


def wait(page: Any) -> None:
    """Wait until the text is complete, with its tables and its attention."""
    expect(page.locator("#status")).to_contain_text("bits each on average")
    expect(page.locator("#tokens .next")).to_be_attached()
    expect(page.locator("#looks")).to_contain_text("looks at")


def read_tokens(page: Any) -> str:
    return "".join(page.locator("#tokens [role=option]:not(.next)").all_inner_texts())


def written_text(lines: Any) -> str:
    first, *rest, _ = lines
    return "".join(token["text"] for token in (*first["tokens"], *(line["token"] for line in rest)))


def percent(value: float) -> str:
    if value == 0:
        return "–"
    return f"{100 * value:.2f}%" if value >= 0.0001 else "<0.01%"


def test_it_opens_with_a_text_the_cursor_in_it_and_a_surprising_token_selected(live, inspector):
    lines = [*inspector.write({"text": PROMPT, **SETTINGS})]
    assert read_tokens(live) == written_text(lines)
    assert live.locator("#name").inner_text() == NAME and live.locator("b").count() == 0
    assert live.evaluate("document.activeElement.id") == "typed"
    bits = [line["token"]["bits"][1] for line in lines[1:-1]]
    index = len(PROMPT) + bits.index(max(bits))
    assert live.locator("#token-title").inner_text().startswith(f"Token {index + 1}:")
    assert f"({max(bits):.2f} bits)" in live.locator("#probability").inner_text()
    live.fill("#typed", "!!")
    live.press("#typed", "Enter")
    ids = [*LETTERS.encode(read_tokens(live)[:32]).tolist(), 0, 0]
    expect(live.locator("#tokens [role=option]")).to_have_count(55)
    assert read_tokens(live) == written_text(inspector.write({"ids": ids, **SETTINGS}))


def test_an_alternative_begins_a_branch_and_each_branch_can_be_returned_to(live, inspector):
    first = read_tokens(live)
    live.locator("#tokens [role=option]").nth(14).click()
    button = live.locator("#likely button").nth(3)
    label = button.inner_text()
    button.click()
    expect(live.locator("#branches button")).to_have_count(2)
    wait(live)
    ids = LETTERS.encode(first[:14] + label).tolist()
    assert read_tokens(live) == written_text(inspector.write({"ids": ids, **SETTINGS}))
    assert live.locator("#token-title").inner_text().startswith("Token 15:")
    live.locator("#branches button").first.click()
    expect(live.locator("#tokens [role=option]").nth(14)).to_have_text(first[14])
    assert read_tokens(live) == first


def test_attention_follows_the_selection_in_every_color(live):
    ids = LETTERS.encode(read_tokens(live)).tolist()
    live.locator("#heads [role=gridcell]").nth(4).click()
    for color, index in itertools.product(("surprise", "attention", "change"), (20, 9)):
        live.check(f"input[value={color}]")
        live.locator("#tokens [role=option]").nth(index).click()
        text = f"layer 2, head 2. “{chr(33 + ids[index])}”\u200e (token {index + 1}) looks at"
        expect(live.locator("#looks")).to_contain_text(text)
    live.locator("#tokens [aria-selected=true]").press("ArrowRight")
    expect(live.locator("#looks")).to_contain_text("(token 11) looks")
    live.check("#with-arcs")
    assert live.locator("#arcs").is_visible()


def test_heads_are_switched_off_in_the_grid_and_the_table_shows_before_and_after(live, inspector):
    ids = LETTERS.encode(read_tokens(live)).tolist()
    live.locator("#tokens [role=option]").nth(9).click()
    live.locator("#heads [role=gridcell]").first.press("ArrowRight")
    live.locator("#heads [aria-selected=true]").press(" ")
    expect(live.locator("#status")).to_contain_text("with all heads")
    assert live.is_checked("input[value=change]")
    (read,) = inspector.read({"ids": ids, "off": [[1, 2]], **SETTINGS, "max_new_tokens": 1})
    expected = [[label, *map(percent, p)] for _, label, *p in read["tokens"][9]["likely"]]
    expect(live.locator("#likely tbody td").nth(0)).to_have_text(expected[0][1])
    rows = live.locator("#likely tbody tr").all()
    assert [row.locator("th, td").all_inner_texts() for row in rows] == expected
    assert "→" in live.locator("#probability").inner_text()
    live.get_by_role("button", name="Switch all on").click()
    expect(live.locator("#status")).not_to_contain_text("with all heads")
    assert live.is_checked("input[value=surprise]")


def test_all_heads_are_measured_ranked_and_kept_over_a_reload(live, inspector):
    ids = LETTERS.encode(read_tokens(live)).tolist()
    live.get_by_role("button", name="Measure all heads").click()
    expect(live.locator("#measure-status")).to_have_text("All 6 heads measured.")
    _, *heads = inspector.measure({"ids": ids})
    ranked = sorted(heads, key=lambda head: -head["bits"])
    names = [f"{i}. layer {h['layer']}, head {h['head']}" for i, h in enumerate(ranked, 1)]
    assert live.locator("#ranks tbody th").all_inner_texts() == names
    live.locator("#tokens [role=option]").nth(14).click()
    live.locator("#likely button").nth(2).click()
    wait(live)
    assert "Another text" in live.locator("#ranks").inner_text()
    assert not any(live.locator("#heads .bits").all_text_contents())
    live.locator("#heads input").nth(5).uncheck()
    expect(live.locator("#status")).to_contain_text("with all heads")
    live.fill("#typed", "not sent")
    before = [read_tokens(live), live.locator("#token-title").inner_text()]
    live.reload()
    expect(live.locator("#status")).to_contain_text("with all heads")
    expect(live.locator("#token-title")).to_have_text(before[1])
    assert read_tokens(live) == before[0] and live.input_value("#typed") == "not sent"
    assert live.locator("#branches button").count() == 2
    assert not live.locator("#heads input").nth(5).is_checked()
    assert live.locator("#ranks tbody th").all_inner_texts() == names
    live.locator("#branches button").first.click()
    expect(live.locator("#heads .bits:not(:empty)")).to_have_count(6)
    assert "Another text" not in live.locator("#ranks").inner_text()


def test_scripts_keep_their_direction_and_characters_of_several_tokens_are_one(page):
    config = ModelConfig(vocab_size=257, context_length=64, num_layers=1, d_model=16)
    inspector = make_inspector(config, ByteTokenizer(), ["abc\nسلام\né"])
    with serve_page(inspector.answers) as server:
        page.goto(server.address)
        wait(page)
        assert page.locator("#tokens .shared b").all_inner_texts()[:5] == [*"سلام", "é"]
        assert "Arabic: 2.0 tokens a letter." in page.locator("#status").inner_text()
        page.locator("#tokens [role=option]").nth(4).click()
        page.locator("#tokens [aria-selected=true]").press("ArrowLeft")  # on in this line
        assert "Token 6:" in page.locator("#token-title").inner_text()


def chat_inspector() -> ModelInspector:
    tokenizer = ByteTokenizer().with_special(SPECIAL_TOKENS)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, context_length=64, d_model=16)
    return make_inspector(config, tokenizer, [], is_chat_model=True)


def send(page: Any, text: str) -> None:
    page.fill("#draft", text)
    page.press("#draft", "Enter")


def test_a_chat_fills_the_page_and_its_answers_open_in_the_inspector(page):
    inspector = chat_inspector()

    def chat(turns: list[str], **options: Any) -> Any:
        *pieces, last = inspector.chat({**SETTINGS, "turns": turns, **options})
        return "".join(piece["text"] for piece in pieces), last["ids"]

    with serve_page(inspector.answers) as server:
        page.goto(server.address)
        send(page, "Hello?")
        assert not page.locator("#inside").is_visible()
        text, ids = chat(["Hello?"])
        expect(page.locator("#turns p")).to_have_text(["Hello?", text])
        send(page, "<b>two</b>")
        turns = ["Hello?", text, "<b>two</b>"]
        expect(page.locator("#turns p")).to_have_text([*turns, chat(turns)[0]])
        page.get_by_role("button", name="Retry").click()
        expect(page.locator("#turns p")).to_have_text([*turns, chat(turns, seed=2)[0]])
        page.get_by_role("button", name="Look inside").first.click()
        wait(page)
        assert page.locator("#tokens [role=option]").count() == len(ids) + 1
        page.reload()
        wait(page)
        page.get_by_role("button", name="Chat", exact=True).click()
        expect(page.locator("#turns p")).to_have_text([*turns, chat(turns, seed=2)[0]])
        assert page.locator("#turns b").count() == 0


def test_an_error_in_a_chat_loses_no_text(browser):
    page = browser.new_context().new_page()  # whose console reports the error of the server
    with serve_page(chat_inspector().answers) as server:
        page.goto(server.address)
        expect(page.locator("#draft")).to_be_visible()
    send(page, "three")
    expect(page.locator("#talk-status")).to_contain_text("does not answer")
    assert page.input_value("#draft") == "three" and page.locator("#turns p").count() == 0
    page.context.close()


@pytest.mark.parametrize("token", ["", "?token=%ff"])
def test_without_its_token_the_page_says_what_to_open(browser, server, token):
    page = browser.new_context().new_page()  # whose console reports the refusal
    response = page.goto(server.address.partition("?")[0] + token)
    assert response.status == 403
    expect(page.locator("#shape")).to_contain_text("token")
    assert not page.locator("#main").is_visible()
    page.context.close()


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_live_page_is_accessible_and_fits_a_phone(page, server, is_chat, check_accessibility):
    with (
        serve_page(chat_inspector().answers) if is_chat else contextlib.nullcontext(server) as used
    ):
        page.goto(used.address)
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
            tops = [page.locator(f"#{name}").bounding_box()["y"] for name in ("typed", "likely")]
            maps = page.locator("#map").bounding_box()["y"]
            assert tops[0] < tops[1] < maps


def test_bars_follow_the_sliders_at_once(live, inspector):
    ids = LETTERS.encode(read_tokens(live)).tolist()
    live.locator("#tokens [role=option]").nth(9).click()
    live.locator("#temperature").fill("0.2")
    settings = {"temperature": 0.2, "top_p": SETTINGS["top_p"]}
    (table,) = inspector.predict({"ids": ids, "at": 9, **settings})
    expected = [percent(row[-1]) for row in table["likely"]]
    last_cells = live.locator("#likely td:last-child")
    expect(last_cells.first).to_have_text(expected[0])
    assert last_cells.all_inner_texts() == expected


def test_measuring_shows_its_progress_and_can_be_stopped(page, inspector):
    release = threading.Event()

    def measure(question: Any) -> Iterator[dict]:
        yield {"bits": 3.0}
        yield {"layer": 1, "head": 1, "bits": 0.5}
        release.wait(60)
        yield {"layer": 1, "head": 2, "bits": 0.5}

    with serve_page(inspector.answers | {"measure": measure}) as server:
        page.goto(server.address)
        wait(page)
        page.click("#measure")
        expect(page.locator("#measure-status")).to_have_text("Head 1 of 6…")
        page.get_by_role("button", name="Stop measuring").click()
        release.set()
        expect(page.locator("#measure-status")).to_have_text("Stopped.")
        assert page.locator("#measure").inner_text() == "Measure all heads"


def test_a_text_of_ones_own_is_measured_or_continued_and_what_is_of_another_waits(live, inspector):
    live.click("#edit")
    assert live.input_value("#whole") == read_tokens(live)
    assert live.locator("#measure").evaluate("element => element.closest('[inert]') !== null")
    live.fill("#whole", "(&1'*2")
    live.click("#read")
    wait(live)
    (read,) = inspector.read({"text": "(&1'*2"})
    bits = [token["bits"][0] for token in read["tokens"][1:]]
    mean = f"{torch.tensor(bits).mean():.2f} bits each"
    assert read_tokens(live) == "(&1'*2" and mean in live.locator("#status").inner_text()
    live.click("#edit")
    live.fill("#whole", PROMPT[:5])
    live.press("#whole", "Enter")
    expect(live.locator("#tokens [role=option]")).to_have_count(5 + SETTINGS["max_new_tokens"] + 1)
    wait(live)
    assert read_tokens(live) == written_text(inspector.write({"text": PROMPT[:5], **SETTINGS}))
    assert live.evaluate("document.activeElement.id") == "typed"
    assert live.locator("[inert]").count() == 0
