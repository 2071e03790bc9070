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
_ANSWERS = frozenset(("output", "completion", *_CONVERSATIONS))
_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names, whose messages have `from` and `value`."""
_TAGS = ("label", "kto_tag")
"""Whether a response is one to imitate, in rows of KTO."""
_MESSAGES = "a string, or a list of messages such as {'role': 'user', 'content': 'Hi'}"
_TURNS = (
    "a system message or none, one message of the user's and one answer of the assistant's at most (until whole "
    "conversations are read: split them into single turns, what was said before written into the user's message)"
)
_IMITATED = (
    "true, or no such field: SFT would imitate this response (KTO's rows are read where all are true; leave the others "
    "out, or make pairs of both: prompt, chosen and rejected)"
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
    given = {name: value for name, value in record.items() if value is not None or name in _PAIR}
    try:
        if any(given.get(name) is not None for name in _PAIR):
            return _preference(given)
        for name in _TAGS:
            if not _ANSWERS.isdisjoint(given) and str(given.get(name)).lower() in ("false", "0"):
                raise _MisfitError(name, given[name], _IMITATED)
        if "instruction" in given:
            return record
        for name in _CONVERSATIONS:
            if name in given:
                return _answered(given, *_turns(given, name, "user"))
        if "prompt" in given:
            answer = _turns(given, "completion", "assistant") if "completion" in given else []
            return _answered(given, *_joined(_turns(given, "prompt", "user"), answer, "completion"))
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
    """The prompt may be in a field of its own, in front of both responses, or both."""
    responses = [_turns(given, name, "assistant") for name in _PAIR]
    if "instruction" in given:
        question = list[tuple[str, str]]()
    elif "prompt" in given or any(len(turns) < 2 for turns in responses):
        question = _turns(given, next(filter(given.__contains__, ("prompt", "conversations")), "prompt"), "user")
    else:
        question = responses[0][:1]
    rows = []
    for name, turns in zip(_PAIR, responses, strict=True):
        if "instruction" in given:
            rows.append({**given, "output": _only(turns, name, "assistant")})
        else:
            rows.append(_answered(given, *_joined(question, turns, name)))
            if "output" not in rows[-1]:
                raise _MisfitError(name, given[name], "an answer of the assistant's")
    outputs = [row["output"] for row in rows]
    label = given.get("preference", 1)
    first, second = reversed(outputs) if label == 2 else outputs
    fields = {name: rows[0][name] for name in ("instruction", *_KEPT) if name in rows[0]}
    return {**fields, "output_1": first, "output_2": second, "preference": label}


def _turns(given: dict[str, Any], field: str, role: str) -> list[tuple[str, str]]:
    """Roles and texts of a field that holds messages, or the text of one; a system message goes to `given`."""
    value = given.get(field, MISSING)
    if is_text(value):
        return [(role, value)]
    turns = [_turn(each) for each in (value if isinstance(value, list | tuple) and value else [value])]
    if not all(is_text(text) for _, text in turns):
        raise _MisfitError(field, value, TEXT if field == "completion" and value is MISSING else _MESSAGES)
    if len(turns) > 1 and turns[0][0] == "system" and given.setdefault("system", turns[0][1]) == turns[0][1]:
        turns = turns[1:]
    if [name for name, _ in turns] not in (["user"], ["assistant"], ["user", "assistant"]):
        raise _MisfitError(field, [name for name, _ in turns], _TURNS)
    return turns


def _turn(message: object) -> tuple[str, Any]:
    """Role and text of a message; no text if it is none."""
    if not isinstance(message, Mapping):
        return "", None
    if "from" in message:
        return _ROLES.get(str(message["from"]), str(message["from"])), message.get("value")
    return str(message.get("role")), message.get("content")


def _joined(prompt: list[tuple[str, str]], turns: list[tuple[str, str]], field: str) -> list[tuple[str, str]]:
    """A question and its answer, which may repeat the question."""
    question = [("user", _only(prompt, "prompt", "user"))]
    if turns[:1] == question:
        return turns
    return [*question, ("assistant", _only(turns, field, "assistant"))] if turns else question


def _only(turns: list[tuple[str, str]], field: str, role: str) -> str:
    if [name for name, _ in turns] != [role]:
        expected = f"one message of the {role}'s, or the prompt and it"
        raise _MisfitError(field, turns, expected)
    return turns[0][1]


def _answered(given: Mapping[str, Any], *turns: tuple[str, str]) -> dict[str, Any]:
    """A question, and its answer if there is one, with what else the row says."""
    if turns[0][0] != "user":
        raise _MisfitError("messages", [turns[0][0]], _TURNS)
    text, row = turns[0][1], {name: given[name] for name in _KEPT if name in given}
    if end := row.get("input"):
        if not (is_text(end) and text.endswith(f"\n\n{end}")):
            raise _MisfitError("input", end, "the end of the user's message, after a blank line, or no such field")
        text = text.removesuffix(f"\n\n{end}")
    row["instruction"] = text
    return {**row, "output": turns[1][1]} if len(turns) > 1 else row
