"""Break the code of each invariant in turn, and check that its tests fail.

python tests/tools/mutants.py [WORD …] takes those with a word in their names; exit code 1: missed.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Invariant | tests that should fail, then: file | code that it has once | replacement
MUTANTS = """
causality | test_model.py -k later
    engine/nn/attention.py | is_causal=True if is_square | is_causal=False if is_square
heads = loop = nn.MultiheadAttention | test_model.py -k attention
    model.py | mixed.transpose(1, 2).reshape(B | mixed.reshape(B
cached = uncached | generation/test_decoding_engine.py -k cached
    engine/generation/decoding_engine.py | values[indices] = value[ | values[indices] = key[
a text alone = together | generation/test_text_batch.py -k alone
    engine/generation/decoding_engine.py | [rows[target] for target in targets]] | targets]
resumed = uninterrupted | test_train.py -k bit_for_bit
    engine/training/trainer.py | self.optimizer.load_state( | list(
N ranks = 1 | core/test_distributed.py -k n_ranks
    engine/core/distributed.py | dist.all_reduce(total) | dist.all_reduce(total, dist.ReduceOp.MAX)
accumulated = whole batch | test_train.py -k accumulated
    train.py | gradients(*pair, scale, | gradients(*pair, scale / len(micro_batches),
the loss is divided by the counted targets | core/test_distributed.py -k counted
    train.py | (targets != IGNORE_INDEX).sum()).clamp | (targets != 10**6).sum()).clamp
an epoch visits each window once | data/test_batches.py
    engine/data/order.py | sequence_index % np.uint64(size), | sequence_index % (size // 2 + 1),
examples are split by their prompts | data/test_documents.py -k prompt
    engine/data/documents/corpus.py | document.prompt.encode(), d | document.text.encode(), d
threads write the same stream | data/test_writer.py -k stream
    engine/data/shards/writer.py | pending.append( | pending.appendleft(
targets of a chat | data/test_chat.py -k targets
    engine/data/chats/chat.py | example[start:stop] = ids[start:stop] | example[start] = ids[start]
Hugging Face's model = ours | huggingface/test_convert.py
    engine/huggingface/convert.py | (first_half, -second_half) | (first_half, second_half)
GGUF's tensors = ours | test_huggingface.py -k gguf
    engine/huggingface/gguf.py | halves.transpose(1, 2).reshape( | halves.reshape(
saved page = model | report/test_model_page.py -k option
    engine/report/web/gpt.js | dot(q, keys[s]) / Math.sqrt(q.length) | dot(q, keys[s])
checksums of a checkpoint | runs/test_checkpoint.py
    engine/runs/checkpoint.py | files.sha256(file) != expected_hash | False
directories are replaced atomically | core/test_files.py
    engine/core/files.py | target.rename(replaced) | shutil.rmtree(target)
gradients that are not finite change nothing | training/test_optimizer.py
    engine/training/optimizer.py | bool(norm.isfinite() & (norm <= max_norm)) | True
each row has a seed of its own | generation/test_sampling.py
    engine/generation/sampling.py | num_equal[ids] += 1 | num_equal[ids] += 0
each parameter has one spec | test_model.py -k spec
    engine/nn/specs.py | if len(keys) != 1: | if not keys:
a fast tokenizer gives the same ids | data/test_tokenizer.py -k merge
    engine/data/runners.py | if np.array_equal(_run_by_splintr(merging)([text])[0], ids): | if True:
the golden run | test_golden.py
    engine/training/optimizer.py | factor = 1 - progress | factor = 1.0
"""


def check_mutant(invariant: str, change: str) -> bool:
    """Change a file, run the tests, and restore the file; return whether the tests fail."""
    name, tests = invariant.split(" | ")
    file, original, replacement = change.strip().split(" | ", 2)
    path = ROOT / file
    content = path.read_text(encoding="utf-8")
    assert content.count(original) == 1, f"{name}: must be once in {file}: {original}"
    command = ["pytest", "-n", "0", "-x", "-p", "no:cacheprovider", *tests.split()]
    try:
        path.write_text(content.replace(original, replacement), encoding="utf-8")
        code = subprocess.run(command, cwd=ROOT / "tests", stdout=subprocess.DEVNULL).returncode
    finally:
        path.write_text(content, encoding="utf-8")
    print(f"{'caught' if code == 1 else 'MISSED'}: {name}", flush=True)  # 1: tests failed
    return code == 1


if __name__ == "__main__":
    lines = MUTANTS.strip().splitlines()
    pairs = zip(lines[::2], lines[1::2], strict=True)
    words = sys.argv[1:] or [""]
    results = [check_mutant(*pair) for pair in pairs if any(word in pair[0] for word in words)]
    print(f"{sum(results)} of {len(results)} caught")
    sys.exit(not all(results))
