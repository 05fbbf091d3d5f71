"""Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest.

python prepare.py INPUT… [--tokenizer NAME] [--vocab-size N] [--out data/NAME] [--val-fraction F]
python prepare.py PAIRS.jsonl --prompt-field A --completion-field B        examples: prompts, and what comes after them
python prepare.py CHATS.jsonl --chat                                       examples: chats, and what the assistant says
python prepare.py INPUT… --out data/NAME --part 3/16   the third of sixteen parts, each made on any machine
python prepare.py --merge --out data/NAME              all parts → what one run without --part makes
python prepare.py INPUT… --out data/NAME --ray local   the same by Ray: here, or on the cluster at an address
python prepare.py --show data/NAME                     what is in there
"""

import contextlib
import hashlib
import io
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from engine.core.cli import progress, run_command
from engine.core.errors import UserError
from engine.core.files import held_alone, to_json
from engine.core.settings import check_ranges, parse
from engine.data.chat import chat_of, pair_of, special_names
from engine.data.cluster import ray_cluster
from engine.data.dataset import manifest_of
from engine.data.encoding import make_dataset
from engine.data.ledger import content_of
from engine.data.parts import count_parts, find_parts, ledgers_of, merge_parts, parts_of, remove_parts
from engine.data.readers import FIELDS, kind_of
from engine.data.sources import Source, find_sources
from engine.data.splits import Corpus
from engine.data.summary import describe, format_duration
from engine.data.tokenizer import LARGEST, PATTERNS, SMALLEST_BPE, AnyCharacter, Tokenizer, named_tokenizer
from engine.data.tokenizer_training import bpe_tokenizer, char_tokenizer, shared_tokenizer
from engine.data.writer import is_made, stamp_of

PATTERN = "pairs"  # of a BPE trained on the text, unless the settings say otherwise
TOKENIZER_BYTES = 2**27  # that a BPE is trained on, unless the settings say otherwise
TRAINED = ("char", "bpe")  # tokenizers that are made from the text
PARTS_PER_WORKER = 4  # with Ray: so many that none waits long for the last, and a lost one is no great loss


@dataclass(frozen=True)
class PrepareConfig:
    """Turn text into data/<name>/: a tokenizer, memory-mapped token shards and a manifest."""

    inputs: tyro.conf.Positional[tuple[str, ...]]
    """Files of text, .jsonl or .ndjson, .csv, .parquet, but Parquet any of these as .gz, .zst or .xz too; folders;
    addresses (https://, s3://, gs://, …); hf:NAME, a Hugging Face dataset on the hub or in a folder; - for standard
    input; stdlib (the sources of Python's standard library); shakespeare (the tiny file, downloaded once)."""
    # char, byte, bpe (trained on this text), a tiktoken encoding (gpt2, cl100k_base, …), or that of a path: a run, a
    # dataset or a tokenizer.json.
    tokenizer: str = "bpe"
    # How a BPE trained on this text cuts it into words; None: pairs. What is to become a GGUF file needs another: gpt2,
    # llama3, qwen2 or smollm.
    pattern: str | None = None
    # How many tokens a BPE trained on this text has; None: 1024 to 8192, up to the root of its bytes.
    vocab_size: Annotated[int | None, f"at least {SMALLEST_BPE}, at most {LARGEST}"] = None
    # Bytes of text that a BPE is trained on, from places spread over all of it; None: 128 MiB.
    tokenizer_bytes: Annotated[int | None, "at least 1"] = None
    out: Path | None = None  # The folder to make; None: data/ and the first input's name.
    # How much is kept for validation: whole documents; of large ones, or if there are few, each one's tail.
    val_fraction: Annotated[float, "above 0, below 1"] = 0.1
    glob: str | None = None  # Which files of a folder to take, at any depth; None: all.
    field: str | None = None  # The field, or column, that holds the text; None: text.
    prompt_field: str | None = None  # For examples: the field with the prompt.
    completion_field: str | None = None  # The field with the completion, which alone is learned.
    # Each record is a chat, {"messages": [{"role": …, "content": …}, …]}: what the assistant says is learned.
    chat: bool = False
    hf_config: str | None = None  # The configuration of a Hugging Face dataset that has several.
    hf_split: str | None = None  # The split of a Hugging Face dataset to take; None: train.
    deduplicate: bool = False  # Leave out documents that are exact repeats of an earlier one.
    sha256: str = ""  # What a download must hash to; it is then kept, and downloaded only once.
    errors: Literal["strict", "replace"] = "strict"  # Refuse bytes that are not UTF-8, or put U+FFFD in their place.
    force: bool = False  # Make it anew, and replace what other arguments, or other text, made there.
    part: str | None = None  # Make only one part of the work, say 3/16, the third of sixteen, in a folder beside --out.
    merge: bool = False  # Join all parts of --out to what one run without --part makes; it takes no input.
    ray: str | None = None  # Have Ray make the parts, then merge: local, local:4 (workers), or a cluster's address.
    show: Path | None = None  # Only print what is in this dataset; it takes no input.


def main(arguments: list[str] | None = None) -> None:
    """Prepare, merge or show as the command line says, and say what to do next."""
    config = parse(PrepareConfig, arguments)
    if config.show is not None:
        if config != PrepareConfig((), show=config.show):
            raise UserError("--show takes a dataset and nothing else: python prepare.py --show data/NAME")
        print(f"{describe(config.show)}\n{outlook(config.show)}")
        return
    out, changed = merge(config) if config.merge else prepare(config)
    if not changed:
        print(f"{out} is up to date: the same arguments and the same text made it. Nothing changed.")
    if config.part:
        print(f"Once all parts are there: python prepare.py --merge --out {out.parent.with_suffix('')}")
        return
    if config.merge:
        print(f"Its parts are no longer needed: rm -r {parts_of(out)}")
    if changed:
        print(outlook(out))
    print(f"Train on it: python train.py --data {out} --out out/{out.name}")


def prepare(config: PrepareConfig, threads: int | None = None) -> tuple[Path, bool]:
    """Make the dataset that the config describes, or a part; return its folder, and whether it had to be made.

    threads encode; None: one a core. Raises UserError for what can't be prepared. Until the end nothing is there, and
    then all of it.
    """
    part, parts = check(config)
    given = None if config.tokenizer in TRAINED else named_tokenizer(config.tokenizer)
    whole = out = config.out or Path("data") / name_of(config.inputs[0])
    with tempfile.TemporaryDirectory() as spool:
        corpus = Corpus(sources_of(config, Path(spool)), config.val_fraction)
        origin, stretch = origin_of(corpus, config, given), corpus.stretch(part, parts)
        if config.part:
            origin |= {"part": f"{part}/{parts}", "listing": corpus.listing}
            out = parts_of(whole) / f"{part}-of-{parts}"
        if inside := [name for name in config.inputs if Path(name).resolve().is_relative_to(parts_of(whole).resolve())]:
            raise UserError(
                f"{inside[0]} lies in {parts_of(whole)}, which is for parts of {whole}; choose another --out"
            )
        if is_made(out, origin, config.force, corpus.stamp, lambda: corpus.content(*stretch)):
            return out, False
        if config.ray:
            by_ray(replace(config, out=out), given)
            return out, True
        with held_alone(out):
            tokenizer = given or trained_tokenizer(corpus, config, origin, whole)
            if corpus.examples:
                tokenizer = tokenizer.with_special(special_names(tokenizer, config.chat))
            if config.deduplicate and not config.part:  # what is a repeat a merge knows
                with apart(out) as other:
                    origin |= {"part": "1/1", "listing": corpus.listing}
                    make_dataset(parts_of(other) / "1-of-1", corpus, tokenizer, origin, stretch, threads)
                    join(out, find_parts(other), corpus.stamp)
            else:
                make_dataset(out, corpus, tokenizer, origin, stretch, threads)
    print(describe(out))
    return out, True


@contextlib.contextmanager
def apart(out: Path) -> Iterator[Path]:
    """A path for a dataset that is gone afterwards, beside out."""
    folder = out.resolve().with_name(f".{out.name}.apart")
    shutil.rmtree(folder, ignore_errors=True)  # left by a kill
    try:
        yield folder / out.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def merge(config: PrepareConfig) -> tuple[Path, bool]:
    """Join the parts of a dataset to what one run makes, byte for byte; return its folder, and whether it had to be.

    Raises UserError for a part that is missing, damaged, or of other text or arguments than the first.
    """
    out = config.out
    if out is None or config != PrepareConfig((), out=out, force=config.force, merge=True):
        raise UserError("--merge needs --out, the dataset whose parts to join, and takes nothing else but --force")
    parts = find_parts(out)
    stamps = {stamp_of(part) or "" for part in parts}
    stamp = stamps.pop() if len(stamps) == 1 else ""
    if is_made(out, origin_of_whole(parts), config.force, stamp, lambda: content_of(ledgers_of(parts))):
        return out, False
    with held_alone(out):
        join(out, parts, stamp)
    print(describe(out))
    return out, True


def join(out: Path, parts: dict[Path, dict[str, Any]], stamp: str) -> None:
    """Merge parts that are whole."""
    total = sum(counts["tokens"] for found in parts.values() for counts in found["splits"].values())
    origin = {"content": content_of(ledgers_of(parts))} | origin_of_whole(parts)
    with progress("merging", total, unit=" tokens") as bar:
        merge_parts(out, parts, origin, stamp, bar.update)


def origin_of_whole(parts: dict[Path, dict[str, Any]]) -> dict[str, Any]:
    """What a dataset is made from whose parts these are, but for the text."""
    first = next(iter(parts.values()))["origin"]
    return {key: value for key, value in first.items() if key not in ("part", "listing", "content")}


def by_ray(config: PrepareConfig, given: Tokenizer | None) -> None:
    """Have Ray make the parts that are not there yet, many at a time, and merge them."""
    out = config.out.absolute()  # a worker may have another working directory
    own = given and config.tokenizer != given.kind
    tokenizer = str(Path(config.tokenizer).absolute()) if own else config.tokenizer
    inputs = tuple(map(absolute, config.inputs))
    whole = replace(config, ray=None, out=out, inputs=inputs, tokenizer=tokenizer)
    with ray_cluster(config.ray) as (workers, run):
        count = count_parts(out) or PARTS_PER_WORKER * workers
        tasks = [replace(whole, part=f"{number}/{count}") for number in range(1, count + 1)]
        with progress("parts", count, unit="") as bar:
            for _ in run(prepare_part, tasks):
                bar.update()
    merge(PrepareConfig((), out=config.out, force=config.force, merge=True))
    remove_parts(config.out)


def absolute(name: str) -> str:
    """An input, its path from the root if it has one."""
    path = name.removeprefix("hf:")
    if path in ("stdlib", "shakespeare") or not Path(path).exists():
        return name
    return name.removesuffix(path) + str(Path(path).absolute())  # a link's own name tells what it is


def prepare_part(config: PrepareConfig) -> None:
    """Make a part with one thread, and print nothing; force replaces one that is there only if it is another."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            prepare(replace(config, force=False), threads=1)
        except ValueError:
            if not config.force:
                raise
            prepare(config, threads=1)


def check(config: PrepareConfig) -> tuple[int, int]:
    """Which part of how many to make: 1, 1 is all. Raises UserError for arguments that can't lead anywhere."""
    if not config.inputs or "" in config.inputs:
        advice = "give a file, a folder, an address, hf:NAME, - for standard input, stdlib or shakespeare"
        raise UserError(f"no input: {advice}")
    check_ranges(config)
    of_bpe = {
        "--vocab-size": config.vocab_size,
        "--pattern": config.pattern,
        "--tokenizer-bytes": config.tokenizer_bytes,
    }
    for flag, value in of_bpe.items():
        if value is not None and config.tokenizer != "bpe":
            raise UserError(f"{flag} {value} is for --tokenizer bpe; {config.tokenizer} has its own")
    if config.pattern not in (None, *PATTERNS):
        raise UserError(f"--pattern {config.pattern} is unknown; the known ones are {', '.join(PATTERNS)}")
    if (config.prompt_field is None) != (config.completion_field is None):
        raise UserError("--prompt-field and --completion-field go together: give both, or --field for plain text")
    given = {"--chat": config.chat or None, "--prompt-field": config.prompt_field, "--field": config.field}
    if len(ways := [flag for flag, value in given.items() if value is not None]) > 1:
        raise UserError(f"{' and '.join(ways)} exclude each other: a line is a chat, a pair, or text; give only one")
    piped = any(name == "-" or Path(name).is_fifo() for name in config.inputs)
    if config.ray and (config.part or piped):
        other = "--part" if config.part else "a pipe"
        raise UserError(f"--ray {config.ray} and {other} exclude each other: Ray's workers make all parts, from files")
    match = re.fullmatch("([0-9]+)/([0-9]+)", "1/1" if config.part is None else config.part)
    part, parts = map(int, match.groups()) if match else (0, 0)
    if not 1 <= part <= parts:
        raise UserError(f"--part is {config.part!r}; of three parts it must be 1/3, 2/3 or 3/3")
    return part, parts


def sources_of(config: PrepareConfig, spool: Path) -> list[Source]:
    """The files to read, and how. Raises UserError for what the fields, or a chat, can't be read from."""
    turns_of = chat_of if config.chat else None
    if config.prompt_field is not None:
        turns_of = partial(pair_of, prompt_field=config.prompt_field, completion_field=config.completion_field)
    of_hub = {"config": config.hf_config, "split": config.hf_split or "train"}
    found = find_sources(config.inputs, config.glob, config.sha256, spool, **of_hub)
    others = [source.name for source in found if not kind_of(source)]
    if config.field is not None and len(others) == len(found):
        raise UserError(f"--field {config.field} is for {FIELDS}, and no input has them")
    if (config.hf_config or config.hf_split) and not any(name.startswith("hf:") for name in config.inputs):
        raise UserError("--hf-config and --hf-split are of Hugging Face datasets, hf:NAME, and no input is one")
    if turns_of and others:
        flag = "--chat" if config.chat else "--prompt-field"
        advice = "leave it out, convert it, or choose a folder's files with --glob '*.jsonl'"
        raise UserError(f"{flag} is for {FIELDS}, which {others[0]} is not; {advice}")
    for folder in (name for name in config.inputs if config.glob is None and Path(name).is_dir()):
        local = [source for source in found if source.fs is None and source.rows is None]
        kinds = {kind_of(one) != "": one.name for one in local if Path(one.path).is_relative_to(folder)}
        if len(kinds) > 1:
            raise UserError(f"{folder} has both {kinds[True]}, with fields, and {kinds[False]}, without: see --glob")
    how = {"field": config.field or "text", "errors": config.errors, "turns_of": turns_of}
    return [replace(source, **how) for source in found]


def name_of(source: str) -> str:
    """A dataset's name after its first input."""
    if source == "-":
        return "stdin"
    path = re.sub(r"[*?#].*", "", source.removeprefix("hf:")).rstrip("/")
    return Path(os.path.abspath(path)).name.split(".")[0] or "text"


def origin_of(corpus: Corpus, config: PrepareConfig, given: Tokenizer | None) -> dict[str, Any]:
    """What a dataset is made from: two of the same origin are the same. given is a tokenizer that is not trained."""
    name = config.tokenizer
    if given and name != given.kind:  # a path, where another tokenizer may stand tomorrow
        name = f"{given.kind} {hashlib.sha256(to_json(given.state()).encode()).hexdigest()}"
    origin = {"tokenizer": name, "val_fraction": config.val_fraction}
    if config.vocab_size:
        origin["vocab_size"] = config.vocab_size
    if config.pattern not in (None, PATTERN):
        origin["pattern"] = config.pattern
    if config.tokenizer_bytes not in (None, TOKENIZER_BYTES):
        origin["tokenizer_bytes"] = config.tokenizer_bytes
    reading = ("deduplicate", "field", "prompt_field", "completion_field", "hf_config", "hf_split")
    origin |= {name: getattr(config, name) for name in reading if getattr(config, name)}
    if config.errors != "strict":
        origin["errors"] = config.errors
    if corpus.examples:
        origin["examples"] = "chats" if config.chat else "pairs"
    elif not corpus.single and (given.end_of_text is None if given else config.tokenizer == "char"):
        origin["separator"] = "\n"
    if corpus.rule.few and not corpus.single:
        origin["split"] = "few"
    return origin


def trained_tokenizer(corpus: Corpus, config: PrepareConfig, origin: dict[str, Any], out: Path) -> Tokenizer:
    """The tokenizer, char or bpe, that the config names, made from the corpus; a BPE once for all parts of out."""
    if config.tokenizer == "char":
        is_apart = config.part or config.deduplicate
        return AnyCharacter() if is_apart else char_tokenizer(corpus, origin.get("separator", ""))
    settings = (config.tokenizer_bytes or TOKENIZER_BYTES, config.vocab_size, origin.get("pattern", PATTERN))
    if not config.part:
        return bpe_tokenizer(corpus, *settings)
    what = [corpus.stamp or corpus.listing, {key: value for key, value in origin.items() if key != "part"}]
    name = hashlib.sha256(to_json(what).encode()).hexdigest()[:16]
    return shared_tokenizer(parts_of(out) / f"tokenizer-{name}.json", lambda: bpe_tokenizer(corpus, *settings))


def outlook(out: Path) -> str:
    """How often a default run sees the training text, and how long its matrix products take here."""
    from engine.training.budget import BATCH_SIZE, STEPS  # torch takes more memory than all that is done before
    from engine.training.estimate import speed_here
    from model import GPT, ModelConfig

    shape, manifest = ModelConfig(), manifest_of(out)
    counts = manifest["splits"]["train"]
    epochs = (tokens := STEPS * BATCH_SIZE * shape.context_length) / max(1, counts["tokens"])
    if "examples" in manifest["origin"]:
        epochs = STEPS * BATCH_SIZE / counts["documents"]
        tokens = epochs * counts["tokens"]
    weights = GPT(replace(shape, vocab_size=1)).num_parameters + shape.d_model * manifest["vocab_size"]
    speed, flops = speed_here(shape.d_model), 6 * weights * tokens  # Kaplan et al. 2020, section 2.1
    time = f", about {format_duration(flops / speed)} of computing here" if speed else ""
    return f"  a default run   {epochs:>16,.2f}  epochs in {STEPS:,} steps{time}"


if __name__ == "__main__":
    run_command(main)
