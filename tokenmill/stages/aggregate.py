"""Stage three: finished shards become one published dataset.

    receipts of all shards -> sums checked -> small parts compacted -> groups -> manifest -> pruning

The manifest is written last but one: only after it do files that it no longer names go away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from tokenmill.accounting import Counts
from tokenmill.errors import AccountingError, ConfigError, DataError, StoreUnavailableError
from tokenmill.groups import group_rows
from tokenmill.job import Job
from tokenmill.keys import fingerprint
from tokenmill.limits import check_limits
from tokenmill.manifest import Manifest, plan_fingerprint, read_manifest, write_manifest
from tokenmill.parquet import FileInfo, create_part, iter_part, part_footer, sha256_of
from tokenmill.plan import Plan, find_todo
from tokenmill.receipts import Receipt, Stage, part_name, read_receipts, receipt_name
from tokenmill.settle import Setup
from tokenmill.store import Store

OWN_FOLDERS = ("tokens", "parts", "results", "rejects", "groups", "receipts")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """The receipts of a finished plan, in shard order, and their sums."""

    tokenize: tuple[Receipt, ...]
    infer: tuple[Receipt, ...]
    counts: Counts


def collect(plan: Plan, store: Store) -> Finished:
    """Read the receipts of every shard and balance them.

    Raises ConfigError while shards are unfinished, AccountingError if a sum is off.
    """
    todo = find_todo(plan, store)
    if todo.infer:
        raise ConfigError(
            f"{store.uri}: {len(todo.infer)} of {len(plan.shards)} shards are unfinished; run the job first"
        )
    tokenize = tuple(read_receipts(store, "tokenize", plan.keys_of("tokenize")))
    infer = tuple(read_receipts(store, "infer", plan.keys_of("infer")))
    sizes = store.sizes()
    for receipt in (*tokenize, *infer):
        _check_whole(receipt, store, sizes)
    for before, after in zip(tokenize, infer, strict=True):
        if before.counts.rows_out != after.counts.rows_in:
            raise AccountingError(
                f"shard {before.shard}: {before.counts.rows_out} rows tokenized, "
                f"{after.counts.rows_in} inferred"
            )
    _check_one_precision(infer)
    return Finished(tokenize=tokenize, infer=infer, counts=job_counts(tokenize, infer))


def _check_one_precision(receipts: Sequence[Receipt]) -> None:
    """Raises ConfigError if `precision: auto` came to different types on different machines."""
    found = {str(receipt.backend.get("precision")): receipt for receipt in receipts}
    if len(found) > 1:
        raise ConfigError(
            f"inference.precision: shards were computed in {' and '.join(sorted(found))}, on different "
            "devices; set inference.precision and run again"
        )


def _check_whole(receipt: Receipt, store: Store, sizes: Mapping[str, int]) -> None:
    """Raises DataError if a file that the receipt names is gone or cut short."""
    for file in (receipt.part, receipt.rejects):
        if file and sizes.get(file.path) != file.bytes:
            raise DataError(
                f"{store.uri}/{file.path}: {sizes.get(file.path, 'no')} bytes, {file.bytes} were written; "
                f"delete {receipt_name(receipt.stage, receipt.key)} and run again to redo its shard"
            )


def job_counts(tokenize: Sequence[Receipt], infer: Sequence[Receipt]) -> Counts:
    """One account of both stages: rows in from the corpus, rows out of the model.

    Raises AccountingError unless rows in == rows out + rejects.
    """
    first, second = (Counts.total(r.counts for r in receipts) for receipts in (tokenize, infer))
    total = replace(
        first,
        rows_out=second.rows_out,
        tokens_computed=second.tokens_computed,
        tokens_padded=second.tokens_padded,
        tokens_generated=second.tokens_generated,
        batches=second.batches,
        out_of_memory=second.out_of_memory,
        rows_recomputed=second.rows_recomputed,
        rejects=first.rejects + second.rejects,
    )
    total.check("job")
    return total


def publish(plan: Plan, setup: Setup, store: Store, finished: Finished) -> Manifest:
    """Compact, group, write the manifest, then remove what it does not name.

    Raises RejectLimitError, QualityError, StoreError, DataError.
    """
    job = setup.job
    check_limits(finished.counts, job.quality)
    before = read_manifest(store)
    known = {f.path: f for f in before.files()} if before else {}
    groups = _part_groups(finished.infer, job.output.target_part_bytes)
    results = tuple(_compact(number, group, store, job, known) for number, group in enumerate(groups))
    _check_stored(store, results)
    receipts = (*finished.tokenize, *finished.infer)
    manifest = Manifest(
        job=job.name,
        plan=plan_fingerprint(plan, job),
        results=results,
        tokens=tuple(receipt.part for receipt in finished.tokenize),
        rejects=tuple(receipt.rejects for receipt in receipts if receipt.rejects),
        groups=tuple(_write_groups(job, store, results)),
        counts=finished.counts,
        shards=tuple(_shard_entry(*pair) for pair in zip(finished.tokenize, finished.infer, strict=True)),
        made_by=made_by(setup),
    )
    write_manifest(store, manifest)
    prune(plan, store, manifest)
    return manifest


def made_by(setup: Setup) -> dict[str, Any]:
    """Fingerprints and options that the results depend on."""
    infer = setup.infer.key_options() if setup.infer else {}
    return {"tokenize": setup.tokenize.key_options(), "infer": infer}


def _shard_entry(before: Receipt, after: Receipt) -> Mapping[str, Any]:
    return {
        "tokens_key": before.key,
        "results_key": after.key,
        "rows_in": before.counts.rows_in,
        "rows_out": after.counts.rows_out,
        "rejects": before.counts.rows_rejected + after.counts.rows_rejected,
        "tokens": before.counts.tokens,
    }


def _part_groups(receipts: Sequence[Receipt], target_bytes: int) -> Iterator[list[Receipt]]:
    """Neighbouring parts to be published as one file of about target_bytes, in corpus order."""
    group: list[Receipt] = []
    filled = 0
    for receipt in receipts:
        if group and filled + receipt.part.bytes > target_bytes:
            yield group
            group, filled = [], 0
        group.append(receipt)
        filled += receipt.part.bytes
    if group:
        yield group


def _compact(
    number: int, group: Sequence[Receipt], store: Store, job: Job, known: Mapping[str, FileInfo]
) -> FileInfo:
    """Publish a group of parts as one file. The same group always gets the same name and bytes."""
    name = f"results/part-{number:05d}-{fingerprint([r.key for r in group])[:12]}.parquet"
    if name in known and store.sizes(name).get(name) == known[name].bytes:
        return known[name]
    sources = [receipt.part.path for receipt in group]
    if len(sources) == 1:
        store.copy(sources[0], name)
        return replace(group[0].part, path=name)
    schema, _ = part_footer(store, sources[0])
    with create_part(store, name, schema.remove_metadata(), {"job": job.name, "stage": "publish"}) as part:
        for source in sources:
            for batch in iter_part(store, source):
                part.write(batch)
    assert part.info is not None
    return part.info


def _write_groups(job: Job, store: Store, results: Sequence[FileInfo]) -> Iterator[FileInfo]:
    """The group-by table, if the job asks for one."""
    columns = job.aggregate.group_by
    if not columns:
        return
    schema, _ = part_footer(store, results[0].path)
    table = group_rows(lambda: _rows(store, results), schema, columns, job.inference.task)
    name = f"groups/groups-{fingerprint([columns, [r.sha256 for r in results]])[:12]}.parquet"
    with create_part(store, name, table.schema, {"job": job.name, "stage": "groups"}) as part:
        for batch in table.to_batches():
            part.write(batch)
    assert part.info is not None
    yield part.info


def _check_stored(store: Store, files: Sequence[FileInfo]) -> None:
    """Raises StoreUnavailableError for a result that storage copied without an error and does not have."""
    sizes = store.sizes("results")
    for file in files:
        if sizes.get(file.path) != file.bytes:
            raise StoreUnavailableError(
                f"{store.uri}/{file.path}: {sizes.get(file.path, 0)} of {file.bytes} bytes arrived"
            )


def _rows(store: Store, files: Sequence[FileInfo]) -> Iterator[pa.RecordBatch]:
    for file in files:
        yield from iter_part(store, file.path)


def prune(plan: Plan, store: Store, manifest: Manifest) -> list[str]:
    """Remove files of this output that neither the manifest nor its shards name; their names."""
    stale = _stale(plan, manifest, store.sizes())
    store.remove(stale)
    return stale


def _stale(plan: Plan, manifest: Manifest, sizes: Mapping[str, int]) -> list[str]:
    ours = (name for name in sizes if name.partition("/")[0] in OWN_FOLDERS and "/" in name)
    return sorted(set(ours) - _named(plan, manifest))


def _named(plan: Plan, manifest: Manifest) -> set[str]:
    """Files that a published dataset consists of, or that its shards are resumed from."""
    named = {f.path for f in manifest.files()}
    stages: tuple[Stage, ...] = ("tokenize", "infer")
    for stage in stages:
        for key in plan.keys_of(stage):
            named |= {receipt_name(stage, key), part_name(stage, key)}
    return named


def is_complete(plan: Plan, manifest: Manifest, store: Store) -> bool:
    """Whether all that is published is there, and nothing that a stopped run left over."""
    sizes = store.sizes()
    whole = all(sizes.get(file.path) == file.bytes for file in manifest.files())
    return whole and _named(plan, manifest) <= set(sizes) and not _stale(plan, manifest, sizes)


def check_file(store: Store, file: FileInfo, sizes: Mapping[str, int]) -> str | None:
    """What is wrong with a stored Parquet file, or None: size, checksum and rows are recomputed."""
    if file.path not in sizes:
        return f"{file.path}: missing"
    if sizes[file.path] != file.bytes:
        return f"{file.path}: {sizes[file.path]} bytes, {file.bytes} written"
    if sha256_of(store, file.path) != file.sha256:
        return f"{file.path}: checksum differs: its bytes changed after it was written"
    rows = part_footer(store, file.path)[1]
    if rows != file.rows:
        return f"{file.path}: {rows} rows, {file.rows} written"
    return None
