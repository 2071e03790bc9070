"""An agent's answers to the instructions of a split, stored in blocks as they come."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ...data.files import write_atomic
from ...errors import DataError
from ...instructions import Instruction
from ...oracles.reward_model import num_positions
from ..harness.stored import read_stored
from ..methods.methods import Actor

ANSWERED_AT_ONCE: Final = 161
"""Instructions whose answers are stored together; draws of `act` are keyed on all of them."""
ANSWERS: Final = {"responses": [str], "tokens": int}


@contextmanager
def room_for(actor: Any, longest: int) -> Iterator[None]:
    """Prompts of so many tokens are answered within, also those that training left out; 0 for no policy."""
    if not longest:
        yield
        return
    before = actor.policy.max_prompt_tokens
    actor.policy.max_prompt_tokens = max(before, longest)
    yield
    actor.policy.max_prompt_tokens = before


def longest_prompt(actor: Actor, instructions: Sequence[Instruction]) -> int:
    """Tokens of the longest prompt to answer, which training may have left out; 0 for an actor without a policy.

    Raises:
        DataError: A prompt and a response do not fit the policy's positions.
    """
    policy: Any = getattr(actor, "policy", None)
    if not hasattr(policy, "max_response_tokens"):
        return 0
    from ...agents.prompts import own_control_token, prompt_lengths

    width = policy.max_response_tokens + (own_control_token(policy.model) is not None)
    room = num_positions(policy.model.config) - width
    lengths = prompt_lengths(policy.tokenizer, policy.template, instructions)
    if too_long := [length for length in lengths if length > room]:
        raise DataError(
            f"{len(too_long)} of {len(lengths)} prompts of eval do not fit the policy with a response of {width} "
            f"tokens: the longest has {max(too_long)}, and there is room for {room:g}. Leave them out of the data (a "
            "prompt is never cut)."
        )
    return max(lengths, default=0)


def answer(
    actor: Actor, instructions: Sequence[Instruction], folder: Path, tell: Callable[[float], None]
) -> tuple[tuple[str, ...], int]:
    """One response per instruction and the tokens sampled for all; answers stored by an earlier call are kept.

    Processes of a world share the missing files; a response does not depend on which one gives it. Best-of-n has its
    own number of instructions to a file: 161 times 1024 samples of a large model would take hours.
    """
    from ...agents.processes import Processes

    world, size = Processes(), getattr(actor, "instructions_at_once", ANSWERED_AT_ONCE)
    starts = range(0, len(instructions), size)
    blocks = {folder / f"{first:06}-{size}.json": instructions[first : first + size] for first in starts}
    missing = world.from_main([file for file in blocks if not file.is_file()])
    for first in range(0, len(missing), world.count):
        files = missing[first : first + world.count]
        done = world.spread(files, lambda file: respond(actor, blocks[file]))
        for file, block in zip(files, done, strict=True):
            if world.is_main:
                folder.mkdir(exist_ok=True)
                write_atomic(file, json.dumps(block))
        left = sum(len(blocks[file]) for file in missing[first + world.count :])
        tell(1 - left / len(instructions))
    stored = world.from_main([read_stored(file, *ANSWERS, shape=ANSWERS) for file in blocks if world.is_main])
    responses = tuple(response for block in stored for response in block["responses"])
    return responses, sum(block["tokens"] for block in stored)


def respond(actor: Actor, instructions: Sequence[Instruction]) -> dict[str, Any]:
    """The responses to some instructions, and the tokens sampled for them."""
    before = getattr(actor, "num_tokens", 0)
    responses = list(actor.act(instructions))
    if len(responses) != len(instructions):
        raise ValueError(
            f"{type(actor).__name__}.act: expected a response to each of {len(instructions)} instructions, got "
            f"{len(responses)} responses"
        )
    return {"responses": responses, "tokens": getattr(actor, "num_tokens", 0) - before}
