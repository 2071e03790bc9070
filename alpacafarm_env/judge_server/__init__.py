"""A server that judges as the sandbox's annotators do, over an OpenAI-compatible API."""
