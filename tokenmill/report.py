"""The report of an output: `report/report.json` for machines, `report/index.html` for people.

Both say what the receipts and the manifest say, and no secret. What those do not remember (files
passed over, gates, the run's own seconds) is told by whoever ran the job, and taken from the last
report of the same shards where it is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokenmill.errors import ConfigError
from tokenmill.figures import (
    ShardReceipts,
    done_shards,
    job_figures,
    length_figures,
    shard_figures,
    stage_figures,
)
from tokenmill.job import Job
from tokenmill.keys import fingerprint
from tokenmill.manifest import JOB_FILE, Manifest, read_job_file, read_manifest
from tokenmill.plan import Plan, Shard, find_todo
from tokenmill.receipts import encode_json, read_receipts
from tokenmill.report_entries import (
    Keys,
    dataset_entry,
    gate_entry,
    job_entry,
    model_entry,
    plain,
    public_uri,
    published,
)
from tokenmill.stages.aggregate import Finished
from tokenmill.store import Store, is_local

REPORT_VERSION = 1
FOLDER = "report"
REPORT_FILE = f"{FOLDER}/report.json"
PAGE_FILE = f"{FOLDER}/index.html"
DATA_DOCS = "data-docs/index.html"  # below FOLDER; the gates write it, if they run
REMEMBERED = ("gates", "skipped", "agreement", "wall_seconds")

Report = dict[str, Any]


def report_data(
    job: Job,
    finished: Finished,
    manifest: Manifest | None,
    *,
    gates: Sequence[Any] | None = None,
    skipped: Mapping[str, int] | None = None,
    agreement: Mapping[str, Any] | None = None,
    wall_seconds: float | None = None,
) -> Report:
    """What there is to say of a finished plan, as plain and finite values.

    gates: results with name, success and checks, as objects or dicts.  skipped: files passed over,
    by reason.  agreement: `Agreement` of int8 with float32.  wall_seconds: of the run that just ended.
    None: not known here.
    """
    pairs = list(zip(finished.tokenize, finished.infer, strict=True))
    shards = [ShardReceipts(tokenize=before, infer=after) for before, after in pairs]
    told = {
        "gates": None if gates is None else [gate_entry(gate) for gate in gates],
        "skipped": skipped,
        "agreement": agreement,
        "wall_seconds": wall_seconds,
    }
    plan = [(before.key, after.key) for before, after in pairs]
    return {**_assemble(job, plan, shards, manifest), **plain(told)}


def write_report(store: Store, report: Report) -> Report:
    """Write both files; what they say, filled up with what an earlier report remembered."""
    from tokenmill.report_page import render

    present = store.sizes(FOLDER)
    former = _former(store, report["plan"]) if REPORT_FILE in present else {}
    known = {name: former.get(name) if report.get(name) is None else report[name] for name in REMEMBERED}
    place = public_uri(store.root if is_local(store.fs) else store.uri)
    docs = DATA_DOCS if f"{FOLDER}/{DATA_DOCS}" in present else None
    report = {**report, **known, "output": plain(place), "data_docs": docs}
    store.write_bytes(REPORT_FILE, encode_json(report))
    store.write_bytes(PAGE_FILE, render(report).encode())
    return report


def rebuild(store: Store) -> Report:
    """Write the report anew from the output alone, finished or not; what it says.

    Raises ConfigError if the output is none of tokenmill's, DataError if it is damaged.
    """
    claim = read_job_file(store)
    if claim is None:
        raise ConfigError(f"{store.uri}: no {JOB_FILE} here; not an output of tokenmill")
    job = Job.parse(claim["job"], source=f"{store.uri}/{JOB_FILE}")
    plan = [(tokens_key, results_key) for tokens_key, results_key in claim["shards"]]
    return write_report(store, _assemble(job, plan, list(_read_shards(store, plan)), read_manifest(store)))


def summary(report: Report) -> Report:
    """The report without its long lists: what a task returns and a command prints."""
    stages = {
        name: {key: value for key, value in stage.items() if key != "batch_latency_s"}
        for name, stage in report["stages"].items()
    }
    kept = ("job", "state", "counts", "rates", "dataset", "output", *REMEMBERED)
    return {**{name: report.get(name) for name in kept}, "stages": stages}


def _assemble(
    job: Job, plan: Sequence[Keys], shards: Sequence[ShardReceipts], manifest: Manifest | None
) -> Report:
    has_model = job.inference.model is not None
    before = [shard.tokenize for shard in shards if shard.tokenize]
    after = [shard.infer for shard in shards if shard.infer]
    settled = manifest.made_by.get("tokenize", {}) if manifest else {}
    report = {
        "report_version": REPORT_VERSION,
        "plan": fingerprint([list(pair) for pair in plan]),
        "job": job_entry(job),
        "model": model_entry(job, after),
        "state": {
            "shards": len(shards),
            "shards_tokenized": len(before),
            "shards_done": len(done_shards(shards, has_model)),
            "published": published(plan, manifest),
        },
        **job_figures(shards, has_model),
        "stages": {
            "tokenize": stage_figures(before),
            **({"infer": stage_figures(after)} if has_model else {}),
        },
        "lengths": length_figures(before, job.tokenizer.max_tokens or settled.get("max_tokens")),
        "dataset": dataset_entry(manifest),
        "shards": [shard_figures(number, shard) for number, shard in enumerate(shards)],
    }
    return plain(report)  # type: ignore[no-any-return]


def _read_shards(store: Store, plan: Sequence[Keys]) -> Iterator[ShardReceipts]:
    """The receipts there are, in the order of the plan."""
    shards = tuple(
        Shard(index=index, slices=(), tokens_key=keys[0], results_key=keys[1])
        for index, keys in enumerate(plan)
    )
    todo = find_todo(Plan(shards=shards, options=""), store)
    tokens_keys = _without([s.tokens_key for s in shards], [s.tokens_key for s in todo.tokenize])
    results_keys = _without([s.results_key for s in shards], [s.results_key for s in todo.infer])
    tokenized = {r.key: r for r in read_receipts(store, "tokenize", tokens_keys)}
    inferred = {r.key: r for r in read_receipts(store, "infer", results_keys)}
    for tokens_key, results_key in plan:
        yield ShardReceipts(tokenize=tokenized.get(tokens_key), infer=inferred.get(results_key))


def _without(keys: Sequence[str], missing: Sequence[str]) -> list[str]:
    absent = set(missing)
    return [key for key in keys if key not in absent]


def _former(store: Store, plan: str) -> Report:
    """The report that is there, if it is of the same shards and readable; else empty."""
    try:
        former = json.loads(store.read_bytes(REPORT_FILE))
    except ValueError:
        return {}
    same = isinstance(former, dict) and former.get("report_version") == REPORT_VERSION
    return former if same and former.get("plan") == plan else {}
