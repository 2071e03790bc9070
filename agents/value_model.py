"""Value models of PPO: V before every response token, from hidden states and a linear head that starts at 0.

Two kinds behind one call, `values(rollouts)`:

| kind | reads with | beside the policy |
|---|---|---|
| "model" | a trunk of its own, all of which trains | another model and its optimizer state |
| "adapter" | a LoRA adapter of its own on the policy's frozen trunk | an adapter |
"""

import copy
import warnings
from pathlib import Path
from typing import Any, Literal, Self

import peft
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..bases import is_adapter
from ..folders import check_model
from ..last_layer import last_mlp_at
from ..oracles.reward_model import load_scorer
from ..pretrained import load_model, load_tokenizer, reading
from .adapters import as_scorer, bare, builds_on, has_lora, turn_off_dropout, with_adapter
from .language_model import LanguageModel
from .rollouts import Rollouts, scoring_inputs

Kind = Literal["model", "adapter"]


class ValueModel(nn.Module):
    """A trunk and a linear head that starts at zero, so that before training V = 0 everywhere.

    The trunk is a causal decoder that returns `last_hidden_state` [B, L, d]; `fill_token_id` is any id that it embeds.
    """

    def __init__(self, trunk: nn.Module, head: nn.Linear, *, fill_token_id: int) -> None:
        super().__init__()
        self.trunk = turn_off_dropout(trunk)
        self.head = head
        self._fill_token_id = fill_token_id

    @classmethod
    def from_pretrained(cls, path: str | Path, *, policy: LanguageModel, dtype: torch.dtype = torch.float32) -> Self:
        """Takes the trunk of a reward model, whole or an adapter merged into its base; its own head is dropped.

        AlpacaFarm starts so (Dubois et al. 2023, Appendix B).

        Raises:
            CheckpointError: The folder is missing or damaged.
            ValueError: Its tokenizer is not the policy's: the same ids would mean other words.
        """
        check_model(path)
        check_same_vocabulary(policy.tokenizer, load_tokenizer(path), str(path))
        if is_adapter(path):
            model = load_scorer(path, dtype=dtype).merge_and_unload()
        else:
            model, _ = load_model("AutoModelForSequenceClassification", path, new={"score.weight"}, dtype=dtype)
        return cls._of(model.base_model.requires_grad_(True), policy)

    @classmethod
    def from_policy(cls, policy: LanguageModel) -> Self:
        """Takes a copy of the policy's own trunk, LoRA adapters merged in; all of it trains."""
        model: Any = copy.deepcopy(policy.model)
        if isinstance(model, peft.PeftModel):
            model = model.merge_and_unload()
        return cls._of(model.base_model.requires_grad_(True), policy)

    @classmethod
    def on_trunk(cls, policy: LanguageModel, *, reward_adapter: str | Path | None = None, seed: int = 0) -> Self:
        """Takes the frozen trunk of a LoRA policy itself, with an adapter of its own, which trains.

        That is a copy of a reward model's adapter over the same base; or a fresh one of the policy's settings, the
        identity, whose random half `seed` decides.

        Raises:
            ValueError: The policy has no LoRA adapter or trains more than that, or the reward adapter's base or
                tokenizer is another.
        """
        if not has_lora(policy.model):
            raise ValueError(
                "value='adapter' needs a policy with a LoRA adapter, whose frozen trunk it shares. Load the policy "
                "with lora=..., or take value='model'."
            )
        trunk = bare(policy.model)
        if reward_adapter is None:
            config = copy.deepcopy(policy.model.active_peft_config)
            config.init_lora_weights, config.inference_mode = True, False
            with_adapter(trunk, config, seed=seed)  # puts its layers into the modules that it is given
            return cls._of(trunk.base_model, policy)
        if not builds_on(reward_adapter, policy.model):
            raise ValueError(f"{reward_adapter}: expected a LoRA reward adapter over the base of the policy.")
        check_same_vocabulary(policy.tokenizer, load_tokenizer(reward_adapter), str(reward_adapter))
        base = as_scorer(trunk, pad_token_id=policy.tokenizer.pad_token_id)
        model = load_scorer(reward_adapter, dtype=base.dtype, base=base, trains=True)
        return cls._of(model.get_base_model().base_model, policy)

    @classmethod
    def _of(cls, trunk: Any, policy: LanguageModel) -> Self:
        return cls(trunk, zero_head(trunk), fill_token_id=policy.tokenizer.eos_token_id).to(policy.device)

    def values(self, rollouts: Rollouts) -> Tensor:
        """V before every response token: flat [sum T] float32.

        V_t reads the hidden state of the position that predicts token t: it knows the prompt and the tokens before t.
        """
        given = rollouts.to(self.head.weight.device)
        inputs, predicts = scoring_inputs(self.trunk, given, self._fill_token_id)
        with last_mlp_at(self.trunk, predicts):
            hidden = self.trunk(**inputs).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(hidden[predicts].to(self.head.weight.dtype))[:, 0].float()
        return values

    def save_weights(self, path: Path) -> None:
        """Write what trains of it."""
        save_file({name: value.detach().cpu().contiguous() for name, value in self._trained().items()}, path)

    @torch.no_grad()
    def load_weights(self, path: Path) -> None:
        """Read what `save_weights` wrote; CheckpointError if that is damaged, or of another value model."""
        with reading(path, "this value model's weights"):
            saved, trained = load_file(path), self._trained()
            if others := sorted(saved.keys() ^ trained.keys()):
                raise ValueError(f"its tensors are others than the model's, such as {others[0]}")
            for name, value in trained.items():
                value.copy_(saved[name])

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: value for name, value in self.named_parameters() if value.requires_grad}


def make_value_model(policy: LanguageModel, kind: Kind, *, init: str | Path | None = None, seed: int = 0) -> ValueModel:
    """The value model of PPO, started from the reward model `init` where its kind can be; else a warning says so."""
    if init is not None:
        check_model(init)
    if kind == "model":
        if init is None:
            return ValueModel.from_policy(policy)
        return ValueModel.from_pretrained(init, policy=policy, dtype=policy.model.dtype)
    usable = init is not None and builds_on(init, policy.model)
    if init is not None and not usable:
        warnings.warn(
            f"The value model starts from 0 and not from {init}: value={kind!r} reads with the policy's trunk, and can "
            "start from a LoRA reward adapter over that only.",
            stacklevel=3,
        )
    return ValueModel.on_trunk(policy, reward_adapter=init if usable else None, seed=seed)


def zero_head(trunk: PreTrainedModel) -> nn.Linear:
    """A head [d] -> 1 of zeros, float32."""
    width = trunk.config.get_text_config().hidden_size
    head = nn.Linear(width, 1, device="meta", dtype=torch.float32).to_empty(device=trunk.device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def check_same_vocabulary(policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, name: str) -> None:
    """Raises ValueError unless two tokenizers map the same tokens to the same ids.

    A padding token that only one of them has got is no word that the other would have to read.
    """
    ours, theirs = policy.get_vocab(), other.get_vocab()
    pads = {policy.pad_token, other.pad_token} - (ours.keys() & theirs.keys())
    words = (ours.keys() | theirs.keys()) - pads
    if differing := sorted(token for token in words if ours.get(token) != theirs.get(token)):
        first = differing[0]
        raise ValueError(
            f"The value model in {name} must read the policy's tokens, but {len(differing)} tokens differ: {first!r} "
            f"is id {ours.get(first)} for the policy and {theirs.get(first)} there. Use a reward model with the "
            "policy's tokenizer, or start the value model from the policy"
        )
