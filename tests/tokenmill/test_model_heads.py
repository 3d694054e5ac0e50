"""A checkpoint that does not fit its task is one line, before any shard starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import copy_tokenizer, make_headed
from outputs import jsonl, write_files
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
)

from tokenmill.errors import ConfigError, ModelMismatchError
from tokenmill.model_heads import read_labels
from tokenmill.settle import prepare
from tokenmill.testing import make_job


@pytest.mark.parametrize(
    ("auto_class", "task", "message"),
    [
        (AutoModel, "classify", r"BertModel has no head for task classify; .*ForSequenceClassification"),
        (AutoModelForMaskedLM, "score", r"BertForMaskedLM has no head .*predicts masked tokens, not next"),
        (AutoModelForMaskedLM, "rank", r"BertForMaskedLM has no head for task rank"),
        (AutoModelForSequenceClassification, "score", r"BertForSequenceClassification has no head"),
    ],
)
def test_a_head_of_another_task_is_told_while_settling(
    tmp_path: Path, auto_class: Any, task: str, message: str
) -> None:
    model = make_headed(tmp_path / "model", "bert", auto_class)
    copy_tokenizer(model)
    inputs = {"pair": "other"} if task == "rank" else {}
    with pytest.raises(ModelMismatchError, match=message):
        prepare(make_job(tmp_path, input=inputs, inference={"model": str(model), "task": task}))


def test_a_head_whose_weights_are_missing_is_told_when_the_model_is_loaded(tmp_path: Path) -> None:
    model = make_headed(tmp_path / "model", "bert", AutoModel)
    copy_tokenizer(model)
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": None}))
    setup = prepare(make_job(tmp_path, inference={"model": str(model), "task": "classify"}))
    with pytest.raises(ModelMismatchError, match=r"weights that classify needs are missing, .*classifier"):
        setup.need_model().load_backend()


def config(folder: Path, **values: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_labels_come_in_the_models_order_with_the_names_that_transformers_leaves_out(tmp_path: Path) -> None:
    many = {str(n): f"l{n}" for n in range(12)}
    assert read_labels(config(tmp_path, id2label=many), "classify").names == tuple(many.values())
    plain = read_labels(config(tmp_path), "classify")
    assert (plain.names, plain.several, plain.activation) == (("LABEL_0", "LABEL_1"), False, "softmax")


def test_one_label_and_several_a_row_have_a_sigmoid(tmp_path: Path) -> None:
    one = read_labels(config(tmp_path, id2label={"0": "toxic"}), "classify")
    assert (one.several, one.activation) == (False, "sigmoid")
    kind = {"problem_type": "multi_label_classification"}
    several = read_labels(config(tmp_path, id2label={"0": "a", "1": "b"}, **kind), "classify")
    assert (several.several, several.activation) == (True, "sigmoid")


@pytest.mark.parametrize(
    ("values", "task", "message"),
    [
        ({"id2label": {"0": "a", "1": "a"}}, "classify", "two labels of id2label have one name"),
        ({"id2label": {"0": "a", "1": "b"}}, "rank", r"needs a model with one output, .* 2 labels \(a, b\)"),
        (
            {"id2label": {"0": "a"}, "sentence_transformers": {"activation_fn": "torch.nn.Tanh"}},
            "rank",
            r"activation torch\.nn\.Tanh; set inference\.activation",
        ),
    ],
)
def test_labels_that_do_not_fit_are_told(
    tmp_path: Path, values: dict[str, Any], task: str, message: str
) -> None:
    with pytest.raises(ModelMismatchError, match=message):
        read_labels(config(tmp_path, **values), task)


@pytest.mark.parametrize(
    ("inference", "message"),
    [
        ({"task": "rank"}, r"inference\.task: rank needs pairs of texts; name the second one in input\.pair"),
        ({"task": "score", "pooling": "cls"}, r"pooling: only for task embed, not for score"),
        ({"task": "embed", "all_scores": True}, r"all_scores: only for task classify, not for embed"),
        ({"task": "embed", "activation": "none"}, r"activation: only for task classify and rank"),
        ({"task": "clasify"}, r"inference\.task: .*'embed', 'classify', 'rank'"),
    ],
)
def test_options_of_another_task_are_mistakes_in_the_job(
    tmp_path: Path, inference: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_job(tmp_path, inference=inference)


def test_a_column_may_be_called_as_a_result_of_another_task(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": jsonl([{"text": "a", "label": "x"}])})
    assert make_job(tmp_path, input={"keep": ["label"]}).input.keep == ["label"]
    with pytest.raises(ConfigError, match=r"input\.keep: 'label' is a column of tokenmill's own"):
        make_job(tmp_path, input={"keep": ["label"]}, inference={"task": "classify"})


def test_the_plan_names_what_the_model_is_used_for(tmp_path: Path) -> None:
    model = make_headed(tmp_path / "model", "gpt2", AutoModelForCausalLM)
    copy_tokenizer(model)
    found = prepare(make_job(tmp_path, inference={"model": str(model), "task": "score"})).describe()
    assert (found["task"], "pooling" in found) == ("score", False)
    labels = {0: "bad", 1: "good"}
    model = make_headed(tmp_path / "other", "bert", AutoModelForSequenceClassification, id2label=labels)
    copy_tokenizer(model)
    found = prepare(make_job(tmp_path, inference={"model": str(model), "task": "classify"})).describe()
    assert (found["labels"], found["activation"]) == (["bad", "good"], "softmax")
