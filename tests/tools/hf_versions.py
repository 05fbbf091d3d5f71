"""Check that exports of every family compute the same in other versions of transformers.

python tests/tools/hf_versions.py PYTHON …

Each PYTHON loads exports, with another version of transformers, and saves and loads them again.
"""

import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import safetensors
import torch
import transformers

MAX_RELATIVE_ERRORS = {"float32": 1e-4, "bfloat16": 0.1}


@torch.no_grad()
def check_export(path: Path) -> None:
    """Load an export, save it and load it again; compare each with PATH.safetensors beside it."""
    with safetensors.safe_open(path.with_suffix(".safetensors"), "pt") as file:
        text = file.metadata()["text"]
        ids = file.get_tensor("ids")
        logits = file.get_tensor("logits")
        continued = file.get_tensor("continued")
    dtype = json.loads((path / "config.json").read_text())["torch_dtype"]
    for directory in (path, path / "saved"):
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, report = load(directory, dtype="auto", output_loading_info=True)
        assert not any(report.values()), f"{directory}: {report}"
        assert str(model.dtype) == f"torch.{dtype}", directory
        error = (model.eval()(ids).logits - logits).abs().max() / logits.abs().max().clamp(min=1)
        assert error <= MAX_RELATIVE_ERRORS[dtype], f"{directory}: logits differ by {error}"
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        end = tokenizer.eos_token
        assert tokenizer(text + end)["input_ids"] == ids[0].tolist(), directory
        assert tokenizer.pad_token is model.config.pad_token_id is None, directory
        assert tokenizer.apply_chat_template([{"role": "user", "content": text}])
        model.generation_config.validate(strict=True)
        greedy = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        generated = model.generate(ids[:, :4], max_new_tokens=continued.shape[1] - 4, **greedy)
        assert dtype != "float32" or torch.equal(generated, continued), directory
        model.save_pretrained(path / "saved")
        tokenizer.save_pretrained(path / "saved")
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
        labels = collate([tokenizer(text + end), tokenizer(text)])["labels"]
        assert labels[0].tolist() == ids[0].tolist(), f"{directory}: {labels}"


def check_exports(folder: Path) -> None:
    """Check the exports in a folder whose family this version of transformers knows."""
    for path in sorted(folder.glob("*/config.json")):
        (architecture,) = json.loads(path.read_text())["architectures"]
        if hasattr(transformers, architecture):  # nanochat: from 5.0
            check_export(path.parent)
            print(f"transformers {transformers.__version__}: {path.parent.name}")


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        check_exports(Path(sys.argv[2]))
        sys.exit()
    sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])
    from test_huggingface import MODEL_FAMILIES, export_random_model

    with tempfile.TemporaryDirectory() as folder:
        for family, dtype in itertools.product(MODEL_FAMILIES, MAX_RELATIVE_ERRORS):
            export_random_model(family, 1, dtype, Path(folder, f"{family}-{dtype}"))
        for interpreter in (sys.executable, *sys.argv[1:]):
            subprocess.run([interpreter, __file__, "--check", folder], check=True)
