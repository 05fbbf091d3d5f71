"""Run exports in other programs, and print tables of what each computes.

    python -m benchmarks.consumers NODE_FOLDER [--tokenizers FOLDER …]

In NODE_FOLDER: npm install node-llama-cpp @huggingface/transformers. ctranslate2 takes part where
it is installed. ``--tokenizers`` are folders of real tokenizer.json files: their ids in llama.cpp
and transformers are compared with those of the file.
"""

import contextlib
import importlib.metadata
import importlib.util
import io
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
import tyro

from engine.core.cli import run_command
from engine.core.errors import UserError, describe_briefly
from engine.core.settings import parse
from engine.data.tokenizer import Tokenizer, from_document, load_tokenizer
from engine.data.tokenizer_training import train_bpe_tokenizer
from engine.runs.checkpoint import RunState, write_checkpoint
from huggingface import ExportConfig, ImportConfig, export_model, import_model
from model import GPT, ModelConfig

MAX_EQUAL_NATS = 0.02  # llama.cpp rounds keys and values to float16
LLAMA_CPP = """import {getLlama} from "node-llama-cpp"; import fs from "fs";
const [path, texts, out] = process.argv.slice(2);
const llama = await getLlama({gpu: false, build: "never"});
const model = await llama.loadModel({modelPath: path});
const context = await model.createContext({contextSize: 256});
const results = [];
for (const text of JSON.parse(fs.readFileSync(texts))) {
  const ids = [...model.tokenize(text, false)];
  const sequence = context.getSequence();
  const options = {generateNext: {probabilities: true}};
  const last = [ids[ids.length - 1], options];
  const answers = await sequence.controlledEvaluate([...ids.slice(0, -1), last]);
  const probabilities = [...answers[answers.length - 1].next.probabilities].slice(0, 50);
  results.push({ids, probabilities});
  await sequence.dispose();
}
fs.writeFileSync(out, JSON.stringify(results));
"""
TRANSFORMERS_JS = """import {AutoTokenizer} from "@huggingface/transformers"; import fs from "fs";
const [path, texts, out] = process.argv.slice(2);
const tokenizer = await AutoTokenizer.from_pretrained(path, {local_files_only: true});
const options = {add_special_tokens: false};
const encode = text => ({ids: tokenizer.encode(text, options)});
fs.writeFileSync(out, JSON.stringify(JSON.parse(fs.readFileSync(texts)).map(encode)));
"""
TEXT_WORDS = [
    "It's",
    "DON'T",
    "l'été",
    "naïve",
    "12345",
    "3.14",
    "日本語",
    "привет",
    "🚀",
    "x_y",
    "</s>",
]
TEXT_SPACES = [" ", "  ", "\n", "\n\n", "\t", "\r\n", "   \n ", ""]
SAMPLE_TEXTS = [
    f"{a}{b}{c}."
    for a in TEXT_WORDS[:5]
    for b in TEXT_SPACES
    for c in (TEXT_WORDS[(len(a + b)) % 11],)
]
BIASED_SETTINGS = {"qk_norm": False, "qkv_bias": True}
PLAIN_SETTINGS = {"qk_norm": False}
ABSOLUTE_SETTINGS = {"position": "learned", "norm": "layernorm", "qk_norm": False, "bias": True}
LLAMA3_FACTORS = (8.0, 1.0, 4.0, 32.0)
MODEL_SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": ("llama", PLAIN_SETTINGS),
    "llama, biases": ("llama", PLAIN_SETTINGS | {"bias": True}),
    "llama, linear RoPE": ("llama", PLAIN_SETTINGS | {"rope_scaling": (2.0,)}),
    "llama, Llama 3's RoPE": ("llama", PLAIN_SETTINGS | {"rope_scaling": LLAMA3_FACTORS}),
    "qwen2": ("qwen2", BIASED_SETTINGS),
    "qwen2, windows": ("qwen2", BIASED_SETTINGS | {"windows": (16, 0)}),
    "qwen3": ("qwen3", {}),
    "qwen3, windows": ("qwen3", {"windows": (16, 0)}),
    "qwen3, Llama 3's RoPE": ("qwen3", {"rope_scaling": LLAMA3_FACTORS}),
    "mistral": ("mistral", PLAIN_SETTINGS),
    "mistral, windows": ("mistral", PLAIN_SETTINGS | {"windows": (16,)}),
    "gpt2": ("gpt2", ABSOLUTE_SETTINGS | {"activation": "gelu"}),
    "gpt2, ReLU": ("gpt2", ABSOLUTE_SETTINGS | {"activation": "relu"}),
    "nanochat": ("nanochat", {"activation": "relu2"}),
}
LONG_TEXT = "The number 12 is followed by 13, and 13 by 14.\n" * 4


@dataclass(frozen=True)
class ConsumersConfig:
    """Run exports in other programs, and print a table of what each computes."""

    node: tyro.conf.Positional[Path]  # The folder of npm's packages.
    tokenizers: tuple[Path, ...] = ()  # Folders of real tokenizer.json files.


def train_tokenizer() -> Tokenizer:
    """Train a BPE like Qwen2's."""
    document = train_bpe_tokenizer([LONG_TEXT, *SAMPLE_TEXTS], 400, "qwen2").document
    model = document["model"] | {"ignore_merges": False}
    return from_document(document | {"model": model, "normalizer": {"type": "NFC"}})


def save_random_run(path: Path, tokenizer: Tokenizer, settings: dict[str, Any]) -> GPT:
    """Write a run with random weights."""
    sizes = {"vocab_size": tokenizer.vocab_size, "context_length": 256, "num_layers": 2}
    config = ModelConfig(**{**sizes, "num_heads": 4, "d_model": 64, "d_ff": 128, **settings})
    torch.manual_seed(0)
    model = GPT(config).eval()
    for name, param in model.named_parameters():
        if not name.endswith("norm.weight"):
            torch.nn.init.normal_(param, std=0.2)
    params: dict[str, torch.Tensor] = dict(model.named_parameters())
    target = path / "checkpoints" / "step-00000000"
    write_checkpoint(target, RunState(config), params, {}, tokenizer.save)
    return model


def run_node(node: Path, script: str, path: Path, texts: list[str]) -> list[dict[str, Any]]:
    """Run a script of JavaScript on a model and texts."""
    files = [node / name for name in ("consumer.mjs", "texts.json", "results.json")]
    files[0].write_text(script)
    files[1].write_text(json.dumps(texts))
    command = ["node", files[0].name, str(path), *(file.name for file in files[1:])]
    subprocess.run(command, cwd=node, check=True, capture_output=True)
    return json.loads(files[2].read_text())


def largest_difference(log_probs: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference among the most likely tokens, in nats."""
    likely = expected.topk(50).indices
    return (log_probs - expected)[likely].abs().max().item()


def describe_difference(log_probs: torch.Tensor, expected: torch.Tensor) -> str:
    """Return "equal", or the largest difference among the most likely tokens."""
    error = largest_difference(log_probs, expected)
    return "equal" if error < MAX_EQUAL_NATS else f"wrong by {error:.1f} nats"


def run_transformers(path: Path, ids: list[int], expected: torch.Tensor, node: Path) -> str:
    """Compare a model in transformers."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    return describe_difference(model(torch.tensor([ids])).logits[0, -1].log_softmax(0), expected)


def run_ctranslate2(path: Path, ids: list[int], expected: torch.Tensor, node: Path) -> str:
    """Compare a model in ctranslate2."""
    import ctranslate2

    converted = path / "ctranslate2"
    ctranslate2.converters.TransformersConverter(str(path)).convert(str(converted), force=True)
    generator = ctranslate2.Generator(str(converted), compute_type="float32")
    logits = torch.from_numpy(np.array(generator.forward_batch([ids])))[0, -1]
    shutil.rmtree(converted)
    return describe_difference(logits.float().log_softmax(0), expected)


def run_llama_cpp(path: Path, ids: list[int], expected: torch.Tensor, node: Path) -> str:
    """Compare the GGUF file of a model in llama.cpp, of which a refusal is our own."""
    (file,) = path.glob("*.gguf")
    (result,) = run_node(node, LLAMA_CPP, file, [LONG_TEXT])
    if result["ids"] != ids:
        return "other ids"
    return describe_difference(read_log_probs(result, expected), expected)


def read_log_probs(result: dict[str, Any], expected: torch.Tensor) -> torch.Tensor:
    """Return llama.cpp's log probabilities, and the expected ones for unlikely tokens."""
    log_probs = expected.clone()
    for number, probability in result["probabilities"]:
        log_probs[number] = torch.tensor(probability).log()
    return log_probs


def run_transformers_js(path: Path, ids: list[int], expected: torch.Tensor, node: Path) -> str:
    """Compare the ids of a tokenizer in transformers.js."""
    (result,) = run_node(node, TRANSFORMERS_JS, path, [LONG_TEXT])
    return "equal ids" if result["ids"] == ids else "other ids"


CONSUMER_FUNCTIONS: dict[str, Callable[[Path, list[int], torch.Tensor, Path], str]] = {
    "transformers": run_transformers,
    "llama.cpp": run_llama_cpp,
    "ctranslate2": run_ctranslate2,
    "transformers.js": run_transformers_js,
}


@torch.no_grad()
def compare_models(node: Path, folder: Path) -> None:
    """Print a row for each kind of model."""
    tokenizer = train_tokenizer()
    ids = tokenizer.encode(LONG_TEXT).tolist()
    print(
        f"| model | {' | '.join(CONSUMER_FUNCTIONS)} |\n| --- |{' --- |' * len(CONSUMER_FUNCTIONS)}"
    )
    for name, (family, settings) in MODEL_SETTINGS.items():
        run, out = (folder / f"{kind}{len(list(folder.iterdir()))}" for kind in ("run", "hf"))
        model = save_random_run(run, tokenizer, settings)
        expected = model(torch.tensor([ids]))[0, -1].log_softmax(0)
        refusal = ""
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                export_model(ExportConfig(run, out, family=family, gguf="f32"))
            except UserError:
                refusal = "refused"
                export_model(ExportConfig(run, out, family=family))
        cells = [name]
        for consumer, compare in CONSUMER_FUNCTIONS.items():
            try:
                is_refused = refusal and consumer == "llama.cpp"
                cells.append(refusal if is_refused else compare(out, ids, expected, node))
            except Exception as error:  # of the other program
                cells.append(f"fails: {describe_briefly(error)[:60]}")
        print(f"| {' | '.join(cells)} |", flush=True)


@torch.no_grad()
def compare_types(node: Path, folder: Path) -> None:
    """Print the differences in llama.cpp of a Llama in each type of a GGUF file."""
    tokenizer = train_tokenizer()
    model = save_random_run(folder / "run", tokenizer, PLAIN_SETTINGS)
    ids = torch.tensor([tokenizer.encode(LONG_TEXT).tolist()])
    expected = model(ids)[0, -1].log_softmax(0)
    print("\n| type | largest difference, nats |\n| --- | --- |")
    for dtype in get_args(get_args(get_type_hints(ExportConfig)["gguf"])[0]):
        with contextlib.redirect_stdout(io.StringIO()):
            export_model(ExportConfig(folder / "run", folder / dtype, "llama", gguf=dtype))
        (file,) = (folder / dtype).glob("*.gguf")
        (result,) = run_node(node, LLAMA_CPP, file, [LONG_TEXT])
        difference = largest_difference(read_log_probs(result, expected), expected)
        print(f"| {dtype} | {difference:.2g} |", flush=True)


def compare_tokenizers(paths: tuple[Path, ...], node: Path, folder: Path) -> None:
    """Print a row for each real tokenizer, in a tiny Llama."""
    import transformers

    print("\n| tokenizer | texts | llama.cpp: other ids | transformers: other ids |")
    print("| --- | --- | --- | --- |")
    for number, path in enumerate(paths):
        source, run, out = (folder / f"{kind}-t{number}" for kind in ("source", "run", "hf"))
        source.mkdir()
        for file in path.glob("tokenizer*.json"):
            shutil.copy(file, source)
        tokenizer = load_tokenizer(source / "tokenizer.json")
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 2, "vocab_size": tokenizer.vocab_size}
        config = transformers.LlamaConfig(**sizes)
        transformers.LlamaForCausalLM(config).save_pretrained(source)
        with contextlib.redirect_stdout(io.StringIO()):
            import_model(ImportConfig(str(source), run))
            try:
                export_model(ExportConfig(run, out, gguf="f16"))
                (file,) = out.glob("*.gguf")
                results = [r["ids"] for r in run_node(node, LLAMA_CPP, file, SAMPLE_TEXTS)]
            except UserError as error:
                results = []
                refusal = str(error)
                export_model(ExportConfig(run, out))
        expected = [tokenizer.encode(text).tolist() for text in SAMPLE_TEXTS]
        differences = [
            text
            for *pair, text in zip(results, expected, SAMPLE_TEXTS, strict=False)
            if pair[0] != pair[1]
        ]
        hf_tokenizer = transformers.AutoTokenizer.from_pretrained(out)
        options = {"add_special_tokens": False, "split_special_tokens": True}
        hf_ids = [hf_tokenizer.encode(text, **options) for text in SAMPLE_TEXTS]
        num_hf = sum(ids != own_ids for ids, own_ids in zip(hf_ids, expected, strict=True))
        cell = f"{len(differences)} {differences[:3] or ''}" if results else refusal
        print(f"| {path.parents[1].name} | {len(SAMPLE_TEXTS)} | {cell} | {num_hf} |", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Compare models, then tokenizers."""
    config = parse(ConsumersConfig, arguments, description=ConsumersConfig.__doc__)
    for name in ("transformers", "ctranslate2"):
        if importlib.util.find_spec(name):
            print(f"{name} {importlib.metadata.version(name)}")
    for name in ("node-llama-cpp", "@huggingface/transformers"):
        package = config.node / "node_modules" / name / "package.json"
        print(f"{name} {json.loads(package.read_text())['version']}")
    with tempfile.TemporaryDirectory() as folder:
        compare_models(config.node, Path(folder))
        compare_types(config.node, Path(folder))
        compare_tokenizers(config.tokenizers, config.node, Path(folder))


if __name__ == "__main__":
    run_command(main)
