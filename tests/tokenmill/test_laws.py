"""The laws that the README promises, over the whole engine with fakes.

A batched row equals a row alone; budget, window, workers and shards change nothing; every row comes
out once, as a result or as a reject with a reason.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from outputs import jsonl, new_folder, published, published_bytes, run_fake, write_files

from tokenmill.testing import END, START, FakeBackend, make_job, word_id

few = settings(max_examples=20)

words = st.sampled_from(["a", "bb", "ccc", "é", "你好", "w" * 101, "\u0301"])
texts = st.lists(st.lists(words, max_size=9).map(" ".join), min_size=1, max_size=25)
speeds = st.fixed_dictionaries(
    {
        "workers": st.integers(1, 3),
        "max_batch_tokens": st.integers(1, 60),
        "window_rows": st.integers(1, 30),
    }
)


@few
@given(texts, st.integers(3, 8), st.sampled_from(["left", "right"]))
def test_a_batched_row_equals_the_row_alone(rows: list[str], max_tokens: int, side: str) -> None:
    with new_folder() as folder:
        write_files(folder, {"a.jsonl": jsonl(rows)})
        job = make_job(folder, tokenizer={"max_tokens": max_tokens, "truncation_side": side})
        backend = FakeBackend()
        run_fake(job, backend)
        alone = FakeBackend()
        for row, text in zip(published(job), rows, strict=True):
            inner = [word_id(word) for word in text.split()]
            room = max_tokens - 2
            kept = inner[:room] if side == "right" else inner[max(len(inner) - room, 0) :]
            assert row["embedding"] == alone.vector([START, *kept, END]).tolist()
            assert (row["num_tokens"], row["num_tokens_dropped"]) == (len(kept) + 2, len(inner) - len(kept))


@few
@given(texts, speeds, speeds)
def test_results_do_not_depend_on_budget_window_or_workers(
    rows: list[str], speed: dict[str, int], other: dict[str, int]
) -> None:
    with new_folder() as folder:
        write_files(folder, {"a.jsonl": jsonl(rows[::2]), "b.txt": "\n".join(rows[1::2])})
        found = []
        for run in (speed, other):
            job = make_job(
                folder, input={"shard_bytes": 40}, output={"uri": f"{folder}/{json.dumps(run)}"}, run=run
            )
            run_fake(job)
            found.append({name: data for name, data in published_bytes(job).items() if "/" in name})
        assert found[0] == found[1]


@few
@given(texts, st.integers(1, 200), st.integers(1, 200), st.integers(1, 3000))
def test_results_do_not_depend_on_shards_or_on_published_file_sizes(
    rows: list[str], shard_bytes: int, other_bytes: int, part_bytes: int
) -> None:
    with new_folder() as folder:
        files = {f"{number:02d}.jsonl": jsonl(rows[number : number + 3]) for number in range(0, len(rows), 3)}
        write_files(folder, files)
        found = []
        for size in (shard_bytes, other_bytes):
            job = make_job(
                folder,
                input={"shard_bytes": size},
                output={"uri": f"{folder}/{size}", "target_part_bytes": part_bytes},
            )
            run_fake(job)
            found.append(published(job))
        assert found[0] == found[1]
        assert len(found[0]) == len(rows)


@few
@given(texts)
def test_equal_texts_are_rows_of_their_own_and_computed_once(rows: list[str]) -> None:
    with new_folder() as folder:
        write_files(folder, {"a.jsonl": jsonl([*rows, *rows])})
        job, backend = make_job(folder), FakeBackend()
        manifest = run_fake(job, backend)
        found = published(job)
        assert [row["row_ordinal"] for row in found] == list(range(2 * len(rows)))
        half = len(rows)
        assert [r["embedding"] for r in found[:half]] == [r["embedding"] for r in found[half:]]
        distinct = {tuple(word_id(word) for word in text.split()) for text in rows}
        assert sum(count for count, _ in backend.shapes) == len(distinct)
        assert manifest.counts.tokens_computed == sum(len(ids) + 2 for ids in distinct)


# --- Conservation ---

GOOD_JSON = [b'{"text": "good a"}', b'{"text": 7}', rb'{"text": "\ud800"}', b'{"text": ""}']
BAD_JSON = {
    b"{bad": "bad_json",
    b"[]": "bad_json",
    b'{"other": 1}': "missing_text",
    b'{"text": null}': "null_text",
    b'{"text": "\xff"}': "undecodable",
    b'{"text": "' + b"x" * 1100 + b'"}': "row_too_large",
    b'{"text": "one two three four five six"}': "too_long",
}
GOOD_CSV = [b"good", b'"a\nb"', b"NA", b'"say ""x"""', b"a\0b"]
BAD_CSV = {
    b"a,b": "bad_csv",
    b'"x"y': "bad_csv",
    b"\xff": "undecodable",
    b"y" * 1100: "row_too_large",
    b"one two three four five six": "too_long",
}
GOOD_TEXT = [b"good", b"", b"  ", b"null"]
BAD_TEXT = {b"a\xff\xfe": "undecodable", b"z" * 1100: "row_too_large", b"1 2 3 4 5 6": "too_long"}
GOOD_CELLS = [b"good", b"", "é".encode()]
BAD_CELLS = {
    None: "null_text",
    b"\xff": "undecodable",
    b"v" * 1100: "row_too_large",
    b"1 2 3 4 5 6": "too_long",
}


def in_lines(lines: list[bytes]) -> bytes:
    return b"".join(line + b"\n" for line in lines)


def mixture(good: list, bad: dict, blank: list | None = None) -> st.SearchStrategy[list]:
    return st.lists(st.sampled_from([*good, *bad, *(blank or [])]), max_size=12)


@given(
    mixture(GOOD_JSON, BAD_JSON, [b"", b"  "]),
    mixture(GOOD_CSV, BAD_CSV, [b""]),
    mixture(GOOD_TEXT, BAD_TEXT),
    mixture(GOOD_CELLS, BAD_CELLS),
    st.integers(1, 3000),
)
def test_every_row_comes_out_once_as_a_result_or_as_a_reject(
    json_lines: list[bytes],
    csv_lines: list[bytes],
    text_lines: list[bytes],
    cells: list[bytes | None],
    shard_bytes: int,
) -> None:
    with new_folder() as folder:
        write_files(
            folder,
            {
                "a.jsonl": in_lines([b'{"text": "first"}', *json_lines]),
                "b.csv": in_lines([b"text", *csv_lines]),
                "c.txt": in_lines(text_lines),
                "d.parquet": pa.table({"text": pa.array(cells, pa.binary())}),
            },
        )
        job = make_job(
            folder,
            input={"shard_bytes": shard_bytes, "max_row_bytes": 1024},
            tokenizer={"max_tokens": 7, "overflow": "reject"},
            quality={"max_reject_rate": 1},
        )
        counts = run_fake(job).counts
        results, rejects = published(job), published(job, "rejects")
        bad = Counter(
            kind[row]
            for rows, kind in [
                (json_lines, BAD_JSON),
                (csv_lines, BAD_CSV),
                (text_lines, BAD_TEXT),
                (cells, BAD_CELLS),
            ]
            for row in rows
            if row in kind
        )
        blank = sum(not line.strip() for line in json_lines) + csv_lines.count(b"")
        total = 1 + len(json_lines) + len(csv_lines) + len(text_lines) + len(cells) - blank
        assert counts.rejects == bad == Counter(row["reason"] for row in rejects)
        assert (counts.rows_in, counts.rows_out, counts.lines_blank) == (total, total - bad.total(), blank)
        places = [(row["source_file"], row["row_ordinal"]) for row in (*results, *rejects)]
        assert len(places) == len(set(places)) == total
        for name, rows in {"b.csv": csv_lines, "c.txt": text_lines, "d.parquet": cells}.items():
            found = sorted(ordinal for file, ordinal in places if Path(file).name == name)
            assert found == list(range(len(rows) - (rows.count(b"") if name == "b.csv" else 0)))
        assert all(np.isfinite(row["embedding"]).all() for row in results)
        assert all(row["detail"] and row["stage"] == "tokenize" for row in rejects)
