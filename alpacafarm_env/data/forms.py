"""Other libraries' rows: prompt and completion, chosen and rejected, chat messages. Read, and written, as AlpacaFarm's.

A text stays what it is, character for character. TRL's rows are written as lists of messages, so that the trained
model's own chat template makes the prompt, and ends the response, as it does here. They carry what TRL has no field
for, and does not mind: `input` (the end of the user's message that is one), `preference` (1: the chosen response came
first) and `dataset`. Rows of others do without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..instructions import Demonstration, Instruction, Preference
from .schema import KINDS, MISSING, TEXT, Fault, is_text, shown

FORMATS = ("trl", "alpacafarm")
_OWN = frozenset(field.name for fields in KINDS.values() for field in fields)
_KEPT = ("input", "dataset", "generator")
_MESSAGES = "a string, or a list of messages such as {'role': 'user', 'content': 'Hi'}"
_TURNS = "one message of the user's and one answer of the assistant's at most"
_SCHEMAS = (
    "the fields of one kind of row (instruction, input and output; instruction, input, output_1, output_2 and "
    "preference; messages; prompt and completion; prompt, chosen and rejected)"
)


class _MisfitError(Exception):
    """Wraps the fault of a record that is none of the kinds."""

    def __init__(self, field: str, found: object, expected: str) -> None:
        super().__init__()
        self.fault = Fault(0, field, shown(found), expected)


def as_row(record: object) -> object:
    """A record in AlpacaFarm's fields, or the `Fault` that keeps it from that; what has them already, as it is.

    The user's message is the instruction. Where a field `input` is there too, it is the message's end, after a blank
    line. Conversations of more than two messages, or with a system message, are no single instruction: a fault.
    """
    if not isinstance(record, Mapping):
        return record
    given = {name: value for name, value in record.items() if value is not None}
    try:
        if "chosen" in given or "rejected" in given:
            return _preference(given)
        if "instruction" in given:
            return record
        if "messages" in given:
            return _answered(given, *_turns(given, "messages", "user"))
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
        return {"instruction": ask.instruction, "input": ask.input, **_outputs(record), **source}
    prompt, rest = _message("user", str(ask)), {"input": ask.input, **source}
    if isinstance(record, Preference):
        pair = {name: _message("assistant", getattr(record, name)) for name in ("chosen", "rejected")}
        return {"prompt": prompt, **pair, **rest, "preference": record.preference}
    answer = {"completion": _message("assistant", record.response)} if isinstance(record, Demonstration) else {}
    return {"prompt": prompt, **answer, **rest}


def _outputs(record: Instruction | Demonstration | Preference) -> dict[str, Any]:
    if isinstance(record, Preference):
        first, second = record.responses
        return {"output_1": first, "output_2": second, "preference": record.preference}
    return {"output": record.response} if isinstance(record, Demonstration) else {}


def _message(role: str, content: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content}]


def _preference(given: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt may be in a field of its own, in front of both responses, or both."""
    responses = [_turns(given, name, "assistant") for name in ("chosen", "rejected")]
    if "instruction" in given:
        asked = list[tuple[str, str]]()
    elif "prompt" in given or any(len(turns) < 2 for turns in responses):
        asked = _turns(given, "prompt", "user")
    else:
        asked = responses[0][:1]
    rows = []
    for name, turns in zip(("chosen", "rejected"), responses, strict=True):
        if "instruction" in given:
            rows.append({**given, "output": _only(turns, name, "assistant")})
        else:
            rows.append(_answered(given, *_joined(asked, turns, name)))
            if "output" not in rows[-1]:
                raise _MisfitError(name, given[name], "an answer of the assistant's")
    outputs = [row["output"] for row in rows]
    label = given.get("preference", 1)
    first, second = reversed(outputs) if label == 2 else outputs
    question = {name: rows[0][name] for name in ("instruction", *_KEPT) if name in rows[0]}
    return {**question, "output_1": first, "output_2": second, "preference": label}


def _turns(given: Mapping[str, Any], field: str, role: str) -> list[tuple[str, str]]:
    """Roles and texts of a field that holds messages, or the text of one."""
    value = given.get(field, MISSING)
    if is_text(value):
        return [(role, value)]
    messages: list[Any] = list(value) if isinstance(value, list | tuple) and value else [None]
    if not all(isinstance(each, Mapping) and is_text(each.get("content")) for each in messages):
        raise _MisfitError(field, value, TEXT if field == "completion" and value is MISSING else _MESSAGES)
    turns = [(str(each.get("role")), each["content"]) for each in messages]
    if [name for name, _ in turns] not in (["user"], ["assistant"], ["user", "assistant"]):
        raise _MisfitError(field, [name for name, _ in turns], _TURNS)
    return turns


def _joined(asked: list[tuple[str, str]], turns: list[tuple[str, str]], field: str) -> list[tuple[str, str]]:
    """A question and its answer, which may repeat the question."""
    question = [("user", _only(asked, "prompt", "user"))]
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
