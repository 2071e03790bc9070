"""The prompt of a model whose tokenizer brings its own, and our templates as other libraries' `chat_template`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from .errors import DataError, did_you_mean
from .instructions import system_front
from .templates import ALPACA, FILE_NAME, PromptTemplate, cut_anchor, tokens_of, warn_no_place

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAMED: Final = {"alpaca": ALPACA}
_MARKS: Final = {role: f"alpacafarm {role}" for role in ("system", "user", "assistant")}
"""Messages that stand for any other's while a template is looked at."""
_SAME_DAY: Final = "{%- macro strftime_now(format) -%}26 Jul 2024{%- endmacro -%}"
"""Today, for templates that write the date: a prompt must not depend on when it is read. Llama 3.2's own default."""
Conversation = dict[str, str]
"""Role -> its message, in their order."""


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
    """

    program: str
    """The template's source."""
    between: str
    """From the end of the user's message to the start of the answer."""
    trail: str
    """The text behind the answer."""
    end: int
    """The first token of `trail` that is no text, the tokenizer's EOS if it has none."""
    has_system: bool
    """Whether it has a place for a system text."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ChatTemplate:
        """Reads off what a chat template writes around two messages; DataError if it does not write each once."""
        program = _SAME_DAY + tokenizer.get_chat_template()
        ask = {"user": _MARKS["user"]}
        prompt = _pieces(tokenizer, program, ask, add_generation_prompt=True)
        head, between, trail = _pieces(tokenizer, program, {**ask, "assistant": _MARKS["assistant"]})
        if head != prompt[0]:
            raise DataError("it begins a conversation unlike a question")
        # Not all that were added for a template are marked as special.
        added = {n: token for n, token in tokenizer.added_tokens_decoder.items() if n != tokenizer.unk_token_id}
        ends = [n for n in _parsed(tokenizer, [trail])[0] if n in added and str(added[n]).strip()]
        end = ends[0] if ends else cast(int, tokenizer.eos_token_id)
        try:
            _pieces(tokenizer, program, _MARKS)
            has_system = True
        except Exception:  # noqa: BLE001 -- a program of its own: Gemma's refuses, others leave the text out
            has_system = False
        plain = ("{instruction}\n\n{input}".join(prompt), "{instruction}".join(prompt))
        return cls(*plain, program, between, trail, end, has_system)

    def encode_prompts(self, tokenizer: PreTrainedTokenizerBase, instructions: Sequence[str]) -> list[list[int]]:
        """As the base class."""
        return self._encode(tokenizer, [self._ask(each) for each in instructions], add_generation_prompt=True)

    def encode_responses(self, tokenizer: PreTrainedTokenizerBase, responses: Sequence[str]) -> list[list[int]]:
        """As the base class."""
        # White space before an answer that the prompt leaves out: a sampled text has it.
        lead = self.between.removeprefix(self.tail) if self.between.startswith(self.tail) else ""
        lead = "" if lead.strip() else lead
        texts = [lead + response.removeprefix(lead) for response in responses]
        (anchor,), joined = _parsed(tokenizer, [self.tail]), _parsed(tokenizer, [self.tail + text for text in texts])
        for row, spells in enumerate(_spell(tokenizer, texts)):
            if spells:
                joined[row] = anchor + tokens_of(tokenizer, [texts[row]])[0]
        return cut_anchor(tokenizer, anchor, joined, texts)

    def encode_pairs(
        self,
        tokenizer: PreTrainedTokenizerBase,
        instructions: Sequence[str],
        responses: Sequence[str],
        *,
        eos: bool,
    ) -> list[list[int]]:
        """The conversation of an instruction and its response; `eos`: with what ends it."""
        pairs = zip(instructions, responses, strict=True)
        conversations = [{**self._ask(ask), "assistant": response} for ask, response in pairs]
        return self._encode(tokenizer, conversations, without="" if eos else self.trail)

    def end_id(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """The token that ends a response."""
        return self.end

    def save(self, folder: str | Path) -> None:
        """Writes no file: the tokenizer carries the template. An older `prompt_template.json` is removed."""
        (Path(folder) / FILE_NAME).unlink(missing_ok=True)

    def _ask(self, instruction: str) -> Conversation:
        system = getattr(instruction, "system", "")
        if system and not self.has_system:
            warn_no_place()
            system = ""
        front = {"system": system} if system else {}
        return {**front, "user": instruction.removeprefix(system_front(system))}

    def _encode(
        self,
        tokenizer: PreTrainedTokenizerBase,
        conversations: Sequence[Conversation],
        *,
        without: str = "",
        **options: Any,
    ) -> list[list[int]]:
        """Encodes conversations as one text each, as other libraries do, and by pieces where one spells tokens.

        `without` is cut off the end of each text.
        """
        texts = [_written(tokenizer, self.program, each, **options).removesuffix(without) for each in conversations]
        rows = _parsed(tokenizer, texts)
        spell = _spell(tokenizer, [" ".join(messages.values()) for messages in conversations])
        for number, messages in enumerate(conversations):
            if spell[number]:
                marks = {role: _MARKS[role] for role in messages}
                own = _pieces(tokenizer, self.program, marks, **options)
                own[-1] = own[-1].removesuffix(without)
                blank = {role: f"\t{mark}\t" for role, mark in marks.items()}
                spaced = _written(tokenizer, self.program, blank, **options)
                said = [text if blank[role] in spaced else text.strip() for role, text in messages.items()]
                pieces = _parsed(tokenizer, own)
                for place, letters in enumerate(tokens_of(tokenizer, said)):
                    pieces[place] = pieces[place] + letters
                rows[number] = [token for piece in pieces for token in piece]
        return rows


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
    prompt, (expected,) = template.render("Hi"), template.encode_prompts(tokenizer, ["Hi"])
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


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Without the one that stands for unknown letters."""
    added = tokenizer.added_tokens_decoder.items()
    return {number for number, token in added if token.special and number != tokenizer.unk_token_id}


_parsed = partial(tokens_of, special=True)


def _spell(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[bool]:
    """Which texts spell a special token out."""
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    spelled = re.compile("|".join(map(re.escape, special)) or "(?!)")
    return [spelled.search(text) is not None for text in texts]


def _written(tokenizer: PreTrainedTokenizerBase, program: str, messages: Conversation, **options: Any) -> str:
    turns: Any = [{"role": role, "content": str(text)} for role, text in messages.items()]
    return cast(str, tokenizer.apply_chat_template(turns, tokenize=False, chat_template=program, **options))


def _pieces(tokenizer: PreTrainedTokenizerBase, program: str, marks: Conversation, **options: Any) -> list[str]:
    """The template's own texts around messages; DataError if it does not write each message once, in order."""
    text = _written(tokenizer, program, marks, **options)
    pieces = re.split("|".join(marks.values()), text)
    if re.findall("|".join(marks.values()), text) != list(marks.values()):
        raise DataError(f"it writes {len(pieces) - 1} messages, expected each of {len(marks)} once, in their order")
    return pieces
