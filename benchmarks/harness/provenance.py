"""Where the numbers of a study come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Provenance:
    """Where the numbers come from; stands under every figure and table."""

    level: str
    """sandbox, recorded or live."""
    dataset: str
    policy: str
    reward_model: str
    num_val: int
    num_eval: int
    num_seeds: int
    temperature: float
    temperature_note: str = ""
    """Whose temperature is another one."""
    judge: str = ""
    """The judge of one's own behind the column win_rate; "" for none."""

    @property
    def sandbox(self) -> bool:
        """Whether the numbers are those of the simulation."""
        return self.level == "sandbox"

    @property
    def reference(self) -> str:
        """Whose responses are to be beaten."""
        return "the sandbox's stand-in for Davinci003" if self.sandbox else f"the references of {self.dataset}"

    def label(self, split: str = "eval") -> str:
        """Level, split, n, seeds and interval, in one line."""
        count = self.num_eval if split == "eval" else self.num_val
        seeds = (
            "1 seed, no interval"
            if self.num_seeds == 1
            else f"{self.num_seeds} seeds, 95 % t-intervals of the mean over seeds"
        )
        kind = "sandbox (simulation)" if self.sandbox else self.level
        temperature = f"temperature {self.temperature:g}{self.temperature_note}"
        return f"Level: {kind}; {split}, n = {count} instructions, {temperature}; {seeds}."

    def judges(self) -> str:
        """Who gives which number."""
        own = f" Win rate by the judge: {self.judge}, against {self.reference}." if self.judge else ""
        if not self.sandbox:
            return (
                f"Proxy: reward model {self.reward_model}.{own} This level has no gold reward, no simulated judge and "
                "no human raters: those columns are empty."
            )
        return (
            f"Proxy: reward model {self.reward_model}. Gold: the sandbox's true reward. Win rates against "
            f"{self.reference}: by p_sim^eval (13 simulated annotators, no added noise) and 16 simulated human "
            f"raters.{own}"
        )
