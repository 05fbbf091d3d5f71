"""Directories as Hugging Face's libraries read and write them: their settings, weights, tokenizer, card."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from torch import Tensor, nn

from engine.core.errors import UserError
from engine.core.files import inside, read_json, write_json
from engine.data.chat import CHATML, end_of_turn
from engine.data.dataset import Examples
from engine.data.huggingface_tokenizer import from_huggingface, to_huggingface
from engine.data.mixture import as_paths, open_mixture
from engine.data.tokenizer import Tokenizer

CHECKED, LONGEST_CHECKED = 4, 1024  # pieces of text on which an export is compared, and their tokens at most
TOLERANCE = 1e-4  # of the largest logit
# Jinja templates of chats as engine/data/chat.py encodes them, without ChatML's tokens and with them.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHATML_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CARD = """---
license: {unknown}
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A language model with {parameters:,} parameters, trained from {data}.

- Validation loss: {loss}
- Trained on: {tokens:,} tokens in {step:,} steps, {seconds:,.0f} s
- License of the weights: {unknown}
- License and source of the text: {unknown}
- What it is for, and what it must not be used for: {unknown}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = AutoTokenizer.from_pretrained("{name}"), AutoModelForCausalLM.from_pretrained("{name}")
```

All settings:

```json
{settings}
```
"""


def find_directory(source: str) -> Path:
    """The directory, or a copy of the model of that name on Hugging Face's hub, downloaded once.

    Raises UserError if it is not there.
    """
    if Path(source).is_dir():
        return Path(source)
    if source.count("/") != 1 or source.startswith((".", "/", "~")):
        raise UserError(f"{source} is no directory, nor a name on Hugging Face's hub, such as openai-community/gpt2")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # whatever the network, its libraries or the hub may raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        advice = "check the name and the connection, or give a directory"
        raise UserError(f"{source} could not be downloaded ({reason}); {advice}") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises UserError if there is none."""
    if not path.is_file():
        raise UserError(f"{path.parent} has no {path.name}; give a directory that transformers could load")
    found = read_json(path)
    if not isinstance(found, dict):
        raise UserError(f"{path} is damaged: it holds no settings")
    return found


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """All tensors of a model's safetensors. Raises UserError if they are damaged, or only pickled."""
    index = directory / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        weights = read_object(index).get("weight_map")
        if not isinstance(weights, dict) or not weights:
            raise UserError(f"{index} is damaged: it has no weight_map")
        names = sorted({inside(directory, name).name for name in weights.values()})
    found: dict[str, Tensor] = {}
    for path in (directory / name for name in names):
        if not path.is_file():
            pickled = [file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern)]
            held = f"; {pickled[0]} is pickled, and a pickle can run anything" if pickled else ""
            convert = "AutoModelForCausalLM.from_pretrained(…).save_pretrained(…)"
            advice = f"if you trust it, convert it with transformers: {convert}" if pickled else "give one that has"
            raise UserError(f"{directory} has no {path.name}{held}; {advice}")
        try:
            with safetensors.safe_open(path, "pt") as file:
                found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except safetensors.SafetensorError as error:
            raise UserError(f"{path} is damaged ({error})") from None
    if odd := [name for name, tensor in found.items() if not tensor.is_floating_point() and "attn." not in name]:
        raise UserError(f"{directory}: {odd[0]} is {found[odd[0]].dtype}; quantised weights can't be read here")
    return found


def read_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model. Raises UserError if there is none, or of a kind that can't be had here."""
    if not (directory / "tokenizer.json").is_file():
        raise UserError(f"{directory} has no tokenizer.json; give the tokenizer that it was trained with: --tokenizer")
    said = read_object(directory / "tokenizer_config.json") if (directory / "tokenizer_config.json").is_file() else {}
    end, template = said.get("eos_token"), read_template(directory)
    end = end.get("content") if isinstance(end, dict) else end
    template = None if template in (PLAIN_TEMPLATE, CHATML_TEMPLATE) else template
    return from_huggingface(read_object(directory / "tokenizer.json"), end, template)


def read_template(directory: Path) -> str | None:
    """The template of a model's chats, which is never run here; None if it has none."""
    if (directory / "chat_template.jinja").is_file():
        return (directory / "chat_template.jinja").read_text(encoding="utf-8")
    config = directory / "tokenizer_config.json"
    found = read_object(config).get("chat_template") if config.is_file() else None
    return found if isinstance(found, str) else None


def token_ids(tokenizer: Tokenizer) -> dict[str, int | None]:
    """What a configuration says of special tokens: each family has defaults of its own, which would be wrong."""
    return {"bos_token_id": tokenizer.end_of_text, "eos_token_id": tokenizer.end_of_text, "pad_token_id": None}


def chat_template(tokenizer: Tokenizer, talks: bool) -> str | None:
    """How chats become text: as an imported tokenizer says, or for a model that talks as they are learned here."""
    learned = CHATML_TEMPLATE if tokenizer.special_tokens.keys() >= {*CHATML} else PLAIN_TEMPLATE
    return tokenizer.chat_template or (learned if talks else None)


def write_tokenizer(directory: Path, tokenizer: Tokenizer, context_length: int, template: str | None) -> None:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json."""
    to_huggingface(tokenizer).save(str(directory / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context_length}
    said |= {"clean_up_tokenization_spaces": False} | ({"chat_template": template} if template else {})
    if tokenizer.end_of_text is not None:
        said |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), tokenizer.end_name)
    write_json(directory / "tokenizer_config.json", said)
    turn = end_of_turn(tokenizer) if template else None
    ends = [token for token in (tokenizer.end_of_text, turn) if token is not None]
    choice = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}
    write_json(directory / "generation_config.json", choice | token_ids(tokenizer) | {"eos_token_id": ends or None})


def write_card(path: Path, name: str, state: dict[str, Any], parameters: int) -> None:
    """Write a model card, with what is known; what only a person knows is left to fill in."""
    settings, loss = state["settings"], state.get("val_loss")
    data = settings.get("data") or state.get("imported") or "noise"
    data = ", ".join(map(str, data)) if isinstance(data, list) else data
    said = {"name": name, "parameters": parameters, "data": data, "unknown": "FILL IN", "step": state["step"]}
    said |= {"loss": "not known" if loss is None else f"{loss:.4f} nats per token", "tokens": state.get("tokens", 0)}
    said |= {"seconds": state["elapsed_seconds"], "settings": json.dumps(settings | state["model"], indent=1)}
    path.write_text(CARD.format_map(said), encoding="utf-8")


def held_out(tokenizer: Tokenizer, state: dict[str, Any], length: int) -> tuple[list[int], str]:
    """So many tokens of the validation split that the model was measured on, or if that is gone random ones."""
    try:
        mixture = open_mixture(as_paths(state["settings"]["data"]))
        if mixture.sha256 == state["data_sha256"]:
            dataset = mixture.datasets[0]
            ids = (dataset.val.tokens if isinstance(dataset.val, Examples) else dataset.val)[:length].astype(np.int64)
            return np.where(ids < 0, ~ids, ids).tolist(), f"{dataset.path}'s validation split"
    except (KeyError, TypeError, ValueError):
        pass
    used = sorted({*range(tokenizer.vocab_size)} - {*tokenizer.unused_ids()})
    return np.random.default_rng(0).choice(used, length).tolist(), "random ones, as the validation split is not there"


@torch.no_grad()
def check(directory: Path, model: nn.Module, tokenizer: Tokenizer, state: dict[str, Any]) -> str:
    """What transformers makes of a directory, compared with ours. Raises UserError if it differs."""
    if not importlib.util.find_spec("transformers"):
        return "Not checked: transformers is not installed (pip install transformers)"
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    words = transformers.AutoTokenizer.from_pretrained(directory)
    length = min(model.config.context_length, LONGEST_CHECKED)
    ids, source = held_out(tokenizer, state, CHECKED * length)
    special = {*tokenizer.special_tokens.values()}
    text = tokenizer.decode([token for token in ids if token not in special])
    theirs_of_text = words.encode(text, add_special_tokens=False, split_special_tokens=True)
    if theirs_of_text != tokenizer.encode(text).tolist():
        raise UserError(f"transformers makes other token ids of {source}; this is a defect: please report it")
    furthest, largest = 0.0, 0.0
    for start in range(0, len(ids), length):
        tokens = torch.tensor([ids[start : start + length]])
        ours, found = model(tokens), theirs(tokens).logits
        furthest, largest = max(furthest, (ours - found).abs().max().item()), max(largest, ours.abs().max().item())
    if not furthest <= TOLERANCE * max(1.0, largest):
        raise UserError(f"transformers' logits differ by up to {furthest:.2g}; this is a defect: please report it")
    compared = f"on {len(ids):,} tokens ({source}) the logits differ by at most {furthest:.1g} of {largest:.3g}"
    return f"Checked with transformers {transformers.__version__}: {compared}, and the token ids not at all"
