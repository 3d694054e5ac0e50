"""Checking an output from itself alone: every checksum, every sum, every stray file."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.errors import ConfigError, DataError
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
    problems: list[str] = []
    manifest = _manifest(store, problems)
    shards = [tuple(pair) for pair in claim["shards"]]
    receipts = {
        stage: _receipts(store, stage, [pair[place] for pair in shards], sizes, problems)
        for place, stage in enumerate(STAGES)
    }
    files = _files(receipts, manifest)
    problems += [problem for file in files if (problem := check_file(store, file, sizes))]
    unbalanced = [problem for many in receipts.values() for r in many for problem in _receipt_problems(r)]
    problems += unbalanced
    if not unbalanced and len(receipts["tokenize"]) == len(receipts["infer"]) == len(shards):
        problems += _sum_problems(receipts, manifest)
    if manifest:
        problems += _manifest_problems(manifest)
        problems += _strays(manifest, shards, files, sizes)
    return Verdict(
        job=str(claim["name"]),
        num_shards=len(shards),
        num_done=len(receipts["infer"]),
        published=MANIFEST_FILE in sizes,
        files_checked=len(files),
        bytes_checked=sum(file.bytes for file in files),
        problems=tuple(problems),
    )


STAGES: tuple[Stage, ...] = ("tokenize", "infer")


def _manifest(store: Store, problems: list[str]) -> Manifest | None:
    """The manifest; None, and a problem, if it cannot be read."""
    try:
        return read_manifest(store)
    except DataError as exc:
        problems.append(str(exc))
        return None


def _receipts(
    store: Store, stage: Stage, keys: list[str], sizes: dict[str, int], problems: list[str]
) -> list[Receipt]:
    """The receipts that there are; a problem for each that cannot be read."""
    there = [key for key in keys if receipt_name(stage, key) in sizes]
    try:
        return read_receipts(store, stage, there)
    except DataError as exc:
        if len(there) == 1:
            problems.append(str(exc))
            return []
        return [r for key in there for r in _receipts(store, stage, [key], sizes, problems)]


def _files(receipts: dict[Stage, list[Receipt]], manifest: Manifest | None) -> list[FileInfo]:
    """What receipts and the manifest say of every file. Two that disagree are both checked."""
    found = [r for many in receipts.values() for r in many]
    files = [file for r in found for file in (r.part, r.rejects) if file]
    return list(dict.fromkeys((*files, *(manifest.files() if manifest else ()))))


def _receipt_problems(receipt: Receipt) -> list[str]:
    """Sums of a receipt against its files."""
    counts, rejects = receipt.counts, receipt.rejects.rows if receipt.rejects else 0
    stored = counts.chunks if receipt.stage == "tokenize" else counts.rows_out
    checks = {
        "rows in = rows out + rejects": (counts.rows_in, counts.rows_out + counts.rows_rejected),
        "rows out = rows of its part": (stored, receipt.part.rows),
        "rejects = rows of its rejects": (counts.rows_rejected, rejects),
    }
    name = receipt_name(receipt.stage, receipt.key)
    return [f"{name}: {what}: {a} != {b}" for what, (a, b) in checks.items() if a != b]


def _sum_problems(receipts: dict[Stage, list[Receipt]], manifest: Manifest | None) -> list[str]:
    """The stages against each other, and their sum against what was published of the same shards."""
    pairs = list(zip(receipts["tokenize"], receipts["infer"], strict=True))
    problems = [
        f"shard {before.shard}: {before.counts.rows_out} rows tokenized, {after.counts.rows_in} inferred"
        for before, after in pairs
        if before.counts.rows_out != after.counts.rows_in
    ]
    published = [(shard["tokens_key"], shard["results_key"]) for shard in manifest.shards] if manifest else []
    if problems or manifest is None or published != [(before.key, after.key) for before, after in pairs]:
        return problems
    same = job_counts(receipts["tokenize"], receipts["infer"]) == manifest.counts
    return [] if same else [f"{MANIFEST_FILE}: its counts differ from the sum of the receipts"]


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


def _strays(
    manifest: Manifest, claimed: list[tuple[str, ...]], files: list[FileInfo], sizes: dict[str, int]
) -> list[str]:
    """Files in our folders that neither the published shards name nor those now in work."""
    named = {file.path for file in (*manifest.files(), *files)}
    published = [(shard["tokens_key"], shard["results_key"]) for shard in manifest.shards]
    for keys in (*published, *claimed):
        for stage, key in zip(STAGES, keys, strict=True):
            named |= {receipt_name(stage, key), part_name(stage, key)}
    ours = [name for name in sizes if name.split("/")[0] in OWN_FOLDERS and "/" in name]
    return [f"{name}: nothing names it" for name in sorted(set(ours) - named)]
