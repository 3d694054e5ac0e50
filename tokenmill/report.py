"""The report of an output: `report/report.json` for machines, `report/index.html` for people.

Both say what the receipts and the manifest say, and no secret. What those do not remember (passed
over files, gates, the run's own seconds) is given by whoever ran the job, and kept from the last
report of the same shards where it is not given.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from tokenmill.errors import ConfigError
from tokenmill.figures import (
    ShardReceipts,
    finished,
    job_figures,
    length_figures,
    shard_figures,
    stage_figures,
)
from tokenmill.job import Job
from tokenmill.keys import fingerprint
from tokenmill.manifest import JOB_FILE, Manifest, read_job_file, read_manifest
from tokenmill.parquet import FileInfo
from tokenmill.plan import Plan, Shard, Todo, find_todo
from tokenmill.receipts import Receipt, encode_json, read_receipts
from tokenmill.stages.aggregate import Finished
from tokenmill.store import Store, is_local

REPORT_VERSION = 1
FOLDER = "report"
REPORT_FILE = f"{FOLDER}/report.json"
PAGE_FILE = f"{FOLDER}/index.html"
DATA_DOCS_FILE = f"{FOLDER}/data-docs/index.html"  # written by the gates, if they ran
REMEMBERED = ("gates", "skipped", "wall_seconds")

Report = dict[str, Any]


def report_data(
    job: Job,
    finished: Finished,
    manifest: Manifest | None,
    *,
    gates: Sequence[Any] | None = None,
    skipped: Mapping[str, int] | None = None,
    wall_seconds: float | None = None,
) -> Report:
    """What there is to say of a finished plan, as plain and finite values.

    gates: results with name, success and checks, as objects or dicts.  skipped: files passed over,
    by reason.  wall_seconds: of the run that ended just now.  None: not known here.
    """
    shards = [
        ShardReceipts(tokenize=before, infer=after)
        for before, after in zip(finished.tokenize, finished.infer, strict=True)
    ]
    plan = [(r.key, i.key) for r, i in zip(finished.tokenize, finished.infer, strict=True)]
    told = {
        "gates": None if gates is None else [gate_entry(gate) for gate in gates],
        "skipped": None if skipped is None else dict(skipped),
        "wall_seconds": wall_seconds,
    }
    return plain({**_assemble(job, plan, shards, manifest), **told})


def rebuild(store: Store) -> Report:
    """Write the report anew from the output alone, finished or not; what it says.

    Raises ConfigError if the output is none of tokenmill's, DataError if it is damaged.
    """
    claim = read_job_file(store)
    if claim is None:
        raise ConfigError(f"{store.uri}: no {JOB_FILE} here; not an output of tokenmill")
    job = Job.parse(claim["job"], source=f"{store.uri}/{JOB_FILE}")
    plan = [(tokens_key, results_key) for tokens_key, results_key in claim["shards"]]
    shards = list(_read_shards(store, plan))
    return write_report(store, plain(_assemble(job, plan, shards, read_manifest(store))))


def write_report(store: Store, report: Report) -> Report:
    """Both files are written; what they say, with what an earlier report remembered."""
    from tokenmill.report_page import render

    present = store.sizes(FOLDER)
    former = _former(store, report["plan"]) if REPORT_FILE in present else {}
    known = {name: former.get(name) if report.get(name) is None else report[name] for name in REMEMBERED}
    output = {"uri": public_uri(store.root if is_local(store.fs) else store.uri)}
    docs = DATA_DOCS_FILE.removeprefix(f"{FOLDER}/") if DATA_DOCS_FILE in present else None
    report = {**report, **known, "output": output, "data_docs": docs}
    store.write_bytes(REPORT_FILE, encode_json(report))
    store.write_bytes(PAGE_FILE, render(report).encode())
    return report


def summary(report: Report) -> Report:
    """The report without its long lists: what a task returns and a command prints."""
    stages = {
        name: {key: value for key, value in stage.items() if key != "batch_latency_s"}
        for name, stage in report["stages"].items()
    }
    short = {name: report[name] for name in ("job", "state", "counts", "rates", "dataset", *REMEMBERED)}
    return {**short, "stages": stages, "output": report.get("output")}


def _assemble(
    job: Job, plan: Sequence[tuple[str, str]], shards: Sequence[ShardReceipts], manifest: Manifest | None
) -> Report:
    has_model = job.inference.model is not None
    before = [shard.tokenize for shard in shards if shard.tokenize]
    after = [shard.infer for shard in shards if shard.infer]
    limits = manifest.made_by.get("tokenize", {}) if manifest else {}
    stages = {"tokenize": stage_figures(before), **({"infer": stage_figures(after)} if has_model else {})}
    return {
        "report_version": REPORT_VERSION,
        "plan": fingerprint([list(pair) for pair in plan]),
        "job": _job_entry(job),
        "model": _model_entry(job, after),
        "state": {
            "shards": len(shards),
            "shards_done": len(finished(shards, has_model)),
            "shards_tokenized": len(before),
            "published": _published(plan, manifest),
        },
        **job_figures(shards, has_model),
        "stages": stages,
        "lengths": length_figures(before, job.tokenizer.max_tokens or limits.get("max_tokens")),
        "dataset": _dataset_entry(manifest),
        "shards": [shard_figures(number, shard) for number, shard in enumerate(shards)],
    }


def _job_entry(job: Job) -> Report:
    uris = [job.input.uri] if isinstance(job.input.uri, str) else job.input.uri
    return {
        "name": job.name,
        "input": [public_uri(uri) for uri in uris],
        "text": job.input.text,
        "keep": job.input.keep,
        "overflow": job.tokenizer.overflow,
        "max_reject_rate": job.quality.max_reject_rate,
        "max_unknown_rate": job.quality.max_unknown_rate,
    }


def _model_entry(job: Job, receipts: Sequence[Receipt]) -> Report | None:
    """The model that ran, and everything it ran on: a job may be finished on another machine."""
    spec = job.inference
    if spec.model is None:
        return None
    names = {name for receipt in receipts for name in receipt.backend}
    backend = {name: _distinct(receipt.backend.get(name) for receipt in receipts) for name in sorted(names)}
    return {
        "name": public_uri(spec.model),
        "task": spec.task,
        "dtype": spec.dtype,
        "trust_remote_code": spec.trust_remote_code,
        "backend": backend,
    }


def _distinct(values: Iterator[Any]) -> list[Any]:
    """Example: ["cpu", "cuda", "cpu"] -> ["cpu", "cuda"]."""
    found: list[Any] = []
    for value in values:
        if value is not None and value not in found:
            found.append(value)
    return found


def _published(plan: Sequence[tuple[str, str]], manifest: Manifest | None) -> str:
    """ "yes", "no", or "earlier": readers see a dataset of other shards than the job has now."""
    if manifest is None:
        return "no"
    published = [(shard["tokens_key"], shard["results_key"]) for shard in manifest.shards]
    return "yes" if published == list(plan) else "earlier"


def _dataset_entry(manifest: Manifest | None) -> Report | None:
    if manifest is None:
        return None
    kinds: dict[str, Sequence[FileInfo]] = {
        "results": manifest.results,
        "tokens": manifest.tokens,
        "rejects": manifest.rejects,
        "groups": manifest.groups,
    }
    return {
        kind: {"parts": len(files), "rows": sum(f.rows for f in files), "bytes": sum(f.bytes for f in files)}
        for kind, files in kinds.items()
    }


def _read_shards(store: Store, plan: Sequence[tuple[str, str]]) -> Iterator[ShardReceipts]:
    """The receipts there are, in the order of the plan."""
    shards = tuple(
        Shard(index=index, slices=(), tokens_key=tokens_key, results_key=results_key)
        for index, (tokens_key, results_key) in enumerate(plan)
    )
    todo: Todo = find_todo(Plan(shards=shards, options=""), store)
    tokenized = [shard.tokens_key for shard in shards if shard not in todo.tokenize]
    inferred = [shard.results_key for shard in shards if shard not in todo.infer]
    receipts = [*read_receipts(store, "tokenize", tokenized), *read_receipts(store, "infer", inferred)]
    found = {(receipt.stage, receipt.key): receipt for receipt in receipts}
    for tokens_key, results_key in plan:
        yield ShardReceipts(
            tokenize=found.get(("tokenize", tokens_key)), infer=found.get(("infer", results_key))
        )
