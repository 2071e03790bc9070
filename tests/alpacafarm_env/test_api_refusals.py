"""Refusals of a text, in the words of several servers, and refusals of other things."""

import pytest

from alpacafarm_env.llm.refusals import FILTERED, TOO_LONG, refused_text

LONG = {
    "vLLM": "This model's maximum context length is 2048 tokens. However, you requested 9000 tokens.",
    "vLLM's decoder": "The decoder prompt (length 9000) is longer than the maximum model length of 2048.",
    "llama.cpp": "the request exceeds the available context size. try increasing the context size",
    "llama-cpp-python": "Requested tokens (9000) exceed context window of 2048",
    "Ollama": "the input length exceeds the context length",
    "TGI": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 9000 `inputs` tokens",
    "TGI, inputs": "Input validation error: `inputs` must have less than 4095 tokens. Given: 9000",
    "OpenRouter": "This endpoint's maximum context length is 8192 tokens. You requested about 9000 tokens",
    "Mistral": "Prompt contains 40000 tokens, too large for model with 32768 maximum context length",
    "SGLang": "The input (9000 tokens) is longer than the model's context length (2048 tokens).",
    "Gemini": "The input token count (9000) exceeds the maximum number of tokens allowed (8192).",
    "Anthropic": "prompt is too long: 212345 tokens > 200000 maximum",
    "Groq": "Please reduce the length of the messages or completion.",
}
FLAGGED = (
    "Your input was flagged",
    "Your chosen model requires moderation and your input was flagged for violence",
    "Your request was rejected as a result of our safety system.",
    "The response was filtered due to the prompt triggering a content management policy.",
    "This prompt appears to violate our usage policies",
    "Refused: prohibited content",
)
OTHER = (
    "Unsupported value: 'temperature' does not support 0.0 with this model.",
    "max_tokens is too large: 300. This model supports at most 100 completion tokens.",
    "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.",
    "Project does not have access to model gpt-4.1",
    "Your account was flagged for abuse and is closed",
    "The organization's policy forbids this: it violates our data policy",
    "Country, region, or territory not supported",
    "Access denied due to firewall rules.",
    "",
)


@pytest.mark.parametrize("server", LONG)
def test_a_text_that_is_too_long(server):
    assert refused_text(LONG[server]) == TOO_LONG


@pytest.mark.parametrize("words", FLAGGED)
def test_a_text_that_is_flagged(words):
    assert refused_text(words) == FILTERED


@pytest.mark.parametrize("words", OTHER)
def test_what_is_no_fault_of_the_text(words):
    assert refused_text(words) == ""


def test_codes_and_metadata():
    assert refused_text("no", {"code": "context_length_exceeded"}) == TOO_LONG
    assert refused_text("no", {"code": 400, "type": "exceed_context_size_error"}) == TOO_LONG
    assert refused_text("no", {"code": "content_filter", "type": None}) == FILTERED
    assert refused_text("your account", {"code": 403, "metadata": {"reasons": ["x"], "flagged_input": "y"}}) == FILTERED
    assert refused_text("no", {"code": 403, "metadata": {"provider_name": "x"}}) == ""
    assert refused_text("no", ["content_filter"]) == ""


def test_twin_that_reads_codes_alone_misses_most():
    found = [words for words in (*LONG.values(), *FLAGGED) if refused_text("", {"code": 400, "message": words})]
    assert not found
