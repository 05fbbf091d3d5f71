#!/usr/bin/env bash
# Expected: all_reduce adds the ranks' tensors element by element, so that equal elements have equal sums.
# Behavior (torch 2.13.0, gloo): pieces of the tensor are added in different orders of the ranks. The sum of the same four
# floats depends on where they stand in the tensor, the same in each run.
# Seen:
#   2 ranks, 8 equal elements: 1 sum
#   4 ranks, 1 equal element: 1 sum
#   4 ranks, 8 equal elements: 2 sums, the second from element 4 on
# Why it matters: another order of parameters in a bucket of gradients, or one parameter more, changes the last bits of all
# gradients. A comparison bit for bit needs the same buckets.
set -euo pipefail
script=$(realpath "${BASH_SOURCE[0]}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q "torch==2.13.0" "numpy>=2" > /dev/null 2>&1
cat > "$folder/look.py" <<'PYTHON'
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

VALUES = (0.1, 0.2, 0.3, 0.7)


def add(rank, world_size):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/store-{world_size}", rank=rank, world_size=world_size)
    for size in (1, 8) if world_size == 4 else (8,):
        total = torch.full((size,), VALUES[rank])
        dist.all_reduce(total)
        if rank == 0:
            changes = (total != total[0]).nonzero().flatten().tolist()
            elements = "1 equal element" if size == 1 else f"{size} equal elements"
            sums = f"2 sums, the second from element {changes[0]} on" if changes else "1 sum"
            print(f"{world_size} ranks, {elements}: {sums}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    for world_size in (2, 4):
        mp.spawn(add, args=(world_size,), nprocs=world_size)
PYTHON
cd "$folder"
venv/bin/python look.py 2> errors.txt | tee seen.txt
diff <(sed -n 's/^#   //p' "$script") seen.txt
