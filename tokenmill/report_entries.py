"""The parts of a report that are told rather than summed: job, model, dataset, gates. Pure.

Everything here becomes plain, finite values with no secret in it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from tokenmill.job import Job
from tokenmill.manifest import Manifest
from tokenmill.parquet import FileInfo
from tokenmill.receipts import Receipt

Entry = dict[str, Any]
Keys = tuple[str, str]

USER_INFO = re.compile(r"(?<=://)[^/@]*@")
SIGNATURE = re.compile(r"(?<=\?).*$")
CHECK_FIELDS = ("expectation", "column", "severity", "success", "unexpected_count")


def job_entry(job: Job) -> Entry:
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


def model_entry(job: Job, receipts: Sequence[Receipt]) -> Entry | None:
    """The model, and all that it ran on, each fact a list: a job may be finished elsewhere."""
    spec = job.inference
    if spec.model is None:
        return None
    names = sorted({name for receipt in receipts for name in receipt.backend})
    return {
        "name": public_uri(spec.model),
        "task": spec.task,
        "dtype": spec.dtype,
        "trust_remote_code": spec.trust_remote_code,
        "backend": {name: _distinct(r.backend.get(name) for r in receipts) for name in names},
    }


def _distinct(values: Iterable[Any]) -> list[Any]:
    """Example: ["cpu", "cuda", "cpu"] -> ["cpu", "cuda"]."""
    found: list[Any] = []
    for value in values:
        if value is not None and value not in found:
            found.append(value)
    return found


def published(plan: Sequence[Keys], manifest: Manifest | None) -> str:
    """ "yes", "no", or "earlier": what is published has other shards than the job has now."""
    if manifest is None:
        return "no"
    shards = [(shard["tokens_key"], shard["results_key"]) for shard in manifest.shards]
    return "yes" if shards == list(plan) else "earlier"


def dataset_entry(manifest: Manifest | None) -> Entry | None:
    """Files, rows and bytes of what is published."""
    if manifest is None:
        return None
    kinds: Mapping[str, Sequence[FileInfo]] = {
        "results": manifest.results,
        "tokens": manifest.tokens,
        "rejects": manifest.rejects,
        "groups": manifest.groups,
    }
    return {
        kind: {"parts": len(files), "rows": sum(f.rows for f in files), "bytes": sum(f.bytes for f in files)}
        for kind, files in kinds.items()
    }


def gate_entry(gate: Any) -> Entry:
    """A gate's name, verdict and checks, whether it comes as an object or as a dict."""
    checks = [
        {**{name: _get(check, name) for name in CHECK_FIELDS}, "success": bool(_get(check, "success"))}
        for check in _get(gate, "checks") or ()
    ]
    success = _get(gate, "success")
    passed = all(check["success"] for check in checks) if success is None else bool(success)
    return {"name": str(_get(gate, "name")), "success": passed, "checks": checks}


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def public_uri(uri: str) -> str:
    """Without user, password and signature. Example: "https://me:pw@h/f?sig=x" -> "https://h/f?..."."""
    hidden = USER_INFO.sub("", uri)
    return SIGNATURE.sub("...", hidden) if hidden.startswith(("http://", "https://")) else hidden


def plain(value: Any) -> Any:
    """The same in JSON's own types: no NaN, no infinity, no text that UTF-8 cannot hold."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Mapping):
        return {plain(str(key)): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")
