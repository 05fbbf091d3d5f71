"""Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest.

python prepare.py INPUT… [--tokenizer NAME] [--vocab-size N] [--out data/NAME] [--val-fraction F]
python prepare.py PAIRS.jsonl --prompt-field A --completion-field B   prompts with completions
python prepare.py CHATS.jsonl --chat                                  chats
python prepare.py INPUT… --ray local                                  on a Ray cluster
python prepare.py --show data/NAME                                    describe a dataset

A run that was interrupted continues when the same command is run again.
"""

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge, Gt, Le, Lt

from engine.core.cli import progress, run_command
from engine.core.errors import UserError
from engine.core.files import exclusive_lock
from engine.core.settings import check_ranges, parse
from engine.data.chat import parse_chat, parse_pair, render_with_targets, special_token_names
from engine.data.dataset import Examples, Tokens, is_up_to_date, open_dataset
from engine.data.inputs.readers import KINDS_WITH_FIELDS, kind_of
from engine.data.inputs.sources import Source, find_sources
from engine.data.splits import Corpus, content_hash
from engine.data.tokenizer import Tokenizer, named_tokenizer
from engine.data.tokenizer_json import MAX_VOCAB_SIZE, SPLIT_PATTERNS
from engine.data.tokenizer_training import MIN_BPE_VOCAB_SIZE, train_bpe_tokenizer, train_char_tokenizer
from engine.data.writer import remove_work_folder, write_dataset

DEFAULT_PATTERN = "pairs"
DEFAULT_TOKENIZER_BYTES = 2**27
TRAINED_TOKENIZERS = ("char", "bpe")
MAX_TRAINER_CHARACTERS = 2**16  # given to the BPE trainer at a time, to limit its memory
NUM_SAMPLE_TOKENS = 60  # of a split that are shown
MIN_VOCABULARY_USE = 0.5  # less, of a large vocabulary, gets advice
MIN_WARNED_VOCABULARY = 1000


@dataclass(frozen=True)
class PrepareConfig:
    """Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest."""

    inputs: tyro.conf.Positional[tuple[str, ...]]
    """Files of text, .jsonl or .ndjson, .csv, .parquet, all but Parquet also as .gz, .zst or .xz;
    folders; addresses (https://, s3://, gs://, …); hf:NAME, a Hugging Face dataset on the hub or
    in a folder; - for standard input; stdlib (the sources of Python's standard library);
    shakespeare (the tiny file, downloaded once)."""
    tokenizer: str = "bpe"
    """char, byte, bpe (trained on this text), a tiktoken encoding (gpt2, cl100k_base, …), or the
    path of a run, a dataset or a tokenizer.json."""
    pattern: str | None = None
    """How a BPE trained on this text splits it into words; None: pairs. For export to GGUF choose
    gpt2, llama3, qwen2 or smollm."""
    vocab_size: Annotated[int | None, Ge(MIN_BPE_VOCAB_SIZE), Le(MAX_VOCAB_SIZE)] = None
    """Tokens of a BPE trained on this text; None: 1024 to 8192, up to the root of its bytes."""
    tokenizer_bytes: Annotated[int | None, Ge(1)] = None
    """Bytes of text that a BPE is trained on; None: 128 MiB. Of more text, the beginning of each
    unit of work is used."""
    out: Path | None = None
    """The folder to make; None: data/ and the first input's name."""
    val_fraction: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Fraction for validation: whole documents; of large ones, or if there are few, the tails."""
    glob: str | None = None
    """Which files of a folder to take, at any depth; None: all."""
    field: str | None = None
    """The field or column that holds the text; None: text."""
    prompt_field: str | None = None
    """For examples: the field with the prompt."""
    completion_field: str | None = None
    """For examples: the field with the completion, which alone is learned."""
    chat: bool = False
    """Each record is a chat, {"messages": [{"role": …, "content": …}, …]}; what the assistant
    says is learned."""
    hf_config: str | None = None
    """The configuration of a Hugging Face dataset that has several."""
    hf_split: str | None = None
    """The split of a Hugging Face dataset; None: train."""
    deduplicate: bool = False
    """Leave out documents that repeat an earlier one exactly."""
    sha256: str = ""
    """The hash of a download, which is then kept and downloaded only once."""
    errors: Literal["strict", "replace"] = "strict"
    """Refuse bytes that are not UTF-8, or replace them by U+FFFD."""
    force: bool = False
    """Make the dataset again, and replace one made with other arguments or of other text."""
    ray: str | None = None
    """Encode on Ray: local, local:4 (workers), or the address of a cluster."""
    show: Path | None = None
    """Only describe this dataset."""


def main(arguments: list[str] | None = None) -> None:
    """Prepare or show, and print the next command."""
    config = parse(PrepareConfig, arguments)
    if config.show is not None:
        if config != PrepareConfig((), show=config.show):
            raise UserError("--show: takes a dataset and nothing else. Leave the rest out.")
        print(describe(config.show))
        return
    out, is_new = prepare(config)
    if is_new:
        print(describe(out))
    else:
        print(f"{out} is up to date: nothing changed.")
    print(f"Train on it: python train.py --data {out} --out out/{out.name}")


def prepare(config: PrepareConfig, threads: int | None = None) -> tuple[Path, bool]:
    """Make the dataset that the config describes. Returns its folder and whether it is new.

    threads encode; None: one for each core. Raises UserError for what cannot be prepared.
    """
    check(config)
    tokenizer = None
    if config.tokenizer not in TRAINED_TOKENIZERS:
        tokenizer = named_tokenizer(config.tokenizer)
    out = config.out or Path("data") / name_of(config.inputs[0])
    with tempfile.TemporaryDirectory() as spool:
        corpus = Corpus(sources_of(config, Path(spool)), config.val_fraction)
        origin = origin_of(corpus, config, tokenizer)
        if is_up_to_date(out, origin, config.force, corpus.version, lambda: content_hash(corpus.digests())):
            remove_work_folder(out)
            return out, False
        with exclusive_lock(out):
            if tokenizer is None:
                tokenizer = train_tokenizer(corpus, config, origin.get("separator", ""))
            if corpus.examples:
                tokenizer = tokenizer.with_special(special_token_names(tokenizer, config.chat))
            write_dataset(out, corpus, tokenizer, origin, threads, config.ray)
    return out, True


def check(config: PrepareConfig) -> None:
    """Raise UserError for arguments that contradict each other."""
    if not config.inputs or "" in config.inputs:
        kinds = "a file, a folder, an address, hf:NAME, - for standard input, stdlib or shakespeare"
        raise UserError(f"no input. Give {kinds}.")
    check_ranges(config)
    bpe_flags = {
        "--vocab-size": config.vocab_size,
        "--pattern": config.pattern,
        "--tokenizer-bytes": config.tokenizer_bytes,
    }
    for flag, value in bpe_flags.items():
        if value is not None and config.tokenizer != "bpe":
            raise UserError(f"{flag}: needs --tokenizer bpe (got {config.tokenizer}). Leave it out.")
    if config.pattern not in (None, *SPLIT_PATTERNS):
        names = ", ".join(SPLIT_PATTERNS)
        raise UserError(f"--pattern: must be one of {names} (got {config.pattern}).")
    if (config.prompt_field is None) != (config.completion_field is None):
        raise UserError("--prompt-field: needs --completion-field, and the reverse. Give both.")
    record_flags = {
        "--chat": config.chat,
        "--prompt-field": config.prompt_field is not None,
        "--field": config.field is not None,
    }
    used_flags = [flag for flag, is_used in record_flags.items() if is_used]
    if len(used_flags) > 1:
        raise UserError(f"{' and '.join(used_flags)}: exclude each other. Give one.")
    has_pipe = any(name == "-" or Path(name).is_fifo() for name in config.inputs)
    if config.ray and has_pipe:
        raise UserError(f"--ray {config.ray}: its workers cannot read a pipe. Give files.")


def sources_of(config: PrepareConfig, spool: Path) -> list[Source]:
    """Find the files to read. Raises UserError for files that lack what the flags need."""
    turns_of: Callable[[dict[str, Any]], Any] | None = parse_chat if config.chat else None
    if config.prompt_field is not None and config.completion_field is not None:
        turns_of = partial(
            parse_pair,
            prompt_field=config.prompt_field,
            completion_field=config.completion_field,
        )
    split = config.hf_split or "train"
    sources = find_sources(config.inputs, config.glob, config.sha256, spool, config.hf_config, split)
    plain = [source.name for source in sources if not kind_of(source)]
    if config.field is not None and len(plain) == len(sources):
        raise UserError(f"--field {config.field}: needs {KINDS_WITH_FIELDS}. Leave it out.")
    is_hub = any(name.startswith("hf:") for name in config.inputs)
    if (config.hf_config or config.hf_split) and not is_hub:
        raise UserError("--hf-config, --hf-split: no input is hf:NAME. Leave them out.")
    if turns_of and plain:
        flag = "--chat" if config.chat else "--prompt-field"
        advice = "Convert it, or choose files with --glob '*.jsonl'"
        raise UserError(f"{flag}: needs {KINDS_WITH_FIELDS} (got {plain[0]}). {advice}.")
    for name in config.inputs:
        if config.glob is None and Path(name).is_dir():
            check_folder(Path(name), sources)
    field = config.field or "text"
    return [replace(source, field=field, errors=config.errors, turns_of=turns_of) for source in sources]


def check_folder(folder: Path, sources: list[Source]) -> None:
    """Raise UserError for a folder of both plain text and records."""
    names = {
        bool(kind_of(source)): source.name
        for source in sources
        if isinstance(source.path, Path) and source.path.is_relative_to(folder.absolute())
    }
    if len(names) > 1:
        kinds = f"records ({names[True]}) and plain text ({names[False]})"
        raise UserError(f"{folder}: has both {kinds}. Choose with --glob.")


def name_of(source: str) -> str:
    """Return a dataset's name, given its first input."""
    if source == "-":
        return "stdin"
    path = re.sub(r"[*?#].*", "", source.removeprefix("hf:")).rstrip("/")
    return Path(os.path.abspath(path)).name.split(".")[0] or "text"


def origin_of(corpus: Corpus, config: PrepareConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Return the settings that, with the text, determine the dataset.

    tokenizer is None if it is to be trained.
    """
    name = config.tokenizer
    if tokenizer and name != tokenizer.kind:  # a path, whose tokenizer may change
        name = f"{tokenizer.kind} {tokenizer.fingerprint}"
    if config.tokenizer in TRAINED_TOKENIZERS:
        has_end = config.tokenizer == "bpe"
    else:
        has_end = tokenizer is not None and tokenizer.end_of_text is not None
    needs_separator = not (corpus.examples or corpus.single or has_end)
    optional = {
        "vocab_size": config.vocab_size,
        "pattern": config.pattern if config.pattern != DEFAULT_PATTERN else None,
        "tokenizer_bytes": config.tokenizer_bytes,
        "deduplicate": config.deduplicate,
        "field": config.field,
        "prompt_field": config.prompt_field,
        "completion_field": config.completion_field,
        "hf_config": config.hf_config,
        "hf_split": config.hf_split,
        "errors": config.errors if config.errors != "strict" else None,
        "examples": ("chats" if config.chat else "pairs") if corpus.examples else None,
        "separator": "\n" if needs_separator else None,
        "split": "few" if corpus.rule.few and not corpus.single else None,
    }
    if config.tokenizer_bytes == DEFAULT_TOKENIZER_BYTES:
        del optional["tokenizer_bytes"]
    settings = {key: value for key, value in optional.items() if value}
    return {"tokenizer": name, "val_fraction": config.val_fraction, **settings}


def train_tokenizer(corpus: Corpus, config: PrepareConfig, separator: str) -> Tokenizer:
    """Make a char or BPE tokenizer from the text."""
    if config.tokenizer == "char":
        return train_char_tokenizer(training_texts(corpus, None), separator)
    texts = training_texts(corpus, config.tokenizer_bytes or DEFAULT_TOKENIZER_BYTES)
    return train_bpe_tokenizer(texts, config.vocab_size, config.pattern or DEFAULT_PATTERN)


def training_texts(corpus: Corpus, max_bytes: int | None) -> Iterator[str]:
    """Yield short strings of all text, or of a sample of about ``max_bytes``."""
    total = min(max_bytes or corpus.bytes, corpus.bytes) if corpus.is_plain else None
    with progress("training tokenizer", total) as bar:
        for document in corpus.sample(max_bytes):
            bar.update(len(document))
            turns = [text for _, text in json.loads(document)] if corpus.examples else [document]
            for text in turns:
                for start in range(0, len(text), MAX_TRAINER_CHARACTERS):
                    yield text[start : start + MAX_TRAINER_CHARACTERS]


def describe(out: Path) -> str:
    """Describe a dataset in lines. Raises UserError if there is none."""
    dataset = open_dataset(out)
    splits = dataset.manifest["splits"]
    origin = dataset.manifest["origin"]
    facts = dataset.manifest["facts"]
    is_examples = "examples" in origin
    what = "examples" if is_examples else "documents"
    repeats = f"{facts['repeats']:,} of them exact repeats (see --deduplicate)"
    if "dropped" in facts:
        repeats = f"without {facts['dropped']:,} exact repeats"
    rows = [
        (what, facts["documents"], repeats if "dropped" in facts or facts["repeats"] else ""),
        ("UTF-8 bytes", sum_counts(splits, "bytes"), "of the targets" if is_examples else ""),
        ("tokens", sum_counts(splits, "tokens"), f"{facts['longest']:,} in the longest"),
    ]
    if is_examples:
        rows.append(("targets", sum_counts(splits, "targets"), ""))
    size = dataset.manifest["vocab_size"]
    use = facts["vocabulary"] / size
    is_rare = use < MIN_VOCABULARY_USE and size > MIN_WARNED_VOCABULARY
    advice = "; --tokenizer bpe makes a smaller one, which trains faster" if is_rare else ""
    kind = dataset.manifest["tokenizer"]["kind"]
    rows.append(("vocabulary", size, f"{kind}, {use:.0%} of it used{advice}"))
    for split, counts in splits.items():
        note = f"{counts['documents']:,} {what}" + ("" if is_examples else " end here")
        if split == "val" and origin.get("split") == "few" and not is_examples:
            note += f": the last {100 * origin['val_fraction']:.3g}% of each"
        rows.append((f"{split:<5} tokens", counts["tokens"], note))
    lines = [f"  {name:<15}  {amount:>15,}  {note}".rstrip() for name, amount, note in rows]
    for split in splits:
        lines += describe_sample(split, dataset.tokenizer, getattr(dataset, split))
    return "\n".join([f"{out}", *lines])


def sum_counts(splits: dict[str, Any], name: str) -> int:
    """Sum a count of all splits of a manifest."""
    return sum(counts[name] for counts in splits.values())


def describe_sample(split: str, tokenizer: Tokenizer, tokens: Tokens | Examples) -> list[str]:
    """Show a few tokens of a split as text, or the first training example."""
    if isinstance(tokens, Examples):
        if split == "val":
            return []
        title = "  The first example, its targets between ⟦ and ⟧:"
        text = render_with_targets(tokenizer, tokens.example(0))
    else:
        title = f"  From the middle of {split}:"
        start = max(0, len(tokens) // 2 - NUM_SAMPLE_TOKENS // 2)
        sample = tokenizer.decode(tokens[start : start + NUM_SAMPLE_TOKENS].tolist())
        text = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in sample)
    return [title, *(f"    {line}" for line in text.split("\n"))]


if __name__ == "__main__":
    run_command(main)
