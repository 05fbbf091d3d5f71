"""Scores: right answers are counted as by hand, with an interval."""

import random
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import SMALL, logged, make_dataset, random_model, train_tiny, write_lines

import sample
from engine.core.errors import UserError
from engine.data.chats.chat import turn_ends
from engine.data.dataset import open_dataset
from engine.data.tokenizer import CharTokenizer
from engine.generation.prompt_file import read_lines
from engine.generation.scores import (
    choose,
    encode_questions,
    example_questions,
    parse_answer,
    score_record,
)
from engine.generation.text_generator import TextGenerator

LETTERS = CharTokenizer("abcdefghijklmnopqrstuvwxyz ,.")
GENERATOR = TextGenerator(random_model(SMALL), LETTERS, [0])
FACTS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}


@pytest.mark.parametrize(
    ("num_right", "num_questions", "expected"),
    [(0, 10, (0, 0.2775)), (5, 10, (0.2366, 0.7634)), (98, 100, (0.9300, 0.9945))],
)
def test_the_interval_is_that_of_wilson(num_right, num_questions, expected):
    record = score_record(num_right, num_questions)
    assert record["val_score"] == num_right / num_questions
    assert (record["val_score_low"], record["val_score_high"]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("separator", ["", " ", None], ids=repr)
def test_the_choice_has_the_highest_log_likelihood_per_byte(separator, tmp_path, monkeypatch):
    chunk_logits = 3 * GENERATOR.model.config.vocab_size
    monkeypatch.setattr("engine.generation.decoding_engine.MAX_PROMPT_LOGITS", chunk_logits)
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(1, 6))) for _ in range(30)]
    records = [
        {
            "prompt": "" if separator is None else f"{words[i]},{separator}",
            "choices": words[i + 1 : i + 5],
        }
        for i in range(0, 30, 5)
    ]
    path = write_lines(tmp_path / "in.jsonl", records)
    for record, question in zip(
        records, encode_questions(read_lines(path), GENERATOR), strict=True
    ):
        ratings = {}
        for choice in record["choices"]:
            start = LETTERS.encode(record["prompt"].strip()).tolist() or GENERATOR.initial_tokens
            ids = LETTERS.encode(choice if separator is None else f" {choice}").tolist()
            loss = 0.0
            for number, token in enumerate(ids):
                logits = GENERATOR.model(torch.tensor([start + ids[:number]]))[0, -1]
                loss += F.cross_entropy(logits, torch.tensor(token)).item()
            ratings[choice] = -loss / len(choice)
        best, second, *_ = sorted(ratings.values(), reverse=True)
        assert best - second > 1e-5
        assert ratings[choose(GENERATOR.decoder, question)] == best


def test_a_prompt_longer_than_the_context_loses_its_beginning(tmp_path):
    rows = []
    for prompt in ("ab" * 40, "z" * 9 + "ab" * 35):
        record = {"prompt": f"{prompt} ", "choices": ["cd", "efg"], "answer": "cd"}
        path = write_lines(tmp_path / "in.jsonl", [record])
        rows += encode_questions(read_lines(path), GENERATOR)
    assert len(rows[0].prompt) > GENERATOR.model.config.context_length
    assert choose(GENERATOR.model, rows[0]) == choose(GENERATOR.model, rows[1])


@pytest.mark.parametrize(
    ("answer", "choices", "right"),
    [
        (1, ["no", "yes"], "yes"),
        ("yes", '["no", "yes"]', "yes"),  # as in a CSV file
        (1, ["1", "0"], "0"),
        ("1", ["1", "0"], "1"),
    ],
)
def test_an_answer_is_the_index_or_the_text_of_a_choice(answer, choices, right):
    assert parse_answer({"choices": choices, "answer": answer})[1] == right


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"choices": ["a", "b"], "answer": "c"}, "'answer'.*'c'"),
        *(
            ({"choices": ["a", "2.0", "True"], "answer": answer}, rf"'answer'.*got {answer}\)")
            for answer in (3, -1, 2.0, True)
        ),
        ({"choices": ["a", 3], "answer": 0}, "'choices'"),
        ({"choices": "yes or no", "answer": 0}, "'choices'"),
        ({"choices": ["a", ""], "answer": 0}, "'choices'"),
        ({"choices": ["a", "b" * 99], "answer": 0}, "'choices'.*context"),
    ],
)
def test_unusable_choices_are_refused(line, message, tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "a", **line}])
    with pytest.raises(UserError, match=rf"in\.jsonl, line 1: {message}"):
        [*encode_questions(read_lines(path), GENERATOR)]


@pytest.fixture(scope="module")
def facts(tmp_path_factory) -> Path:
    """Chats of several answers, of which the last follows from the first question."""
    folder = tmp_path_factory.mktemp("facts")
    draw = random.Random(1)
    records = []
    for number in range(300):
        name, color = draw.choice([*FACTS.items()])
        turns = [f"{number} {name}", "Yes.", "Color?", color]
        roles = ["user", "assistant"] * 2
        messages = [{"role": r, "content": t} for r, t in zip(roles, turns, strict=True)]
        records.append({"messages": messages})
    return make_dataset(folder, records, chat=True)


def test_a_question_of_an_example_is_its_last_answer(facts):
    data = open_dataset(facts)
    ends = turn_ends(data.tokenizer, True)
    questions = [*example_questions(data.val, data.tokenizer, ends, 5)]
    assert len(questions) == 5
    for question in questions:
        text = data.tokenizer.decode(question.prompt)
        (name,) = (name for name in FACTS if f" {name}<" in text)
        assert question.answer == FACTS[name] and "Yes." in text and text.endswith("assistant|>")
    assert len([*example_questions(data.val, data.tokenizer, ends, 999)]) == data.val.num_examples


def test_the_score_of_training_is_that_of_a_count_by_hand(facts, tmp_path):
    flags = "--context-length 64 --d-model 32 --learning-rate 0.02 --steps 60 --eval-every 20"
    flags += " --score exact_match --score-examples 20 --batch-size 16 --save-every 20"
    train_tiny(facts, tmp_path / "run", *flags.split(), "--keep-checkpoints", 9)
    scores = logged(tmp_path / "run", "val_score")
    assert list(scores) == [20, 40, 60] and 0.2 < scores[60] < 1
    data = open_dataset(facts)
    ends = turn_ends(data.tokenizer, True)
    questions = [*example_questions(data.val, data.tokenizer, ends, 20)]
    for step, score in scores.items():
        path = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        model = sample.load(path, dtype="float32")
        chats = []
        for question in questions:
            text = data.tokenizer.decode(question.prompt)
            turns = re.findall(r"<\|(user|assistant)\|>([^<]+)", text)
            chats.append([{"role": r, "content": t} for r, t in turns])
        answers = [
            "".join(model.stream_answer([(m["role"], m["content"]) for m in chat], temperature=0))
            for chat in chats
        ]
        num_right = sum(q.answer == a for q, a in zip(questions, answers, strict=True))
        assert num_right / len(questions) == pytest.approx(score)
