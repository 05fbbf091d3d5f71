"""Decoding: the cache, the window, choosing, streaming."""

import dataclasses
import io

import pytest
import torch
from test_model import SMALL, VARIANTS, randomised

from engine.generate import TextStream, choose, generate, opening, stream, window_start
from engine.tokenizer import ByteTokenizer, CharTokenizer


def decoded(model, prompt, **options) -> list[list[int]]:
    return torch.stack(list(generate(model, prompt, **options)), dim=1).tolist()


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("prompt_length", [1, 5, 16, 40])
def test_decoding_with_a_cache_gives_the_tokens_without_one_past_the_context_too(name, prompt_length):
    model = randomised(VARIANTS[name])
    torch.manual_seed(1)
    prompt = torch.randint(37, (2, prompt_length))
    for temperature in (0.0, 1.0):
        options = {"max_new_tokens": 40, "temperature": temperature, "seed": 3}
        assert decoded(model, prompt, **options) == decoded(model, prompt, use_cache=False, **options)


def test_greedy_decoding_takes_the_likeliest_token_each_time():
    model = randomised(SMALL)
    tokens = [1, 2, 3]
    for token in decoded(model, torch.tensor([tokens]), max_new_tokens=10, temperature=0)[0]:
        assert token == model(torch.tensor([tokens]))[0, -1].argmax()
        tokens.append(token)


def test_the_window_grows_then_slides_by_half():
    starts = [window_start(length, 8) for length in range(1, 22)]
    assert starts == [0] * 8 + [4] * 4 + [8] * 4 + [12] * 4 + [16]
    assert [window_start(length, 1) for length in (1, 2, 3)] == [0, 1, 2]
    for context in range(1, 20):
        for length in range(1, 80):
            assert (context + 1) // 2 - 1 <= length - window_start(length, context) - 1 < context or length <= context


def test_the_same_seed_gives_the_same_text_and_another_another():
    model = randomised(SMALL)
    prompt = torch.tensor([[1]])
    texts = [decoded(model, prompt, max_new_tokens=30, seed=seed) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_choosing():
    generator = torch.Generator().manual_seed(0)
    logits = torch.tensor([[0.1, 0.5, 0.2, 0.2]]).log().expand(4000, 4)

    def shares(**options) -> list[float]:
        options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | options
        return (choose(logits, **options, generator=generator).bincount(minlength=4) / 4000).tolist()

    assert shares() == pytest.approx([0.1, 0.5, 0.2, 0.2], abs=0.04)
    assert shares(temperature=0.5) == pytest.approx([0.01 / 0.34, 0.25 / 0.34, 0.04 / 0.34, 0.04 / 0.34], abs=0.04)
    assert shares(top_k=1) == [0, 1, 0, 0]
    assert shares(top_p=0.4) == [0, 1, 0, 0]
    assert shares(top_p=0.85) == pytest.approx([0, 5 / 9, 2 / 9, 2 / 9], abs=0.04)
    assert shares(temperature=0) == [0, 1, 0, 0]


def test_what_must_never_come_does_not():
    model = randomised(SMALL)
    never = list(range(5, 37))
    tokens = decoded(model, torch.tensor([[1]] * 8), max_new_tokens=20, never=never)
    assert {token for row in tokens for token in row} <= set(range(5))


def test_a_stream_never_cuts_a_character():
    text = TextStream(ByteTokenizer())
    parts = [text.push(byte) for byte in "aé€😀".encode()]
    assert parts == ["a", "", "é", "", "", "€", "", "", "", "😀"]
    text.push(0xE2)
    assert text.end() == "�" and text.end() == ""


def test_a_stop_text_ends_the_stream_even_across_tokens_and_is_not_written():
    tokenizer = ByteTokenizer()
    text = TextStream(tokenizer, ["END", "\n\n"])
    parts = [text.push(byte) for byte in b"an EN ENDof"]
    assert "".join(parts) == "an EN " and text.ended
    assert parts[3] == parts[4] == ""  # EN might have been it


def test_the_end_of_text_ends_the_stream():
    text = TextStream(ByteTokenizer())
    assert [text.push(token) for token in (97, 256, 98)] == ["a", "", ""]
    assert text.ended


def test_stream_writes_until_the_end_and_asks_for_no_more():
    tokens = iter([torch.tensor([97]), torch.tensor([256]), torch.tensor([98])])
    file = io.StringIO()
    stream(tokens, ByteTokenizer(), file)
    assert file.getvalue() == "a" and next(tokens) == 98


def test_opening():
    assert opening(ByteTokenizer(), documents=2) == [256]
    assert opening(ByteTokenizer(), documents=1) == [10]
    assert opening(CharTokenizer("\nab"), documents=5) == [0]
    assert opening(CharTokenizer("ab"), documents=5) == [0]


def test_decoding_compiles_into_one_graph_whatever_the_length():
    model = randomised(dataclasses.replace(SMALL, num_layers=1)).eval()
    prompt = torch.randint(SMALL.vocab_size, (2, 3))
    plain = decoded(model, prompt, max_new_tokens=30, temperature=0)
    model.compile(dynamic=True, fullgraph=True, backend="eager")
    assert decoded(model, prompt, max_new_tokens=30, temperature=0) == plain
