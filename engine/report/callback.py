"""The training callback that writes a run's page."""

from typing import Any, cast

from engine.core.files import atomic_write, to_json
from engine.nn.inference import build_decoder
from engine.report.baselines import mixture_baselines
from engine.report.page import collect_run_content, write_page
from engine.report.samples import compute_attention, describe_environment, sample_for_report
from engine.training.callbacks import truncate_records
from engine.training.trainer import Callback, Trainer
from model import GPT


class Report(Callback):
    """Writes report.html at each evaluation, and about.json and samples.jsonl, which it shows."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Drop the samples after the step that is resumed from: they are written again."""
        truncate_records(trainer.config.out / "samples.jsonl", trainer.step)
        about = to_json(describe_environment(trainer), indent=1)
        atomic_write(trainer.config.out / "about.json", about.encode())
        self.baselines = mixture_baselines(trainer.data)

    def on_record(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Write samples and the page after an evaluation; a sharded model is not sampled from."""
        if "val_loss" not in record:
            return
        out = trainer.config.out
        attention = None
        if not trainer.dist_ctx.sharded:
            model = cast(GPT, build_decoder(trainer.model))
            samples = sample_for_report(model, trainer.data, trainer.step, trainer.config.seed)
            with open(out / "samples.jsonl", "a", encoding="utf-8") as file:
                file.write("".join(f"{to_json(sample)}\n" for sample in samples))
            attention = compute_attention(model, trainer.data)
        run = collect_run_content(out, trainer.data, attention=attention, baselines=self.baselines)
        write_page([run], out / "report.html")
