"""Reports: metrics that survive an interruption, and pictures."""

import json

import numpy as np

from engine.report import Recorder, draw_attention, draw_loss


def test_records_after_the_resumed_step_and_torn_lines_are_dropped(tmp_path):
    lines = [json.dumps({"step": step, "train_loss": 1.0}) + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 4, "tra')
    recorder = Recorder(tmp_path, 2, {}, wandb=False)
    recorder.add({"step": 3, "train_loss": 0.5})
    recorder.close()
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(record["step"], record["train_loss"]) for record in steps] == [(1, 1.0), (2, 1.0), (3, 0.5)]
    assert recorder.last("train_loss")["step"] == 3 and recorder.last("val_loss") is None


def test_loss_is_drawn_from_the_first_record_on(tmp_path):
    for records in ([], [{"step": 1, "val_loss": 2.0}], [{"step": s, "train_loss": 9.0 / s} for s in range(1, 90)]):
        draw_loss(records, tmp_path / "loss.png")
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_a_long_prompt_still_makes_a_picture_that_opens(tmp_path):
    maps = np.tril(np.ones((2, 3, 200, 200), np.float32))
    draw_attention(maps / maps.sum(-1, keepdims=True), ["$x_"] * 200, tmp_path / "a.png")
    header = (tmp_path / "a.png").read_bytes()[:24]
    width = int.from_bytes(header[16:20], "big")
    assert 500 < width < 8000
