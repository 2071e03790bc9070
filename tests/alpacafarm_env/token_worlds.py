"""A vocabulary of ten words, and an oracle that counts them, for tests of the token environments."""

import json

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["<pad>", "</s>", "<unk>", "say", "hello", "goodbye", "twice", "in", "French", ":"]
EOS, HELLO = WORDS.index("</s>"), WORDS.index("hello")
ROWS = [
    {"instruction": "say hello", "input": "", "output": "hello"},
    {"instruction": "say goodbye", "input": "in French", "output": "goodbye"},
    {"instruction": "say hello twice", "input": "", "output": "hello hello"},
]


class Brevity:
    """Minus the number of words, or no verdict; remembers what it was asked."""

    name = "brevity"

    def __init__(self, silent=False):
        self.silent, self.asked = silent, []

    def score(self, instructions, responses):
        self.asked += zip(instructions, responses, strict=True)
        return np.array([np.nan if self.silent else -len(response.split()) for response in responses])

    def __deepcopy__(self, memo):
        return self


def save_tokenizer(folder, **special_tokens):
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens).save_pretrained(folder)
    template = {"prompt_inputs": "{instruction} {input} :", "prompt_noinputs": "{instruction} :"}
    (folder / "prompt_template.json").write_text(json.dumps(template), encoding="utf-8")
    return folder


def make_keywords(data, policy):
    """Keywords of the token environments, whose files go into two folders."""
    (data / "unlabeled.json").write_text(json.dumps(ROWS), encoding="utf-8")
    save_tokenizer(policy, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    return {"dataset": str(data), "tokenizer": str(policy), "max_prompt_tokens": 8, "max_response_tokens": 4}
