"""Rejected rows of an output: by reason with samples, and as JSON Lines to mend and run again.

Only rejects of shards that are done count, published or not: a run that stopped at a limit left them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenmill.engine import Run
from tokenmill.errors import ConfigError, OutputError, TokenmillError
from tokenmill.job import Job
from tokenmill.manifest import JOB_FILE, read_job_file
from tokenmill.parquet import iter_part
from tokenmill.plan import Shard
from tokenmill.readers import read_slice
from tokenmill.receipts import Stage, receipt_name, rejects_name
from tokenmill.store import Store

STAGES: tuple[Stage, ...] = ("tokenize", "infer")
NUM_SAMPLES = 3
SAMPLE_CHARS = 80


def iter_rejects(store: Store, texts: SourceTexts | None = None) -> Iterator[dict[str, Any]]:
    """Every reject, in corpus order within a stage.  Raises ConfigError, StoreError, DataError.

    texts: where to find those that a reject does not hold itself.
    """
    claim = _claim(store)
    present = {**store.sizes("rejects"), **store.sizes("receipts")}
    for place, stage in enumerate(STAGES):
        for keys in claim["shards"]:
            name = rejects_name(stage, keys[place])
            if name in present and receipt_name(stage, keys[place]) in present:
                found = (batch.to_pylist() for batch in iter_part(store, name))
                rows = (row for rows in found for row in rows)
                yield from texts.filled_in(keys[0], list(rows)) if texts and stage == "infer" else rows


def _claim(store: Store) -> Mapping[str, Any]:
    claim = read_job_file(store)
    if claim is None:
        raise ConfigError(f"{store.uri}: no {JOB_FILE} here; not an output of tokenmill")
    return claim


class SourceTexts:
    """Texts of rows that the model rejected, read again from the corpus while its files are unchanged."""

    def __init__(self, open_run: Callable[[Job], Run], job: Mapping[str, Any]) -> None:
        self._open_run, self._job = open_run, job
        self.problem: str | None = None

    @cached_property
    def _shards(self) -> tuple[Run | None, dict[str, Shard]]:
        """The run, and its shards by key; none where the job cannot be planned any more."""
        try:
            run = self._open_run(Job.parse(self._job))
            return run, {shard.tokens_key: shard for shard in run.plan().shards}
        except TokenmillError as exc:
            self.problem = str(exc)
            return None, {}

    def filled_in(self, tokens_key: str, rejects: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The rejects of one shard, with their texts where the corpus still has them."""
        run, shards = self._shards
        if run is None or tokens_key not in shards:
            self.problem = self.problem or "their files have changed"
            return rejects
        wanted = {(row["source_file"], row["row_ordinal"]): row for row in rejects}
        for piece in shards[tokens_key].slices:
            for batch in read_slice(piece, run.job.input, run.storages.input):
                columns = (batch.columns[name].to_pylist() for name in ("source_file", "row_ordinal"))
                for index, place in enumerate(zip(*columns, strict=True)):
                    if place in wanted:
                        pair = {"pair": batch.pairs[index]} if batch.pairs else {}
                        wanted[place].update(text=batch.texts[index], text_is="text", **pair)
        return rejects


def count_rejects(store: Store) -> dict[str, Any]:
    """Rejects by reason, most frequent first, each with its first rows as samples."""
    reasons: dict[str, dict[str, Any]] = {}
    for row in iter_rejects(store):
        entry = reasons.setdefault(row["reason"], {"stage": row["stage"], "rows": 0, "samples": []})
        entry["rows"] += 1
        if entry["rows"] <= NUM_SAMPLES:
            text = None if row["text"] is None else row["text"][:SAMPLE_CHARS]
            wanted = ("source_file", "row_ordinal", "id", "detail")
            entry["samples"].append({**{name: row[name] for name in wanted}, "text": text})
    ordered = dict(sorted(reasons.items(), key=lambda item: -item[1]["rows"]))
    return {
        "output": store.uri,
        "rows": sum(entry["rows"] for entry in reasons.values()),
        "reasons": ordered,
    }


def export_rejects(store: Store, path: Path, open_run: Callable[[Job], Run] = Run.open) -> dict[str, Any]:
    """Write every reject as a line of JSON; how many, how many of them without text, and why.

    A line holds the row's own columns, then what the rejects dataset says of it, `text` included.
    Raises OutputError if the file is there already.
    """
    texts = SourceTexts(open_run, _claim(store)["job"])
    number, without = 0, 0
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            for row in iter_rejects(store, texts):
                own = json.loads(row.pop("columns") or "{}")
                file.write(json.dumps({**own, **row}, ensure_ascii=False) + "\n")
                number += 1
                without += row["text"] is None and row["stage"] == "infer"
    except FileExistsError as exc:
        raise OutputError(f"{path}: exists; give a new file, so that no work on it is lost") from exc
    except OSError as exc:
        raise OutputError(f"{path}: cannot be written: {exc.strerror}") from exc
    why = {"without_text": without, "problem": texts.problem} if without else {}
    return {"exported": number, "to": str(path), **why}
