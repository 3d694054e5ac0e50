"""What a job comes to: limits from the model, prompts, and misfits refused before any work."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from outputs import MINILM

from tokenmill.errors import ConfigError, ModelMismatchError, ModelNotFoundError
from tokenmill.model_files import resolve_model
from tokenmill.settle import Setup, prepare
from tokenmill.testing import make_job


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """MiniLM without its weights, to be changed at will."""
    return Path(
        shutil.copytree(
            resolve_model(MINILM), tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors")
        )
    )


def edit(path: Path, **changes: object) -> None:
    data = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**data, **changes}))


def settle(folder: Path | str, **overrides) -> Setup:
    inference = {"model": str(folder), **overrides.pop("inference", {})}
    return prepare(make_job(Path("/nowhere"), inference=inference, **overrides))


def test_the_models_own_limit_holds_unless_the_job_sets_one(minilm: Setup) -> None:
    assert minilm.tokenize.max_tokens == 256
    assert settle(MINILM, tokenizer={"max_tokens": 512}).tokenize.max_tokens == 512
    with pytest.raises(ModelMismatchError, match="513 is more than the model's 512 positions"):
        settle(MINILM, tokenizer={"max_tokens": 513})
    with pytest.raises(ConfigError, match="2 leaves no room beside 2 special tokens"):
        settle(MINILM, tokenizer={"max_tokens": 2})


def test_without_any_stated_limit_one_must_be_set(folder: Path) -> None:
    edit(folder / "sentence_bert_config.json", max_seq_length=None)
    edit(folder / "config.json", max_position_embeddings=-1)
    edit(folder / "tokenizer_config.json", model_max_length=10**30)
    with pytest.raises(ConfigError, match="the model states no limit; set one"):
        settle(folder)
    assert settle(folder, tokenizer={"max_tokens": 9000}).tokenize.max_tokens == 9000


def test_a_prompt_comes_from_the_job_or_from_the_model(folder: Path) -> None:
    prompts = {"query": "query: ", "doc": "passage: "}
    edit(folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="doc")
    assert settle(folder).tokenize.prompt == "passage: "
    assert settle(folder, tokenizer={"prompt_name": "query"}).tokenize.prompt == "query: "
    assert settle(folder, tokenizer={"prompt": ""}).tokenize.prompt == ""
    assert settle(folder, tokenizer={"prompt": "query: "}).tokenize.num_prompt_tokens == 3
    with pytest.raises(ConfigError, match=r"no prompt 'x'; it has: doc, query"):
        settle(folder, tokenizer={"prompt_name": "x"})


def test_a_prompt_that_is_left_out_of_pooling_changes_the_key(folder: Path) -> None:
    edit(folder / "1_Pooling" / "config.json", include_prompt=False)
    options = [
        settle(folder, tokenizer={"prompt": prompt}).need_model().key_options() for prompt in ("", "query: ")
    ]
    assert [option["skipped_prompt_tokens"] for option in options] == [0, 3]


def test_what_the_job_overrides_is_in_the_recipe(folder: Path) -> None:
    infer = settle(folder, inference={"pooling": "cls", "normalize": False}).need_model()
    assert (infer.recipe.pooling, infer.recipe.normalize) == ("cls", False)


def test_a_pad_id_beyond_the_embeddings_is_not_used(folder: Path) -> None:
    assert settle(folder).need_model().pad_id == 0
    edit(folder / "tokenizer_config.json", pad_token="[NEWPAD]")
    edit(folder / "config.json", vocab_size=30522)
    assert settle(folder).need_model().pad_id < 30522


def test_a_model_that_wants_lower_case_gets_it_whatever_its_tokenizer_does(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", do_lower_case=False)
    cased = settle(folder).tokenize.tokenizer
    edit(folder / "sentence_bert_config.json", do_lower_case=True)
    lowered = settle(folder).tokenize.tokenizer
    assert lowered.encode(["HELLO"]).ids.tolist() == cased.encode(["hello"]).ids.tolist()
    assert lowered.encode(["HELLO"]).ids.tolist() != cased.encode(["HELLO"]).ids.tolist()
    assert lowered.info.fingerprint != cased.info.fingerprint


def test_a_job_without_a_model_only_tokenizes() -> None:
    setup = settle(MINILM)
    assert setup.describe()["pooling"] == "mean"
    bare = prepare(make_job(Path("/nowhere"), inference={"model": None}, tokenizer={"name": MINILM}))
    assert bare.infer is None
    assert bare.describe() == {"vocabulary": 30522, "max_tokens": 512}
    with pytest.raises(
        ConfigError, match=r"inference\.model is missing; name a model, or use `tokenmill tokenize`"
    ):
        bare.need_model()
    with pytest.raises(ConfigError, match=r"inference\.model is missing; name a folder"):
        prepare(make_job(Path("/nowhere"), inference={"model": None}))


def test_blocks_are_for_prefect() -> None:
    for section in ("tokenizer", "inference"):
        with pytest.raises(ConfigError, match=rf"{section}\.block: 'b' can only be loaded under Prefect"):
            prepare(make_job(Path("/nowhere"), **{section: {"block": "b"}}))


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelNotFoundError, match="no such folder"):
        settle("/no/such/model")
