"""Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest.

python prepare.py INPUT… [--tokenizer NAME] [--vocab-size N] [--out data/NAME] [--val FILE]
python prepare.py PAIRS.jsonl --prompt-field A --completion-field B   or   CHATS.jsonl --chat
python prepare.py --show data/NAME                                    describe a dataset

To resume an interrupted run, run the same command again.
"""

import codecs
import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Le, Lt

from engine.core.cli import run_command, say, shell_command
from engine.core.errors import UserError, wrap_library_errors
from engine.core.files import exclusive_lock
from engine.core.settings import check_flags, parse, unescape
from engine.core.values import check_ranges
from engine.data.chats import chat, examples
from engine.data.dataset import dataset_name, is_up_to_date
from engine.data.documents.corpus import Corpus
from engine.data.records.reader import choose_sources
from engine.data.records.text import DEFAULT_ENCODING, Reader
from engine.data.shards.dataset_summary import describe_dataset, describe_notes
from engine.data.shards.writer import work_folder, write_dataset
from engine.data.sources.finder import INPUT_ADVICE, STDIN_NAME, find_sources
from engine.data.sources.notes import Notes
from engine.data.sources.source import Source
from engine.data.tokenizer import Tokenizer, named_tokenizer
from engine.data.tokenizer_json import MAX_VOCAB_SIZE
from engine.data.tokenizer_training import (
    DEFAULT_PATTERN,
    MIN_BPE_VOCAB_SIZE,
    tokenizer_texts,
    train_bpe_tokenizer,
    train_char_tokenizer,
)

DEFAULT_VAL_FRACTION = 0.1
MAX_TOKENIZER_BYTES = 2**27  # to train a BPE on: of more text, the beginning of each unit
TRAINED_TOKENIZERS = ("char", "bpe")
# Settings of PrepareConfig that a dataset depends on, besides its tokenizer.
ORIGIN_SETTINGS = ["vocab_size", "deduplicate", "field", "completion_field"]
ORIGIN_SETTINGS += ["chat_field", "hf_config", "hf_split", "hf_val_split", "skip_bad_rows"]
ORIGIN_SETTINGS += ["parse_special", "prompt_suffix", "errors"]


@dataclass(frozen=True)
class PrepareConfig:
    """Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest."""

    # Text, .json, .jsonl, .csv, .tsv (also as .gz, .bz2, .xz, .zst) or .parquet files; folders;
    # addresses (https://, s3://, gs://, …); hf:NAME (a Hugging Face dataset on the hub or in a
    # folder); - (standard input); pydocs (the documentation in Python's standard library); stdlib
    # (its sources); shakespeare (tiny Shakespeare, downloaded once).
    inputs: tyro.conf.Positional[tuple[str, ...]]
    # char, byte, bpe (trained on this text), a tiktoken encoding (gpt2, cl100k_base, …), or the
    # path of a run, a dataset or a tokenizer.json.
    tokenizer: str = "bpe"
    # Words of a BPE trained on this text: as in one of these models. None: qwen2.
    pattern: Literal["gpt2", "llama3", "qwen2", "smollm"] | None = None
    vocab_size: Annotated[int | None, Ge(MIN_BPE_VOCAB_SIZE), Le(MAX_VOCAB_SIZE)] = None
    """Tokens of a BPE trained on this text. None: from 1,024 to 8,192, by the size of the text."""
    out: Path | None = None  # Folder of the dataset; None: data/ and the name of the first input.
    # Fraction of the documents for validation. Few or large documents are cut instead: their last
    # parts are for validation. None: 0.1, or 0 with --val.
    val_fraction: Annotated[float | None, Ge(0), Lt(1)] = None
    val: tuple[str, ...] = ()
    """Files, folders or addresses for validation; all other inputs are for training."""
    # Pattern of the files to take from folders, at any depth, or after a ! to leave out, as in
    # '!*.log'; the flag may be repeated. None: all files, or the larger of plain text and records.
    glob: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    # The field or column that holds the text; None: text. A dotted name reaches into objects.
    field: str | None = None
    prompt_field: tuple[str, ...] | str | None = None
    """The field with the prompt, or several: their nonempty values are joined by a blank line."""
    completion_field: str | None = None
    """The field with the completion. Only its tokens count for the loss."""
    prompt_suffix: str | None = None  # Text to end each prompt with, also in sample.py: \n, \t, ….
    # Each record is a chat, {"messages": [{"role": …, "content": …}, …]}. The messages of the
    # assistant are the targets.
    chat: bool = False
    # NAME=VALUE of the chat template, also of models trained on this; the flag may be repeated.
    template_variable: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    chat_field: str | None = None
    """The field with the messages. None: messages, conversations, or prompt and completion."""
    hf_config: str | None = None  # The configuration of a Hugging Face dataset that has several.
    hf_split: str | None = None  # The split of a Hugging Face dataset; None: train.
    hf_val_split: str | None = None
    """The split for validation of the Hugging Face dataset in --val, or else in the inputs."""
    deduplicate: bool = False  # Leave out documents that repeat an earlier one exactly.
    encoding: str = DEFAULT_ENCODING
    """The encoding of text, JSON and CSV, by its name in Python; auto: detected for each file."""
    errors: Literal["strict", "replace"] = "strict"
    """Refuse bytes that are not in the encoding (strict), or replace them by U+FFFD."""
    separator: str | None = None
    """Text between the documents of a plain text file. None: a file is one document."""
    # Read the names of special tokens in text and pairs as these tokens; by default they are text.
    parse_special: bool = False
    skip_bad_rows: bool = False
    """Leave out and count the records that cannot be used, instead of refusing the file."""
    force: bool = False  # Prepare again, and replace a dataset with other arguments or text.
    ray: str | None = None  # Encode on Ray: local, local:4 (workers), or the address of a cluster.
    show: Path | None = None  # Only print the summary of this dataset.


def main(arguments: list[str] | None = None) -> None:
    """Prepare or show a dataset, and print the next command."""
    config = parse(PrepareConfig, arguments)
    if config.show is not None:
        if config != PrepareConfig((), show=config.show):
            raise UserError("--show: excludes all other arguments. Leave them out.")
        print(describe_dataset(config.show))
        return
    out, is_new = prepare(config)
    print(describe_dataset(out) if is_new else f"{out} is up to date: nothing changed.")
    run = Path("out") / out.name
    base = Path(config.tokenizer.removesuffix("/tokenizer.json"))
    is_model = (base / "checkpoints").is_dir() or (base / "state.json").is_file()
    is_import = (base / "checkpoints" / "step-00000000").is_dir()
    path = "config/lora.toml" if is_import else "config/finetune.toml"
    preset = (path, "--init-from", base) if is_model else ()
    command = shell_command("python", "train.py", *preset, "--data", out, "--out", run)
    print(f"Train on it: {command}")


def prepare_to_train(arguments: list[str], training: str) -> None:
    """Prepare as by this command line, and print it and the notes; ``training`` comes next.

    Raises UserError, which names both commands if a flag can help.
    """
    command = shell_command("python", "prepare.py", *arguments)
    say(f"$ {command}")
    try:
        out, is_new = prepare(parse(PrepareConfig, arguments))
    except UserError as error:
        if "--" not in str(error):
            raise
        raise UserError(f"{error} Add flags to: {command}, then: {training}") from None
    for line in describe_notes(out) if is_new else ():
        say(line)


def prepare(config: PrepareConfig, threads: int | None = None) -> tuple[Path, bool]:
    """Make the dataset of a config. Returns its folder and whether it is new.

    ``threads`` encode; None: one for each core. Raises UserError for unusable arguments or text.
    """
    check_arguments(config)
    out = config.out or Path("data") / dataset_name(config.inputs[0])
    tokenizer = None  # one is trained on the text
    if config.tokenizer not in TRAINED_TOKENIZERS:
        named = named_tokenizer(config.tokenizer)
        tokenizer = chat.with_variables(named, config.template_variable)
    reader = make_reader(config, tokenizer)
    notes = Notes()
    with tempfile.TemporaryDirectory() as spool:
        sources, val_sources = list_sources(config, reader, Path(spool), notes)
        check_reader(config, reader, [*sources, *val_sources])
        val_fraction = 0.0 if val_sources else config.val_fraction or DEFAULT_VAL_FRACTION
        corpus = Corpus(sources, val_fraction, val_sources, reader, notes)
        origin = origin_of(corpus, config, tokenizer)
        if is_up_to_date(out, origin, config.force, corpus.version, corpus.hash_content):
            remove_work(out)
            return out, False
        with exclusive_lock(out):
            tokenizer = tokenizer or train_tokenizer(config, corpus, origin.get("separator", ""))
            if corpus.rule.has_examples:
                tokenizer = tokenizer.with_special(chat.special_token_names(tokenizer, config.chat))
            tokenizer = tokenizer.with_prompt_suffix(unescape(config.prompt_suffix))
            write_dataset(out, corpus, tokenizer, origin, threads, config.ray)
    return out, True


def train_tokenizer(config: PrepareConfig, corpus: Corpus, separator: str) -> Tokenizer:
    """Train a tokenizer on a corpus: its characters, or a BPE."""
    if config.tokenizer == "char":
        return train_char_tokenizer(tokenizer_texts(corpus), separator)
    texts = tokenizer_texts(corpus, MAX_TOKENIZER_BYTES)
    return train_bpe_tokenizer(texts, config.vocab_size, config.pattern or DEFAULT_PATTERN)


def remove_work(out: Path) -> None:
    """Remove what a killed run left beside a dataset, unless another run is at work."""
    if work_folder(out).exists():
        with contextlib.suppress(UserError), exclusive_lock(out):
            shutil.rmtree(work_folder(out))


def check_arguments(config: PrepareConfig) -> None:
    """Raise UserError for arguments that contradict each other."""
    inputs = (*config.inputs, *config.val)
    if not config.inputs or "" in inputs:
        raise UserError(f"INPUT: missing. {INPUT_ADVICE}")
    check_ranges(config)
    has_val = bool(config.val or config.hf_val_split)
    if config.val_fraction is not None and has_val == bool(config.val_fraction):
        problem = f"must be 0 with --val, and greater without it (got {config.val_fraction})"
        raise UserError(f"--val-fraction: {problem}. Leave it out.")
    if any(Path(glob).is_file() for glob in config.glob) and any(map(os.path.isfile, inputs)):
        raise UserError(f"--glob: must be a pattern (got {config.glob[0]}). Quote it: '*.txt'")
    is_trained = config.tokenizer in TRAINED_TOKENIZERS
    num_forms = sum(map(bool, (config.chat, config.prompt_field, config.field)))
    can_parse = not config.chat and config.tokenizer != "char"
    has_folder = any("://" in name or Path(name).is_dir() for name in inputs)
    has_hub = any(name.startswith("hf:") for name in inputs)
    has_val_hub = any(name.startswith("hf:") for name in config.val or config.inputs)
    needs = {
        "vocab_size pattern": (config.tokenizer == "bpe", "--tokenizer bpe"),
        "prompt_field": (config.completion_field, "--completion-field"),
        "completion_field prompt_suffix": (config.prompt_field, "--prompt-field"),
        "parse_special": (can_parse, "text or pairs, and a --tokenizer other than char"),
        "chat field": (num_forms < 2, "an input without --field and --prompt-field"),
        "chat_field": (config.chat, "--chat"),
        "template_variable": (config.chat and not is_trained, "--chat, --tokenizer"),
        "glob": (has_folder, "a folder as input"),
        "hf_config hf_split": (has_hub, "hf:NAME as input"),
        "hf_val_split": (has_val_hub, "hf:NAME as input"),
        "separator": (config.separator != "", "a text"),
        "ray": (STDIN_NAME not in inputs, "files instead of standard input"),
    }
    for names, (is_met, need) in needs.items():
        for name in names.split():
            is_set = getattr(config, name) not in (None, False, ())
            check_flags([(f"--{name.replace('_', '-')}", is_set, is_met, need)])


def make_reader(config: PrepareConfig, tokenizer: Tokenizer | None) -> Reader:
    """Return how the inputs are read. Chats use the tokenizer's chat template."""
    parser = None
    if config.chat:
        template = chat.own_template(tokenizer) if tokenizer else None
        parser = examples.chat_parser(config.chat_field, template)
    if config.completion_field:
        suffix = unescape(config.prompt_suffix)
        parser = examples.pair_parser(config.prompt_field or (), config.completion_field, suffix)
    field = config.field or "text"
    encoding = config.encoding.lower()
    if encoding != "auto":
        advice = ". Give auto, or a name that Python knows, such as utf-16 or cp1252."
        with wrap_library_errors("--encoding: unknown", LookupError, advice=advice):
            encoding = codecs.lookup(encoding).name
    options = (config.errors, unescape(config.separator), config.skip_bad_rows)
    return Reader(field, encoding, *options, parser)


def check_reader(config: PrepareConfig, reader: Reader, sources: list[Source]) -> None:
    """Raise UserError for flags that do not fit the files."""
    got = f"(got {sources[0].name})"
    text_files = [source.name for source in sources if source.kind == "text"]
    records = f"JSON lines, CSV, Parquet or hf:NAME as inputs (got {''.join(text_files[:1])})"
    kinds = {source.kind for source in sources}
    has_encoding = reader.encoding != DEFAULT_ENCODING
    rules = [
        ("--field", config.field, not text_files, records),
        ("--chat", config.chat, not text_files, records),
        ("--prompt-field", config.prompt_field, not text_files, records),
        ("--separator", reader.separator, text_files, f"plain text {got}"),
        ("--skip-bad-rows", reader.skip_bad_rows, kinds - {"text"}, f"rows {got}"),
        ("--encoding", has_encoding, kinds - {".parquet", "rows"}, f"text {got}"),
    ]
    check_flags(rules)


def list_sources(
    config: PrepareConfig, reader: Reader, spool: Path, notes: Notes
) -> tuple[list[Source], list[Source]]:
    """List the files for training and for validation: those of --val, or by their names.

    Files in folders that are test data by their names are left out, unless no others are there.
    """
    has_globs = any(not glob.startswith("!") for glob in config.glob)

    def find(inputs: Sequence[str], hub_split: str | None, folder: Path) -> list[Source]:
        folder.mkdir(exist_ok=True)
        sources = find_sources(inputs, folder, config.glob, notes, config.hf_config, hub_split)
        return choose_sources(sources, reader, notes, has_globs)

    hub_names = [name for name in config.inputs if name.startswith("hf:")]
    val_inputs = config.val or (hub_names if config.hf_val_split else ())
    val_sources = find(val_inputs, config.hf_val_split or config.hf_split, spool / "val")
    val_files = {os.path.realpath(source.path) for source in val_sources if not source.hub_split}
    splits: dict[str, list[Source]] = {"train": [], "val": [], "test": [], "--val": []}
    for source in find(config.inputs, config.hf_split, spool):
        is_val = bool(val_files) and os.path.realpath(source.path) in val_files
        splits["--val" if is_val else source.split or "train"].append(source)
    if not splits["train"]:
        splits = {**splits, "train": splits["val"] + splits["test"], "val": [], "test": []}
    if not splits["train"]:
        raise UserError(f"--val: has all files of {config.inputs[0]}. Give others for training.")
    uses = {
        "--val": "left out of training, as they are in --val",
        "test": "left out, test data by their names",
        "val": f"{'left out' if val_sources else 'for validation'}, validation data by their names",
    }
    for split, use in uses.items():
        notes.add(f"files {use}", len(splits[split]), *(each.title for each in splits[split]))
    if splits["val"] and not val_sources:
        need = f"inputs without validation files (got {splits['val'][0].title})"
        check_flags([("--val-fraction", config.val_fraction, False, need)])
    return splits["train"], val_sources or splits["val"]


def origin_of(corpus: Corpus, config: PrepareConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the settings that determine the dataset; no tokenizer: one is trained on the text."""
    rule = corpus.rule
    name = config.tokenizer
    has_end_of_text = tokenizer.end_of_text_id is not None if tokenizer else name == "bpe"
    if tokenizer and name != tokenizer.kind:  # a path, whose tokenizer may change
        name = f"{tokenizer.kind} {tokenizer.fingerprint}"
    needs_separator = not (rule.has_examples or rule.is_single_document or has_end_of_text)
    is_few = rule.has_few_documents and not rule.is_single_document
    fields = examples.list_fields(config.prompt_field or ())
    defaults = PrepareConfig(())
    settings = {
        **{key: getattr(config, key) for key in ORIGIN_SETTINGS},
        "pattern": config.pattern if config.pattern != DEFAULT_PATTERN else None,
        "encoding": corpus.reader.encoding,
        "prompt_field": fields[0] if len(fields) == 1 else fields,
        "document_separator": corpus.reader.separator,
        "examples": ("chats" if config.chat else "pairs") if rule.has_examples else None,
        "separator": "\n" if needs_separator else None,
        "split": "few" if is_few else None,
        "val": [os.fsencode(PurePath(name).name).decode(errors="replace") for name in config.val],
    }
    changed = {
        key: value
        for key, value in settings.items()
        if value and value != getattr(defaults, key, None)
    }
    return {"tokenizer": name, "val_fraction": rule.val_fraction, **changed}


if __name__ == "__main__":
    run_command(main)
