"""An episode as text, for `render`."""


def transcript(instruction: str, response: str | None, reward: float, oracle: str) -> str:
    """The instruction and, once there is a response, the response and its reward."""
    lines = ["### Instruction", instruction]
    if response is not None:
        verdict = "no verdict" if reward != reward else f"{reward:.4f}"  # NaN differs from itself
        lines += ["", "### Response", response, "", f"### Reward ({oracle})", verdict]
    return "\n".join(lines) + "\n"
