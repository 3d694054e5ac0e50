"""How far an output is, from one listing and two small files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tokenmill.errors import ConfigError
from tokenmill.manifest import JOB_FILE, read_job_file, read_manifest
from tokenmill.receipts import Stage, part_name, receipt_name
from tokenmill.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Shards by stage, and what is published."""

    job: str
    output: str
    num_shards: int
    num_tokenized: int
    num_inferred: int
    published: bool
    rows_published: int
    rows_rejected: int
    num_parts: int
    size_bytes: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_status(store: Store) -> Status:
    """Raises ConfigError if the output is none of tokenmill's."""
    claim = read_job_file(store)
    if claim is None:
        raise ConfigError(f"{store.uri}: no {JOB_FILE} here; not an output of tokenmill")
    sizes = store.sizes()
    present = set(sizes)
    manifest = read_manifest(store)
    stages: tuple[Stage, ...] = ("tokenize", "infer")
    done = {
        stage: sum(
            {receipt_name(stage, keys[place]), part_name(stage, keys[place])} <= present
            for keys in claim["shards"]
        )
        for place, stage in enumerate(stages)
    }
    return Status(
        job=claim["name"],
        output=store.uri,
        num_shards=len(claim["shards"]),
        num_tokenized=done["tokenize"],
        num_inferred=done["infer"],
        published=manifest is not None,
        rows_published=manifest.counts.rows_out if manifest else 0,
        rows_rejected=manifest.counts.rows_rejected if manifest else 0,
        num_parts=len(manifest.results) if manifest else 0,
        size_bytes=sum(sizes.values()),
    )
