"""The prompt of a model whose tokenizer brings its own, and our templates as other libraries' `chat_template`."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import psutil

from .errors import DataError, did_you_mean
from .instructions import system_front
from .templates import ALPACA, FILE_NAME, PromptTemplate, cut_anchor, tokens_of, warn_no_place

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMED: Final = {"alpaca": ALPACA}
_SYSTEM, _QUESTION, _ANSWER = "alpacafarm system", "alpacafarm question", "alpacafarm answer"
_ROLES: Final = ("system", "user", "assistant")
_SECONDS: Final = 5.0
"""The longest that a template may take to write one conversation."""
_BYTES: Final = 2**30
"""The most memory that it may take."""
_SAME_DAY: Final = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro -%}"
"""Today, for templates that write the date: a prompt must not depend on when it is read. Llama 3.2's own default."""


def load_template(
    path: str | Path, tokenizer: PreTrainedTokenizerBase, named: PromptTemplate | str | None = None
) -> PromptTemplate:
    """Returns the template of a model: `named` ("alpaca" or a template), else the folder's own, else its tokenizer's.

    Raises UnknownNameError or DataError if there is no such template, none at all, or it cannot be used.
    """
    if named is not None:
        return named_template(named)
    if (template := PromptTemplate.load(path)) is not None:
        return template
    if not tokenizer.chat_template:
        raise missing(path)
    try:
        return ChatTemplate.of(tokenizer)
    except Exception as error:  # a chat template is a program: it can raise anything
        raise DataError(
            f"{path}: the tokenizer's chat_template cannot be used for one question and its answer ({error}). Give the "
            f"prompt the model was trained on: template='alpaca' or another PromptTemplate, or a file {FILE_NAME}."
        ) from error


def named_template(named: PromptTemplate | str) -> PromptTemplate:
    """Returns the template of a name; a template as it is."""
    if isinstance(named, PromptTemplate):
        return named
    if named not in NAMED:
        raise did_you_mean("template", named, NAMED)
    return NAMED[named]


def check_template(folder: Path, named: PromptTemplate | str | None = None) -> None:
    """Raises what `load_template` would where a folder has no template at all, without loading its tokenizer."""
    if named is not None:
        named_template(named)
    elif PromptTemplate.load(folder) is None:
        config = folder / "tokenizer_config.json"
        inside = config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8")
        if not inside and not (folder / "chat_template.jinja").is_file():
            raise missing(folder)


def missing(path: str | Path) -> DataError:
    """The error for a model whose prompt nobody knows."""
    return DataError(
        f"{path}: expected {FILE_NAME} or a tokenizer with a chat_template, found neither, so the prompt the model was "
        "trained on is not known. Name it: template='alpaca' (Stanford Alpaca's; --template of commands) or a "
        "PromptTemplate, or put the file there."
    )


@dataclass(frozen=True)
class ChatTemplate(PromptTemplate):
    """A tokenizer's own chat template, for one user message and its answer.

    The instruction, with its input after a blank line, is the user's message; its system text the system's, if the
    template has a place for one, and else the message's beginning, with a warning. Special tokens that the template
    writes count, and the tokenizer adds none; those that an instruction or a response spells out are letters. For texts
    that spell none, prompts are `tokenizer.apply_chat_template(..., add_generation_prompt=True)` and pairs the
    conversation, token for token; but today's date is always the same day.

    A template that looks into answers, such as for the end of reasoning, writes each conversation itself.
    """

    between: str
    """From the end of the user's message to the start of the answer."""
    trail: str
    """The text behind the answer."""
    trims: tuple[bool, bool]
    """Whether the template strips white space off the user's message, and off the answer."""
    end: int
    """The first token of `trail` that is no text, the tokenizer's EOS if it has none."""
    system: tuple[str, str, bool] | None
    """The text before a system text, and from its end to the user's message, and whether white space is stripped
    off it; None without a place for it.
    """
    program: str = ""
    """The template itself if what it makes of an answer depends on the answer."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
        """Finds out what a chat template writes around two messages; DataError if that depends on the question."""
        program = _SAME_DAY + tokenizer.get_chat_template()
        written = partial(_written, tokenizer, program)

        def ask(question: str) -> str:
            return written(question, add_generation_prompt=True)

        def tell(answer: str) -> str:
            return written(_QUESTION, answer)

        def place() -> tuple[str, str, bool] | None:
            spaced = f" {_QUESTION}\n "
            options: dict[str, Any] = {"roles": _ROLES, "add_generation_prompt": True}
            try:
                before, rest = _split(written(_SYSTEM, _QUESTION, **options), _SYSTEM)
                behind, end = _split(rest, _QUESTION)
                strips = _is_trimmed(written(f" {_SYSTEM}\n ", _QUESTION, **options), before, _SYSTEM, rest)
                whole = written(_SYSTEM, spaced, _ANSWER, roles=_ROLES)
            except Exception:  # noqa: BLE001 -- a program of its own: Gemma's refuses, others leave the text out
                return None
            parts = (before, _SYSTEM, behind, _QUESTION if trims[0] else spaced, between, _ANSWER, trail)
            return (before, behind, strips) if (end, whole) == (suffix, "".join(parts)) else None

        head, suffix = _split(ask(_QUESTION), _QUESTION)
        told_head, rest = _split(tell(_ANSWER), _QUESTION)
        between, trail = _split(rest, _ANSWER)
        if told_head != head:
            raise DataError("it begins a conversation unlike a question")
        trims = ask(f" {_QUESTION}\n ") == ask(_QUESTION), tell(f" {_ANSWER}\n ") == tell(_ANSWER)
        if any(ask(text) != head + (text.strip() if trims[0] else text) + suffix for text in _probes(_QUESTION)):
            raise DataError("what it writes depends on the white space, the length or the words of a question")
        before = head + _QUESTION + between
        plain = [tell(text) == before + (text.strip() if trims[1] else text) + trail for text in _probes(_ANSWER)]
        if not plain[-1]:
            raise DataError("it changes a long answer")
        # Not all that were added for a template are marked as special.
        added = {n: token for n, token in tokenizer.added_tokens_decoder.items() if n != tokenizer.unk_token_id}
        ends = [n for n in _parsed(tokenizer, [trail])[0] if n in added and str(added[n]).strip()]
        end = ends[0] if ends else cast(int, tokenizer.eos_token_id)
        with_input, without_input = (head + field + suffix for field in ("{instruction}\n\n{input}", "{instruction}"))
        _split(without_input, "{instruction}")  # it might write the placeholder itself
        program = "" if all(plain) else program
        return cls(with_input, without_input, between, trail, trims, end, place(), program)

    def render(self, instruction: str) -> str:
        """The prompt as text, special tokens spelled out."""
        return "".join(self._prompt(instruction))

    def encode_prompts(self, tokenizer: PreTrainedTokenizerBase, instructions: Sequence[str]) -> list[list[int]]:
        """As the base class."""
        return _encode(tokenizer, [self._prompt(instruction) for instruction in instructions])

    def encode_responses(self, tokenizer: PreTrainedTokenizerBase, responses: Sequence[str]) -> list[list[int]]:
        """As the base class."""
        texts = [self._lead + response.removeprefix(self._lead) for response in responses]
        joined = _encode(tokenizer, [(self.tail, text) for text in texts])
        return cut_anchor(tokenizer, _parsed(tokenizer, [self.tail])[0], joined, texts)

    def encode_pairs(
        self,
        tokenizer: PreTrainedTokenizerBase,
        instructions: Sequence[str],
        responses: Sequence[str],
        *,
        eos: bool,
    ) -> list[list[int]]:
        """The conversation of an instruction and its response; `eos`: with what ends it."""
        trail = self.trail if eos else ""
        answers = [y.strip() if self.trims[1] else y.removeprefix(self._lead) for y in responses]
        pairs = list(zip(instructions, answers, strict=True))
        rows: list[tuple[str, ...]] = [(*self._prompt(x)[:-1], self.between, y, trail) for x, y in pairs]
        if self.program:
            special = special_ids(tokenizer) | {tokenizer.unk_token_id}
            own = [special.isdisjoint(ids) for ids in _parsed(tokenizer, [f"{x} {y}" for x, y in pairs])]
            messages = [(*row[1:-3:2], y) for row, (_, y) in zip(rows, pairs, strict=True)]
            texts = [_written(tokenizer, self.program, *each, roles=_ROLES[-len(each) :]) for each in messages]
            texts = texts if eos else [text.removesuffix(self.trail) for text in texts]
            rows = [(text,) if alone else row for text, alone, row in zip(texts, own, rows, strict=True)]
        return _encode(tokenizer, rows)

    def end_id(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """The token that ends a response."""
        return self.end

    def save(self, folder: str | Path) -> None:
        """Writes no file: the tokenizer carries the template. An older `prompt_template.json` is removed."""
        (Path(folder) / FILE_NAME).unlink(missing_ok=True)

    @property
    def _lead(self) -> str:
        """The white space before an answer that the prompt leaves out: a sampled text has it."""
        lead = self.between.removeprefix(self.tail) if self.between.startswith(self.tail) else ""
        return "" if lead.strip() else lead

    def _prompt(self, instruction: str) -> tuple[str, ...]:
        """The template's text before a message, the message (the system's, if any, and the user's), and so on."""
        system = getattr(instruction, "system", "")
        if system and self.system is None:
            warn_no_place()
            system = ""
        message = instruction.removeprefix(system_front(system))
        behind = (message.strip() if self.trims[0] else message, self.tail)
        if not system or self.system is None:
            return self.without_input.split("{instruction}")[0], *behind
        before, between, strips = self.system
        return before, system.strip() if strips else system, between, *behind


def chat_template(template: PromptTemplate, tokenizer: PreTrainedTokenizerBase, *, eos: bool = True) -> str | None:
    """Returns a plain template as a tokenizer's `chat_template`; of a `ChatTemplate` the tokenizer's own.

    The latter writes the date of training for today's, so that the prompt stays what the model was trained on.
    An input is part of the user's message, after a blank line; a system message comes before it in the same way.
    Further turns repeat the form, which the model may never have seen. BOS is written out, once; with `eos` an answer
    ends with EOS. None where no chat template gives the same tokens, as for a plain template that spells special
    tokens.
    """
    if isinstance(template, ChatTemplate):
        own: Any = tokenizer.chat_template  # several by name where a tokenizer has them, of which ours is the default
        dated = isinstance(own, str) and "strftime_now" in own and not own.startswith(_SAME_DAY)
        return cast(str, _SAME_DAY + own if dated else own)
    bos = "".join(tokenizer.convert_ids_to_tokens(ids_around(tokenizer)[0]))
    prompt, (expected,) = template.render(_QUESTION), template.encode_prompts(tokenizer, [_QUESTION])
    # A tokenizer of SentencePiece's kind puts a space before a text, but not where BOS is written in it.
    fronts = [front for front in (bos, bos + " ") if _parsed(tokenizer, [front + prompt])[0] == expected]
    if not fronts:
        return None
    *parts, suffix = template.without_input.split("{instruction}")
    front = f"{{{{- {fronts[0]!r} -}}}}\n" if fronts[0] else ""
    question = " + ".join(f"{part!r} + system + message['content']".removeprefix("'' + ") for part in parts)
    answer = f"{suffix!r} + message['content']" + " + eos_token" * eos
    return (
        f"{front}{{%- set turn = namespace(system='') -%}}\n"
        "{%- for message in messages -%}\n"
        "{%- set system = turn.system -%}\n"
        "{%- if message['role'] == 'system' -%}\n"
        "{%- set turn.system = message['content'] + '\\n\\n' -%}\n"
        "{%- elif message['role'] == 'user' -%}\n"
        f"{{{{- {question} -}}}}{{%- set turn.system = '' -%}}\n"
        "{%- elif message['role'] == 'assistant' -%}\n"
        f"{{{{- {answer} -}}}}\n"
        "{%- else -%}\n"
        "{{- raise_exception('Expected the roles system, user and assistant, got ' + message['role']) -}}\n"
        "{%- endif -%}\n"
        "{%- endfor -%}\n"
        f"{{%- if add_generation_prompt -%}}{{{{- {suffix!r} -}}}}{{%- endif -%}}\n"
    )


def ids_around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts in front of every text, and behind it."""
    (plain,), (whole,) = (tokens_of(tokenizer, ["a"], around=around) for around in (False, True))
    front = next((place for place in range(len(whole)) if whole[place : place + len(plain)] == plain), 0)
    return whole[:front], whole[front + len(plain) :]


def _encode(tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[str, ...]]) -> list[list[int]]:
    """Token ids of rows that alternate between the template's own text and foreign text.

    A row is encoded as one text, as other libraries do. Where that finds more special tokens than the template wrote,
    somebody spelled one out: then piece by piece, the foreign ones as letters.
    """
    encoded = _parsed(tokenizer, ["".join(row) for row in rows])
    special, own_special = special_ids(tokenizer), dict[tuple[str, ...], list[int]]()
    for number, row in enumerate(rows):
        own = row[::2]
        if own not in own_special:
            own_special[own] = [token for piece in _parsed(tokenizer, own) for token in piece if token in special]
        # The unknown token stands for letters too, so it is looked for in the text.
        unknown = tokenizer.unk_token is not None and any(tokenizer.unk_token in text for text in row[1::2])
        if unknown or [token for token in encoded[number] if token in special] != own_special[own]:
            read = (_parsed, tokens_of)
            parts = [read[place % 2](tokenizer, [piece])[0] for place, piece in enumerate(row)]
            encoded[number] = [token for part in parts for token in part]
    return encoded


_parsed = partial(tokens_of, special=True)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Without the one that stands for unknown letters."""
    added = tokenizer.added_tokens_decoder.items()
    return {number for number, token in added if token.special and number != tokenizer.unk_token_id}


def _split(text: str, message: str) -> tuple[str, str]:
    """The texts before and behind a message."""
    parts = text.split(message)
    if len(parts) != 2:
        raise DataError(f"it writes a message {len(parts) - 1} times, expected once")
    return parts[0], parts[1]


def _is_trimmed(text: str, before: str, message: str, behind: str) -> bool:
    """Whether a message lost the white space around it; raises DataError if something else became of it."""
    if text not in (before + message + behind, before + f" {message}\n " + behind):
        raise DataError("what it writes depends on the white space around a message")
    return text == before + message + behind


def _probes(message: str) -> tuple[str, ...]:
    """Messages that some templates change: white space, the marks of reasoning; last a long one."""
    reasoned = (f"<think>\n{message}\n</think>\n\n{message}", f"{message}</think>{message}")
    return f" {message}\n ", f"\n{message}\n", f"{message} ", *reasoned, message + " and so on" * 10_000


def _written(
    tokenizer: PreTrainedTokenizerBase,
    program: str,
    *contents: str,
    roles: Sequence[str] = _ROLES[1:],
    **options: Any,
) -> str:
    """A chat template's text for messages of these roles: a user's, and its answer."""
    turns = zip(roles, contents, strict=False)
    messages: Any = [{"role": role, "content": content} for role, content in turns]
    with _bounded():
        text = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=program, **options)
    return cast(str, text)


@contextmanager
def _bounded() -> Iterator[None]:
    """Within, this thread's Python code that takes too long, or too much memory, ends in an error.

    A template may loop for ever, or ask for a text of 10 GB in one operation, which no clock interrupts.
    """
    end, before, limits = time.monotonic() + _SECONDS, sys.gettrace(), resource.getrlimit(resource.RLIMIT_AS)
    most = psutil.Process().memory_info().vms + _BYTES
    if limits[0] == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))

    def watch(*_: Any) -> Any:
        if time.monotonic() > end:
            raise DataError(f"it takes more than {_SECONDS:g} seconds to write one conversation")
        return watch

    sys.settrace(watch)
    try:
        yield
    finally:
        sys.settrace(before)
        resource.setrlimit(resource.RLIMIT_AS, limits)
