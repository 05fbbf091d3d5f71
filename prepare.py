"""Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest.

python prepare.py INPUT… [--tokenizer NAME] [--vocab-size N] [--out data/NAME] [--val-fraction F]
python prepare.py PAIRS.jsonl --prompt-field A --completion-field B   prompts with completions
python prepare.py CHATS.jsonl --chat                                  chats
python prepare.py INPUT… --ray local                                  on a Ray cluster
python prepare.py INPUT… --val FILE…                                  validation text of your own
python prepare.py --show data/NAME                                    describe a dataset

To resume an interrupted run, run the same command again.
"""

import os
import re
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Le, Lt

from engine.core.cli import count_noun, run_command, shell_command, warn
from engine.core.errors import UserError
from engine.core.files import exclusive_lock
from engine.core.settings import parse
from engine.core.values import check_ranges
from engine.data.chats import chat, examples
from engine.data.dataset import dataset_name, is_up_to_date
from engine.data.dataset_summary import describe_dataset
from engine.data.inputs.documents import Corpus
from engine.data.inputs.finder import INPUT_ADVICE, STDIN_NAME, find_sources
from engine.data.inputs.sources import DEFAULT_ENCODING, Reader, Source
from engine.data.inputs.text import normalize_encoding
from engine.data.tokenizer import ByteTokenizer, Tokenizer, named_tokenizer
from engine.data.tokenizer_json import MAX_VOCAB_SIZE, SPECIAL_TOKENS, SPLIT_PATTERNS
from engine.data.tokenizer_training import (
    DEFAULT_PATTERN,
    MIN_BPE_VOCAB_SIZE,
    tokenizer_texts,
    train_bpe_tokenizer,
    train_char_tokenizer,
)
from engine.data.writer import write_dataset

DEFAULT_VAL_FRACTION = 0.1
MAX_TOKENIZER_BYTES = 2**27  # to train a BPE on: of more text, the beginning of each unit
TRAINED_TOKENIZERS = ("char", "bpe")
# Of a dataset's origin, as they are in PrepareConfig.
ORIGIN_SETTINGS = ["vocab_size", "deduplicate", "field", "completion_field", "chat_field"]
ORIGIN_SETTINGS += ["hf_config", "hf_split", "hf_val_split", "skip_bad_rows"]
ORIGIN_SETTINGS += ["parse_special", "prompt_suffix"]


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
    # Words of a BPE trained on this text: as in gpt2, llama3, qwen2 or smollm. None: qwen2.
    pattern: str | None = None
    vocab_size: Annotated[int | None, Ge(MIN_BPE_VOCAB_SIZE), Le(MAX_VOCAB_SIZE)] = None
    """Tokens of a BPE trained on this text. None: from 1,024 to 8,192, by the size of the text."""
    out: Path | None = None  # Folder of the dataset; None: data/ and the name of the first input.
    # Fraction of the documents for validation. Few or large documents are cut instead: their last
    # parts are for validation. None: 0.1, or 0 with --val.
    val_fraction: Annotated[float | None, Ge(0), Lt(1)] = None
    val: tuple[str, ...] = ()
    """Files, folders or addresses for validation; all other inputs are for training."""
    glob: str | None = None  # Pattern of the files to take from folders, at any depth; None: all.
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
    chat_template: str | None = None  # The one to use, of several; None: the default.
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


def prepare(config: PrepareConfig, threads: int | None = None) -> tuple[Path, bool]:
    """Make the dataset of a config. Returns its folder and whether it is new.

    ``threads`` encode; None: one for each core. Raises UserError for unusable arguments or text.
    """
    check_arguments(config)
    tokenizer = None
    if config.tokenizer not in TRAINED_TOKENIZERS:
        named = named_tokenizer(config.tokenizer)
        tokenizer = chat.with_template(named, config.chat_template, config.template_variable)
    out = config.out or Path("data") / dataset_name(config.inputs[0])
    reader = make_reader(config, tokenizer)
    with tempfile.TemporaryDirectory() as spool:
        sources, val_sources = list_sources(config, Path(spool))
        check_reader(config, reader, [*sources, *val_sources])
        val_fraction = 0.0 if val_sources else config.val_fraction or DEFAULT_VAL_FRACTION
        corpus = Corpus(sources, val_fraction, val_sources, reader)
        origin = origin_of(corpus, config, tokenizer)
        if is_up_to_date(out, origin, config.force, corpus.version, corpus.hash_content):
            return out, False
        with exclusive_lock(out):
            if config.tokenizer == "char":
                separator = origin.get("separator", "")
                tokenizer = train_char_tokenizer(tokenizer_texts(corpus), separator)
            if tokenizer is None:
                texts = tokenizer_texts(corpus, MAX_TOKENIZER_BYTES)
                pattern = config.pattern or DEFAULT_PATTERN
                tokenizer = train_bpe_tokenizer(texts, config.vocab_size, pattern)
            if corpus.rule.has_examples:
                tokenizer = tokenizer.with_special(chat.special_token_names(tokenizer, config.chat))
            tokenizer = tokenizer.with_prompt_suffix(unescape(config.prompt_suffix))
            write_dataset(out, corpus, tokenizer, origin, threads, config.ray)
    return out, True


def check_arguments(config: PrepareConfig) -> None:
    """Raise UserError for arguments that contradict each other."""
    inputs = (*config.inputs, *config.val)
    if not config.inputs or "" in inputs:
        raise UserError(f"INPUT: missing. {INPUT_ADVICE}")
    check_ranges(config)
    if config.pattern not in (None, *SPLIT_PATTERNS):
        names = ", ".join(SPLIT_PATTERNS)
        raise UserError(f"--pattern: must be one of {names} (got {config.pattern}).")
    has_val = bool(config.val or config.hf_val_split)
    if config.val_fraction is not None and has_val == bool(config.val_fraction):
        problem = f"must be 0 with --val, and greater without it (got {config.val_fraction})"
        raise UserError(f"--val-fraction: {problem}. Leave it out.")
    if config.glob and Path(config.glob).is_file() and any(map(os.path.isfile, inputs)):
        pattern = f"--glob '*{Path(config.glob).suffix}'"
        raise UserError(f"--glob: must be a pattern (got {config.glob}). Quote it: {pattern}")
    trains_bpe = config.tokenizer == "bpe"
    has_template = config.chat and config.tokenizer not in TRAINED_TOKENIZERS
    is_not_char = config.tokenizer != "char"
    has_folder = any("://" in name or Path(name).is_dir() for name in inputs)
    has_hub = any(name.startswith("hf:") for name in inputs)
    has_val_hub = any(name.startswith("hf:") for name in config.val or config.inputs)
    requirements = [
        ("--vocab-size", config.vocab_size, trains_bpe, "--tokenizer bpe"),
        ("--pattern", config.pattern, trains_bpe, "--tokenizer bpe"),
        ("--prompt-field", config.prompt_field, config.completion_field, "--completion-field"),
        ("--completion-field", config.completion_field, config.prompt_field, "--prompt-field"),
        ("--prompt-suffix", config.prompt_suffix, config.prompt_field, "--prompt-field"),
        ("--parse-special", config.parse_special, not config.chat, "text or pairs, not --chat"),
        ("--parse-special", config.parse_special, is_not_char, "a --tokenizer other than char"),
        ("--chat-field", config.chat_field, config.chat, "--chat"),
        ("--chat-template", config.chat_template, has_template, "--chat and a --tokenizer"),
        ("--template-variable", config.template_variable, has_template, "--chat and a --tokenizer"),
        ("--glob", config.glob, has_folder, "a folder as input"),
        ("--hf-config", config.hf_config, has_hub, "hf:NAME as input"),
        ("--hf-split", config.hf_split, has_hub, "hf:NAME as input"),
        ("--hf-val-split", config.hf_val_split, has_val_hub, "hf:NAME as input"),
        ("--separator", config.separator == "", False, "a text"),
        ("--ray", config.ray, STDIN_NAME not in inputs, "files instead of standard input"),
    ]
    for flag, value, is_met, requirement in requirements:
        if value and not is_met:
            raise UserError(f"{flag}: needs {requirement}. Otherwise leave {flag} out.")
    if sum(map(bool, (config.chat, config.prompt_field, config.field))) > 1:
        raise UserError("--chat, --prompt-field, --field: are mutually exclusive. Give one.")


def make_reader(config: PrepareConfig, tokenizer: Tokenizer | None) -> Reader:
    """Return how the inputs are read. Chats use the tokenizer's chat template."""
    parser = None
    if config.chat:
        template = chat.own_template(tokenizer) if tokenizer else None
        parser = examples.chat_parser(config.chat_field, template)
    if config.completion_field:
        suffix = unescape(config.prompt_suffix)
        parser = examples.pair_parser(config.prompt_field or (), config.completion_field, suffix)
    names: tuple[re.Pattern[str], ...] = ()
    if not config.parse_special:
        special = tokenizer or ByteTokenizer().with_special([*SPECIAL_TOKENS, "</s>"])
        names = (chat.names_pattern(special), chat.names_pattern(special, has_markup=False))
    field = config.field or "text"
    encoding = normalize_encoding(config.encoding)
    options = (config.errors, unescape(config.separator), config.skip_bad_rows)
    return Reader(field, encoding, *options, parser, names)


def unescape(text: str | None) -> str:
    """Return a text of the command line, in which \\n and \\t are escapes; \\r is left out."""
    return (text or "").replace("\\r", "").replace("\\n", "\n").replace("\\t", "\t")


def check_reader(config: PrepareConfig, reader: Reader, sources: list[Source]) -> None:
    """Raise UserError for flags that do not fit the files."""
    text_files = [source.name for source in sources if source.kind == "text"]
    if text_files and (reader.examples or config.field):
        flag = "--field" if config.field else "--chat" if config.chat else "--prompt-field"
        kinds = "JSON lines, CSV, Parquet or a Hugging Face dataset"
        is_mixed = len(text_files) < len(sources)
        advice = "Choose files with --glob '*.jsonl'" if is_mixed else "Convert it"
        raise UserError(f"{flag}: needs {kinds} (got {text_files[0]}). {advice}.")
    kinds_in_use = {source.kind for source in sources}
    is_encoded = not kinds_in_use <= {".parquet", "rows"}
    ineffective_flags = {
        "--separator": reader.separator and not text_files,
        "--skip-bad-rows": reader.skip_bad_rows and kinds_in_use == {"text"},
        "--encoding": reader.encoding != DEFAULT_ENCODING and not is_encoded,
    }
    for flag, is_ineffective in ineffective_flags.items():
        if is_ineffective:
            raise UserError(f"{flag}: has no effect on {sources[0].name}. Leave it out.")


def list_sources(config: PrepareConfig, spool: Path) -> tuple[list[Source], list[Source]]:
    """List the files of the inputs, and those of --val or --hf-val-split."""
    hub_names = tuple(name for name in config.inputs if name.startswith("hf:"))
    val_inputs = config.val or (hub_names if config.hf_val_split else ())
    val_split = config.hf_val_split or config.hf_split
    find = partial(find_sources, glob=config.glob, hub_config=config.hf_config)
    sources = find(config.inputs, spool, hub_split=config.hf_split)
    (spool / "val").mkdir()
    val_sources = find(val_inputs, spool / "val", hub_split=val_split)
    val_files = {os.path.realpath(source.path) for source in val_sources if not source.hub_split}
    train_sources = [source for source in sources if os.path.realpath(source.path) not in val_files]
    if num_dropped := len(sources) - len(train_sources):
        warn(f"--val: {count_noun(num_dropped, 'file')} of the inputs left out of training")
    if not train_sources:
        raise UserError(f"--val: has all files of {config.inputs[0]}. Give others for training.")
    return train_sources, val_sources


def origin_of(corpus: Corpus, config: PrepareConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the settings that determine the dataset; no tokenizer: one is trained on the text."""
    name = config.tokenizer
    has_end_of_text = name == "bpe"
    if tokenizer:
        has_end_of_text = tokenizer.end_of_text_id is not None
        if name != tokenizer.kind:  # a path, whose tokenizer may change
            name = f"{tokenizer.kind} {tokenizer.fingerprint}"
    rule = corpus.rule
    needs_separator = not (rule.has_examples or rule.is_single_document or has_end_of_text)
    is_few = rule.has_few_documents and not rule.is_single_document
    encoding = corpus.reader.encoding
    fields = examples.list_fields(config.prompt_field or ())
    settings = {
        **{name: getattr(config, name) for name in ORIGIN_SETTINGS},
        "pattern": config.pattern if config.pattern != DEFAULT_PATTERN else None,
        "prompt_field": fields[0] if len(fields) == 1 else fields,
        "encoding": encoding if encoding != DEFAULT_ENCODING else None,
        "errors": config.errors if config.errors != "strict" else None,
        "document_separator": corpus.reader.separator,
        "examples": ("chats" if config.chat else "pairs") if rule.has_examples else None,
        "separator": "\n" if needs_separator else None,
        "split": "few" if is_few else None,
        "val": [os.fsencode(PurePath(name).name).decode(errors="replace") for name in config.val],
    }
    nondefault = {key: value for key, value in settings.items() if value}
    return {"tokenizer": name, "val_fraction": rule.val_fraction, **nondefault}


if __name__ == "__main__":
    run_command(main)
