"""A conversation with a chat model, on standard input and output."""

import contextlib
import io
import sys
from typing import Unpack

from engine.core.errors import UserError
from engine.generation.sampling import TextOptions
from engine.generation.text_generator import TextGenerator


def converse(model: TextGenerator, system: str, **options: Unpack[TextOptions]) -> None:
    """Answer each line of standard input until it ends, in a terminal until Ctrl-C or Ctrl-D."""
    if not sys.stdin:
        raise UserError("--chat: standard input is closed. Use --prompts-file FILE.jsonl.")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401, adds editing and a history to input()
        print("Ctrl-C stops an answer, Ctrl-D ends the chat.", file=sys.stderr)
    # Ctrl-C in a terminal ends an answer, or at the prompt the chat; in a pipe, the command.
    interrupts = [KeyboardInterrupt] if is_terminal else []
    turns = [("system", system)] if system else []
    with contextlib.suppress(EOFError, *interrupts):
        while True:
            question = input("> " if is_terminal else "")
            if not question:
                continue
            chat = [*turns, ("user", question)]
            answer = ""
            try:
                pieces = model.stream_answer(chat, **options)
                with contextlib.suppress(*interrupts):
                    for piece in pieces:
                        answer += piece
                        print(piece, end="", flush=True)
                print()
                turns = [*chat, ("assistant", answer)]
            except UserError as error:  # such as a character that the tokenizer lacks
                if not is_terminal:
                    raise
                print(f"error: {error}", file=sys.stderr)
    if is_terminal:
        print()
