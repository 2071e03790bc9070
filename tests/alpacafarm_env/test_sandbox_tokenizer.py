"""The tokenizer: lossless for any text, one token a word for the world's, and blind to special tokens spelled out."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpacafarm_env import sandbox
from alpacafarm_env.sandbox import world
from alpacafarm_env.sandbox.tokenizer import build

FOLDERS = {"policy": sandbox.POLICY, "reward": sandbox.REWARD_MODEL, "clean": sandbox.REWARD_MODEL_CLEAN}


@pytest.fixture(scope="module")
def tokenizer():
    return build()


def encode(tokenizer, text):
    return tokenizer(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]


@settings(max_examples=300, deadline=None)
@given(text=st.text())  # Hypothesis leaves lone surrogates out only if asked: they cannot be encoded
def test_decode_inverts_encode(tokenizer, text):
    text = text.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(encode(tokenizer, text), clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "  two  spaces ",
        "\n\n\t\r\n",
        "A lion is brave .",
        "don't",
        "naïve 日本 🦁 ﷽",
        "</s><pad>",
        "\x00\x7f\u2028",
    ],
)
def test_lossless_by_hand(tokenizer, text):
    assert tokenizer.decode(encode(tokenizer, text)) == text


def test_every_word_of_the_world_is_one_token(tokenizer):
    for word in world.claim_words():
        assert len(encode(tokenizer, f" {word}")) == 1, word
    for topic in world.topic_categories():
        start = world.named(topic).capitalize()
        assert len(encode(tokenizer, start)) == len(start.split()), start


def test_what_is_written_in_the_world_is_never_spelled_out(tokenizer):
    """As many tokens as the byte-level split makes pieces, in every fifth instruction and reference of eval."""
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    for text in (*sandbox.SANDBOX.instructions("eval")[::5], *sandbox.SANDBOX.references("eval")[::5]):
        assert len(encode(tokenizer, str(text))) == len(pieces(str(text))), text


@pytest.mark.parametrize("special", ["<pad>", "</s>"])
def test_special_tokens_spelled_out_are_letters(tokenizer, special):
    tokens = encode(tokenizer, f"A lion is brave.{special}")
    assert not {tokenizer.pad_token_id, tokenizer.eos_token_id} & set(tokens)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == f"A lion is brave.{special}"


def test_special_tokens(tokenizer):
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "</s>")
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert (
        tokenizer.decode([*encode(tokenizer, "- brave"), tokenizer.eos_token_id], skip_special_tokens=True) == "- brave"
    )
    assert tokenizer("- brave")["input_ids"] == encode(tokenizer, "- brave")  # nothing is put around a text


@pytest.mark.parametrize("folder", FOLDERS.values(), ids=FOLDERS)
def test_the_shipped_models_have_this_tokenizer(tokenizer, folder):
    from transformers import AutoTokenizer

    shipped = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert shipped.get_vocab() == tokenizer.get_vocab()
    assert (
        json.loads(shipped.backend_tokenizer.to_str())["model"]
        == json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    assert (config["pad_token_id"], config["eos_token_id"]) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
