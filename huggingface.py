"""Export a run to a directory that transformers loads, or import one: out/<run>/ ↔ hf/<name>/.

python huggingface.py export out/NAME hf/NAME [--family NAME] [--gguf q8_0 | --adapter]
python huggingface.py import DIRECTORY_OR_HUB_NAME out/NAME [--tokenizer NAME] [--base out/BASE]
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from engine.core.cli import run_command, shell_command, warn
from engine.core.errors import UserError
from engine.core.files import atomic_directory, read_json, write_json
from engine.core.settings import check_flags, parse
from engine.data.chats.chat import chat_format
from engine.data.tokenizer import Tokenizer, from_document, load_tokenizer, named_tokenizer
from engine.data.tokenizer_config import read_chat_template, with_model_files
from engine.data.tokenizer_json import EXTENSION_KEY, token_ids_of, with_extension
from engine.huggingface import adapter, convert, directory
from engine.huggingface import gguf as gguf_file
from engine.huggingface.families import MODEL_FAMILIES, Family, unsupported_settings
from engine.nn.attention import CHECK_TOLERANCE, attention_difference
from engine.runs import checkpoint as checkpoints
from engine.runs.checkpoint import Checkpoint, RunState, load_model, write_tensors
from engine.runs.run_files import find_checkpoint, list_checkpoints
from engine.training.estimate import cached_meta_model
from model import ModelConfig


@dataclass(frozen=True)
class ExportConfig:
    """Export a run to a directory for transformers, and compare its results with the run's."""

    run: tyro.conf.Positional[Path]  # A run (its best checkpoint is used) or a checkpoint.
    out: tyro.conf.Positional[Path]  # The directory to create.
    family: Literal["auto", "qwen2", "llama", "qwen3", "mistral", "gpt2", "nanochat"] = "auto"
    """The model class to export as. auto: the first that supports the model."""
    dtype: Literal["float32", "bfloat16"] = "float32"  # Type of the weights in safetensors.
    gguf: Literal["f32", "f16", "bf16", "q8_0", "q4_0"] | None = None
    """Also write a GGUF file for llama.cpp, with most matrices in this type."""
    adapter: bool = False  # Write only the updates of a LoRA run, for PEFT.
    base: Path | None = None  # The base model of a LoRA run, if it was moved.
    force: bool = False  # Replace an earlier export.


@dataclass(frozen=True)
class ImportConfig:
    """Convert a model of transformers to a run folder, for sample.py and train.py --init-from."""

    source: tyro.conf.Positional[str]  # A directory, or a name on Hugging Face's hub.
    out: tyro.conf.Positional[Path]  # The run folder to create.
    tokenizer: str | None = None  # As for prepare.py. None: the model's own.
    base: Path | None = None  # For an adapter of PEFT: the run or import of its base model.
    force: bool = False  # Replace an earlier import.


def main(arguments: list[str] | None = None) -> None:
    """Export or import a model."""
    commands = (
        Annotated[ExportConfig, tyro.conf.subcommand("export")]
        | Annotated[ImportConfig, tyro.conf.subcommand("import")]
    )
    config = parse(commands, arguments, description="Export a run, or import a model.")
    if isinstance(config, ExportConfig):
        report = export_model(config)
        files = ", ".join(sorted(path.name for path in config.out.iterdir()))
        print(f"{config.out}: {files}\n{report}")
        loader = "peft.AutoPeftModel" if config.adapter else "transformers.AutoModel"
        print(f"Load it: {loader}ForCausalLM.from_pretrained({str(config.out)!r})")
    else:
        is_chat_model = import_model(config)
        chat_flag = ["--chat"] if is_chat_model else []
        sample = shell_command("python", "sample.py", config.out, *chat_flag)
        flags = ("--init-from", config.out, "--data", "data/NAME")
        finetune = shell_command("python", "train.py", "config/lora.toml", *flags)
        print(f"Try it: {sample}\nTrain it further: {finetune}")


@torch.no_grad()
def export_model(config: ExportConfig) -> str:
    """Export a run, and report how it compares with transformers.

    Raises UserError for a model that no family supports. After any error nothing is written.
    """
    directory.check_target(config.out, config.force)
    checkpoint = find_checkpoint(config.run, config.base)
    print(f"Step {checkpoint.step:,} of {config.run}:")
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    model = load_model(checkpoint)
    if model.config.attention == "loop" and attention_difference(model) > CHECK_TOLERANCE:
        problem = "no family computes attention as Head.attention in model.py does"
        raise UserError(f"{config.run}: {problem}. Use sample.py.")
    names = gguf_file.LLAMA_CPP_ACTIVATIONS if config.gguf else MODEL_FAMILIES
    family, model_config = choose_family(model.config, config.family, tokenizer, names)
    if config.adapter:
        return adapter.export_adapter(config.out, checkpoint, model.config.head_width, family)
    tensors = convert.to_hf(convert.rewrite_params(model, model_config), family)
    hf_config = convert.to_hf_config(model_config, family) | directory.special_token_ids(tokenizer)
    if config.gguf:
        gguf_file.check_supported(model_config, family, tokenizer)
    template = directory.chat_template(tokenizer, checkpoint.is_chat_model)
    name = config.out.resolve().name
    with atomic_directory(config.out) as path:
        write_tensors(path / "model.safetensors", tensors, {"format": "pt"})
        write_json(path / "config.json", hf_config)
        length = model_config.context_length
        directory.write_tokenizer(path, tokenizer, length, template)
        directory.write_card(path / "README.md", name, checkpoint.state, model.num_parameters)
        if config.gguf:
            file = path / f"{name}-{config.gguf}.gguf"
            gguf_file.write(file, hf_config, tensors, tokenizer, template, config.gguf)
        report = directory.compare_with_transformers(path, model, tokenizer, family)
        if config.dtype == "bfloat16":  # the comparison is exact only before rounding
            rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
            write_tensors(path / "model.safetensors", rounded, {"format": "pt"})
            dtypes = dict.fromkeys(("dtype", "torch_dtype"), config.dtype)
            write_json(path / "config.json", hf_config | dtypes)
        return report


def read_adapter_tokenizer(name: str | None, path: Path, base: Checkpoint) -> Tokenizer:
    """Return an adapter's tokenizer, chat template and sampling, or else its base model's.

    Raises UserError for one with other token ids.
    """
    file = path / "tokenizer.json"
    name = name or (str(file) if file.is_file() else None)
    base_tokenizer = load_tokenizer(base.path / "tokenizer.json")
    tokenizer = named_tokenizer(name) if name else base_tokenizer
    ids = token_ids_of(tokenizer.document).items()
    has_ids = token_ids_of(base_tokenizer.document).items() <= ids
    if not has_ids or tokenizer.vocab_size > base.state.model.vocab_size:
        fix = f"Use those of the base model: --tokenizer {shell_command(base.path)}"
        raise UserError(f"{name}: its token ids are not those of the base model. {fix}")
    values = base_tokenizer.document["model"].get(EXTENSION_KEY, {})
    values = values | tokenizer.document["model"].get(EXTENSION_KEY, {})
    document = with_extension(tokenizer.document, **values)
    tokenizer = from_document(with_model_files(document, path))
    tokenizer.folder = path
    return tokenizer


def read_model(
    config: ImportConfig, path: Path
) -> tuple[Family, RunState, convert.Tensors, Tokenizer]:
    """Read a model of transformers."""
    check_flags([("--base", config.base, False, f"an adapter of PEFT (got {path})")])
    source = str(path / "config.json")
    family, model_config = convert.from_hf_config(read_json(path / "config.json"), source)
    tensors = directory.read_tensors(path, convert.rewrite_config(model_config, family), family)
    if model_config.tie_embeddings and convert.has_own_head(tensors, family):
        warn(f"{source}: tie_word_embeddings is true, but lm_head.weight differs: not tied")
    tokenizer = directory.read_tokenizer(path, config.tokenizer)
    num_rows = len(tensors[f"{family.modules['token_embedding']}.weight"])
    if tokenizer.vocab_size > num_rows:
        sizes = f"got {tokenizer.vocab_size:,} tokens, the model has {num_rows:,}"
        fix = f"Give that of the model, or call its resize_token_embeddings({tokenizer.vocab_size})"
        name = "--tokenizer" if config.tokenizer else path / "tokenizer.json"
        raise UserError(f"{name}: must fit the model's embeddings ({sizes}). {fix}.")
    examples: Literal["chats"] | None = "chats" if read_chat_template(path) else None
    return family, RunState(model_config, examples=examples), tensors, tokenizer


def read_adapter(
    config: ImportConfig, path: Path
) -> tuple[Family, RunState, convert.Tensors, Tokenizer]:
    """Read an adapter of PEFT, merged into its base model."""
    hf_config = adapter.read_config(path)
    name = hf_config.get("base_model_name_or_path")
    if config.base is None:
        problem = f"is an adapter of {name or 'another model'}"
        raise UserError(f"{path}: {problem}. Import that, and name the import with --base.")
    base = find_checkpoint(config.base)
    if name and base.state.imported not in (name, str(Path(name).resolve())):
        warn(f"{path}: its base model is {name}, and {config.base} was not imported from that")
    tokenizer = read_adapter_tokenizer(config.tokenizer, path, base)
    model = load_model(base)
    family, model_config = choose_family(model.config, "auto", tokenizer)
    # In PEFT, a tied embedding and head are adapted alone, but merged together.
    is_tied = model_config.tie_embeddings and bool(hf_config.get("ensure_weight_tying"))
    peft_config = replace(model_config, tie_embeddings=is_tied)
    tensors = convert.to_hf(convert.rewrite_params(model, peft_config), family)
    tensors = adapter.merge_adapter(path, peft_config, family, tensors)
    examples = "chats" if read_chat_template(path) else base.state.examples
    return family, RunState(model_config, examples=examples), tensors, tokenizer


def import_model(config: ImportConfig) -> bool:
    """Import a model, and return whether one can chat with it.

    Raises UserError, before anything is written, for an unsupported one.
    """
    target = config.out / "checkpoints" / "step-00000000"
    if paths := list_checkpoints(config.out):
        is_import = (
            paths == [target]
            and checkpoints.read_state(target).imported is not None
            and not checkpoints.adapters_file(target).exists()
        )
        advice = "Add --force to replace it, or choose" if is_import else "Choose"
        if not (config.force and is_import):
            raise UserError(f"{config.out}: already has checkpoints. {advice} another folder.")
    path = directory.find_directory(config.source)
    is_adapter = (path / adapter.CONFIG_FILE).is_file()
    family, state, tensors, tokenizer = (read_adapter if is_adapter else read_model)(config, path)
    is_tied = state.model.tie_embeddings and not convert.has_own_head(tensors, family)
    model_config = replace(state.model, tie_embeddings=is_tied)
    names = dict(cached_meta_model(model_config).named_parameters())
    params = convert.from_hf(tensors, names, family)
    imported = str(path.resolve()) if Path(config.source).is_dir() else config.source
    state = replace(state, model=model_config, imported=imported)
    if tokenizer.sampling:
        values = ", ".join(f"{name} {value:g}" for name, value in tokenizer.sampling.items())
        print(f"Its defaults of sampling: {values}")
    checkpoints.write_checkpoint(target, state, params, {}, tokenizer.save)
    try:
        chat_format(tokenizer)
    except UserError as error:
        warn(f"{error}")
        return False
    return state.examples == "chats"


def choose_family(
    config: ModelConfig, name: str, tokenizer: Tokenizer, names: Iterable[str] = MODEL_FAMILIES
) -> tuple[Family, ModelConfig]:
    """Return the family to export as, by default one of the names, and the config rewritten for it.

    Raises UserError, naming every unsupported setting, if there is none.
    """
    families = MODEL_FAMILIES.items()
    configs = {key: convert.rewrite_config(config, family) for key, family in families}
    unsupported = {key: unsupported_settings(configs[key], family) for key, family in families}
    unsupported["qwen2"] += directory.differences_from_qwen2(tokenizer)
    supporting = [key for key in names if not unsupported[key]]
    if name == "auto":
        name = min(names, key=lambda key: len(unsupported[key]))
    if unsupported[name]:
        fix = f"Use --family {supporting[0]}." if supporting else "Train without them to export."
        raise UserError(f"--family {name}: unsupported {', '.join(unsupported[name])}. {fix}")
    return MODEL_FAMILIES[name], configs[name]


if __name__ == "__main__":
    run_command(main)
