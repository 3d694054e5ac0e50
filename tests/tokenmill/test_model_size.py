"""What a checkpoint is and needs, told without reading its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import make_headed
from outputs import MINILM
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tokenmill.errors import ModelMismatchError
from tokenmill.model_files import resolve_model
from tokenmill.model_size import memory_bytes, read_size


def test_minilm_is_as_large_as_it_says() -> None:
    size = read_size(resolve_model(MINILM))
    assert (size.architecture, size.stored_as, size.positions) == ("BertModel", "F32", 512)
    assert 22.5e6 < size.num_parameters < 22.9e6
    assert (size.hidden, size.inner) == (384, 1536)
    assert memory_bytes(size, "fp32", 0) == 4 * size.num_parameters == 2 * memory_bytes(size, "bf16", 0)
    more = memory_bytes(size, "fp32", 2048, extra_bytes=7) - memory_bytes(size, "fp32", 1024)
    assert more == 1024 * (8 * 384 + 2 * 1536) * 4 + 7


@pytest.mark.parametrize("kind", ["gpt2", "llama", "distilbert"])
def test_widths_are_found_under_every_name(tmp_path: Path, kind: str) -> None:
    auto_class = AutoModelForSequenceClassification if kind == "distilbert" else AutoModelForCausalLM
    size = read_size(make_headed(tmp_path / "model", kind, auto_class))
    assert (size.hidden, size.positions) == (32, 64)
    assert size.num_parameters > 30522 * 32


def test_damaged_and_pickled_weights_are_told(tmp_path: Path) -> None:
    folder = make_headed(tmp_path / "model", "gpt2", AutoModelForCausalLM)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelMismatchError, match=r"model\.safetensors: not readable as safetensors"):
        read_size(folder)
    path.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelMismatchError, match=r"no \.safetensors file"):
        read_size(folder)
