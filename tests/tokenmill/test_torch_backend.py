"""The one module that touches the device: checkpoints that are damaged, and failures of a batch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from tokenmill import torch_backend
from tokenmill.backend import Backend
from tokenmill.errors import (
    BackendError,
    BackendUnavailableError,
    ConfigError,
    ModelMismatchError,
    ModelNotFoundError,
    OutOfMemoryError,
    TokenmillError,
)
from tokenmill.model_files import folder_state, read_recipe
from tokenmill.torch_backend import ModelSpec, TorchBackend, load_backend


def load(folder: Path, **options) -> TorchBackend:
    settings = {
        "task": "embed",
        "device": "cpu",
        "precision": "auto",
        "recipe": read_recipe(folder),
        **options,
    }
    return load_backend(ModelSpec(folder=folder, state=folder_state(folder), **settings))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("m") / "model", normalize=True)


IDS = np.array([[101, 7592, 2088, 102], [101, 2088, 102, 0]], dtype=np.int64)
LENGTHS = np.array([4, 3], dtype=np.int64)


def test_a_loaded_model_describes_itself(model: Path) -> None:
    info = load(model).info
    assert (info.model_type, info.device, info.precision) == ("bert", "cpu", "fp32")
    assert info.matmul == torch.get_float32_matmul_precision() == "highest"
    assert (info.num_values, info.pad_id) == (32, 0)
    assert json.loads(json.dumps(info.to_json()))["num_parameters"] > 30522 * 32
    assert load(model).device_memory_bytes() == 0


def test_a_model_is_loaded_once_until_its_files_change(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    first = load(folder)
    assert load(folder) is first
    before = first.run(IDS, LENGTHS)
    state = folder / "model.safetensors"
    other = make_checkpoint(tmp_path / "other", kind="bert")
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-40_000:] = bytes(40_000)
    state.write_bytes(weights)
    second = load(folder)
    assert second is not first
    assert not np.array_equal(second.run(IDS, LENGTHS), before)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_padding_changes_nothing(tmp_path: Path, pooling: str) -> None:
    backend: Backend = load(make_checkpoint(tmp_path / "model", pooling=pooling))
    together = backend.run(IDS, LENGTHS)
    alone = [
        backend.run(IDS[row : row + 1, :length], LENGTHS[row : row + 1]) for row, length in enumerate(LENGTHS)
    ]
    assert together.dtype == np.float32
    np.testing.assert_allclose(together, np.concatenate(alone), atol=1e-6)
    garbage = IDS.copy()
    garbage[1, 3] = 9999
    np.testing.assert_allclose(backend.run(garbage, LENGTHS), together, atol=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_row_shorter_than_its_prompt_does_not_depend_on_its_neighbours(
    tmp_path: Path, pooling: str
) -> None:
    folder = make_checkpoint(tmp_path / "model", pooling=pooling, include_prompt=False)
    backend = load(folder, num_prompt_tokens=3)
    together = backend.run(IDS, LENGTHS)
    np.testing.assert_allclose(backend.run(IDS[1:, :3], LENGTHS[1:]), together[1:], atol=1e-6)
    assert np.isfinite(together).all()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_is_close_and_comes_back_as_float32(model: Path, precision: str) -> None:
    exact, low = load(model).run(IDS, LENGTHS), load(model, precision=precision).run(IDS, LENGTHS)
    assert low.dtype == np.float32
    np.testing.assert_allclose(low, exact, atol=0.05)


def test_an_overflow_of_half_precision_has_a_value_in_fp32(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    name = "encoder.layer.1.output.dense.bias"
    weights[name] = weights[name] + 1e5  # fp16 ends at 65,504
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    low = load(folder, precision="fp16")
    assert not np.isfinite(low.run(IDS, LENGTHS)).all()
    exact = low.in_fp32()
    assert exact is not None
    assert exact is low.in_fp32()
    assert exact.in_fp32() is None
    np.testing.assert_array_equal(exact.run(IDS, LENGTHS), load(folder, precision="fp32").run(IDS, LENGTHS))


def test_without_memory_for_a_copy_in_fp32_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = load(make_checkpoint(tmp_path / "model"), precision="bf16")

    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch_backend, "TorchBackend", fail)
    assert low.in_fp32() is None


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), OutOfMemoryError),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), OutOfMemoryError),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), OutOfMemoryError),
        (RuntimeError("expected scalar type Float"), BackendError),
        (IndexError("index out of range in self"), BackendError),
    ],
)
def test_failures_of_a_batch_are_errors_of_ours(
    model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[TokenmillError]
) -> None:
    backend = load(model)

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(backend, "_head", fail)
    with pytest.raises(expected, match="2 x 4 tokens") as caught:
        backend.run(IDS, LENGTHS)
    assert type(caught.value) is expected


def test_an_id_beyond_the_embeddings_is_an_error_not_a_crash(model: Path) -> None:
    with pytest.raises(BackendError, match="model failed on 1 x 2 tokens"):
        load(model).run(np.array([[101, 10**6]]), np.array([2]))


def test_a_model_that_does_not_fit_may_fit_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch_backend, "TorchBackend", fail)
    with pytest.raises(BackendUnavailableError, match="does not fit into the free memory of cpu"):
        load(make_checkpoint(tmp_path / "model"))


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        ModelMismatchError, match=r"no \.safetensors file; tokenmill does not load pickled weights"
    ):
        load(folder)


def damage_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "bert", "hidden_size": "wide"}')


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def other_shapes(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 64}))


def unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "no-such-type"}')


@pytest.mark.parametrize("damage", [damage_config, cut_weights, other_shapes, unknown_type])
def test_a_damaged_checkpoint_is_one_line_that_names_it(tmp_path: Path, damage) -> None:
    folder = make_checkpoint(tmp_path / "model")
    damage(folder)
    with pytest.raises(ModelNotFoundError, match=r"model .*model: cannot be loaded: \S") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 3}))
    with pytest.raises(
        ModelMismatchError, match=r"that embed needs are missing, the first is encoder\.layer\.2"
    ):
        load(folder)


def test_a_dense_layer_must_be_one_that_is_known_and_whole(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", dense=[(8, "activation.Tanh")])
    assert load(folder).info.num_values == 8
    weights = folder / "2_Dense" / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-3])
    with pytest.raises(ModelMismatchError, match="is not a linear layer"):
        load(folder)
    weights.unlink()
    with pytest.raises(ModelMismatchError, match="not there; tokenmill loads safetensors only"):
        load(folder)
    odd = make_checkpoint(tmp_path / "odd", dense=[(8, "activation.Hardswish")])
    with pytest.raises(ModelMismatchError, match="activation Hardswish is not one of"):
        load(odd)


def test_dimensions_beyond_the_models_are_a_mistake_in_the_job(model: Path) -> None:
    assert load(model, dimensions=32).info.num_values == 32
    with pytest.raises(ConfigError, match=r"inference\.dimensions: 33 is more than the model's 32"):
        load(model, dimensions=33)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_gpu_gives_the_same_vectors(model: Path) -> None:
    cpu, gpu = load(model), load(model, device="cuda", precision="fp32")
    np.testing.assert_allclose(gpu.run(IDS, LENGTHS), cpu.run(IDS, LENGTHS), atol=1e-3)
    assert gpu.device_memory_bytes() > 0
