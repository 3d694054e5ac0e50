"""Receipts: plain, finite, and the same after a round trip."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from outputs import jsonl, write_files

from tokenmill.errors import DataError
from tokenmill.receipts import Receipt, encode_json, peak_memory_bytes, read_receipts, write_receipt
from tokenmill.testing import FakeBackend, make_job, make_run


@pytest.fixture
def receipt(tmp_path: Path) -> Receipt:
    write_files(tmp_path, {"a.jsonl": jsonl(["x y", "z"]) + "{\n"})
    run = make_run(make_job(tmp_path))
    (shard,) = run.plan().shards
    run.tokenize(shard)
    return run.infer(shard, FakeBackend())


def test_a_receipt_survives_storage(receipt: Receipt, tmp_path: Path) -> None:
    store = make_run(make_job(tmp_path)).store
    write_receipt(store, receipt)
    assert read_receipts(store, "infer", [receipt.key]) == [receipt]
    assert Receipt.from_json(json.loads(json.dumps(receipt.to_json()))) == receipt


def test_figures_are_plain_and_finite(receipt: Receipt) -> None:
    figures = receipt.throughput()
    assert all(isinstance(value, str | int | float) for value in figures.values())
    assert all(math.isfinite(value) for value in figures.values() if not isinstance(value, str))
    assert (figures["stage"], figures["rows"], figures["tokens"]) == ("infer", 2, 7)
    assert 0 <= figures["idle_share"] <= 1
    still = replace(receipt, seconds={"wall": 0.0})
    assert (still.tokens_per_second, still.idle_share) == (0.0, 0.0)


def test_json_is_stable_readable_and_refuses_nan() -> None:
    assert encode_json({"b": 1, "a": "é"}) == '{\n "a": "é",\n "b": 1\n}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_json({"a": math.nan})


def test_a_file_name_that_is_not_utf8_survives_json() -> None:
    assert json.loads(encode_json({"uri": "bad\udcff"})) == {"uri": "bad\udcff"}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"stage": "infer"}'])
def test_what_is_no_receipt_is_told_with_its_name(receipt: Receipt, tmp_path: Path, content: str) -> None:
    store = make_run(make_job(tmp_path)).store
    store.write_bytes(f"receipts/infer-{receipt.key}.json", content.encode())
    with pytest.raises(DataError, match=rf"infer-{receipt.key}\.json: not a receipt that this version reads"):
        read_receipts(store, "infer", [receipt.key])


def test_memory_is_counted_in_bytes() -> None:
    assert 10 * 2**20 < peak_memory_bytes() < 2**44
