"""Checking an output from itself alone: every checksum, every sum, every stray file."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ConfigError
from tokenmill.manifest import JOB_FILE, MANIFEST_FILE, Manifest, read_job_file, read_manifest
from tokenmill.parquet import FileInfo
from tokenmill.receipts import Receipt, Stage, part_name, read_receipts, receipt_name
from tokenmill.stages.aggregate import OWN_FOLDERS, check_file, job_counts
from tokenmill.store import Store


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What `verify` found. `problems` is empty if and only if all is well."""

    job: str
    num_shards: int
    num_done: int
    published: bool
    files_checked: int
    bytes_checked: int
    problems: tuple[str, ...]


def verify(store: Store) -> Verdict:
    """Recompute checksums and sums of an output.  Raises ConfigError if it is none of ours."""
    claim = read_job_file(store)
    if claim is None:
        raise ConfigError(f"{store.uri}: no {JOB_FILE} here; not an output of tokenmill")
    sizes = store.sizes()
    manifest = read_manifest(store)
    shards = [tuple(pair) for pair in claim["shards"]]
    done = {
        stage: _done(stage, [pair[place] for pair in shards], sizes) for place, stage in enumerate(STAGES)
    }
    receipts = {stage: read_receipts(store, stage, done[stage]) for stage in STAGES}
    files = _files(receipts, manifest)
    problems = [problem for file in files.values() if (problem := check_file(store, file, sizes))]
    complete = len(done["infer"]) == len(shards)
    if complete and not problems:
        job_counts(receipts["tokenize"], receipts["infer"])
    if manifest:
        problems += _manifest_problems(manifest)
        problems += _strays(manifest, sizes)
    return Verdict(
        job=str(claim["name"]),
        num_shards=len(shards),
        num_done=len(done["infer"]),
        published=manifest is not None,
        files_checked=len(files),
        bytes_checked=sum(file.bytes for file in files.values()),
        problems=tuple(problems),
    )


STAGES: tuple[Stage, ...] = ("tokenize", "infer")


def _done(stage: Stage, keys: list[str], sizes: dict[str, int]) -> list[str]:
    return [key for key in keys if receipt_name(stage, key) in sizes]


def _files(receipts: dict[Stage, list[Receipt]], manifest: Manifest | None) -> dict[str, FileInfo]:
    """Every file that a receipt or the manifest answers for, by path."""
    found = [r for many in receipts.values() for r in many]
    files = [file for r in found for file in (r.part, r.rejects) if file]
    return {file.path: file for file in (*files, *(manifest.files() if manifest else ()))}


def _manifest_problems(manifest: Manifest) -> list[str]:
    """Sums of the manifest against each other."""
    counts = manifest.counts
    rejects = sum(file.rows for file in manifest.rejects)
    checks = {
        "rows in = rows out + rejects": (counts.rows_in, counts.rows_out + counts.rows_rejected),
        "rows out = rows of results": (counts.rows_out, sum(file.rows for file in manifest.results)),
        "rejects = rows of rejects": (counts.rows_rejected, rejects),
        "rows in = sum over shards": (counts.rows_in, sum(s["rows_in"] for s in manifest.shards)),
        "rows out = sum over shards": (counts.rows_out, sum(s["rows_out"] for s in manifest.shards)),
    }
    return [f"{MANIFEST_FILE}: {what}: {a} != {b}" for what, (a, b) in checks.items() if a != b]


def _strays(manifest: Manifest, sizes: dict[str, int]) -> list[str]:
    """Files in our folders that nothing names."""
    named = {file.path for file in manifest.files()}
    for shard in manifest.shards:
        for stage, key in (("tokenize", shard["tokens_key"]), ("infer", shard["results_key"])):
            named |= {receipt_name(stage, key), part_name(stage, key)}  # type: ignore[arg-type]
    ours = [name for name in sizes if name.split("/")[0] in OWN_FOLDERS and "/" in name]
    return [f"{name}: nothing names it" for name in sorted(set(ours) - named)]
