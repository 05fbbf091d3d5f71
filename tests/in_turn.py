"""For torchrun: several runs of train.py, one after the other, in the same processes; importing torch once is enough.

The argument is a JSON list of [flags, step at which the last process gets a SIGTERM, or null, whether to watch]. What
is watched ends with a line of JSON: what was communicated in the third step, and the bytes that this process held.
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))

import train
from engine.parallel import local

train.SAMPLE_TOKENS = 2  # each is a round of messages
train.Recorder.draw_loss = lambda self: None
log, train_step, seen = train.log, train.train_step, {}


def watched_step(run):
    if run.step != 2 or not watched:
        return train_step(run)
    optimizer_step = run.optimizer.step

    def step(*arguments):
        parameters = list(run.model.parameters())
        seen["parameters"] = sum(local(p).nbytes for p in parameters)
        seen["gradients"] = sum(local(p.grad).nbytes for p in parameters)
        return optimizer_step(*arguments)

    run.optimizer.step = step
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        result = train_step(run)
    seen["optimizer"] = sum(local(value).nbytes for value in run.optimizer.state().values())
    seen["messages"] = [(e.name, e.input_shapes[0]) for e in profiled.events() if e.name.startswith("gloo:")]
    return result


train.train_step = watched_step
with train.processes("cpu") as world:

    @contextlib.contextmanager
    def joined_already(device, parallel, timeout):
        yield dataclasses.replace(world, sharded=parallel == "fsdp")

    train.processes = joined_already
    for flags, stop, watched in json.loads(sys.argv[1]):

        def log_and_stop(run, *arguments, stop=stop):
            log(run, *arguments)
            if run.step == stop and world.rank == world.size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

        train.log = log_and_stop
        sys.argv = ["train.py", *flags]
        assert train.main() == (143 if stop else 0)
        if watched and world.is_first:
            print(json.dumps(seen))
