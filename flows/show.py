"""What a command prints for a person. Takes the same plain values that `--json` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Data = Mapping[str, Any]


def _facts(rows: list[tuple[str, Any]], title: str) -> Table:
    """Two columns: what, and how much."""
    table = Table(
        title=escape(title), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    for name, value in rows:
        table.add_row(name, escape(str(value)))
    return table


def size(num_bytes: float) -> str:
    """Example: 1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def duration(seconds: float) -> str:
    """Example: 3700 -> "1 h 2 min"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def show_plan(data: Data, console: Console) -> None:
    """The page of `tokenmill plan`."""
    skipped = ", ".join(f"{n} {why}" for why, n in data["skipped"].items()) or "none"
    rate = data["infer_tokens_per_second"]
    rows = [
        ("input", f"{data['files']:,} files, {size(data['text_bytes'])} of text"),
        ("skipped files", skipped),
        (
            "shards",
            f"{data['shards']:,}: {data['shards_tokenized']:,} tokenized, "
            f"{data['shards_inferred']:,} inferred",
        ),
        ("tokens", f"about {data['tokens_estimate']:,}, {data['tokens_left_estimate']:,} left to infer"),
        (
            "max tokens a row",
            f"{data['max_tokens']:,} ({data['share_truncated_in_sample']:.1%} of a sample is longer)",
        ),
        *([("model", f"{data['model']}, {data['pooling']} pooling")] if "model" in data else []),
        (
            "this machine",
            f"tokenize {data['tokenize_tokens_per_second']:,.0f} tok/s"
            + (f", infer {rate:,.0f} tok/s" if rate else ""),
        ),
        (
            "time left",
            f"about {duration(data['seconds_estimate'])}"
            + ("" if rate or "model" not in data else " for tokenizing alone"),
        ),
        ("output", data["output"]),
    ]
    console.print(_facts(rows, f"Plan of {data['job']}"))
    if data["published"]:
        console.print("Nothing to do: every shard is done and published.")


def show_status(data: Data, console: Console) -> None:
    """The page of `tokenmill status`."""
    published = (
        f"yes: {data['rows_published']:,} rows in {data['num_parts']:,} files, "
        f"{data['rows_rejected']:,} rejected"
        if data["published"]
        else "no"
    )
    rows = [
        ("tokenized", f"{data['num_tokenized']:,} of {data['num_shards']:,} shards"),
        ("inferred", f"{data['num_inferred']:,} of {data['num_shards']:,} shards"),
        ("published", published),
        ("size", size(data["size_bytes"])),
        ("output", data["output"]),
    ]
    console.print(_facts(rows, f"Status of {data['job']}"))


def show_verdict(data: Data, console: Console) -> None:
    """The page of `tokenmill verify`."""
    checked = f"{data['files_checked']:,} files, {size(data['bytes_checked'])}"
    rows = [
        ("shards", f"{data['num_done']:,} of {data['num_shards']:,} done"),
        ("published", "yes" if data["published"] else "no"),
        ("checked", checked),
    ]
    console.print(_facts(rows, f"Verification of {data['job']}"))
    for problem in data["problems"]:
        console.print(f"  [red]wrong[/red]  {escape(problem)}", highlight=False)
    if not data["problems"]:
        console.print("All checksums and sums are right.", style="green")
