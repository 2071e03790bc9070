"""Whether a server refuses one request's own text, told by its words: servers share no codes for this.

What is missed here ends a whole call, where one text would have been left out; what is found by mistake leaves texts
out, each with the server's words. So phrases count only if they speak of a text and its length, or of its content.
"""

from __future__ import annotations

import re
from typing import Any, Final

TOO_LONG: Final = "the prompt and max_tokens together are longer than the model's context"
FILTERED: Final = "the server's filter refused the text"
_MOST_CHARS: Final = 20_000
_CODES: Final = {
    "context_length_exceeded": TOO_LONG,
    "exceed_context_size_error": TOO_LONG,
    "string_above_max_length": TOO_LONG,
    "content_filter": FILTERED,
    "content_policy_violation": FILTERED,
    "moderation_blocked": FILTERED,
}
# OpenAI, vLLM, OpenRouter, Mistral, SGLang, llama.cpp and its Python server, Ollama and LM Studio speak of a "context
# length", "size" or "window"; vLLM also of a "maximum model length", TGI of "`inputs` tokens + `max_new_tokens`",
# Gemini of a "token count" that "exceeds the maximum", Anthropic of a prompt that "is too long".
_LONG: Final = re.compile(
    r"context[ _-](?:length|size|window|limit)|maximum model length|inputs?\W{0,2} tokens? \+ \W?max_new_tokens"
    r"|inputs?\W{0,2} must have less than \d+ tokens|token count .{0,60}exceeds? the maximum"
    r"|(?:prompt|input|request)(?: is| was)? too (?:long|large)|too many (?:input |prompt )?tokens"
    r"|reduce the length of (?:the|your)",
    re.IGNORECASE,
)
_FLAGGED: Final = re.compile(
    r"\bflagged\b|\bmoderation\b|content[ _-](?:filter|policy|management)|safety (?:system|filter|polic)"
    r"|(?:violat\w+|against|by) (?:\w+ ){0,4}polic(?:y|ies)|usage polic(?:y|ies)|prohibited[ _]content",
    re.IGNORECASE,
)
_ACCOUNT: Final = re.compile(r"\b(?:account|organi[sz]ation|api[ _]key|billing|country|region)\b", re.IGNORECASE)
"""Words of refusals that are about who asks, not about what."""


def refused_text(words: str, body: Any = None) -> str:
    """Why a text was refused; "" where it is not the text, as far as one can tell.

    Args:
        words: What the server said.
        body: Its error as JSON; "code", "type" and "metadata" (OpenRouter's `reasons`, `flagged_input`) are read.
    """
    error = body if isinstance(body, dict) else {}
    for name in ("code", "type"):
        if str(error.get(name)) in _CODES:
            return _CODES[str(error[name])]
    metadata = error.get("metadata")
    if isinstance(metadata, dict) and "flagged_input" in metadata:
        return FILTERED
    words = words[:_MOST_CHARS]
    if _LONG.search(words):
        return TOO_LONG
    return FILTERED if _FLAGGED.search(words) and not _ACCOUNT.search(words) else ""
