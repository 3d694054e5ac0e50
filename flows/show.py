"""What a command prints for a person. Takes the same plain values that `--json` prints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tokenmill.quantities import agreement_told, counted, seconds, short, size_bytes

Data = Mapping[str, Any]


def _facts(rows: list[tuple[str, Any]], title: str) -> Table:
    """Two columns: what, and how much."""
    table = Table(
        title=escape(title), title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    for name, value in rows:
        table.add_row(name, escape(str(value)))
    return table


def show_plan(data: Data, console: Console) -> None:
    """The page of `tokenmill plan`."""
    skipped = ", ".join(f"{n} {why}" for why, n in data["skipped"].items()) or "none"
    rate, new_rate = data["infer_tokens_per_second"], data["generate_tokens_per_second"]
    new = data["tokens_generated_at_most"]
    rows = [
        ("input", f"{counted(data['files'], 'file')}, {size_bytes(data['text_bytes'])} of text"),
        ("skipped files", skipped),
        (
            "shards",
            f"{data['shards']:,}: {data['shards_tokenized']:,} tokenized, "
            f"{data['shards_inferred']:,} inferred",
        ),
        ("tokens", f"about {data['tokens_estimate']:,}, {data['tokens_left_estimate']:,} left to infer"),
        *([("new tokens", f"at most {new:,}")] if new else []),
        (
            "max tokens a row",
            f"{data['max_tokens']:,} ({data['share_longer_in_sample']:.1%} of a sample is longer)",
        ),
        *([("model", f"{data['model']}, {_head(data)}")] if "model" in data else []),
        *([("", _checkpoint(data))] if "architecture" in data else []),
        *([("", _faster(data["faster_precision"]))] if data.get("faster_precision") else []),
        (
            "this machine",
            f"tokenize {data['tokenize_tokens_per_second']:,.0f} tok/s"
            + (f", infer {rate:,.0f} tok/s" if rate else "")
            + (f", generate {new_rate:,.0f} tok/s" if new_rate else ""),
        ),
        (
            "time left",
            f"{'at most ' if new else ''}about {seconds(data['seconds_estimate'])}"
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
        f"yes: {counted(data['rows_published'], 'row')} in {counted(data['num_parts'], 'file')}, "
        f"{data['rows_rejected']:,} rejected"
        if data["published"]
        else "no"
    )
    rows = [
        ("tokenized", f"{data['num_tokenized']:,} of {counted(data['num_shards'], 'shard')}"),
        ("inferred", f"{data['num_inferred']:,} of {counted(data['num_shards'], 'shard')}"),
        ("published", published),
        ("size", size_bytes(data["size_bytes"])),
        ("output", data["output"]),
    ]
    console.print(_facts(rows, f"Status of {data['job']}"))


def show_verdict(data: Data, console: Console) -> None:
    """The page of `tokenmill verify`."""
    checked = f"{counted(data['files_checked'], 'file')}, {size_bytes(data['bytes_checked'])}"
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


def _checkpoint(data: Data) -> str:
    """Example: "BertModel, 22.7M parameters; fp32 on cpu, about 121 MiB of 23.5 GiB"."""
    fits = "" if data["fits"] else ": it does not fit"
    return (
        f"{data['architecture']}, {short(data['parameters'])} parameters; {data['precision']} on "
        f"{', '.join(data['devices'])}, about {size_bytes(data['memory_estimate_bytes'])} of "
        f"{size_bytes(data['device_memory_bytes'])}{fits}"
    )


def _faster(found: Data) -> str:
    """Example: "bf16 computes its layers 2.2 times as fast on this CPU (inference.precision)"."""
    held = ", after a sample is held against fp32" if found["precision"] == "int8" else ""
    return (
        f"{found['precision']} computes its layers {found['speed']:.1f} times as fast on this CPU "
        f"(inference.precision{held})"
    )


def _head(data: Data) -> str:
    """What the model is used for. Example: "classify by 3 labels: negative, neutral, positive"."""
    if "labels" in data:
        shown = ", ".join(data["labels"][:5]) + (", ..." if len(data["labels"]) > 5 else "")
        return f"{data['task']} by {counted(len(data['labels']), 'label')}: {shown}"
    return f"{data['task']}, {data['pooling']} pooling" if "pooling" in data else str(data["task"])


def show_rejects(data: Data, console: Console) -> None:
    """The page of `tokenmill rejects`."""
    if not data["rows"]:
        console.print(f"No rejects in {data['output']}", highlight=False)
    for reason, entry in data["reasons"].items():
        console.print(
            f"[bold]{escape(reason)}[/bold]  {counted(entry['rows'], 'row')} ({entry['stage']})",
            highlight=False,
        )
        for sample in entry["samples"]:
            own = f", id {sample['id']}" if sample["id"] is not None else ""
            place = f"{sample['source_file']} row {sample['row_ordinal']:,}{own}: {sample['detail']}"
            console.print(f"  {escape(place)}", highlight=False, soft_wrap=True)
            if sample["text"]:
                console.print(
                    f"    {escape(repr(sample['text']))}", style="dim", highlight=False, soft_wrap=True
                )
        more = entry["rows"] - len(entry["samples"])
        if more:
            console.print(f"  and {more:,} more", style="dim", highlight=False)
    if "exported" in data:
        console.print(f"{counted(data['exported'], 'row')} written to {escape(data['to'])}", highlight=False)
    if "without_text" in data:
        told = f"{data['without_text']:,} of them without text: {data['problem']}"
        console.print(escape(told), highlight=False, soft_wrap=True)


def show_summary(data: Data, console: Console) -> None:
    """The page at the end of `run`, `aggregate`, `report` and of a single stage."""
    if data.get("nothing_to_do"):
        console.print(data["message"], highlight=False)
        return
    if "rows" not in data and "counts" not in data:
        console.print(_facts([("output", data["output"])], data["message"]))
        return
    if "counts" not in data:
        _show_stage(data, console)
        return
    account = _account(data["counts"], data["rates"], data.get("skipped"))
    console.print(_facts(account, f"Account of {data['job']['name']}"))
    console.print(_stage_table(data["stages"]))
    for stage in data["stages"].values():
        console.print(f"  {escape(stage['held_back_by'])}", style="dim", highlight=False)
    for line in _unmet(data["gates"] or []):
        console.print(escape(line), style="yellow", highlight=False)
    if data.get("agreement"):
        console.print(f"  {agreement_told(data['agreement'])}", style="dim", highlight=False)
    console.print(_facts(_times(data), "Time"))
    console.print(_facts(_places(data), "Where it is"))


def _show_stage(data: Data, console: Console) -> None:
    new = f", {data['tokens_generated']:,} generated" if data["tokens_generated"] else ""
    rows = [
        ("rows", f"{data['rows']:,}, {data['rejects']:,} rejected"),
        ("tokens", f"{data['tokens']:,}{new}, {data['tokens_per_second']:,.0f} tok/s"),
        ("output", data["output"]),
    ]
    console.print(_facts(rows if data["rows"] else rows[-1:], data["message"]))


def _unmet(gates: list[Data]) -> list[str]:
    """A line for each check that did not hold; those that fail the run never come here."""
    return [
        f"  gate {gate['name']}: {check['expectation']}({check['column']}) is not met ({check['severity']})"
        for gate in gates
        for check in gate["checks"]
        if not check["success"]
    ]


def _account(counts: Data, rates: Data, skipped: Data | None) -> list[tuple[str, Any]]:
    rejects = ", ".join(f"{reason} {n:,}" for reason, n in counts["rejects"].items())
    dropped = counted(counts["tokens_dropped"], "token")
    rows = [
        ("rows in", f"{counts['rows_in']:,}"),
        ("rows out", f"{counts['rows_out']:,}"),
        ("rows rejected", f"{counts['rows_rejected']:,}" + (f"  ({rejects})" if rejects else "")),
        ("tokens", f"{counts['tokens']:,}"),
        ("truncated", f"{counted(counts['rows_truncated'], 'row')}, {dropped} dropped"),
        ("unknown tokens", f"{counts['tokens_unknown']:,}  ({rates['unknown']:.2%})"),
    ]
    if counts["chars_unknown"]:
        told = f"{rows[-1][1]}, {_in_rows(counts, 'chars_unknown', 'rows_with_unknown')}"
        rows[-1] = ("unknown tokens", told)
    if counts["chunks"] > counts["rows_in"]:
        rows.append(("chunks", f"{counts['chunks']:,}, pooled to {counted(counts['rows_out'], 'row')}"))
    found = [(title, tell(counts)) for name, title, tell in ODDITIES if counts[name]]
    passed_over = ", ".join(f"{n:,} {why}" for why, n in (skipped or {}).items())
    return [*rows, *found, *([("files passed over", passed_over)] if passed_over else [])]


def _in_rows(counts: Data, chars: str, rows: str) -> str:
    return f"{counted(counts[chars], 'character')} in {counted(counts[rows], 'row')}"


# Shown only where there are any: the count, a title, and how it is told.
ODDITIES: tuple[tuple[str, str, Callable[[Data], str]], ...] = (
    ("tokens_generated", "generated", lambda c: counted(c["tokens_generated"], "token")),
    ("rows_blank", "blank rows", lambda c: f"{c['rows_blank']:,}"),
    ("lines_blank", "blank lines", lambda c: f"{c['lines_blank']:,} passed over"),
    (
        "rows_scrubbed",
        "replaced by U+FFFD",
        lambda c: _in_rows(c, "chars_replaced", "rows_scrubbed"),
    ),
    (
        "rows_with_removed",
        "removed by normaliser",
        lambda c: _in_rows(c, "chars_removed", "rows_with_removed"),
    ),
    ("rows_with_special", "spell a special token", lambda c: counted(c["rows_with_special"], "row")),
)


def _stage_table(stages: Data) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), title="Stages", title_justify="left")
    for title in (
        "stage",
        "shards",
        "rows",
        "tokens",
        "seconds",
        "tokens/s",
        "effective",
        "idle",
        "peak memory",
    ):
        table.add_column(title, justify="left" if title == "stage" else "right")
    for name, stage in stages.items():
        ratio = stage["effective_token_ratio"]
        table.add_row(
            name,
            f"{stage['shards']:,}",
            f"{stage['rows_in']:,}",
            f"{stage['tokens'] + stage['tokens_generated']:,}",
            f"{stage['seconds']:,.1f}",
            f"{stage['tokens_per_second']:,.0f}",
            f"{ratio:.3f}" if ratio is not None else "-",
            f"{stage['idle_share']:.0%}",
            size_bytes(stage["peak_memory_bytes"]),
        )
    return table


def _times(data: Data) -> list[tuple[str, Any]]:
    rows = [
        ("shards, gates, publication", data["wall_seconds"]),
        ("Prefect's server start", data.get("seconds_server_start")),
    ]
    return [(name, seconds(value)) for name, value in rows if value]


def _places(data: Data) -> list[tuple[str, Any]]:
    out = data["output"]
    rejects = [("rejects", f"{out}/rejects")] if data["counts"]["rows_rejected"] else []
    groups = [("groups", f"{out}/groups")] if data["dataset"] and data["dataset"]["groups"]["parts"] else []
    return [
        ("results", f"{out}/results"),
        *rejects,
        *groups,
        ("report", f"{out}/report/index.html"),
        ("pandas", f'pd.read_parquet("{out}/results")'),
        ("DuckDB", f"duckdb.sql(\"FROM '{out}/results/*.parquet'\")"),
        ("datasets", f'load_dataset("parquet", data_files="{out}/results/*.parquet")'),
    ]
