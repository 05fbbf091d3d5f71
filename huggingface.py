"""Export a run to a directory that transformers loads, or import one: out/<run>/ ↔ hf/<name>/.

python huggingface.py export out/NAME hf/NAME [--family NAME] [--gguf q8_0 | --adapter]
python huggingface.py import DIRECTORY_OR_HUB_NAME out/NAME [--tokenizer NAME | --base out/BASE]
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from engine.core.cli import run_command, shell_command, warn
from engine.core.errors import UserError
from engine.core.files import atomic_directory, read_json, write_json
from engine.core.settings import parse
from engine.data.chats.chat import chat_format
from engine.data.tokenizer import Tokenizer, from_document, load_tokenizer, named_tokenizer
from engine.data.tokenizer_config import read_chat_templates
from engine.data.tokenizer_json import EXTENSION_KEY, token_ids_of, with_extension
from engine.data.tokenizer_training import pre_tokenizer_name
from engine.huggingface import adapter, convert, directory
from engine.huggingface import gguf as gguf_file
from engine.huggingface.families import MODEL_FAMILIES, Family, unsupported_settings
from engine.nn.attention import CHECK_TOLERANCE, attention_difference
from engine.nn.lora import TOKEN_PARAMETERS
from engine.nn.positions import FREQUENCY_BASE, sinusoids
from engine.runs.checkpoint import Checkpoint, RunState, load_model, write_checkpoint, write_tensors
from engine.runs.run_files import find_checkpoint, list_checkpoints
from engine.training.estimate import cached_meta_model
from model import GPT, ModelConfig


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
    family, model_config = choose_family(model.config, config.family, tokenizer)
    if config.adapter:
        return adapter.export_adapter(config.out, checkpoint, model.config.head_width, family)
    tensors = convert.to_hf(rewrite_params(model, model_config), family)
    hf_config = convert.to_hf_config(model_config, family) | directory.special_token_ids(tokenizer)
    if config.gguf:
        gguf_file.check_supported(hf_config, tokenizer)
    template = directory.chat_template(tokenizer, checkpoint.is_chat_model)
    name = config.out.resolve().name
    with atomic_directory(config.out) as path:
        write_tensors(path / "model.safetensors", tensors, {"format": "pt"})
        write_json(path / "config.json", hf_config)
        directory.write_tokenizer(path, tokenizer, model_config.context_length, template)
        directory.write_card(path / "README.md", name, checkpoint.state, model.num_parameters)
        if config.gguf:
            file = path / f"{name}-{config.gguf}.gguf"
            gguf_file.write(file, hf_config, tensors, tokenizer, template, config.gguf)
        report = directory.compare_with_transformers(path, model, tokenizer)
        if config.dtype == "bfloat16":  # the comparison is exact only before rounding
            rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
            write_tensors(path / "model.safetensors", rounded, {"format": "pt"})
            dtypes = dict.fromkeys(("dtype", "torch_dtype"), config.dtype)
            write_json(path / "config.json", hf_config | dtypes)
        return report


def import_adapter(config: ImportConfig, path: Path, imported: str) -> bool:
    """Import an adapter of PEFT onto its base model, and return whether one can chat with it."""
    settings = adapter.read_settings(path)
    name = settings.base_model_name_or_path
    if config.base is None:
        problem = f"is an adapter of {name or 'another model'}"
        raise UserError(f"{path}: {problem}. Import that, and name the import with --base.")
    base = find_checkpoint(config.base)
    if name and base.state.imported not in (name, str(Path(name).resolve())):
        warn(f"{path}: its base model is {name}, and {config.base} was not imported from that")
    model_config = base.state.model
    tokenizer = read_adapter_tokenizer(config.tokenizer, path, base)
    family, hf_config = choose_family(model_config, "auto", tokenizer)
    params = adapter.read_adapter(path, settings, model_config, family)
    token_params = params.keys() & TOKEN_PARAMETERS
    if token_params and (model_config.scale_embeddings or model_config.norm != hf_config.norm):
        problem = f"{path}: its embeddings need a base model that was imported (got {base.path})"
        raise UserError(f"{problem}. Export that, import the export, and name it with --base.")
    if token_params and model_config.tie_embeddings:  # in PEFT, each has its own copy
        model_config = replace(model_config, tie_embeddings=False)
        params.setdefault("head.weight", dict(base.merged_model())["token_embedding.weight"])
    state = RunState(
        model_config,
        imported=imported,
        examples="chats" if read_chat_templates(path) else base.state.examples,
        base=base.reference(config.out),
        is_modified=base.state.is_modified,
    )
    return write_import(config.out, state, params, tokenizer)


def read_adapter_tokenizer(name: str | None, path: Path, base: Checkpoint) -> Tokenizer:
    """Return an adapter's tokenizer and chat template, or its base model's where it has none.

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
    if templates := read_chat_templates(path):
        values["chat_template"] = templates.pop("default", None)
        values["other_templates"] = json.dumps(templates) if templates else None
    tokenizer = from_document(with_extension(tokenizer.document, **values))
    tokenizer.folder = path
    return tokenizer


def import_model(config: ImportConfig) -> bool:
    """Import a model, and return whether one can chat with it.

    Raises UserError, before anything is written, for an unsupported one.
    """
    if list_checkpoints(config.out):
        raise UserError(f"{config.out}: already has checkpoints. Choose another folder.")
    path = directory.find_directory(config.source)
    imported = str(path.resolve()) if Path(config.source).is_dir() else config.source
    if (path / adapter.CONFIG_FILE).is_file():
        return import_adapter(config, path, imported)
    if config.base:
        raise UserError(f"--base: is for adapters of PEFT, and {path} has none. Leave it out.")
    source = str(path / "config.json")
    fix = "Give the directory of its config.json, in transformers' layout"
    directory.check_exists(path / "config.json", fix)
    family, model_config = convert.from_hf_config(read_json(path / "config.json"), source)
    tensors = convert.read_names(directory.read_tensors(path), family, str(path))
    if model_config.tie_embeddings and convert.has_own_head(tensors, family):
        warn(f"{source}: tie_word_embeddings is true, but lm_head.weight differs: not tied")
        model_config = replace(model_config, tie_embeddings=False)
    if model_config.num_layers > len(tensors):
        got = f"got {len(tensors)} for {model_config.num_layers:,} layers"
        raise UserError(f"{source}: each layer must have tensors ({got}).")
    name = config.tokenizer
    tokenizer = named_tokenizer(name) if name else directory.read_tokenizer(path)
    model = cached_meta_model(model_config)
    num_rows = len(model.token_embedding.weight)
    if tokenizer.vocab_size > num_rows:
        sizes = f"got {tokenizer.vocab_size:,} tokens, the model has {num_rows:,}"
        fix = f"Give that of the model, or call its resize_token_embeddings({tokenizer.vocab_size})"
        tokenizer_name = "--tokenizer" if name else path / "tokenizer.json"
        raise UserError(f"{tokenizer_name}: must fit the model's embeddings ({sizes}). {fix}.")
    if pre_tokenizer_name(tokenizer) is None:
        warn(f"--gguf will not write its {tokenizer.kind} tokenizer: {gguf_file.OTHER_CONVERTER}")
    params = convert.from_hf(tensors, dict(model.named_parameters()), family, str(path))
    examples: Literal["chats"] | None = "chats" if read_chat_templates(path) else None
    state = RunState(model_config, imported=imported, examples=examples)
    return write_import(config.out, state, params, tokenizer)


def write_import(out: Path, state: RunState, params: convert.Tensors, tokenizer: Tokenizer) -> bool:
    """Write the checkpoint of an import, and return whether one can chat with it."""
    path = out / "checkpoints" / "step-00000000"
    write_checkpoint(path, state, params, {}, tokenizer.save)
    try:
        chat_format(tokenizer)
    except UserError as error:
        warn(f"{error}")
        return False
    return state.examples == "chats"


def choose_family(
    config: ModelConfig, name: str, tokenizer: Tokenizer
) -> tuple[Family, ModelConfig]:
    """Return the family to export as, and the config rewritten for it.

    Raises UserError, naming every unsupported setting, if there is none.
    """
    families = MODEL_FAMILIES.items()
    configs = {key: rewrite_config(config, family) for key, family in families}
    unsupported = {key: unsupported_settings(configs[key], family) for key, family in families}
    if not directory.is_qwen2_tokenizer(tokenizer):
        unsupported["qwen2"].append(f"{tokenizer.kind} tokenizer (supported: Qwen2's)")
    supporting = [key for key in MODEL_FAMILIES if not unsupported[key]]
    if name == "auto":
        name = min(MODEL_FAMILIES, key=lambda key: len(unsupported[key]))
    if unsupported[name]:
        fix = f"Use --family {supporting[0]}." if supporting else "Train without them to export."
        raise UserError(f"--family {name}: unsupported {', '.join(unsupported[name])}. {fix}")
    return MODEL_FAMILIES[name], configs[name]


def rewrite_config(config: ModelConfig, family: Family) -> ModelConfig:
    """Return an equivalent config without None, in settings of the family where possible."""
    supports = family.supported_values()
    changes: dict[str, Any] = {
        "attention": "fused",
        "scale_embeddings": False,
        "rope_base": config.rope_base or FREQUENCY_BASE,
        "num_kv_heads": config.num_groups,
        "head_dim": config.head_width,
        "d_ff": config.feed_forward_width,
        "norm_epsilon": config.epsilon,
    }
    if config.norm == "rmsnorm" and "weighted_rmsnorm" in supports["norm"]:
        changes["norm"] = "weighted_rmsnorm"
    if config.position == "sinusoidal" and "learned" in supports["position"]:
        changes["position"] = "learned"
    if config.scale_embeddings and config.tie_embeddings and "rmsnorm" not in supports["norm"]:
        changes["tie_embeddings"] = False  # the head is not scaled
    if supports.get("bias") == (True,) or (config.qkv_bias and "bias" not in supports):
        changes["bias"] = True
    if config.bias or changes.get("bias"):
        changes["qkv_bias"] = False  # bias includes it
    return replace(config, **changes)


def rewrite_params(model: GPT, config: ModelConfig) -> convert.Tensors:
    """Compute the parameters that give the same logits under the rewritten config."""
    params: convert.Tensors = dict(model.named_parameters())
    embedding = params["token_embedding.weight"]
    if model.config.scale_embeddings:
        params["token_embedding.weight"] = embedding * math.sqrt(config.d_model)
    if model.config.norm != config.norm:  # rmsnorm becomes weighted_rmsnorm
        params["token_embedding.weight"] = model.embedding_norm(params["token_embedding.weight"])
    if model.config.position != config.position:
        positions = torch.arange(config.context_length)
        params["position_embedding.weight"] = sinusoids(positions, config.d_model)
    if model.config.tie_embeddings != config.tie_embeddings:
        params["head.weight"] = embedding
    neutral = {  # norm weights of 1 and biases of 0 change nothing
        name: torch.full(param.shape, float(name.endswith("norm.weight")))
        for name, param in cached_meta_model(config).named_parameters()
    }
    return neutral | params


if __name__ == "__main__":
    run_command(main)
