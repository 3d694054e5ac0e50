"""Rejected rows of an output: by reason with samples, and as JSON Lines to mend and run again.

Only rejects of shards that are done count, published or not: a run that stopped at a limit left them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenmill.errors import ConfigError, OutputError
from tokenmill.manifest import JOB_FILE, read_job_file
from tokenmill.parquet import iter_part
from tokenmill.receipts import Stage, receipt_name, rejects_name
from tokenmill.store import Store

NUM_SAMPLES = 3
SAMPLE_CHARS = 80


def iter_rejects(store: Store) -> Iterator[dict[str, Any]]:
    """Every reject, in corpus order within a stage.  Raises ConfigError, StoreError, DataError."""
    claim = read_job_file(store)
    if claim is None:
        raise ConfigError(f"{store.uri}: no {JOB_FILE} here; not an output of tokenmill")
    present = {**store.sizes("rejects"), **store.sizes("receipts")}
    stages: tuple[Stage, ...] = ("tokenize", "infer")
    for place, stage in enumerate(stages):
        for keys in claim["shards"]:
            name = rejects_name(stage, keys[place])
            if name in present and receipt_name(stage, keys[place]) in present:
                for batch in iter_part(store, name):
                    yield from batch.to_pylist()


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


def export_rejects(store: Store, path: Path) -> int:
    """Write every reject as a line of JSON; how many.  Raises OutputError if the file is there already.

    A line holds the row's own columns, then what the rejects dataset says of it, `text` included.
    """
    number = 0
    try:
        with path.open("x", encoding="utf-8", newline="\n") as file:
            for row in iter_rejects(store):
                own = json.loads(row.pop("columns") or "{}")
                file.write(json.dumps({**own, **row}, ensure_ascii=False) + "\n")
                number += 1
    except FileExistsError as exc:
        raise OutputError(f"{path}: exists; give a new file, so that no work on it is lost") from exc
    except OSError as exc:
        raise OutputError(f"{path}: cannot be written: {exc.strerror}") from exc
    return number
