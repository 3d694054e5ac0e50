"""Who an output belongs to, and what is published in it.

`job.json` is written first and claims the folder for one job; `manifest.json` is written last and
names every file of the published dataset. Neither holds a time or a secret: two runs of one job
write the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.accounting import Counts
from tokenmill.errors import ConfigError, DataError, OutputError, StoreError, StoreUnavailableError
from tokenmill.job import Job
from tokenmill.keys import fingerprint
from tokenmill.parquet import FileInfo
from tokenmill.plan import Plan, plan_from_keys
from tokenmill.receipts import encode_json
from tokenmill.settle import Setup
from tokenmill.splits import Cuts
from tokenmill.store import Store

MANIFEST_VERSION = 1
JOB_FILE = "job.json"
MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The published dataset: results in corpus order, tokens, rejects, groups, and the sums."""

    job: str
    plan: str
    results: tuple[FileInfo, ...]
    tokens: tuple[FileInfo, ...]
    rejects: tuple[FileInfo, ...]
    groups: tuple[FileInfo, ...]
    counts: Counts
    shards: tuple[Mapping[str, Any], ...]
    made_by: Mapping[str, Any]

    def files(self) -> tuple[FileInfo, ...]:
        return (*self.results, *self.tokens, *self.rejects, *self.groups)

    def to_json(self) -> dict[str, Any]:
        return {
            "manifest_version": MANIFEST_VERSION,
            "job": self.job,
            "plan": self.plan,
            **{name: [f.to_json() for f in getattr(self, name)] for name in FILE_LISTS},
            "counts": self.counts.to_json(),
            "shards": [dict(shard) for shard in self.shards],
            "made_by": dict(self.made_by),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        lists = {name: tuple(FileInfo(**entry) for entry in data[name]) for name in FILE_LISTS}
        return cls(
            job=data["job"],
            plan=data["plan"],
            counts=Counts.from_json(data["counts"]),
            shards=tuple(data["shards"]),
            made_by=data["made_by"],
            **lists,
        )


FILE_LISTS = ("results", "tokens", "rejects", "groups")


def plan_fingerprint(plan: Plan, job: Job) -> str:
    """Changes whenever a published dataset would have to be published anew."""
    shards = [[shard.tokens_key, shard.results_key] for shard in plan.shards]
    publishing = {"group_by": job.aggregate.group_by, "target": job.output.target_part_bytes}
    return fingerprint({"version": MANIFEST_VERSION, "shards": shards, "publishing": publishing})


def read_manifest(store: Store) -> Manifest | None:
    """The published dataset, or None.  Raises DataError if the file cannot be parsed."""
    data = _read(store, MANIFEST_FILE)
    if data is None:
        return None
    try:
        return Manifest.from_json(data)
    except (KeyError, TypeError, ValueError) as exc:
        raise DataError(
            f"{store.uri}/{MANIFEST_FILE}: not a manifest that this version reads; delete it and run again"
        ) from exc


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Publishes: from here on readers see the new dataset."""
    store.write_bytes(MANIFEST_FILE, encode_json(manifest.to_json()))


def read_job_file(store: Store) -> Mapping[str, Any] | None:
    """What claims the output: name, job and shard keys; None where nothing does.

    Raises OutputError for a file of that name that is not ours.
    """
    claim = _read(store, JOB_FILE)
    if claim is not None and not (
        isinstance(claim, dict) and {"name", "job", "options", "shards"} <= set(claim)
    ):
        raise OutputError(f"{store.uri}/{JOB_FILE}: not written by tokenmill; choose another folder")
    return claim


def _read(store: Store, name: str) -> dict[str, Any] | None:
    try:
        raw = store.read_bytes(name)
    except StoreUnavailableError:
        raise
    except StoreError as exc:
        if isinstance(exc.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise
    try:
        return json.loads(raw)  # type: ignore[no-any-return]
    except ValueError as exc:
        # Without job.json the folder would be nobody's, and refused.
        remedy = "choose another folder" if name == JOB_FILE else "delete it and run again"
        raise DataError(f"{store.uri}/{name}: not readable as JSON: {exc}; {remedy}") from exc


def check_owner(store: Store, job: Job) -> None:
    """Raises OutputError if the output belongs to another job, or to nobody but is not empty, or
    cannot be written.
    """
    store.check_writable()
    claim = read_job_file(store)
    if claim is not None:
        if claim.get("name") != job.name:
            raise OutputError(
                f"output.uri: {store.uri} was written by job {claim.get('name')!r}, not {job.name!r}; "
                "choose another folder or the same name"
            )
    elif strangers := store.sizes():
        raise OutputError(
            f"output.uri: {store.uri} is not empty ({sorted(strangers)[0]}) and was not written by "
            "tokenmill; choose an empty folder"
        )


def claimed_plan(store: Store, setup: Setup) -> Plan:
    """The shards that the output was claimed for: keys only, no slices.

    Later stages use it in place of a new plan, so that files that arrive meanwhile change nothing.
    Raises ConfigError if nothing claims the output, or if the job has changed since.
    """
    claim = read_job_file(store)
    if claim is None:
        raise ConfigError(f"{store.uri}: no {JOB_FILE} here; run the job, or `tokenmill tokenize`, first")
    return plan_from_keys(setup, [tokens_key for tokens_key, _ in claim["shards"]], claim["options"])


def remembered_cuts(store: Store) -> Mapping[str, Cuts]:
    """`Plan.cuts` of the plan that claimed the output; none where nothing does."""
    claim = read_job_file(store)
    return claim.get("cuts", {}) if claim else {}


def claim_output(store: Store, job: Job, plan: Plan) -> None:
    """Make the output this job's own and note its shards.  Raises OutputError."""
    check_owner(store, job)
    shards: Sequence[list[str]] = [[shard.tokens_key, shard.results_key] for shard in plan.shards]
    claim = {
        "name": job.name,
        "job": job.model_dump(mode="json"),
        "options": plan.options,
        "shards": shards,
        "cuts": plan.cuts,
    }
    data = encode_json(claim)
    if _read(store, JOB_FILE) == json.loads(data):
        return
    try:
        store.write_bytes(JOB_FILE, data)
    except StoreUnavailableError:
        raise
    except StoreError as exc:
        raise OutputError(f"output.uri: {store.uri} cannot be written: {exc.__cause__}") from exc
