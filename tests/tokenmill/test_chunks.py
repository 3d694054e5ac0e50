"""Long texts in chunks: windows of one text, pooled back to it, nothing dropped, nothing counted twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import copy_tokenizer, make_headed, train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import jsonl, new_folder, open_fake, published, run_fake, write_files
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tokenmill.cut import wrap_chunks
from tokenmill.engine import run_job
from tokenmill.errors import ConfigError
from tokenmill.settle import prepare
from tokenmill.testing import END, FAKE_INFO, START, FakeBackend, FakeTokenizer, make_job, word_id
from tokenmill.verify import verify


def windows(ids: list[int], room: int, stride: int) -> list[tuple[list[int], int]]:
    """Each chunk's tokens and how many of them the one before has. The oracle."""
    found, at = [(ids[:room], 0)], room - stride
    while at + stride < len(ids):
        found.append((ids[at : at + room], stride))
        at += room - stride
    return found


numbers = st.lists(st.lists(st.integers(10, 99), max_size=23), max_size=6)


@given(numbers, st.integers(0, 3), st.integers(1, 6), st.integers(0, 5), st.booleans())
def test_chunks_are_the_windows_of_each_text(
    rows: list[list[int]], num_head: int, room: int, stride: int, inner_suffix: bool
) -> None:
    stride = min(stride, room - 1)
    encoded = FakeTokenizer().encode([])
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    encoded = type(encoded)(ids=np.array([i for row in rows for i in row], np.int32), offsets_N1=offsets)
    cut = wrap_chunks(
        encoded, FAKE_INFO, num_head + room + 2, stride=stride, num_head=num_head, inner_suffix=inner_suffix
    )
    expected = []
    for text, row in enumerate(rows):
        head, parts = row[:num_head], windows(row[num_head:], room, stride)
        for index, (ids, shared) in enumerate(parts):
            suffix = [END] if inner_suffix or index == len(parts) - 1 else []
            first_new = 1 + len(head) + shared if index else 0
            expected.append((text, index, first_new, [START, *head, *ids, *suffix]))
    assert cut.chunks is not None
    marks = zip(
        cut.chunks.text_N.tolist(),
        cut.chunks.index_N.tolist(),
        cut.chunks.first_new_N.tolist(),
        np.split(cut.ids, cut.offsets_N1[1:-1]) if len(cut.offsets_N1) > 1 else [],
        strict=True,
    )
    assert [(*rest, ids.tolist()) for *rest, ids in marks] == expected
    assert not cut.num_dropped_N.any()


texts = st.lists(st.lists(st.sampled_from("abcde"), max_size=25).map(" ".join), min_size=1, max_size=12)


@settings(max_examples=20)
@given(texts, st.integers(3, 8), st.integers(0, 4), st.integers(1, 30), st.integers(1, 60))
def test_a_row_is_the_mean_of_its_chunks_weighted_by_length(
    rows: list[str], max_tokens: int, stride: int, window_rows: int, budget: int
) -> None:
    room = max_tokens - 2
    stride = min(stride, room - 1)
    with new_folder() as folder:
        write_files(folder, {"a.jsonl": jsonl(rows)})
        job = make_job(
            folder,
            tokenizer={"max_tokens": max_tokens, "overflow": "chunk", "stride": stride},
            run={"window_rows": window_rows, "max_batch_tokens": budget},
        )
        counts = run_fake(job).counts
        found, num_chunks = published(job), 0
        for row, text in zip(found, rows, strict=True):
            parts = windows([word_id(word) for word in text.split()], room, stride)
            vectors = [FakeBackend().vector([START, *ids, END]) for ids, _ in parts]
            sizes = [len(ids) + 2 for ids, _ in parts]
            np.testing.assert_allclose(
                row["embedding"], np.average(vectors, axis=0, weights=sizes), atol=1e-6
            )
            assert (row["num_chunks"], row["num_tokens"]) == (len(parts), sum(sizes))
            num_chunks += len(parts)
        assert (counts.rows_in, counts.rows_out, counts.chunks) == (len(rows), len(rows), num_chunks)
        assert (counts.rows_truncated, counts.tokens_dropped) == (0, 0)
        assert verify(open_fake(job).store).problems == ()


def test_one_bad_chunk_is_one_rejected_row_and_the_sums_hold(tmp_path: Path) -> None:
    write_files(tmp_path, {"a.jsonl": jsonl(["a b c d e f bad g", "fine", "a b c bad bad bad"])})
    job = make_job(tmp_path, tokenizer={"max_tokens": 4, "overflow": "chunk"}, quality={"max_reject_rate": 1})
    manifest = run_fake(job, FakeBackend(nan_ids=frozenset({word_id("bad")})))
    assert manifest.counts.rejects == {"non_finite": 2}
    assert [row["row_ordinal"] for row in published(job)] == [1]
    assert [row["row_ordinal"] for row in published(job, "rejects")] == [0, 2]
    assert verify(open_fake(job).store).problems == ()


def run(folder: Path, rows: list[str], inference: dict[str, Any], **tokenizer: Any) -> list[dict[str, Any]]:
    write_files(folder, {"a.jsonl": jsonl(rows)})
    job = make_job(
        folder, inference={"precision": "fp32", **inference}, tokenizer={"overflow": "chunk", **tokenizer}
    )
    run_job(job)
    return published(job)


LONG = ["word " * 100, "The quick brown fox jumps over the lazy dog. " * 20, "short"]


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_labels_of_a_long_text_are_pooled(tmp_path: Path, pool: str) -> None:
    labels = {0: "bad", 1: "good"}
    model = make_headed(tmp_path / "model", "bert", AutoModelForSequenceClassification, id2label=labels)
    copy_tokenizer(model)
    spec = {"model": str(model), "task": "classify", "all_scores": True, "pool_chunks": pool}
    rows = run(tmp_path, LONG, spec, max_tokens=32, stride=4)
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForSequenceClassification.from_pretrained(model).eval()
    for row, text in zip(rows, LONG, strict=True):
        parts = tokenizer(text, truncation=True, max_length=32, stride=4, return_overflowing_tokens=True)[
            "input_ids"
        ]
        with torch.inference_mode():
            scores = [loaded(input_ids=torch.tensor([ids])).logits[0].softmax(0).numpy() for ids in parts]
        sizes = [len(ids) for ids in parts]
        expected = np.max(scores, axis=0) if pool == "max" else np.average(scores, axis=0, weights=sizes)
        np.testing.assert_allclose(list(row["scores"].values()), expected, atol=1e-5)
        assert row["num_chunks"] == len(parts)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("stride", [1, 5, None])
def test_a_long_text_is_scored_token_by_token_each_once(
    tmp_path: Path, kind: str, stride: int | None
) -> None:
    model = make_headed(tmp_path / "model", kind, AutoModelForCausalLM, vocab_size=400)
    train_tokenizer(model)
    rows = run(tmp_path, LONG, {"model": str(model), "task": "score"}, max_tokens=32, stride=stride)
    tokenizer = AutoTokenizer.from_pretrained(model)
    loaded = AutoModelForCausalLM.from_pretrained(model).eval()
    shared = 16 if stride is None else stride
    for row, text in zip(rows, LONG, strict=True):
        ids = tokenizer(text)["input_ids"]
        total, done = 0.0, 1
        for part, overlap in windows(ids, 32, shared):
            with torch.inference_mode():
                logits = loaded(input_ids=torch.tensor([part])).logits[0].double()
            new = slice(max(overlap, 1), len(part))
            right = logits.log_softmax(1)[range(new.start - 1, new.stop - 1), part[new]]
            total, done = total - right.sum().item(), done + len(right)
        assert done == len(ids) == row["num_scored"] + 1
        assert row["nll"] == pytest.approx(total, rel=1e-5)
        assert row["perplexity"] == pytest.approx(np.exp(total / (len(ids) - 1)), rel=1e-5)


def test_a_prompt_begins_every_chunk(tmp_path: Path) -> None:
    model = make_headed(tmp_path / "model", "bert", AutoModelForSequenceClassification)
    copy_tokenizer(model)
    write_files(tmp_path, {"a.jsonl": jsonl(["one two three four five"])})
    job = make_job(
        tmp_path,
        tokenizer={"max_tokens": 7, "overflow": "chunk", "prompt": "query : "},
        inference={"model": str(model), "task": "classify"},
    )
    run_job(job)
    words = AutoTokenizer.from_pretrained(model)
    shown = [words.decode(row["input_ids"]) for row in published(job, "tokens")]
    assert shown == [
        "[CLS] query : one two three [SEP]",
        "[CLS] query : four five [SEP]",
    ]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"tokenizer": {"stride": 3}}, r"tokenizer: stride: only with overflow: chunk"),
        (
            {"tokenizer": {"overflow": "chunk"}, "input": {"pair": "b"}},
            r"tokenizer\.overflow: pairs cannot be cut into chunks",
        ),
        (
            {"tokenizer": {"overflow": "chunk", "stride": 0}, "inference": {"task": "score"}},
            r"tokenizer\.stride: to score, a chunk needs at least 1 token",
        ),
    ],
)
def test_what_cannot_be_in_chunks_is_a_mistake_in_the_job(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_job(tmp_path, **sections)


def test_a_stride_that_leaves_no_room_is_told(tmp_path: Path) -> None:
    model = make_headed(tmp_path / "model", "bert", AutoModelForSequenceClassification)
    copy_tokenizer(model)
    job = make_job(
        tmp_path,
        tokenizer={"overflow": "chunk", "max_tokens": 10, "stride": 8},
        inference={"model": str(model), "task": "classify"},
    )
    with pytest.raises(ConfigError, match=r"tokenizer\.stride: 8 leaves no room .* chunks of 10, of which 2"):
        prepare(job)
