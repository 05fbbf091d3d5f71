"""For torchrun: several runs of train.py, one after the other, in the same processes; importing torch once is enough.

The argument is a JSON list of [flags, step at which the last process gets a SIGTERM, or null].
"""

import contextlib
import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import train

train.SAMPLE_TOKENS = 2  # each is a round of messages
train.Recorder.draw_loss = lambda self: None
log = train.log
with train.processes("cpu") as world:

    @contextlib.contextmanager
    def joined_already(device, parallel, timeout):
        yield dataclasses.replace(world, sharded=parallel == "fsdp")

    train.processes = joined_already
    for flags, stop in json.loads(sys.argv[1]):

        def log_and_stop(run, *arguments, stop=stop):
            log(run, *arguments)
            if run.step == stop and world.rank == world.size - 1:
                os.kill(os.getpid(), signal.SIGTERM)

        train.log = log_and_stop
        sys.argv = ["train.py", *flags]
        assert train.main() == (143 if stop else 0)
