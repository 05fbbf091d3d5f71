"""Take a model to Hugging Face's form, or bring one from there: out/<run>/ ↔ model directories.

python huggingface.py export out/NAME hf/NAME [--family NAME] [--gguf f32]
python huggingface.py import DIRECTORY_OR_HUB_NAME out/NAME [--tokenizer NAME]
"""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import safetensors.torch
import torch
import tyro

from engine.core.cli import run_command
from engine.core.errors import UserError
from engine.core.files import new_directory, write_json
from engine.core.settings import from_values, parse
from engine.data.tokenizer import load_tokenizer, named_tokenizer
from engine.huggingface import directory as hub
from engine.huggingface import families
from engine.huggingface import gguf as gguf_file
from engine.huggingface.families import (
    FAMILIES,
    Family,
    Tensors,
    configuration,
    obstacles,
    read_configuration,
    renamed,
    restored,
)
from engine.training.checkpoint import load_model, write_checkpoint
from engine.training.run_dir import find_checkpoint
from model import BASE, GPT, ModelConfig


@dataclass(frozen=True)
class ExportConfig:
    """Write a run's best checkpoint as a directory that transformers loads, and check that it computes the same."""

    run: tyro.conf.Positional[Path]  # A run folder, for its best checkpoint, or a checkpoint's own folder.
    out: tyro.conf.Positional[Path]  # The directory to make.
    family: Literal["auto", *FAMILIES] = "auto"
    """The kind of model to write it as; auto: of those that can hold it the one that most programs run."""
    gguf: Literal["f32", "bf16"] | None = None  # Also write a GGUF file, for llama.cpp, in this dtype.


@dataclass(frozen=True)
class ImportConfig:
    """Bring a model that transformers could load into a run folder, for sample.py and train.py --init-from."""

    source: tyro.conf.Positional[str]  # A directory, or a name on Hugging Face's hub.
    out: tyro.conf.Positional[Path]  # The run folder to make.
    tokenizer: str | None = None  # A tokenizer's name, as prepare.py takes it; None: the model's own.


def main(arguments: list[str] | None = None) -> None:
    """Export or import as the command line says."""
    commands = (
        Annotated[ExportConfig, tyro.conf.subcommand("export")]
        | Annotated[ImportConfig, tyro.conf.subcommand("import")]
    )
    config = parse(commands, arguments)
    if isinstance(config, ImportConfig):
        import_model(config)
        print(f"Write with it: python sample.py {config.out}")
        print(f"Train it further: python train.py config/finetune.toml --init-from {config.out} --data data/NAME")
        return
    export_model(config)
    print(f'Load it: transformers.AutoModelForCausalLM.from_pretrained("{config.out}")')


def export_model(config: ExportConfig) -> None:
    """Export. Raises UserError for what no family holds; until the end nothing is there, and then all."""
    if config.out.exists() and (not config.out.is_dir() or any(config.out.iterdir())):
        raise UserError(f"{config.out} is there already; remove it, or choose another directory")
    found = find_checkpoint(config.run)
    tokenizer, model = load_tokenizer(found.path / "tokenizer.json"), load_model(found, ModelConfig, GPT)
    family, shape = choose_family(model.config, config.family)
    settings = configuration(shape, family) | hub.token_ids(tokenizer)
    if config.gguf:
        gguf_file.check(settings, tokenizer)
    with new_directory(config.out) as directory, torch.no_grad():
        tensors = renamed(folded(model, shape), family)
        safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
        write_json(directory / "config.json", settings)
        template = hub.chat_template(tokenizer, found.talks)
        hub.write_tokenizer(directory, tokenizer, shape.context_length, template)
        hub.write_card(directory / "README.md", config.out.resolve().name, found.state, model.num_parameters)
        if config.gguf:
            file = directory / f"{config.out.resolve().name}-{config.gguf}.gguf"
            gguf_file.write(file, settings, tensors, tokenizer, template, config.gguf)
        print(hub.check(directory, model, tokenizer, found.state))


def import_model(config: ImportConfig) -> None:
    """Import. Raises UserError naming what can't be held here; nothing is written then."""
    if (config.out / "checkpoints").exists():
        raise UserError(f"{config.out} already holds checkpoints; choose another folder")
    directory = hub.find_directory(config.source)
    source = str(directory / "config.json")
    said = hub.read_object(directory / "config.json")
    family, settings = read_configuration(said, source)
    layers = from_values(ModelConfig, settings, source).num_layers  # a number, so far what the file said
    settings["windows"] = families.read_windows(said, family, layers, source)
    shape, tensors = from_values(ModelConfig, settings, source), hub.read_tensors(directory)
    if shape.num_layers > len(tensors):
        raise UserError(f"{source}: {shape.num_layers:,} layers can't be made of {len(tensors)} tensors")
    tokenizer = named_tokenizer(config.tokenizer) if config.tokenizer else hub.read_tokenizer(directory)
    if tokenizer.vocab_size > shape.vocab_size:
        sizes = f"{tokenizer.vocab_size:,} tokens, but the model only {shape.vocab_size:,}"
        raise UserError(f"the tokenizer of {config.tokenizer or directory} has {sizes}; give --tokenizer NAME")
    sizes = {name: parameter.shape for name, parameter in blank_model(shape).named_parameters()}
    tensors = restored(tensors, sizes, family, str(directory))
    state = {"step": 0, "model": asdict(shape), "settings": {}, "documents": 2, "elapsed_seconds": 0.0}
    state |= {"best_val_loss": None, "val_loss": None, "data_sha256": "", "imported": config.source}
    state |= {"examples": "chats" if hub.read_template(directory) else None}
    write_checkpoint(config.out / "checkpoints" / "step-00000000", state, tensors, {}, tokenizer.save)


def held(config: ModelConfig, family: Family) -> ModelConfig:
    """The same function in the family's words, with every setting said; some may still be what it can't hold."""
    holds, changes = family.holds, {"scale_embeddings": False, "rope_base": config.rope_base or BASE}
    changes |= {"num_kv_heads": config.num_groups, "head_dim": config.head_width, "d_ff": config.feed_forward_width}
    changes |= {"norm_epsilon": config.epsilon}
    if config.norm == "rmsnorm" and "weighted_rmsnorm" in holds["norm"]:  # its weights are 1
        changes["norm"] = "weighted_rmsnorm"
    if config.position == "sinusoidal" and "learned" in holds["position"]:  # they become the table
        changes["position"] = "learned"
    if config.scale_embeddings and config.tie_embeddings and holds["norm"] != ("rmsnorm",):  # the head is not scaled
        changes["tie_embeddings"] = False
    if holds.get("bias") == (True,):  # those that are missing are 0
        changes["bias"] = True
    return replace(config, **changes, **({} if "dropout" in family.settings else {"dropout": 0.0}))


def choose_family(config: ModelConfig, asked: str) -> tuple[Family, ModelConfig]:
    """The family asked for, or the first that holds the model; and the model in its words. ValueError if none does."""
    shapes = {name: held(config, family) for name, family in FAMILIES.items()}
    missed = {name: obstacles(shapes[name], family) for name, family in FAMILIES.items()}
    able = [name for name in FAMILIES if not missed[name]]
    name = asked if asked != "auto" else able[0] if able else min(missed, key=lambda one: len(missed[one]))
    if missed[name]:
        advice = f"take --family {able[0]}" if able else f"no family does; {name} comes nearest: train without"
        raise UserError(f"{name} can't hold {', '.join(missed[name])}; {advice}")
    return FAMILIES[name], shapes[name]


def folded(model: GPT, shape: ModelConfig) -> Tensors:
    """The model's parameters in the form that :func:`held` gave its shape: the same function."""
    given, config = dict(model.named_parameters()), model.config
    embedding = given["token_embedding.weight"]
    if config.scale_embeddings:
        given["token_embedding.weight"] = embedding * math.sqrt(config.d_model)
    if config.norm == "rmsnorm" != shape.norm:
        given["token_embedding.weight"] = model.embedding_norm(given["token_embedding.weight"])
    if config.position != shape.position:
        given["position_embedding.weight"] = model.positions(0, config.context_length)
    if config.tie_embeddings != shape.tie_embeddings:
        given["head.weight"] = embedding
    blank = blank_model(shape)
    values = {name: torch.full(p.shape, blank.rules[name].mean) for name, p in blank.named_parameters()}
    return {name: given.get(name, value) for name, value in values.items()}


def blank_model(shape: ModelConfig) -> GPT:
    """A model without values, for the names and shapes of its parameters."""
    with torch.device("meta"):
        return GPT(shape)


if __name__ == "__main__":
    run_command(main)
