"""The value model of PPO: the reward to be expected before each response token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..folders import check_model
from ..pretrained import load_model, load_tokenizer
from .language_model import LanguageModel, turn_off_dropout
from .rollouts import Rollouts, scoring_batch


class ValueModel(nn.Module):
    """A trunk and a linear head that starts at zero, so that before training V = 0 everywhere.

    AlpacaFarm starts the trunk from the reward model (Dubois et al. 2023, Appendix B): `from_pretrained`.

    Args:
        trunk: A causal decoder that returns `last_hidden_state` [B, L, d].
        head: Linear, d to 1.
        fill_token_id: Any id the trunk embeds; fills rows up on the right, unseen.
    """

    def __init__(self, trunk: nn.Module, head: nn.Linear, *, fill_token_id: int) -> None:
        super().__init__()
        self.trunk = turn_off_dropout(trunk)
        self.head = head
        self._fill_token_id = fill_token_id

    @classmethod
    def from_pretrained(
        cls, path: str | Path, *, policy: LanguageModel, dtype: torch.dtype = torch.float32
    ) -> ValueModel:
        """Takes the trunk of a sequence-classification folder (a reward model); its own head is dropped.

        Args:
            path: Folder or hub name of any Hugging Face sequence-classification model over a decoder.
            policy: The language model whose tokens are valued; the value model goes to its device.
            dtype: Of the weights.

        Raises:
            CheckpointError: The folder is missing or damaged.
            ValueError: Its tokenizer is not the policy's: the same ids would mean other words.
        """
        check_model(path)
        check_same_vocabulary(policy.tokenizer, load_tokenizer(path), str(path))
        model, _ = load_model("AutoModelForSequenceClassification", path, new={"score.weight"}, dtype=dtype)
        return cls._with_zero_head(model, policy)

    @classmethod
    def from_policy(cls, policy: LanguageModel) -> ValueModel:
        """Takes a copy of the policy's own trunk, LoRA adapters merged in; all of it trains."""
        model: Any = copy.deepcopy(policy.model)
        if isinstance(model, peft.PeftModel):
            model = model.merge_and_unload()
        return cls._with_zero_head(model, policy)

    @classmethod
    def _with_zero_head(cls, model: PreTrainedModel, policy: LanguageModel) -> ValueModel:
        head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=model.dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        trunk = model.base_model.requires_grad_(True)
        return cls(trunk, head, fill_token_id=policy.tokenizer.eos_token_id).to(policy.device)

    def forward(self, rollouts: Rollouts) -> Tensor:
        """The same as `values`."""
        ids, predicts = scoring_batch(rollouts.to(self.head.weight.device), fill_token_id=self._fill_token_id)
        hidden = self.trunk(input_ids=ids, use_cache=False).last_hidden_state
        values: Tensor = self.head(hidden[predicts])[:, 0].float()
        return values

    def values(self, rollouts: Rollouts) -> Tensor:
        """V before every response token: flat [sum T] float32.

        V_t reads the hidden state of the position that predicts token t: it knows the prompt and the tokens before t.
        """
        values: Tensor = self(rollouts)
        return values


def check_same_vocabulary(policy: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, name: str) -> None:
    """Raises ValueError unless two tokenizers map the same tokens to the same ids."""
    ours, theirs = policy.get_vocab(), other.get_vocab()
    if ours == theirs:
        return
    differing = sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    first = differing[0]
    raise ValueError(
        f"The value model in {name} must read the policy's tokens, but {len(differing)} tokens differ: {first!r} is id "
        f"{ours.get(first)} for the policy and {theirs.get(first)} there. Use a reward model with the policy's "
        "tokenizer, or start the value model from the policy"
    )
