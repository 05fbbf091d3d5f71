"""A killed command that is run again ends as if it had not been killed: a sample of soak.py."""

from pathlib import Path

import pytest
import torch
from helpers import make_state
from soak import KINDS, events, kills, ranks, run_ranks

from engine.core.distributed import init_distributed
from engine.core.errors import UserError
from engine.training import checkpoint
from engine.training.checkpoint import open_checkpoint
from engine.training.run_dir import RunDir, list_checkpoints


def sample(name: str, num_events: int) -> list[int]:
    """Choose file events, of those of one command, to be killed at."""
    if KINDS[name].num_ranks > 1:  # these take longest
        return [num_events // 2 if KINDS[name].victim == 0 else num_events]
    every = {"train": 90, "resume": 60}.get(name, 5)
    return sorted({1, *range(every, num_events + 1, every), num_events})


@pytest.mark.parametrize("name", KINDS)
def test_a_command_killed_at_a_file_event_ends_the_same_when_it_is_run_again(name, tmp_path):
    assert "events" in events(tmp_path, name, lambda num_events: sample(name, num_events))


def test_training_killed_at_random_moments_ends_in_the_same_weights(tmp_path):
    assert "resumed to the same weights" in kills(tmp_path, 3)


def test_a_rank_killed_in_a_save_and_restarted_by_torchrun_ends_in_the_same_weights(tmp_path):
    assert "2 kills" in ranks(tmp_path, [("while writing", 1), ("before the rename", 0)])


@pytest.mark.parametrize("victim", [0, 1])
def test_an_error_of_any_rank_in_a_sharded_save_is_raised_on_all_ranks(tmp_path, victim):
    def save_tokenizer(path: Path) -> None:
        path.write_text("{}")

    def raise_disk_full(*arguments: object) -> None:
        raise OSError("No space left")

    def save_twice(rank: int) -> int:
        with init_distributed("cpu", "fsdp", timeout=20) as world:
            run_dir = RunDir(tmp_path / "run", world=world)
            tensors = {"weight": torch.ones(2)}
            run_dir.save(make_state(1), tensors, tensors, save_tokenizer)
            run_dir.wait()
            if victim == 1 and rank == 1:
                checkpoint.write_tensors = raise_disk_full
            save_second = save_tokenizer if victim == 1 else raise_disk_full  # on the main process
            run_dir.save(make_state(2), tensors, tensors, save_second)
            try:
                run_dir.wait()
            except (OSError, UserError) as error:
                (tmp_path / f"error-{rank}").write_text(str(error))
            run_dir.close()
        return 0

    assert run_ranks(tmp_path / "log", 2, save_twice) == [0, 0], (tmp_path / "log").read_text()
    errors = [(tmp_path / f"error-{rank}").read_text() for rank in (0, 1)]
    assert errors[victim] == "No space left"
    assert errors[1 - victim] == f"rank {victim}: No space left"
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000001"]
    saved = open_checkpoint(list_checkpoints(tmp_path / "run")[0]).verify()
    assert saved.shards == 2 and torch.equal(dict(saved.model())["weight"], torch.ones(2))
