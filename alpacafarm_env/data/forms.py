"""Other libraries' rows: prompt and completion, chosen and rejected, messages. Read, and written, as AlpacaFarm's.

A text stays what it is, character for character. TRL's rows are written as lists of messages, so that the trained
model's own chat template makes the prompt, and ends the response, as it does here. They carry what TRL has no field
for, and does not mind: `input` (the end of the user's message that is one), `preference` (1: the chosen response came
first) and `dataset`. Rows of others do without. A system message is the field `system`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..instructions import Demonstration, Instruction, Preference, system_front
from .schema import KINDS, MISSING, TEXT, Fault, is_text, shown

FORMATS = ("trl", "alpacafarm")
_OWN = frozenset(field.name for fields in KINDS.values() for field in fields)
_KEPT = ("input", "system", "dataset", "generator")
_PAIR = ("chosen", "rejected")
_CONVERSATIONS = ("messages", "conversations")
_ANSWERS = ("output", "completion", *_CONVERSATIONS)
_TAGS = ("label", "kto_tag")
"""Whether a response is one to imitate, in rows of KTO."""
_ROLES = ("system", "user", "assistant")
_NAMES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's, whose messages have `from` and `value`."""
_MESSAGES = "a string, or a list of messages such as {'role': 'user', 'content': 'Hi'}"
_TURNS = (
    "a system message or none, one message of the user's and one answer of the assistant's at most (until whole "
    "conversations are read: split them into single turns, what was said before written into the user's message)"
)
_IMITATED = (
    "true, or no such field, as what a file of examples has is imitated. Good and bad responses are what KTO learns "
    "from: alpacafarm_env.data.read_labels(FILE) reads them for agents.KTO. Or leave the bad ones out, or make pairs "
    "of both: prompt, chosen and rejected"
)
_SCHEMAS = (
    "the fields of one kind of row (instruction, input and output; instruction, input, output_1, output_2 and "
    "preference; messages or conversations; prompt and completion; prompt, chosen and rejected)"
)


class _MisfitError(Exception):
    """Wraps the fault of a record that is none of the kinds."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__()
        self.fault = Fault(0, field, shown(value), expected)


def as_row(record: object) -> object:
    """A record in AlpacaFarm's fields, or the `Fault` that keeps it from that; what has them already, as it is.

    The user's message is the instruction. Where a field `input` is there too, it is the message's end, after a blank
    line. A system message is `system`. Conversations of several turns are no single instruction: a fault, as is a
    response that the row says not to imitate.
    """
    if not isinstance(record, Mapping):
        return record
    given = {name: value for name, value in record.items() if value is not None}
    try:
        if any(name in given for name in _PAIR):
            return _preference(given)
        for name in _TAGS:
            if str(given.get(name)).lower() in ("false", "0") and any(answer in given for answer in _ANSWERS):
                raise _MisfitError(name, given[name], _IMITATED)
        first = next((name for name in ("instruction", *_CONVERSATIONS, "prompt") if name in given), "")
        if first == "prompt":
            said = _question(given, first)
            return _row(given, _answered(given, "completion", said) if "completion" in given else said, first)
        if first in _CONVERSATIONS:
            return _row(given, _said(given, first), first)
    except _MisfitError as error:
        return error.fault
    if _OWN.isdisjoint(record):
        return Fault(0, "", f"the fields {', '.join(map(str, record)) or '(none)'}", _SCHEMAS)
    return record


def row_of(record: Instruction | Demonstration | Preference, form: str) -> dict[str, Any]:
    """A record as a row that `as_row` and `RowDataset` read back, but for its id, which is its place in the file."""
    ask = record if isinstance(record, Instruction) else record.instruction
    source = {"dataset": ask.source} if isinstance(record, Demonstration) else {}
    if form == "alpacafarm":
        return {**fields_of(ask), **_outputs(record), **source}
    prompt, rest = messages_of(ask), {"input": ask.input, **source}
    if isinstance(record, Preference):
        pair = {name: _message("assistant", getattr(record, name)) for name in _PAIR}
        return {"prompt": prompt, **pair, **rest, "preference": record.preference}
    answer = {"completion": _message("assistant", record.response)} if isinstance(record, Demonstration) else {}
    return {"prompt": prompt, **answer, **rest}


def fields_of(ask: Instruction) -> dict[str, str]:
    """An instruction in AlpacaFarm's fields; a system text, if it has one, in `system`."""
    fields = {"instruction": ask.instruction.removeprefix(system_front(ask.system)), "input": ask.input}
    return {**fields, "system": ask.system} if ask.system else fields


def labelled_row(record: object) -> object:
    """As `as_row`, of a response that says whether it is one to imitate: that is `label`."""
    if not isinstance(record, Mapping):
        return record
    tags = [record[name] for name in _TAGS if record.get(name) is not None]
    row = as_row({name: value for name, value in record.items() if name not in _TAGS})
    return {**row, "label": tags[0]} if isinstance(row, Mapping) and tags else row


def messages_of(ask: Instruction) -> list[dict[str, str]]:
    """An instruction as messages: the system's, if it has one, and the user's."""
    system = _message("system", ask.system) if ask.system else []
    return [*system, *_message("user", ask.removeprefix(system_front(ask.system)))]


def _outputs(record: Instruction | Demonstration | Preference) -> dict[str, Any]:
    if isinstance(record, Preference):
        first, second = record.responses
        return {"output_1": first, "output_2": second, "preference": record.preference}
    return {"output": record.response} if isinstance(record, Demonstration) else {}


def _message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _preference(given: dict[str, Any]) -> dict[str, Any]:
    """The prompt may be in a field of its own, in front of the responses, or both."""
    if "instruction" in given:
        said = {"user": given["instruction"]}
    else:
        said = _question(given, *[name for name in ("prompt", "conversations") if name in given][:1])
    outputs = []
    for name in _PAIR:
        said = _answered(given, name, said)
        outputs.append(said.pop("assistant"))
    if "instruction" in given:
        system = {"system": said["system"]} if "system" in said else {}
        row = {**given, "input": given.get("input", ""), **system}
    else:
        row = _row(given, said, "prompt")
    label = given.get("preference", 1)
    first, second = reversed(outputs) if label == 2 else outputs
    fields = {name: row[name] for name in ("instruction", *_KEPT) if name in row}
    return {**fields, "output_1": first, "output_2": second, "preference": label}


def _question(given: Mapping[str, Any], *fields: str) -> dict[str, str]:
    """`_said` of fields that hold no answer."""
    said = _said(given, *fields)
    if "assistant" in said:
        raise _MisfitError(fields[0], list(said), "the question alone, without an answer of the assistant's")
    return said


def _answered(given: Mapping[str, Any], field: str, question: Mapping[str, str]) -> dict[str, str]:
    """The question and its answer, which `field` holds, perhaps behind the question."""
    said = _said(given, field, before=question)
    if "assistant" not in said:
        raise _MisfitError(field, given.get(field, MISSING), "an answer of the assistant's")
    return said


def _said(given: Mapping[str, Any], *fields: str, before: Mapping[str, str] | None = None) -> dict[str, str]:
    """Role -> its text, by fields that hold messages or a text alone; each may repeat those `before` it."""
    said = {**({"system": given["system"]} if "system" in given else {}), **(before or {})}
    for field in fields:
        value = given.get(field, MISSING)
        alone = {"role": "assistant" if field in (*_PAIR, "completion") else "user", "content": value}
        messages = value if isinstance(value, list | tuple) else [value if isinstance(value, Mapping) else alone]
        if not all(isinstance(each, Mapping) for each in messages):
            raise _MisfitError(field, value, _MESSAGES)
        names = [str(each.get("role", each.get("from"))) for each in messages]
        roles = [_NAMES.get(name, name) for name in names]
        texts = [each.get("content", each.get("value")) for each in messages]
        if not all(map(is_text, texts)):
            raise _MisfitError(field, value, TEXT if value is MISSING else _MESSAGES)
        if roles != [role for role in _ROLES if role in roles]:
            raise _MisfitError(field, roles, _TURNS)
        for role, text in zip(roles, texts, strict=True):
            if said.setdefault(role, text) != text:
                raise _MisfitError(field, text, f"the same {role}'s message as before")
    return said


def _row(given: Mapping[str, Any], said: Mapping[str, str], field: str) -> dict[str, Any]:
    """A question, and its answer if there is one, with what else the row says."""
    if "user" not in said:
        raise _MisfitError(field, list(said) if field in given else MISSING, _TURNS)
    row = {name: given[name] for name in _KEPT if name in given}
    text = said["user"]
    if end := row.get("input"):
        if not (is_text(end) and text.endswith(f"\n\n{end}")):
            raise _MisfitError("input", end, "the end of the user's message, after a blank line, or no such field")
        text = text.removesuffix(f"\n\n{end}")
    row |= {"instruction": text, "system": said.get("system", "")}
    return {**row, "output": said["assistant"]} if "assistant" in said else row
