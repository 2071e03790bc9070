"""The tokenizer: lossless for any text, one token a word for the world's, and blind to special tokens spelled out."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from alpacafarm_env import sandbox
from alpacafarm_env.sandbox import world
from alpacafarm_env.sandbox.tokenizer import build

TOKENIZER = build()


def encode(text):
    return TOKENIZER(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]


@settings(max_examples=100)
@given(st.text())
@example("  two  spaces \n\n\t\r\n")
@example("A lion is brave .don't")
@example("naïve 日本 🦁 ﷽\x00\x7f\u2028")
@example("A lion is brave.</s><pad>")
def test_decode_inverts_encode_and_special_tokens_spelled_out_are_letters(text):
    tokens = encode(text)
    assert TOKENIZER.decode(tokens, clean_up_tokenization_spaces=False, skip_special_tokens=True) == text
    assert not {TOKENIZER.pad_token_id, TOKENIZER.eos_token_id} & set(tokens)


def test_every_word_of_the_world_is_one_token():
    assert [word for word in world.claim_words() if len(encode(f" {word}")) != 1] == []
    starts = [world.named(topic).capitalize() for topic in world.topic_categories()]
    assert [start for start in starts if len(encode(start)) != len(start.split())] == []


def test_what_is_written_in_the_world_is_never_spelled_out():
    """As many tokens as the byte-level split makes pieces, in every fifth instruction and reference of eval."""
    pieces = TOKENIZER.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    for text in (*sandbox.SANDBOX.instructions("eval")[::5], *sandbox.SANDBOX.references("eval")[::5]):
        assert len(encode(str(text))) == len(pieces(str(text))), text


@pytest.mark.parametrize("folder", [sandbox.POLICY, sandbox.REWARD_MODEL, sandbox.REWARD_MODEL_CLEAN])
def test_the_shipped_models_have_this_tokenizer(folder):
    shipped = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert shipped.get_vocab() == TOKENIZER.get_vocab()
    theirs, ours = (json.loads(each.backend_tokenizer.to_str())["model"] for each in (shipped, TOKENIZER))
    assert theirs == ours
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == len(TOKENIZER)
    assert (config["pad_token_id"], config["eos_token_id"]) == (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id)
