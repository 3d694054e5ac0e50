"""The plan: which shards a job has, and which of them are done.

Made from listings, footers and the heads of CSV and JSONL files: a wrong column name is caught
before any work starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from tokenmill import arrow_ipc, keys, parquet
from tokenmill.columns import check_json_keys, check_table_columns
from tokenmill.corpus import (
    Corpus,
    Slice,
    SourceFile,
    check_readable,
    find_corpus,
    group_slices,
    without_output,
)
from tokenmill.errors import ConfigError, DataError
from tokenmill.job import InputSpec
from tokenmill.readers import HEADS, head_columns
from tokenmill.receipts import part_name, receipt_name
from tokenmill.settle import Setup
from tokenmill.splits import Cuts, cuts_key, find_cuts, is_splittable, split_slices
from tokenmill.storage_errors import mapped
from tokenmill.store import StorageConfig, Store, open_filesystem

FOOTER_THREADS = 16
COMPRESSION_RATIO = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One unit of work and of retry. Without a model `results_key` names nothing."""

    index: int
    slices: tuple[Slice, ...]
    tokens_key: str
    results_key: str

    @property
    def text_bytes(self) -> int:
        return sum(piece.text_bytes for piece in self.slices)

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "slices": [piece.to_json() for piece in self.slices],
            "tokens_key": self.tokens_key,
            "results_key": self.results_key,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Shard:
        return cls(**{**data, "slices": tuple(Slice.from_json(piece) for piece in data["slices"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All shards of a job in corpus order, and the files that were passed over.

    cuts: where large files of lines were cut, so that nobody has to count their lines again.
    """

    shards: tuple[Shard, ...]
    options: str
    skipped: Mapping[str, int] = field(default_factory=dict)
    cuts: Mapping[str, Cuts] = field(default_factory=dict)

    @property
    def text_bytes(self) -> int:
        return sum(shard.text_bytes for shard in self.shards)

    @property
    def num_files(self) -> int:
        return len({piece.file.uri for shard in self.shards for piece in shard.slices})

    def keys_of(self, stage: str) -> list[str]:
        """Keys of "tokenize" or "infer", in shard order."""
        return [s.tokens_key if stage == "tokenize" else s.results_key for s in self.shards]


def make_plan(setup: Setup, storage: StorageConfig, known_cuts: Mapping[str, Cuts] | None = None) -> Plan:
    """Find the corpus, check its columns, cut it into shards and name each.

    storage: how to open the input.  known_cuts: `Plan.cuts` of an earlier plan.
    Raises InputNotFoundError, ConfigError, UnreadableFileError, DataError.
    """
    spec = setup.job.input
    corpus = without_output(find_corpus(spec, storage), setup.job.output.uri)
    pieces, cuts = _slices(corpus, spec, storage, known_cuts or {})
    token_options = _token_options(setup)
    infer_options = setup.infer.key_options() if setup.infer else {}
    return Plan(
        shards=tuple(_shards(group_slices(pieces, spec.shard_bytes), token_options, infer_options)),
        options=keys.fingerprint(token_options),
        skipped=corpus.skipped,
        cuts=cuts,
    )


INPUT_OPTIONS = frozenset(
    {"text", "template", "pair", "messages", "id", "keep", "rows", "nulls", "encoding", "csv", "unicode"}
    | {"undecodable", "max_row_bytes"}
)


def _token_options(setup: Setup) -> dict[str, Any]:
    """Every option of the job that changes a token part."""
    options = setup.job.input.model_dump(mode="json", include=set(INPUT_OPTIONS))
    return {**options, **setup.tokenize.key_options()}


def check_tokens_key(setup: Setup, shard: Shard) -> None:
    """Raises DataError if the tokenizer is not the one that the shard was planned with."""
    key = keys.tokenize_key([piece.identity() for piece in shard.slices], _token_options(setup))
    if key != shard.tokens_key:
        raise DataError(f"shard {shard.index}: the tokenizer changed while the job ran; run the job again")


def check_results_key(setup: Setup, shard: Shard) -> None:
    """Raises DataError if the model is not the one that the shard was planned with."""
    key = keys.infer_key(shard.tokens_key, setup.need_model().key_options())
    if key != shard.results_key:
        raise DataError(f"shard {shard.index}: the model changed while the job ran; run the job again")


def plan_from_keys(setup: Setup, tokens_keys: Sequence[str], options: str) -> Plan:
    """The plan of shards that are tokenized already: keys only, no slices.

    options: `Plan.options` when they were tokenized.
    Raises ConfigError if the job has changed since in a way that changes token ids.
    """
    if options != keys.fingerprint(_token_options(setup)):
        raise ConfigError(
            "the job's input, tokenizer or the model's own limits changed since it was tokenized; "
            "run `tokenmill tokenize` again"
        )
    infer_options = setup.infer.key_options() if setup.infer else {}
    shards = (
        Shard(index=index, slices=(), tokens_key=key, results_key=keys.infer_key(key, infer_options))
        for index, key in enumerate(tokens_keys)
    )
    return Plan(shards=tuple(shards), options=options)


def _shards(
    groups: Iterator[tuple[Slice, ...]], token_options: Mapping[str, Any], infer_options: Mapping[str, Any]
) -> Iterator[Shard]:
    for index, group in enumerate(groups):
        tokens_key = keys.tokenize_key([piece.identity() for piece in group], token_options)
        yield Shard(
            index=index,
            slices=group,
            tokens_key=tokens_key,
            results_key=keys.infer_key(tokens_key, infer_options),
        )


def _slices(
    corpus: Corpus, spec: InputSpec, storage: StorageConfig, known_cuts: Mapping[str, Cuts]
) -> tuple[list[Slice], dict[str, Cuts]]:
    """Every file's slices, columns checked, and the cuts of those that were cut at lines."""
    lined = [file for file in corpus.files if file.format in HEADS]
    large = [file for file in corpus.files if is_splittable(file, spec)]

    def head_of(file: SourceFile) -> list[str]:
        return head_columns(file, spec, storage)

    with ThreadPoolExecutor(max_workers=FOOTER_THREADS) as pool:
        found = list(pool.map(lambda file: _file_slices(file, spec, storage), corpus.files))
        heads = dict(zip((f.uri for f in lined), pool.map(head_of, lined), strict=True))
        check_json_keys({f.uri: heads[f.uri] for f in lined if f.format == "jsonl"}, spec)
        _check_kept_types([(file, types) for file, (_, types) in zip(corpus.files, found, strict=True)])
        cuts = find_cuts(large, spec, storage, known_cuts, pool)
    ranges = {file.uri: list(split_slices(file, cuts[cuts_key(file, spec)])) for file in large}
    pieces = [ranges.get(file.uri, whole) for file, (whole, _) in zip(corpus.files, found, strict=True)]
    return [piece for many in pieces for piece in many], cuts


def _check_kept_types(found: Sequence[tuple[SourceFile, Mapping[str, pa.DataType]]]) -> None:
    """Raises ConfigError if two files disagree on a kept column: never the first one's silently."""
    first_file, first_types = found[0]
    for file, types in found:
        for name, dtype in types.items():
            if dtype != first_types[name]:
                raise ConfigError(
                    f"input.keep: column {name!r} is {first_types[name]} in {first_file.uri} but {dtype} in "
                    f"{file.uri}; make them one type or leave it out"
                )


def _file_slices(
    file: SourceFile, spec: InputSpec, storage: StorageConfig
) -> tuple[list[Slice], dict[str, pa.DataType]]:
    check_readable(file)
    if file.format == "parquet":
        return _parquet_slices(file, spec, storage)
    if file.format == "arrow":
        fs, path = open_filesystem(file.uri, storage)
        with mapped(f"reading {file.uri}"), fs.open(path, "rb") as handle:
            types = check_table_columns(arrow_ipc.read_schema(handle, file.uri), file.uri, spec)
        return [Slice(file=file, text_bytes=file.size_bytes)], types
    text_bytes = file.size_bytes * (COMPRESSION_RATIO if file.compression else 1)
    return [Slice(file=file, text_bytes=text_bytes)], dict.fromkeys(spec.keep, pa.string())


def _parquet_slices(
    file: SourceFile, spec: InputSpec, storage: StorageConfig
) -> tuple[list[Slice], dict[str, pa.DataType]]:
    """Runs of row groups with about `shard_bytes` of text each."""
    fs, path = open_filesystem(file.uri, storage)
    with mapped(f"reading {file.uri}"), fs.open(path, "rb") as handle:
        schema, metadata = parquet.read_footer(handle, file.uri)
    types = check_table_columns(schema, file.uri, spec)
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    tops = [path.partition(".")[0] if path not in spec.text_columns else path for path in paths]
    places = [place for place, top in enumerate(tops) if top in spec.text_columns]
    slices: list[Slice] = []
    first, first_row, row, held = 0, 0, 0, 0
    for group in range(metadata.num_row_groups):
        size = sum(metadata.row_group(group).column(place).total_uncompressed_size for place in places)
        if group > first and held + size > spec.shard_bytes:
            slices.append(_group_slice(file, first, group, first_row, row, held))
            first, first_row, held = group, row, 0
        held += size
        row += metadata.row_group(group).num_rows
    slices.append(_group_slice(file, first, metadata.num_row_groups, first_row, row, held))
    return slices, types


def _group_slice(file: SourceFile, first: int, stop: int, first_row: int, row: int, size: int) -> Slice:
    return Slice(
        file=file,
        first_group=first,
        num_groups=stop - first,
        first_row=first_row,
        num_rows=row - first_row,
        text_bytes=size,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Todo:
    """The shards that still need each stage, in corpus order."""

    tokenize: tuple[Shard, ...]
    infer: tuple[Shard, ...]


def find_todo(plan: Plan, store: Store) -> Todo:
    """Decide from three listings which shards are done: receipt there, and its part with it."""
    present = set(store.sizes("receipts")) | set(store.sizes("tokens")) | set(store.sizes("parts"))

    def is_done(stage: Any, key: str) -> bool:
        return receipt_name(stage, key) in present and part_name(stage, key) in present

    infer = tuple(s for s in plan.shards if not is_done("infer", s.results_key))
    tokenize = tuple(s for s in plan.shards if not is_done("tokenize", s.tokens_key))
    return Todo(tokenize=tokenize, infer=infer)
