"""The demo's prompts: questions about one long text, and a conversation that goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from .model import source_files

PREFIX_TOKENS = 3500
QUESTIONS = (
    "Which of these functions is called first when the module is imported, and by whom?",
    "List every exception that can leave this code, with the line that raises it.",
    "Rewrite the longest function so that it fits a screen.",
)
FOLLOW_UP = "Thank you. Now say the same in one sentence, for somebody who has never read Python."


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of the demo.

    engine: index of the engine that answers it. shares: whether blocks of it must be cached by then.
    """

    name: str
    engine: int
    tokens: list[int]
    shares: bool


def make_prompts(model_directory: Path) -> list[Prompt]:
    """Five prompts for two engines; the first brings the shared prefix, the others find it."""
    tokenizer = Tokenizer.from_file(str(model_directory / "tokenizer.json"))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in source_files()[:12])
    prefix = tokenizer.encode(text).ids[:PREFIX_TOKENS]
    first, second, third = ([*prefix, *_question(tokenizer, question)] for question in QUESTIONS)
    follow_up = [*second, *_question(tokenizer, FOLLOW_UP)]
    return [
        Prompt("text and question 1", 0, first, shares=False),
        Prompt("text and question 2", 1, second, shares=True),
        Prompt("text and question 3", 0, third, shares=True),
        Prompt("question 2 goes on", 0, follow_up, shares=True),
        Prompt("question 1 again", 1, first, shares=True),
    ]


def _question(tokenizer: Tokenizer, question: str) -> list[int]:
    """Tokens of a question, with its own context so that each prompt has an end of its own."""
    return list(tokenizer.encode(f"\n\nQuestion: {question}\n" + question[::-1] * 4 + "\nAnswer:").ids)
