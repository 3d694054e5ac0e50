"""The report as one HTML page that needs nothing else: no network, no script, no other file.

A pure function of the report's JSON. Every text is escaped by the template engine.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenmill import quantities
from tokenmill.charts import Chart, histogram_chart, throughput_chart, time_bar

TEMPLATE = "report.html.j2"
MAX_TABLE_ROWS = 200

Report = Mapping[str, Any]


def render(report: Report) -> str:
    """The page of a report. The same report gives the same text."""
    from tokenmill import __version__

    page: str = _template().render(
        report=report,
        charts=_charts(report),
        time_bars={name: time_bar(stage["seconds_by_activity"]) for name, stage in report["stages"].items()},
        shards=report["shards"][:MAX_TABLE_ROWS],
        sections=opening_lines(report["output"]),
        version=__version__,
    )
    return page


@functools.cache
def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": quantities.count,
        "short": quantities.short,
        "percent": quantities.percent,
        "seconds": quantities.seconds,
        "size_bytes": quantities.size_bytes,
        "agreement_told": quantities.agreement_told,
    }
    return environment.get_template(TEMPLATE)


def _charts(report: Report) -> dict[str, Chart | None]:
    """Every chart of the page by name; None where there is nothing to draw."""
    return {
        **{f"throughput_{stage}": throughput_chart(report["shards"], stage) for stage in report["stages"]},
        "latency": _latency(report["stages"].get("infer")),
        "lengths": _lengths(report["lengths"]),
    }


def _latency(stage: Mapping[str, Any] | None) -> Chart | None:
    latency = stage["batch_latency_s"] if stage else None
    if not latency or not latency["bars"]:
        return None
    quantiles = {name: latency[name] for name in ("p50", "p95")}
    return histogram_chart(
        latency["bars"], label=quantities.seconds, base=10, unit="batches", quantiles=quantiles
    )


def _lengths(lengths: Mapping[str, Any] | None) -> Chart | None:
    if not lengths or not lengths["bars"]:
        return None
    quantiles = {name: lengths[name] for name in ("p50", "p99")}
    return histogram_chart(lengths["bars"], label=quantities.count, base=2, unit="rows", quantiles=quantiles)


def opening_lines(place: str) -> list[tuple[str, str]]:
    """Library, and lines to paste that open the published results in it.

    place: the output's folder or URI.  Example: the lines for pandas end in
    `rows = pd.read_parquet("out/results")`.
    """
    folder, files = _literal(f"{place}/results"), _literal(f"{place}/results/*.parquet")
    protocol = place.split("://", 1)[0] if "://" in place else None
    duckdb = ["import duckdb"]
    if protocol:
        duckdb = [
            "import duckdb",
            "import fsspec",
            "",
            f"duckdb.register_filesystem(fsspec.filesystem({_literal(protocol)}))",
        ]
    lines = {
        "pandas": ["import pandas as pd", "", f"rows = pd.read_parquet({folder})"],
        "DuckDB": [*duckdb, "", f"rows = duckdb.read_parquet({files})"],
        "datasets": [
            "from datasets import load_dataset",
            "",
            f'rows = load_dataset("parquet", data_files={files}, split="train")',
        ],
    }
    return [(library, "\n".join(code)) for library, code in lines.items()]


def _literal(text: str) -> str:
    """A Python string literal in double quotes."""
    return json.dumps(text, ensure_ascii=False)
