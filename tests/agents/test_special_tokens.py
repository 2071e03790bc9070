"""Which token pads, and which tokens end a response, of models as a hub has them."""

import warnings

import pytest
from tiny_models import TEMPLATE, build_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from alpacafarm_env.agents import LanguageModel
from alpacafarm_env.chat_templates import ChatTemplate

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MEDIA, RESERVED, FINETUNE = "<|image_pad|>", "<|reserved_special_token_0|>", "<|finetune_right_pad_id|>"


def build(*names, chat_template=CHATML, **named):
    """One token a byte, after ChatML's and `names`; `named` are roles."""
    special = ["</s>", "<|im_start|>", "<|im_end|>", *names]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "</s>", **named})
    tokenizer.add_special_tokens({"additional_special_tokens": special}, replace_extra_special_tokens=False)
    tokenizer.chat_template = chat_template
    return tokenizer


def policy_of(tokenizer, *, free_rows=0, **settings):
    model = build_llama(len(tokenizer) + free_rows, **settings)
    return LanguageModel(model, tokenizer, ChatTemplate.of(tokenizer) if tokenizer.chat_template else TEMPLATE)


@pytest.mark.parametrize(
    ("names", "named", "free_rows", "expected"),
    [
        ([RESERVED, FINETUNE], {}, 0, FINETUNE),
        ([MEDIA, RESERVED, "<unk>"], {"unk_token": "<unk>"}, 1, RESERVED),
        ([MEDIA, "<odd>", "<unk>"], {"unk_token": "<unk>"}, 1, "<unk>"),
        ([MEDIA, "<odd>"], {"unk_token": "</s>"}, 1, "<pad>"),
        ([MEDIA, "<odd>"], {}, 0, "<odd>"),
        (["<odd>"], {"pad_token": "</s>"}, 0, "<odd>"),
        (["<odd>"], {"pad_token": "<|im_end|>"}, 0, "<odd>"),  # it ends a turn
        (["<odd>"], {"pad_token": "</s>", "chat_template": None}, 0, "<|im_start|>"),
        ([FINETUNE, "<odd>"], {"chat_template": f"{FINETUNE}{CHATML}"}, 0, "<odd>"),  # it is part of the prompt
    ],
)
def test_a_padding_token_that_ends_no_response_is_chosen_and_saved(names, named, free_rows, expected, tmp_path):
    tokenizer = build(*names, **named)
    known = len(tokenizer)
    with pytest.warns(UserWarning, match="takes its place"):
        policy = policy_of(tokenizer, free_rows=free_rows)
    assert tokenizer.pad_token == expected
    assert len(tokenizer) == known + (expected == "<pad>")
    policy.save(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LanguageModel.from_pretrained(tmp_path)
    ids = [AutoTokenizer.from_pretrained(tmp_path).pad_token_id]
    ids += [kind.from_pretrained(tmp_path).pad_token_id for kind in (AutoConfig, GenerationConfig)]
    assert ids == [tokenizer.convert_tokens_to_ids(expected)] * 3


def test_a_padding_token_that_fits_is_kept():
    policy = policy_of(build("<odd>", FINETUNE, pad_token="<odd>"))
    assert policy.tokenizer.pad_token == "<odd>"
    assert policy.model.config.pad_token_id == policy.tokenizer.pad_token_id


def test_a_tokenizer_that_no_token_can_pad_or_end_is_refused():
    with pytest.raises(ValueError, match="padding token"):
        policy_of(build(MEDIA))
    with pytest.raises(ValueError, match="end-of-sequence token"):
        policy_of(build("<odd>", eos_token=None, pad_token="<odd>"))


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (3, [2, 0, 3]),
        ([3], [2, 0, 3]),
        ([0, 3, 2], [2, 0, 3]),
        (None, [2, 0]),
        ("copied", [2, 0]),  # the architecture's default, which nobody has chosen
    ],
)
def test_a_response_ends_where_template_tokenizer_or_generation_config_end_it(listed, expected, tmp_path):
    tokenizer = build("<end>", "<odd>", pad_token="<odd>")
    model = build_llama(len(tokenizer))
    if listed == "copied":
        model.config.eos_token_id = 7
        model.generation_config = GenerationConfig.from_model_config(model.config)
    else:
        model.generation_config = GenerationConfig(eos_token_id=listed, repetition_penalty=1.1)
    policy = LanguageModel(model, tokenizer, ChatTemplate.of(tokenizer))
    assert list(policy.eos_token_ids) == expected
    policy.save(tmp_path)
    assert list(LanguageModel.from_pretrained(tmp_path).eos_token_ids) == expected
    saved = GenerationConfig.from_pretrained(tmp_path)
    assert sorted(saved.eos_token_id) == sorted(expected)
    assert saved.repetition_penalty in (None, 1.0)
