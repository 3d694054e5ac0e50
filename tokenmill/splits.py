"""Cutting a large file of lines into byte ranges of whole lines.

A file is cut behind the first line end at or after each multiple of `input.shard_bytes`. Row ordinals
are those of the whole file, so its lines are counted when the job is planned: once, in blocks read by
several threads. The output remembers the cuts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import islice

import numpy as np

from tokenmill.corpus import Slice, SourceFile
from tokenmill.errors import DataError
from tokenmill.job import InputSpec
from tokenmill.keys import fingerprint
from tokenmill.storage_errors import mapped
from tokenmill.store import StorageConfig, open_filesystem

BLOCK_BYTES = 4 << 20
SMALL_FILE_BYTES = 1 << 20  # is read whole: to count its lines first would cost more than it gains
LINE_END = 10

Cuts = Sequence[Sequence[int]]  # [first byte, first row] of each range but the first

_found: dict[str, Cuts] = {}  # by `cuts_key`; a run plans once before its server starts and once after


def is_splittable(file: SourceFile, spec: InputSpec) -> bool:
    """Whether ranges of the file can be read by themselves, and it is large enough for several shards."""
    lines = file.format == "jsonl" or (file.format == "text" and spec.rows == "lines")
    has_ranges = file.compression is None and not file.uri.startswith(("http://", "https://"))
    return lines and has_ranges and file.size_bytes > max(spec.shard_bytes, SMALL_FILE_BYTES)


def cuts_key(file: SourceFile, spec: InputSpec) -> str:
    """Names a content of a file and how it is cut."""
    return fingerprint([file.uri, file.size_bytes, file.version, spec.shard_bytes])


def find_cuts(
    files: Sequence[SourceFile],
    spec: InputSpec,
    storage: StorageConfig,
    known: Mapping[str, Cuts],
    pool: Executor,
) -> dict[str, Cuts]:
    """The cuts of every file, by `cuts_key`. Reads those that are not known yet.

    Raises DataError for a file that shrinks meanwhile, StoreError, StoreUnavailableError.
    """
    known = {**_found, **known}
    keys = {cuts_key(file, spec): file for file in files}
    unread = {key: file for key, file in keys.items() if key not in known}
    blocks = [(file, start) for file in unread.values() for start in range(0, file.size_bytes, BLOCK_BYTES)]
    scans = pool.map(lambda block: _read_block(block[0], block[1], spec.shard_bytes, storage), blocks)
    read = {
        key: join_scans(islice(scans, -(-file.size_bytes // BLOCK_BYTES)), file.size_bytes, spec.shard_bytes)
        for key, file in unread.items()
    }
    _found.update({key: cuts for key, cuts in read.items() if unread[key].version != "unknown"})
    return {key: read[key] if key in read else known[key] for key in keys}


def split_slices(file: SourceFile, cuts: Cuts) -> Iterator[Slice]:
    """One slice a range, in order."""
    starts = [[0, 0], *cuts]
    ends = [*(first_byte for first_byte, _ in cuts), file.size_bytes]
    for (first_byte, first_row), end in zip(starts, ends, strict=True):
        size = end - first_byte
        yield Slice(file=file, first_byte=first_byte, num_bytes=size, first_row=first_row, text_bytes=size)


@dataclass(frozen=True, slots=True)
class Scan:
    """The line ends of one block: how many, places of the first and last, and the cuts behind later ones.

    Bytes are counted from the start of the file, rows from that of the block.
    """

    num_lines: int
    first: int = -1
    last: int = -1
    cuts: Sequence[tuple[int, int]] = ()


def scan_block(data: bytes, start: int, step: int) -> Scan:
    """What `join_scans` needs of the block at byte `start`."""
    ends_N = np.flatnonzero(np.frombuffer(data, np.uint8) == LINE_END) + start
    if not len(ends_N):
        return Scan(0)
    at = np.flatnonzero(np.diff(ends_N // step)) + 1
    cuts = list(zip((ends_N[at] + 1).tolist(), (at + 1).tolist(), strict=True))
    return Scan(len(ends_N), int(ends_N[0]), int(ends_N[-1]), cuts)


def join_scans(scans: Iterable[Scan], size: int, step: int) -> list[list[int]]:
    """The cuts of a file of `size` bytes from the scans of its blocks, in order.

    Example: b"aa\\nb\\ncc\\n" with step 2 -> [[3, 1], [5, 2]]: lines of 3, 2 and 3 bytes
    """
    cuts: list[list[int]] = []
    num_lines, last = 0, 0
    for scan in scans:
        if not scan.num_lines:
            continue
        if scan.first // step > last // step:
            cuts.append([scan.first + 1, num_lines + 1])
        cuts += [[byte, num_lines + row] for byte, row in scan.cuts]
        num_lines, last = num_lines + scan.num_lines, scan.last
    if cuts and cuts[-1][0] == size:
        cuts.pop()
    return cuts


def _read_block(file: SourceFile, start: int, step: int, storage: StorageConfig) -> Scan:
    stop = min(start + BLOCK_BYTES, file.size_bytes)
    fs, path = open_filesystem(file.uri, storage)
    with mapped(f"reading {file.uri}"):
        data = fs.cat_file(path, start=start, end=stop)
    if len(data) != stop - start:
        raise DataError(f"{file.uri}: shorter than listed; is it being written? Run the job again")
    return scan_block(data, start, step)
