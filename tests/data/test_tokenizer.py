"""Text ↔ token ids."""

import base64
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import tokenizers
from tokenizers import Regex, models
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from engine.data.huggingface_tokenizer import from_huggingface, pre_tokenizer_name, to_huggingface
from engine.data.tokenizer import (
    END_OF_TEXT,
    END_OF_TURN,
    PATTERNS,
    RESERVED,
    ROLES,
    SMALLEST_BPE,
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    fitting_vocabulary,
    load_tokenizer,
    named_tokenizer,
    train_bpe,
    train_huggingface,
)


def gapped() -> BPETokenizer:
    """Built like p50k_base: the end of text stands amid the ranks, and one id stands for nothing."""
    ranks = {bytes((byte,)): byte for byte in range(256)} | {b"ab": 257, b"abab": 258, b" ab": 260}
    special = {END_OF_TEXT: 256}
    return BPETokenizer(
        tiktoken.Encoding("gapped", pat_str=r"\s?\w+|\W", mergeable_ranks=ranks, special_tokens=special)
    )


@pytest.fixture(scope="module", params=["char", "byte", "gapped", "bpe", "gpt2", "cl100k_base"])
def tokenizer(request: pytest.FixtureRequest, strings: list[str], code: str) -> Tokenizer:
    if request.param in ("gpt2", "cl100k_base"):
        request.getfixturevalue("tiktoken_cache")
        return named_tokenizer(request.param)
    make = {
        "char": lambda: CharTokenizer("".join(sorted({*"".join(strings)}))),
        "byte": ByteTokenizer,
        "gapped": gapped,
        "bpe": lambda: train_bpe([code], 1000),
    }
    return make[request.param]()


def test_ids_decode_to_the_text(tokenizer: Tokenizer, strings: list[str]):
    for text in strings:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint32 and (ids < tokenizer.vocab_size).all()
        assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
        assert b"".join(tokenizer.decode_bytes([i]) for i in ids) == text.encode()


def test_part_of_a_character_decodes_to_a_replacement():
    assert ByteTokenizer().decode("é".encode()[:1]) == "\ufffd"


def test_spelled_out_end_of_text_is_ordinary_text(tokenizer: Tokenizer):
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"


def test_end_of_text_decodes_to_its_name(tokenizer: Tokenizer):
    if tokenizer.kind == "char":
        assert tokenizer.end_of_text is None
    else:
        assert tokenizer.decode([tokenizer.end_of_text]) == END_OF_TEXT


def test_loaded_is_what_was_saved(tokenizer: Tokenizer, strings: list[str], tmp_path: Path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    monkeypatch.delattr(tiktoken, "get_encoding")  # the file must be enough
    loaded = load_tokenizer(path)
    for name in ("kind", "vocab_size", "end_of_text"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    unused = tokenizer.unused_ids()
    assert loaded.unused_ids() == unused
    for text in strings:
        np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))
    every_id = [i for i in range(tokenizer.vocab_size) if i not in unused]
    assert loaded.decode_bytes(every_id) == tokenizer.decode_bytes(every_id)


def test_unused_ids_are_all_ids_that_stand_for_nothing(tokenizer: Tokenizer):
    expected = {"cl100k_base": [100256, *range(100258, 100277)], "gapped": [259], "bpe": [996, 997, 998, 999]}
    assert tokenizer.unused_ids() == expected.get(tokenizer.kind, [])


def test_half_a_character_is_refused(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match=r"the text has '\\udc80', half of a character, at 2|not know .*\(U\+DC80\)"):
        tokenizer.encode("ab\udc80c")


@pytest.mark.parametrize("unknown", ["é", "\U0001f680", "\ud83d"])
def test_unknown_character_is_named(unknown: str):
    with pytest.raises(ValueError, match=re.escape(f"{unknown!r} (U+{ord(unknown):04X})")):
        CharTokenizer("abc").encode(f"ab{unknown}c?")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_trained_bpe_encodes_as_hugging_face_does(pattern: str, strings: list[str], code: str):
    # Two regex engines must cut text into the same words, whatever stands by a letter, a digit or a space.
    code_points = [i for i in (*range(0x1000), *range(0x1000, 0x110000, 100)) if not 0xD800 <= i < 0xE000]
    all_sorts = "".join(f"a{c} {c}1{c}{c}\n{c}" for c in map(chr, code_points))
    texts = [*strings, all_sorts, code]
    theirs, ours = train_huggingface(texts, 1000, pattern), train_bpe(texts, 1000 + len(RESERVED), pattern)
    assert ours.vocab_size == 1000 + len(RESERVED)
    for text in texts:
        assert ours.encode(text).tolist() == theirs.encode(text).ids


def test_unknown_name_is_told_the_known_ones():
    with pytest.raises(ValueError, match=r"^--tokenizer gpt5 is unknown; .* char, byte, bpe, .*gpt2.*path"):
        named_tokenizer("gpt5")


def test_path_names_a_tokenizer(tmp_path: Path, trained: Callable[..., Path]):
    run = trained("run", "--steps", 2, "--save-every", 1)
    newest = sorted((run / "checkpoints").iterdir())[-1]
    CharTokenizer("xyz").save(newest / "tokenizer.json")
    gapped().save(tmp_path / "tokenizer.json")
    for path, kind in ((run, "char"), (newest, "char"), (tmp_path, "gapped"), (tmp_path / "tokenizer.json", "gapped")):
        assert named_tokenizer(str(path)).kind == kind
    assert named_tokenizer(str(run)).vocab_size == 3
    with pytest.raises(ValueError, match=f"{re.escape(str(run / 'checkpoints'))} .*tokenizer.json, or a dataset's"):
        named_tokenizer(str(run / "checkpoints"))
    with pytest.raises(ValueError, match=f"^{re.escape(str(run / 'config.toml'))} is damaged"):
        named_tokenizer(str(run / "config.toml"))


def test_bpe_has_as_many_tokens_as_asked_or_as_the_text_has(code: str):
    assert train_bpe([code], 500).vocab_size == 500
    assert train_bpe(["aa"], 500).vocab_size == SMALLEST_BPE + 1
    assert train_bpe([], SMALLEST_BPE).vocab_size == SMALLEST_BPE


def test_the_text_decides_how_many_tokens_fit(code: str):
    assert [fitting_vocabulary(size) for size in (0, 10**6, 10**7, 2**26, 10**12)] == [1024, 1024, 2048, 8192, 8192]
    assert train_bpe([code, code], None).state() == train_bpe([code, code], 1024).state()


def test_bpe_takes_digits_in_pairs():
    assert len(train_bpe(["202420 " * 9], 500).encode("202420")) == 3


@pytest.mark.parametrize("run", [" " * 300_000, "a" * 300_000, "\n" * 300_000, "-" * 300_000, "7" * 300_000])
def test_no_word_of_a_trained_bpe_is_endless(run: str):
    trained = train_bpe([run], 300)
    assert all(len(token) <= 128 for token in trained.encoding._mergeable_ranks)
    for text in (run, f"x{run}x", f"{run}\n{run}"):
        assert trained.decode(trained.encode(text).tolist()) == text


def test_a_character_that_a_large_tokenizer_does_not_know_is_named_with_some_that_it_does():
    many = CharTokenizer("".join(map(chr, range(0x4E00, 0x9000))))
    with pytest.raises(ValueError, match=re.escape("'a' (U+0061); its 16,896 are '一丁丂")) as caught:
        many.encode("a")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"kind": "char"},
        {"kind": "char", "characters": ""},
        {"kind": "char", "characters": "\ud800"},
        {"tokens": None},
        {"tokens": "a"},
        {"tokens": "é"},
        {"pattern": "("},
        {"special_tokens": {}},
        {"special_tokens": {END_OF_TEXT: -1}},
        {"special_tokens": {END_OF_TEXT: 2**24}},
        {"tokens": " ".join(["", *(base64.b64encode(bytes((byte,))).decode() for byte in range(255))])},
    ],
)
def test_damaged_file_is_refused_by_name(changes: dict, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    gapped().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} (is damaged|has format 2).* again$"):
        load_tokenizer(path)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": 1', b"\xff"])
def test_what_is_no_tokenizer_is_refused_by_name(content: bytes, tmp_path: Path):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} is damaged"):
        load_tokenizer(path)


NAMES = [*RESERVED, "<|new|>"]


def test_special_tokens_come_last_and_no_text_becomes_one(tokenizer: Tokenizer, strings: list[str]):
    extended = tokenizer.with_special(NAMES)
    assert extended.with_special(NAMES[::-1]) is extended
    assert extended.extends(tokenizer) and extended.extends(extended) and not tokenizer.extends(extended)
    new = [name for name in NAMES if name not in tokenizer.special_tokens]
    assert [extended.special_tokens[name] for name in new] == [*range(tokenizer.vocab_size, extended.vocab_size)]
    assert extended.decode([extended.special_tokens[name] for name in NAMES]) == "".join(NAMES)
    for text in strings:
        np.testing.assert_array_equal(extended.encode(text), tokenizer.encode(text))
    spelled = "".join(NAMES)
    assert {*extended.special_tokens.values()}.isdisjoint(extended.encode(spelled).tolist())
    assert extended.decode(extended.encode(spelled)) == spelled
    assert {extended.special_tokens[name] for name in new} - {extended.end_of_text} <= {*extended.unused_ids()}
    assert extended.end_of_text not in extended.unused_ids()


def test_special_tokens_are_saved(tokenizer: Tokenizer, tmp_path: Path):
    extended = tokenizer.with_special(NAMES)
    extended.save(tmp_path / "tokenizer.json")
    assert load_tokenizer(tmp_path / "tokenizer.json").state() == extended.state()


def test_another_tokenizer_is_not_extended():
    assert not CharTokenizer("abd").with_special(NAMES).extends(CharTokenizer("abc"))
    assert not ByteTokenizer().with_special([END_OF_TURN]).extends(ByteTokenizer().with_special([*ROLES.values()]))


@pytest.fixture(scope="module")
def random_strings() -> list[str]:
    """A thousand, half of them of any characters, half of those that words are cut at; and runs and repetitions."""
    chance = random.Random(1)
    anything = [chr(code_point) for code_point in range(0x110000) if not 0xD800 <= code_point < 0xE000]
    seams = [
        "'s",
        "'LL",
        "'\u017f",
        " the",
        "The",
        "12345",
        "...",
        "\r\n",
        "\n",
        "  ",
        "\t",
        "\u3000",
        "/",
        "e\u0301",
        "ab",
        "ba",
    ]
    lengths = [chance.randint(1, 60) for _ in range(500)]
    found = ["".join(chance.choices(sort, k=length)) for length in lengths for sort in (anything, seams)]
    return [
        *found,
        *(unit * times for unit in ("a", " ", "ab", "aab", "=-", "0", "\n") for times in (2, 3, 7, 50, 333)),
    ]


@pytest.fixture(scope="module")
def exported(tokenizer: Tokenizer, random_strings: list[str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer with special tokens added, the same in transformers, and its tokenizer.json."""
    from transformers import AutoTokenizer

    if tokenizer.kind == "char":
        tokenizer = CharTokenizer("".join(sorted({*tokenizer.characters, *"".join(random_strings)})))
    tokenizer, folder = tokenizer.with_special(NAMES), tmp_path_factory.mktemp("exported")
    to_huggingface(tokenizer).save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
    config |= {"clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer, AutoTokenizer.from_pretrained(folder), json.loads((folder / "tokenizer.json").read_text())


def test_transformers_gives_the_same_ids(exported: Any, strings: list[str], random_strings: list[str]):
    ours, theirs, _ = exported
    texts = [*random_strings, *(text for text in strings if text and END_OF_TEXT not in text)]
    ids = [ours.encode(text).tolist() for text in texts]
    assert theirs(texts)["input_ids"] == theirs(texts, add_special_tokens=False)["input_ids"] == ids
    assert theirs.batch_decode(ids) == texts


def test_transformers_gives_shakespeare_the_same_ids(exported: Any, shakespeare: Path):
    ours, theirs, _ = exported
    text = shakespeare.read_text(encoding="utf-8")[:100_000]  # more takes transformers seconds
    ids = ours.encode(text).tolist()
    assert theirs(text)["input_ids"] == ids and theirs.decode(ids) == text


def test_transformers_reads_special_tokens_in_text_unless_it_is_told_not_to(exported: Any):
    ours, theirs, _ = exported
    named = [ours.special_tokens[name] for name in NAMES]
    assert theirs.eos_token_id == ours.end_of_text and theirs.convert_tokens_to_ids(NAMES) == named
    assert theirs.encode("".join(NAMES)) == named and theirs.decode(named) == "".join(NAMES)
    assert theirs.encode("".join(NAMES), split_special_tokens=True) == ours.encode("".join(NAMES)).tolist()


def test_what_was_exported_is_imported_unchanged(exported: Any):
    ours, _, tokenizer_json = exported
    again = from_huggingface(tokenizer_json)
    same_kind = ours.kind in ("char", "byte", "bpe")
    assert again.state() == (ours.state() if same_kind else ours.state() | {"kind": "bpe"})
    if ours.vocab_size < 10_000:  # the large ones take seconds
        assert json.loads(to_huggingface(again).to_str()) == tokenizer_json


def test_hugging_face_does_not_drop_a_character_that_it_does_not_know():
    with pytest.raises(Exception, match="Missing"):
        to_huggingface(CharTokenizer("abc")).encode("abxc")


def test_no_order_among_equal_merges_changes_ids():
    chance = random.Random(2)
    for _ in range(100):
        words = sorted(
            {"".join(chance.choices("ab", k=chance.randint(2, 6))) for _ in range(40)}, key=lambda w: len(w) // 3
        )
        ranks = {bytes((byte,)): byte for byte in range(256)} | {word.encode(): 256 + i for i, word in enumerate(words)}
        special = {END_OF_TEXT: len(ranks)}
        options = {"pat_str": r"[\s\S]+", "mergeable_ranks": ranks, "special_tokens": special}
        ours = BPETokenizer(tiktoken.Encoding("any", **options))
        theirs = to_huggingface(ours)
        for _ in range(20):
            text = "".join(chance.choices("ab", k=chance.choice((2, 3, 4, 5, 40))))
            assert theirs.encode(text).ids == ours.encode(text).tolist()


def words_of(pattern: str) -> Sequence:
    return Sequence([Split(Regex(PATTERNS[pattern]), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)])


FAMILIES = {  # how the tokenizers of well-known models cut text; all of them are byte-level BPEs
    "GPT-2": ByteLevel(add_prefix_space=False, use_regex=True),
    "Llama 3": words_of("llama3"),
    "Qwen 2": words_of("qwen2"),
    "SmolLM2": Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]),
}


def original(family: str, texts: list[str]) -> tokenizers.Tokenizer:
    """A tokenizer as a family of models has it, trained on texts."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = FAMILIES[family]
    first = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"] if family == "SmolLM2" else []
    options = {"initial_alphabet": ByteLevel.alphabet(), "special_tokens": first, "show_progress": False}
    made.train_from_iterator(texts, tokenizers.trainers.BpeTrainer(vocab_size=1500, **options))
    if family == "Qwen 2":
        made.normalizer = tokenizers.normalizers.NFC()
        made.add_tokens([tokenizers.AddedToken("<tool_call>", special=False)])
    made.add_special_tokens(["<|end_of_text|>"] if family == "Llama 3" else ["<|endoftext|>"])
    if family == "Llama 3":
        start = tokenizers.processors.TemplateProcessing("<|end_of_text|> $0", None, [("<|end_of_text|>", 1500)])
        made.post_processor = start
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_imported_gives_the_ids_of_the_original(family: str, strings: list[str], random_strings: list[str], code: str):
    theirs = original(family, [*strings, code])
    tokenizer_json = json.loads(theirs.to_str())
    if family == "GPT-2":  # as older files have it
        tokenizer_json["model"]["merges"] = [" ".join(merge) for merge in tokenizer_json["model"]["merges"]]
        del tokenizer_json["model"]["type"], tokenizer_json["pre_tokenizer"]["use_regex"]
    ours = from_huggingface(tokenizer_json, "<|end_of_text|>" if family == "Llama 3" else None, "{{ messages }}")
    assert ours.vocab_size == theirs.get_vocab_size() and ours.chat_template == "{{ messages }}"
    assert ours.special_tokens == {added.content: i for i, added in theirs.get_added_tokens_decoder().items()}
    assert ours.decode([ours.end_of_text]) == ("<|end_of_text|>" if family == "Llama 3" else "<|endoftext|>")
    normal = theirs.normalizer.normalize_str if theirs.normalizer else str
    for text in (*random_strings, *(text for text in strings if END_OF_TEXT not in text), code):
        ids = ours.encode(text).tolist()
        assert ids == theirs.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == normal(text)
    again = json.loads(to_huggingface(ours).to_str())
    assert from_huggingface(again, ours.end_name, ours.chat_template).state() == ours.state()


def trained_json() -> dict[str, Any]:
    return json.loads(original("Llama 3", ["hello low lower lowest " * 9]).to_str())


SENTENCEPIECE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
ADDED = {"id": 5000, "content": "    ", "special": False}


@pytest.mark.parametrize(
    "path, value, found",
    [
        (["model", "type"], "Unigram", "a Unigram model"),
        (["model", "type"], "WordPiece", "a WordPiece model"),
        (["model", "byte_fallback"], True, "byte_fallback"),
        (["model", "dropout"], 0.1, "dropout"),
        (["normalizer"], SENTENCEPIECE, "the normalizer .*Replace"),
        (["pre_tokenizer"], {"type": "Metaspace"}, "the pre-tokenizer .*Metaspace"),
        (["pre_tokenizer"], None, "the pre-tokenizer null"),
        (["pre_tokenizer", "pretokenizers", 1, "add_prefix_space"], True, "the pre-tokenizer .*add_prefix_space"),
        (["pre_tokenizer", "pretokenizers", 0, "invert"], True, "the pre-tokenizer .*invert"),
        (["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"], r"\s+|\S{1,3}+", "regex means something else"),
        (["pre_tokenizer", "pretokenizers", 0, "pattern", "Regex"], "(", "parenthesis"),
        (["added_tokens", 0], ADDED, "the added token .* which is ordinary text"),
        (["added_tokens", 0, "id"], 70, "two tokens have one id"),
        (["added_tokens", 0, "id"], 2**24, "is not of 0 to"),
        (["model", "vocab", "a"], -1, "is not of 0 to"),
        (["model", "merges"], [["l", "o"], ["lo", "x"]], "KeyError"),
        (["model", "merges", 1], 7, "TypeError"),
        (["model"], {}, "KeyError"),
    ],
)
def test_what_gives_other_ids_here_is_refused_by_name(path: list, value: Any, found: str):
    tokenizer_json = trained_json()
    inner = tokenizer_json
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ValueError, match=f"^the model's tokenizer .*{found}.* --tokenizer NAME.*$"):
        from_huggingface(tokenizer_json, "<|end_of_text|>")


def test_a_token_that_no_merge_makes_is_imported_as_unused():
    tokenizer_json = trained_json()
    tokenizer_json["model"]["vocab"] |= {"zq": 4000}
    ours = from_huggingface(tokenizer_json, "<|end_of_text|>")
    assert ours.encode("zq").tolist() == tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json)).encode("zq").ids[1:]
    assert ours.vocab_size == max(ours.special_tokens.values()) + 1 and 4000 not in ours.encode(" zq zq").tolist()


def test_ids_in_another_order_than_the_merges_are_refused():
    tokenizer_json = trained_json()
    vocab = tokenizer_json["model"]["vocab"]
    first, second = ("".join(merge) for merge in tokenizer_json["model"]["merges"][:2])
    vocab[first], vocab[second] = vocab[second], vocab[first]
    with pytest.raises(ValueError, match="not in the order of its merges"):
        from_huggingface(tokenizer_json, "<|end_of_text|>")


def test_merges_that_do_not_make_a_token_are_refused():
    tokenizer_json = trained_json()
    vocab, merges = tokenizer_json["model"]["vocab"], [["h", "e"], ["e", "l"], ["el", "l"], ["h", "ell"]]
    kept = {name: number for name, number in vocab.items() if len(name) == 1}
    kept |= {name: 300 + index for index, name in enumerate(("he", "el", "ell", "hell"))}
    tokenizer_json["model"] |= {"vocab": kept, "merges": merges}
    with pytest.raises(ValueError, match="do not make its token 'hell'"):
        from_huggingface(tokenizer_json, "<|end_of_text|>")


@pytest.mark.parametrize("end_of_text", [None, "<|eot|>"])
def test_end_of_text_must_be_one_of_the_added_tokens(end_of_text: str | None):
    with pytest.raises(ValueError, match=r"is no special token; name the one .* of <\|end_of_text\|>$"):
        from_huggingface(trained_json(), end_of_text)


def test_llama_cpp_has_names_for_the_cuts_that_it_knows(tiktoken_cache):
    known = {"pairs": None, "gpt2": "gpt-2", "llama3": "llama-bpe", "qwen2": "qwen2", "smollm": "smollm"}
    assert {name: pre_tokenizer_name(train_bpe(["ab ab"], 300, name)) for name in PATTERNS} == known
    assert pre_tokenizer_name(named_tokenizer("gpt2")) == "gpt-2"
    assert pre_tokenizer_name(named_tokenizer("cl100k_base")) == "llama-bpe"
    assert pre_tokenizer_name(gapped()) is pre_tokenizer_name(ByteTokenizer()) is None


@pytest.mark.parametrize("name, pattern", [("gpt2", "gpt2"), ("cl100k_base", "llama3")])
def test_patterns_of_llama_cpp_give_the_ids_of_tiktoken(name, pattern, strings, random_strings, tiktoken_cache):
    ours = named_tokenizer(name)
    options = {"mergeable_ranks": ours.encoding._mergeable_ranks, "special_tokens": {}}
    other = tiktoken.Encoding(pattern, pat_str=PATTERNS[pattern], **options)
    for text in (*strings, *random_strings, "ab \n  ", "\n \n \t", " \r\n "):
        assert other.encode_ordinary(text) == ours.encode(text).tolist()
