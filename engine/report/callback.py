"""The training callback that makes a run's page."""

from typing import Any

from engine.core.files import to_json, write_whole
from engine.nn.inference import for_decoding
from engine.report.page import about, attention_of, baseline_losses, describe_run, new_samples, write_page
from engine.training.callbacks import records_until


class Report:
    """Makes report.html, a page to look at, at each evaluation, and keeps what it shows: about.json, samples.jsonl."""

    def started(self, run: Any) -> None:
        """Samples after the step that is resumed from are dropped: they come again."""
        records_until(run.config.out / "samples.jsonl", run.step)
        write_whole(run.config.out / "about.json", to_json(about(run), indent=1).encode())
        self.baselines = baseline_losses(run.dataset)

    def recorded(self, run: Any, record: dict[str, Any]) -> None:
        if "val_loss" not in record:
            return
        out, attention = run.config.out, None
        if not run.world.sharded:  # every process would have to take part
            model = for_decoding(run.model)
            samples = new_samples(model, run.dataset, run.step, run.config.seed)
            with open(out / "samples.jsonl", "a", encoding="utf-8") as file:
                file.write("".join(f"{to_json(one)}\n" for one in samples))
            attention = attention_of(model, run.dataset)
        write_page([describe_run(out, run.dataset, attention, baselines=self.baselines)], out / "report.html")
