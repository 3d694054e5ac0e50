"""What was measured, as a table, a plot and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.memory import Memory
from benchmarks.side_by_side import OURS, SideBySide
from benchmarks.whole_flow import WholeFlow

PEERS = ("sentence-transformers", "plain-loop", "tokenmill-no-allocator")
COLOURS = {OURS: "#2b6cb0", "tokenmill-no-allocator": "#90b4d8"}
OTHER_COLOUR = "#a0a0a0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """A promise with the figure that was measured for it."""

    name: str
    value: float
    limit: float
    at_least: bool

    @property
    def kept(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def line(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{'ok' if self.kept else 'MISSED':<7} {self.name}: {self.value:.7g} {sign} {self.limit:g}"


def checks(side: SideBySide, flow: WholeFlow, memory: Memory) -> list[Check]:
    """What the benchmark must show."""
    at_least = (
        ("times faster than SentenceTransformer.encode", median(side.ratios("sentence-transformers")), 1.3),
        ("times faster than a plain loop", median(side.ratios("plain-loop")), 3.0),
        (
            "smallest cosine with SentenceTransformer.encode",
            side.min_cosine["sentence-transformers"],
            0.99999,
        ),
        ("smallest cosine with a plain loop", side.min_cosine["plain-loop"], 0.99999),
    )
    at_most = (
        ("flow over engine, fixed costs apart", flow.ratio, 1.05),
        ("peak memory, four times the corpus over one", memory.growth, 1.15),
    )
    return [
        *(Check(name=name, value=value, limit=limit, at_least=True) for name, value, limit in at_least),
        *(Check(name=name, value=value, limit=limit, at_least=False) for name, value, limit in at_most),
    ]


def print_table(side: SideBySide, flow: WholeFlow, memory: Memory, console: Console) -> None:
    table = Table(
        "embedding, fp32", "tokens/s", "tokenmill is faster by", "chunk by chunk", title_justify="left"
    )
    table.add_row(f"{OURS}, embed stage", f"{side.rate(OURS):,.0f}", "", "")
    for peer in PEERS:
        ratios = side.ratios(peer)
        spread = " ".join(f"{ratio:.2f}" for ratio in ratios)
        table.add_row(peer, f"{side.rate(peer):,.0f}", f"{median(ratios):.2f} x", spread)
    whole = f"{OURS}, whole corpus, {side.whole_tokens:,} tokens"
    table.add_row(
        whole, f"{side.whole_rate:,.0f}", "", f"effective-token ratio {side.whole_effective_token_ratio:.3f}"
    )
    console.print(table)
    with_tokenizing = median(side.ratios_with_tokenizing("sentence-transformers"))
    for line in (
        f"chunks of {median(side.tokens):,.0f} tokens, {median(side.rows):,.0f} rows; {side.threads} threads"
        f"{', on a GPU' if side.cuda else ''}; "
        f"with our tokenize stage counted in: {with_tokenizing:.2f} x SentenceTransformer.encode",
        f"flow: start-up {flow.startup_s:.1f} s (server {flow.server_s:.1f} s of it) once, "
        f"{flow.fixed_s:.1f} s a run; then {flow.ratio:.3f} x the engine alone "
        f"({median(flow.flow_s):.1f} s and {median(flow.engine_s):.1f} s for {flow.tokens:,} tokens)",
        f"peak memory: {memory.once_bytes / 2**20:,.0f} MiB for {memory.once_tokens:,} tokens, "
        f"{memory.four_times_bytes / 2**20:,.0f} MiB for {memory.four_times_tokens:,}: x {memory.growth:.3f}",
    ):
        console.print(line, highlight=False, soft_wrap=True)


def write_json(
    path: Path,
    machine: Mapping[str, Any],
    side: SideBySide,
    flow: WholeFlow,
    memory: Memory,
    results: Sequence[Check],
) -> None:
    figures = {
        "machine": machine,
        "side_by_side": asdict(side),
        "whole_flow": asdict(flow),
        "memory": asdict(memory),
        "checks": [{**asdict(check), "kept": check.kept} for check in results],
    }
    path.write_text(json.dumps(figures, indent=1) + "\n")


def draw(path: Path, machine: Mapping[str, Any], side: SideBySide) -> None:
    """Tokens per second by contender, with every chunk's own figure as a dot."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "tokenmill"
    from matplotlib import pyplot

    names = sorted((OURS, *PEERS), key=side.rate)
    figure, axes = pyplot.subplots(figsize=(8, 2.6), layout="constrained")
    rates = [side.rate(name) for name in names]
    axes.barh(names, rates, color=[COLOURS.get(name, OTHER_COLOUR) for name in names], height=0.6)
    for place, name in enumerate(names):
        dots = [tokens / s for tokens, s in zip(side.tokens, side.seconds[name], strict=True)]
        axes.plot(dots, [place] * len(dots), ".", color="black", markersize=4, alpha=0.6)
        axes.annotate(f"  {rates[place]:,.0f}", (max(*dots, rates[place]), place), va="center")
    axes.set_xlabel("real tokens per second, fp32, higher is better")
    axes.set_xlim(0, max(rates) * 1.25)
    axes.set_title(f"{machine['cpu']}, {machine['cores']} cores", loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
