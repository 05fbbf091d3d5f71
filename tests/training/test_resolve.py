"""Settings and weights that a run takes from a checkpoint."""

from pathlib import Path

import numpy as np
import pytest

from engine.core.distributed import SINGLE_PROCESS
from engine.core.errors import UserError
from engine.core.settings import build, flatten
from engine.data.dataset import Dataset
from engine.data.split import Examples, Split
from engine.data.tokenizer import ByteTokenizer
from engine.data.tokenizer_json import CHAT_ROLES, END_OF_TURN
from engine.runs.checkpoint import Checkpoint, RunState
from engine.training.config import TrainConfig, make_run_config
from engine.training.resolve import changed_settings, fit_context, split_token_ids
from model import ModelConfig

TYPED = TrainConfig(model=ModelConfig(vocab_size=11), steps=100)
CONFIG = make_run_config(TYPED, {}, SINGLE_PROCESS)
SETTINGS = flatten(CONFIG)
VALUES = {"settings": SETTINGS, "data_sha256": "abc", "step": 60, "elapsed_seconds": 120.0}
STATE = RunState(CONFIG.model, **VALUES)


def test_a_resumed_run_is_as_long_as_its_checkpoint_or_longer():
    changes = {"--steps": {"steps": 59}, "--minutes": {"steps": None, "minutes": 1.9}}
    for flag, shorter in changes.items():
        with pytest.raises(UserError, match=flag):
            changed_settings(STATE, SETTINGS | shorter, "abc")
    minutes = changed_settings(STATE, SETTINGS | {"steps": None, "minutes": 2.0}, "abc")["minutes"]
    assert minutes == (None, 2.0)


def examples_of(train: list[int], val: list[int]) -> Dataset:
    """Return a dataset of examples of these lengths, whose first token is no target."""
    splits = []
    for lengths in map(np.array, (train, val)):
        rows = [[~1] + [1] * (n - 1) for n in lengths.tolist()]
        tokens = np.concatenate(rows).astype(np.int32)
        splits.append(Examples(tokens, np.cumsum(lengths) - lengths, lengths))
    manifest = {"splits": {"val": {}}}
    return Dataset(Path("data"), manifest, ByteTokenizer(), *splits, "abc")


def text_of(num_tokens: int) -> Dataset:
    splits = [Split(np.zeros(num_tokens, np.uint16))] * 2
    return Dataset(Path("data"), {}, ByteTokenizer(), *splits, "abc")


def fit(data: Dataset, base: RunState | None = None, **settings) -> tuple[int | None, Dataset]:
    """Return the context length of a run on some data, and the data that fits it."""
    model = {"vocab_size": 257, **({"position": base.model.position} if base else {})}
    config = build(TrainConfig, {"init_from": Path("base"), **model, **settings})
    config, data = fit_context(config, data, SINGLE_PROCESS, base)
    return config.model.context_length, data


def base_of(positions: int, position: str = "rope", **settings: int) -> RunState:
    """Return the state of a model of tokens in rows of settings["context_length"], or imported."""
    model = ModelConfig(vocab_size=257, context_length=positions, position=position)
    return RunState(model, settings=settings)


@pytest.mark.parametrize(
    ("data", "base", "context_length"),
    [
        (examples_of([31, 9], [9]), None, 256),
        (examples_of([290, 9], [300]), None, 598),
        (examples_of([9, 9], [600]), None, 1024),
        (examples_of([31, 9], [9]), base_of(64), 256),
        (examples_of([31, 9], [9]), base_of(64, "learned"), 64),
        (examples_of([3001, 9], [9]), base_of(64, "sinusoidal"), 3000),
        (text_of(10**5), None, None),
        (text_of(10**5), base_of(40_960), 1024),
        (text_of(10**5), base_of(40_960, context_length=64), 64),
        (text_of(10**5), base_of(2048, context_length=2048), 2048),
        (text_of(101), base_of(512, "learned"), 100),
    ],
)
def test_the_context_fits_examples_and_base(data, base, context_length):
    length, fitting = fit(data, base)
    assert (length, fitting.num_removed) == (context_length, 0)


SHORT = [9] * 18
FEW = examples_of([*SHORT, 65], [9])
MANY = examples_of([*SHORT, 65, 65, 65], [9])


def test_a_few_long_examples_are_left_out_with_a_warning(capsys):
    assert fit(FEW, context_length=32)[1].num_removed == 1
    warning = capsys.readouterr().err
    assert warning.startswith("warning: 1 example ") and "64" in warning
    fit(MANY, context_length=64)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "base", "problem", "advice"),
    [
        (MANY, None, "3 of 22", "Use 64."),
        (examples_of(SHORT, [65]), None, "1 of 19", "Use 64."),
        (MANY, base_of(32, "learned"), "3 of 22", "Shorten them, or choose another base model."),
        (FEW, base_of(31, "learned"), "31 positions", "Lower it, or choose another base model."),
    ],
)
def test_many_long_examples_are_refused_with_advice_that_works(data, base, problem, advice):
    with pytest.raises(UserError, match=f"^--context-length: .*{problem}.*32.*{advice}$"):
        fit(data, base, context_length=32)
    if "Use 64" in advice:
        assert not fit(data, base, context_length=64)[1].num_removed


CHAT_NAMES = [*CHAT_ROLES.values(), END_OF_TURN]


@pytest.mark.parametrize(
    ("reserved", "is_chat_model", "learns_chats", "untrained", "new"),
    [
        (True, False, True, range(257, 261), range(257, 261)),  # of a BPE of ours
        (True, False, False, range(257, 261), []),
        (True, True, True, [], []),
        (False, False, True, [], range(257, 261)),  # also where the model has rows of padding
        (False, False, False, [], range(257, 261)),
    ],
)
def test_rows_of_chat_tokens_are_untrained_in_a_model_of_text(
    reserved: bool, is_chat_model: bool, learns_chats: bool, untrained, new, tmp_path
):
    tokenizer = ByteTokenizer().with_special(CHAT_NAMES)
    (tokenizer if reserved else ByteTokenizer()).save(tmp_path / "tokenizer.json")
    examples = "chats" if is_chat_model else None
    base = Checkpoint(tmp_path, RunState(CONFIG.model, examples=examples), {})
    num_ids = tokenizer.vocab_size if reserved else 257
    trained = sorted({*range(num_ids)} - {*untrained})
    assert split_token_ids(base, tokenizer, learns_chats) == (trained, [*new])
