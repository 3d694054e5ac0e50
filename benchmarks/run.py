"""The benchmark: one run over one corpus of real docstrings, one table, one plot.

python -m benchmarks.run            about ten minutes on two cores
python -m benchmarks.run --smoke    about a minute: that it works, not how fast
python -m benchmarks.run --check    exit code 1 if a promise is not kept
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmarks import machine, memory, show, side_by_side, whole_flow
from benchmarks.child import ENVIRONMENT
from benchmarks.corpus import bench_job, make_corpora
from benchmarks.sizes import FULL, SMOKE


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--smoke", action="store_true", help="small sizes, no promises checked")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a promise is not kept")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for the results")
    arguments = parser.parse_args()
    sizes = SMOKE if arguments.smoke else FULL
    os.environ.update(ENVIRONMENT)
    out, work = arguments.out.resolve(), arguments.out.resolve() / "work"
    shutil.rmtree(work, ignore_errors=True)
    start = time.perf_counter()
    described = machine.describe()
    print(json.dumps(described, indent=1))
    corpora = make_corpora(work / "corpus", sizes)
    _say(start, "corpus is ready; contenders take turns")
    job = bench_job("side-by-side", corpora.whole, work / "out-side-by-side")
    side = side_by_side.measure(job, corpora.num_chunks, work)
    _say(start, "whole corpus is embedded; the flow beside the engine")
    flow = whole_flow.measure(corpora, sizes.job_repeats, work)
    _say(start, "memory")
    peak = memory.measure(corpora, work)
    _say(start, "done")
    results = show.checks(side, flow, peak)
    show.print_table(side, flow, peak, Console(width=110))
    show.write_json(out / "bench.json", described, side, flow, peak, results)
    show.draw(out / "bench.svg", described, side)
    shutil.rmtree(work, ignore_errors=True)
    print(f"saved {out / 'bench.json'} and {out / 'bench.svg'}")
    if not arguments.smoke:
        print("\n".join(check.line() for check in results))
    return int(arguments.check and not arguments.smoke and not all(check.kept for check in results))


def _say(start: float, text: str) -> None:
    print(f"{time.perf_counter() - start:6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
