"""Every task beside plain transformers, one row at a time, on many architectures and on odd texts."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import copy_tokenizer, make_headed, train_tokenizer
from outputs import jsonl, published, write_files
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoTokenizer,
)

from tokenmill.engine import run_job
from tokenmill.testing import make_job

TEXTS = [
    "",
    "a",
    "The cat sat on the mat.",
    "The cat sat on the mat.",
    "Съешь же ещё этих мягких французских булок",
    "[CLS] not really [SEP] special",
    "你好世界 👍🏽 e\u0301 \u200b",
    "word " * 300,
    *(f"row {n} " + "and so on " * (n % 7) for n in range(40)),
]
ENCODERS = ["bert", "roberta", "distilbert", "mpnet", "modernbert"]
DECODERS = ["gpt2", "llama", "qwen3", "gemma"]
MAX_TOKENS = 48


def run(folder: Path, rows: Sequence[Any], model: Path, task: str, **sections: Any) -> list[dict[str, Any]]:
    write_files(folder, {"a.jsonl": jsonl(rows)})
    job = make_job(
        folder,
        tokenizer={"max_tokens": MAX_TOKENS, "special_tokens_in_text": "parse"},
        inference={"model": str(model), "task": task, "precision": "fp32", **sections.pop("inference", {})},
        **sections,
    )
    run_job(job)
    return published(job)


def reference(model: Path, auto_class: Any, rows: Sequence[Any]) -> list[Any]:
    """The model's output for each row alone."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = auto_class.from_pretrained(model).eval()
    found = []
    for row in rows:
        texts = ([row["q"]], [row["a"]]) if isinstance(row, dict) else ([row],)
        encoded = tokenizer(*texts, truncation=True, max_length=MAX_TOKENS, return_tensors="pt")
        if not getattr(loaded.config, "type_vocab_size", 0):
            encoded.pop("token_type_ids", None)
        with torch.inference_mode():
            found.append((encoded["input_ids"][0], loaded(**encoded)))
    return found


def close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    expected = [torch.as_tensor(row).tolist() for row in theirs]
    np.testing.assert_allclose(np.array(ours), np.array(expected), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS, "t5"])
def test_embed(tmp_path: Path, kind: str) -> None:
    auto_class = AutoModelForTextEncoding if kind == "t5" else AutoModel
    model = make_headed(tmp_path / "model", kind, auto_class)
    copy_tokenizer(model)
    rows = run(tmp_path, TEXTS, model, "embed")
    expected = [out.last_hidden_state[0].mean(dim=0) for _, out in reference(model, auto_class, TEXTS)]
    close([row["embedding"] for row in rows], expected)


LABELS = {0: "bad", 1: "so-so", 2: "good"}


@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS])
def test_classify(tmp_path: Path, kind: str) -> None:
    model = make_headed(tmp_path / "model", kind, AutoModelForSequenceClassification, id2label=LABELS)
    copy_tokenizer(model)
    rows = run(tmp_path, TEXTS, model, "classify", inference={"all_scores": True})
    scores = [
        out.logits[0].softmax(dim=0) for _, out in reference(model, AutoModelForSequenceClassification, TEXTS)
    ]
    assert [list(row["scores"]) for row in rows] == [list(LABELS.values())] * len(TEXTS)
    close([list(row["scores"].values()) for row in rows], scores)
    assert [row["label"] for row in rows] == [LABELS[int(score.argmax())] for score in scores]
    close([row["score"] for row in rows], [score.max() for score in scores])


def test_classify_several_labels_a_row(tmp_path: Path) -> None:
    settings = {"id2label": LABELS, "problem_type": "multi_label_classification"}
    model = make_headed(tmp_path / "model", "bert", AutoModelForSequenceClassification, **settings)
    copy_tokenizer(model)
    alone = reference(model, AutoModelForSequenceClassification, TEXTS)
    scores = [torch.sigmoid(out.logits[0]) for _, out in alone]
    threshold = float(torch.stack(scores).median()) - 1e-6
    rows = run(tmp_path, TEXTS, model, "classify", inference={"threshold": threshold})
    held = [[LABELS[n] for n in range(3) if score[n] >= threshold] for score in scores]
    assert [row["labels"] for row in rows] == held
    assert len(set(map(tuple, held))) > 1
    close([row["score"] for row in rows], [score.max() for score in scores])


PAIRS = [{"q": text, "a": other} for text, other in zip(TEXTS, reversed(TEXTS), strict=True)]


@pytest.mark.parametrize("kind", ["bert", "distilbert", "modernbert"])
@pytest.mark.parametrize("stored", [None, "torch.nn.modules.linear.Identity"])
def test_rank(tmp_path: Path, kind: str, stored: str | None) -> None:
    model = make_headed(tmp_path / "model", kind, AutoModelForSequenceClassification, num_labels=1)
    copy_tokenizer(model)
    if stored:
        path = model / "config.json"
        config = {**json.loads(path.read_text()), "sbert_ce_default_activation_function": stored}
        path.write_text(json.dumps(config))
    rows = run(tmp_path, PAIRS, model, "rank", input={"text": "q", "pair": "a"})
    alone = reference(model, AutoModelForSequenceClassification, PAIRS)
    logits = torch.stack([out.logits[0, 0] for _, out in alone])
    close([row["score"] for row in rows], logits if stored else torch.sigmoid(logits))


@pytest.mark.parametrize("kind", [*DECODERS, "gemma2", "granite", "cohere"])
def test_score(tmp_path: Path, kind: str) -> None:
    model = make_headed(tmp_path / "model", kind, AutoModelForCausalLM, vocab_size=400)
    train_tokenizer(model)
    texts = [text for text in TEXTS if text]
    rows = run(tmp_path, texts, model, "score")
    for row, (ids, out) in zip(rows, reference(model, AutoModelForCausalLM, texts), strict=True):
        nll = torch.nn.functional.cross_entropy(out.logits[0, :-1].double(), ids[1:], reduction="sum").item()
        assert row["num_scored"] == len(ids) - 1 == row["num_tokens"] - 1
        assert row["nll"] == pytest.approx(nll, rel=1e-5)
        mean = nll / row["num_scored"] if row["num_scored"] else math.nan
        assert row["perplexity"] == (pytest.approx(math.exp(mean), rel=1e-5) if row["num_scored"] else None)
