#!/usr/bin/env bash
# Expected: autocast converts the same operations on every device, so that a dtype that is right on a CPU is right on a
# GPU. torch.square, which no list of autocast names, keeps its dtype.
# Behavior (torch 2.13.0): the lists differ. rms_norm, softmax, pow, sum and layer_norm are computed in float32 by the
# autocasts of CUDA and XPU, and not by that of CPUs; MPS converts pow, softmax and layer_norm, but not rms_norm. square
# is in no list, but it consists of pow, which is: on CUDA the square of a bfloat16 tensor is float32.
# Seen:
#   rms_norm            CPU -    CUDA cast MPS -    XPU cast
#   pow.Tensor_Scalar   CPU -    CUDA cast MPS cast XPU cast
#   softmax.int         CPU -    CUDA cast MPS cast XPU cast
#   layer_norm          CPU -    CUDA cast MPS cast XPU cast
#   square              CPU -    CUDA -    MPS -    XPU -
#   square calls pow: True
# Why it matters: normalized queries and keys become float32 on a GPU only. Fused attention with masks, the dtype of a
# cache, and memory then differ from every test on a CPU. ReLU² layers keep twice the bytes for the backward pass.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "numpy>=2" > /dev/null 2>&1
cat > "$folder/look.py" <<'PYTHON'
import torch
from torch.utils._python_dispatch import TorchDispatchMode

NAMES = ("rms_norm", "pow.Tensor_Scalar", "softmax.int", "layer_norm", "square")
DEVICES = ("CPU", "CUDA", "MPS", "XPU")


class Names(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        names.append(str(function))
        return function(*args, **(kwargs or {}))


for name in NAMES:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    casts = [has_kernel(f"aten::{name}", f"Autocast{device}") for device in DEVICES]
    cells = [f"{device} {'cast' if is_cast else '-':<4}" for device, is_cast in zip(DEVICES, casts)]
    print(f"{name:<19} {' '.join(cells)}".rstrip())
names = []
with Names():
    torch.ones(2).square()
print("square calls pow:", "aten.pow.Tensor_Scalar" in names)
PYTHON
cd "$folder"
venv/bin/python look.py | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
