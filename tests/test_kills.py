"""A killed command that is run again ends as if it had not been killed: a sample of soak.py."""

from unittest.mock import Mock

import pytest
import torch
from helpers import make_state, newest_checkpoint, run_ranks, save_tokenizer
from soak import events

from engine.core.distributed import init_distributed
from engine.core.errors import UserError
from engine.runs import checkpoint
from engine.training.run_dir import RunDir


@pytest.mark.parametrize(
    ("name", "max_kills"), [("train", 3), ("prepare --force", 3), ("rank 1 of two", 1)]
)
def test_a_command_killed_at_a_file_event_ends_the_same_when_it_is_run_again(
    name, max_kills, tmp_path
):
    assert events(tmp_path, name, max_kills) >= max_kills


def test_an_error_of_any_rank_in_a_sharded_save_is_raised_on_all_ranks(tmp_path):
    raise_disk_full = Mock(side_effect=OSError("No space left"))

    def save_three_times(rank: int) -> int:
        tensors = {"weight": torch.ones(2)}
        with init_distributed("cpu", "fsdp", timeout=20) as world:
            run_dir = RunDir(tmp_path / "run", dist_ctx=world)
            run_dir.save(make_state(1), tensors, tensors, save_tokenizer)
            run_dir.wait()
            for victim, save in enumerate((raise_disk_full, save_tokenizer)):
                if rank == victim == 1:
                    checkpoint.write_tensors = raise_disk_full
                run_dir.save(make_state(2), tensors, tensors, save)
                own_error = OSError if rank == victim else UserError
                with pytest.raises(own_error) as caught:
                    run_dir.wait()
                (tmp_path / f"error-{victim}-{rank}").write_text(str(caught.value))
            run_dir.close()
        return 0

    log = tmp_path / "log"
    assert run_ranks(log, 2, save_three_times) == [0, 0], log.read_text()
    for victim in (0, 1):
        errors = [(tmp_path / f"error-{victim}-{rank}").read_text() for rank in (0, 1)]
        assert errors[victim] == "No space left"
        assert errors[1 - victim] == f"rank {victim}: No space left"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    saved = newest_checkpoint(tmp_path / "run")
    assert saved.shards == 2 and torch.equal(dict(saved.model())["weight"], torch.ones(2))
