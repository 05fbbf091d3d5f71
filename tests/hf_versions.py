"""Check that exports of every family compute the same in other versions of transformers.

python tests/hf_versions.py PYTHON …

Each PYTHON is of a virtual environment with torch and another version of transformers, such as
4.57. It loads exports that this environment makes, saves them, and loads them again.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

CHECK_FLAG = "--check"
MAX_RELATIVE_ERROR = 1e-4
MAX_RELATIVE_ERROR_BF16 = 0.1
LLAMA = {"qk_norm": False, "norm": "weighted_rmsnorm", "rope_base": 5e5, "num_kv_heads": 1}
LEARNED = {"position": "learned", "norm": "layernorm", "activation": "gelu", "qk_norm": False}
EXPORTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-bfloat16": LLAMA,
    "llama-linear": LLAMA | {"rope_scaling": (2.0,)},
    "llama-llama3": LLAMA | {"rope_scaling": (8.0, 1.0, 4.0, 16.0)},
    "qwen2": LLAMA | {"qkv_bias": True, "windows": (0, 5)},
    "qwen3": {"rope_base": 5e5, "head_dim": 12, "windows": (5, 0)},
    "mistral": LLAMA | {"windows": (7,)},
    "gpt2": LEARNED | {"bias": True, "tie_embeddings": True},
    "nanochat": {"activation": "relu2", "logit_softcap": 9.0, "rope_base": 5e5},
}


@torch.no_grad()
def make_exports(folder: Path) -> None:
    """Export a model of each kind, and write the logits and token ids that are expected."""
    import dataclasses

    from helpers import SMALL, random_model
    from test_huggingface import qwen2_tokenizer, save_run

    import huggingface

    tokenizer = qwen2_tokenizer()
    text = "7 is followed by 8."
    end = tokenizer.end_of_text
    ids = torch.tensor([[*tokenizer.encode(text).tolist(), end]])
    for name, settings in EXPORTS.items():
        config = dataclasses.replace(SMALL, vocab_size=400, context_length=64, **settings)
        model = random_model(config)
        run = save_run(model, folder / f"{name}-run", tokenizer, "chats")
        family, _, dtype = name.partition("-")
        flags = ["--family", family, "--dtype", dtype if dtype == "bfloat16" else "float32"]
        huggingface.main(["export", str(run), str(folder / name), *flags])
        expected = {"ids": ids, "logits": model(ids)}
        safetensors.torch.save_file(expected, folder / f"{name}.safetensors", {"text": text})


@torch.no_grad()
def check_exports(folder: Path) -> list[str]:
    """Load every export with this transformers, and return the names of those that it has."""
    names = []
    for name in EXPORTS:
        with safetensors.safe_open(folder / f"{name}.safetensors", "pt") as file:
            text = file.metadata()["text"]
            ids = file.get_tensor("ids")
            logits = file.get_tensor("logits")
        config = json.loads((folder / name / "config.json").read_text())
        if not hasattr(transformers, config["architectures"][0]):  # nanochat, before 5.0
            continue
        names.append(name)
        dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
        tolerance = MAX_RELATIVE_ERROR if dtype == torch.float32 else MAX_RELATIVE_ERROR_BF16
        saved_name = f"{name}-saved-by-{transformers.__version__}"
        for path in (folder / name, folder / saved_name):
            load = transformers.AutoModelForCausalLM.from_pretrained
            model, report = load(path, dtype="auto", output_loading_info=True)
            assert not any(report.values()), f"{path}: {report}"
            assert model.dtype == dtype, f"{path}: {model.dtype}"
            error = (model.eval()(ids).logits - logits).abs().max()
            assert error <= tolerance * logits.abs().max(), f"{path}: logits differ by {error}"
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
            end = tokenizer.eos_token
            assert tokenizer(text + end)["input_ids"] == ids[0].tolist(), path
            assert tokenizer.pad_token is None, path
            assert model.config.pad_token_id is model.generation_config.pad_token_id is None, path
            assert tokenizer.apply_chat_template([{"role": "user", "content": text}])
            model.generation_config.validate(strict=True)
            model.generate(ids[:, :4], max_new_tokens=2)
            model.save_pretrained(folder / saved_name)
            tokenizer.save_pretrained(folder / saved_name)
            tokenizer.add_special_tokens({"pad_token": "[PAD]"})
            collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
            labels = collate([tokenizer(text + end), tokenizer(text)])["labels"]
            assert labels[0].tolist() == ids[0].tolist(), f"{path}: {labels}"
    return names


def main(arguments: list[str]) -> None:
    """Make exports, and check them here and with each other interpreter."""
    transformers.logging.set_verbosity_error()
    if arguments[0] == CHECK_FLAG:
        names = check_exports(Path(arguments[1]))
        print(f"transformers {transformers.__version__}: {', '.join(names)}")
        return
    tests = Path(__file__).resolve().parent
    sys.path[:0] = [str(tests), str(tests.parent)]
    with tempfile.TemporaryDirectory() as folder:
        make_exports(Path(folder))
        for interpreter in (sys.executable, *arguments):
            subprocess.run([interpreter, __file__, CHECK_FLAG, folder], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
