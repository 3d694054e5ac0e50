"""The job: what to do, in one vocabulary for YAML, the Prefect UI's form and Python.

Only settings live here: no paths are opened, nothing is probed. Secrets never enter a job; they
stay in blocks or in the environment (see `tokenmill.store.StorageConfig`).
"""

from __future__ import annotations

import difflib
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from tokenmill.errors import ConfigError, UnknownKeyError
from tokenmill.job_file import read_mapping
from tokenmill.schemas import GROUP_COUNTS, GROUP_FIGURES, RESERVED, RESULT_NAMES
from tokenmill.uris import is_bucket, is_web

MIB = 1024 * 1024

Task = Literal["embed", "classify", "rank", "score", "generate"]
OPTIONS_OF_TASKS: Mapping[str, tuple[Task, ...]] = {
    "pooling": ("embed",),
    "normalize": ("embed",),
    "dimensions": ("embed",),
    "dtype": ("embed",),
    "all_scores": ("classify",),
    "threshold": ("classify",),
    "pool_chunks": ("classify",),
    "activation": ("classify", "rank"),
    "max_new_tokens": ("generate",),
    "temperature": ("generate",),
    "top_p": ("generate",),
    "top_k": ("generate",),
    "seed": ("generate",),
    "num_outputs": ("generate",),
    "stop": ("generate",),
    "stop_ids": ("generate",),
}
Precision = Literal["auto", "fp32", "bf16", "fp16", "int8"]
Format = Literal["auto", "parquet", "arrow", "jsonl", "csv", "text"]


class Spec(BaseModel):
    """Common rules of all parts of a job: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


SECRET_WORDS = ("signature=", "sig=", "token=", "secret=", "password=", "api_key=", "apikey=")


def refuse_secrets(uri: str) -> None:
    """Raises PydanticCustomError for a URI that holds a password or a signature: jobs are shown."""
    parts = urlsplit(uri if "://" in uri else "")
    named = parts.password or (parts.username and is_web(uri))
    if named or any(word in parts.query.lower() for word in SECRET_WORDS):
        instead = "download the file" if is_web(uri) else "use a storage block or the environment"
        raise PydanticCustomError("secret", f"must not hold a password or signature; {instead}")


def template_columns(template: str) -> list[str]:
    """Names in braces, in order; "{{" and "}}" stand for braces.  Raises ValueError.

    Example: "{title}: {body}" -> ["title", "body"]
    """
    parts = list(string.Formatter().parse(template))
    if any(spec or conversion for _, _, spec, conversion in parts):
        raise ValueError("template: write a column's name alone in braces, and {{ for a brace")
    return [name for _, name, _, _ in parts if name is not None]


class StorageSpec(Spec):
    """Where an S3 bucket is and which saved credentials open it. Holds no secret itself."""

    block: str | None = Field(None, description="A saved tokenmill-storage block, or aws-credentials/NAME.")
    endpoint_url: str | None = Field(None, description="S3 endpoint, if not the default one.")
    region: str | None = Field(None, description="S3 region.")
    anon: bool = Field(False, description="Read a public bucket without credentials.")

    @field_validator("endpoint_url")
    @classmethod
    def _endpoint_holds_no_secret(cls, value: str | None) -> str | None:
        refuse_secrets(value or "")
        return value


def _storage_fits(uris: list[str], storage: StorageSpec) -> None:
    """Raises ValueError for a setting that would have no effect: they are S3's."""
    fields = StorageSpec.model_fields
    set_here = [name for name, field in fields.items() if getattr(storage, name) != field.default]
    if set_here and not any(is_bucket(uri) for uri in uris):
        raise ValueError(
            f"storage.{set_here[0]}: is for s3:// only; remove it, {', '.join(uris)} is opened without"
        )


class CsvSpec(Spec):
    """The dialect of CSV files."""

    delimiter: str | None = Field(
        None, min_length=1, max_length=1, description="Default: a comma, or a tab in .tsv files."
    )
    quote: str | None = Field(
        '"', min_length=1, max_length=1, description="null: a quotation mark is a character like any other."
    )
    escape: str | None = Field(
        None, min_length=1, max_length=1, description="Takes the meaning from the character after it."
    )
    columns: list[str] | None = Field(
        None, min_length=1, description="Column names, for files whose first line is not a header."
    )

    @model_validator(mode="after")
    def _characters_differ(self) -> CsvSpec:
        given = [c for c in (self.delimiter, self.quote, self.escape) if c is not None]
        if len(set(given)) < len(given) or set(given) & set("\r\n\0"):
            raise ValueError("csv: delimiter, quote and escape must differ and be no line end")
        return self


class InputSpec(Spec):
    """The corpus: where it is and which columns matter."""

    uri: str | list[str] = Field(
        description="File, folder, glob or list of them; a local path, s3://, gs://, az:// or http(s)://."
    )
    format: Format = Field("auto", description="auto goes by each file's name.")
    text: str | list[str] = Field(
        "text", description="Column to tokenize, or several in order. Ignored for plain text."
    )
    template: str | None = Field(
        None, description="How several columns make one text, e.g. '{title}: {body}'. Default: a line each."
    )
    pair: str | None = Field(
        None, description="Column of a second text, joined to the first as the tokenizer joins pairs."
    )
    messages: str | None = Field(
        None, description="Column of chat messages for the tokenizer's chat template, instead of a text."
    )
    id: str | None = Field(None, description="Your own row id, carried through as text.")
    keep: list[str] = Field(default=[], description="Columns carried through unchanged.")
    rows: Literal["lines", "files"] = Field(
        "lines", description="What is a row of a plain text file: each line, or the whole file."
    )
    nulls: Literal["reject", "empty"] = Field(
        "reject", description="A null text becomes a reject, or counts as an empty text."
    )
    encoding: str = Field("utf-8", description="Text encoding of JSONL, CSV and plain text.")
    csv: CsvSpec = CsvSpec()
    unicode: Literal["NFC", "NFD", "NFKC", "NFKD"] | None = Field(
        None, description="Bring texts into a Unicode normal form first. Default: as they are."
    )
    undecodable: Literal["reject", "replace"] = Field(
        "reject", description="Bytes that are not text: reject the row, or put U+FFFD and count."
    )
    max_row_bytes: int = Field(
        16 * MIB, ge=1024, description="A longer row becomes a reject instead of filling memory."
    )
    shard_bytes: int = Field(
        8 * MIB,
        ge=1,
        description="Text per shard, in bytes as stored. Changing it redoes finished shards.",
    )
    storage: StorageSpec = StorageSpec()

    @property
    def uris(self) -> list[str]:
        return [self.uri] if isinstance(self.uri, str) else self.uri

    @property
    def text_columns(self) -> list[str]:
        """Columns that a row's text is made from, the second text of a pair last."""
        if self.messages is not None:
            return [self.messages]
        first = [self.text] if isinstance(self.text, str) else self.text
        return [*first, *([self.pair] if self.pair is not None else [])]

    @property
    def columns(self) -> list[str]:
        """Every column that is read, once."""
        return list(dict.fromkeys([*self.text_columns, *([self.id] if self.id else []), *self.keep]))

    @model_validator(mode="after")
    def _text_is_told_once(self) -> InputSpec:
        names = [self.text] if isinstance(self.text, str) else self.text
        if not names or len(set(names)) < len(names):
            raise ValueError("text: name at least one column, and each once")
        if self.messages is not None and (names != ["text"] or self.pair is not None or self.template):
            raise ValueError("messages: stands in place of text, template and pair; remove those")
        if self.template is not None and set(template_columns(self.template)) != set(names):
            raise ValueError(f"template: must hold each column of text once in braces: {', '.join(names)}")
        return self

    @model_validator(mode="after")
    def _storage_is_used(self) -> InputSpec:
        _storage_fits(self.uris, self.storage)
        return self

    @field_validator("uri")
    @classmethod
    def _uri_is_named(cls, value: str | list[str]) -> str | list[str]:
        if not all(uri.strip() for uri in ([value] if isinstance(value, str) else value)):
            raise ValueError("must name a file, folder or glob")
        for uri in [value] if isinstance(value, str) else value:
            refuse_secrets(uri)
        return value

    @field_validator("encoding")
    @classmethod
    def _encoding_has_lines(cls, value: str) -> str:
        ascii_text = 'a\r\n,"{}\t'
        try:
            plain = ascii_text.encode("ascii").decode(value) == ascii_text
        except (LookupError, UnicodeError) as exc:
            raise ValueError("must be a text encoding that Python knows") from exc
        if not plain:
            raise ValueError("must write line ends as ASCII does; convert the files to utf-8")
        return value


class TokenizerSpec(Spec):
    """How text becomes token ids."""

    block: str | None = Field(None, description="Name of a saved tokenmill-tokenizer block.")
    name: str | None = Field(
        None, description="Folder, package:NAME/FOLDER or hub id. Default: the model's own."
    )
    max_tokens: int | None = Field(
        None, ge=1, description="Longest row, special tokens included. Default: the model's."
    )
    overflow: Literal["truncate", "reject", "chunk"] = Field(
        "truncate",
        description="What happens to a longer row: cut, rejected, or computed in chunks.",
    )
    stride: int | None = Field(
        None,
        ge=0,
        description="Tokens that a chunk shares with the one before. Default: 0; to score, half.",
    )
    truncation_side: Literal["right", "left"] | None = Field(
        None, description="The end that is cut. Default: right; to generate, left."
    )
    special_tokens_in_text: Literal["text", "parse", "reject"] = Field(
        "text", description="A text that spells a special token: keep it as text, obey it, or reject the row."
    )
    add_generation_prompt: bool | None = Field(
        None,
        description="End chat messages with the beginning of the assistant's answer. Default: to generate.",
    )
    prompt: str | None = Field(None, description="Text put before every row.")
    prompt_name: str | None = Field(None, description="Name of a prompt in the model's own files.")

    @model_validator(mode="after")
    def _stride_is_of_chunks(self) -> TokenizerSpec:
        if self.stride is not None and self.overflow != "chunk":
            raise ValueError("stride: only with overflow: chunk")
        return self

    @model_validator(mode="after")
    def _one_prompt(self) -> TokenizerSpec:
        if self.prompt is not None and self.prompt_name is not None:
            raise ValueError("give prompt or prompt_name, not both")
        return self


class InferenceSpec(Spec):
    """Which model runs over the tokens, and what is kept of its output."""

    block: str | None = Field(None, description="Name of a saved tokenmill-model block.")
    task: Task = Field("embed", description="What the model computes for each row.")
    model: str | None = Field(None, description="Folder, package:NAME/FOLDER or hub id.")
    precision: Precision = Field(
        "auto",
        description="auto: bf16 on GPUs and CPUs with a matrix unit for it, else fp32. int8: on CPUs.",
    )
    min_agreement: float = Field(
        0.99, ge=0, le=1, description="int8: lowest agreement with fp32 on a sample, or the job is refused."
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$",
        description="auto: all GPUs if there are any, else the CPU; cuda:N: that one alone.",
    )
    pooling: Literal["auto", "mean", "cls", "last"] = Field(
        "auto", description="auto: as the model's own files say."
    )
    normalize: bool | None = Field(None, description="Unit-length vectors. Default: as the model.")
    dimensions: int | None = Field(None, ge=1, description="Keep only the first dimensions.")
    dtype: Literal["float32", "float16"] = Field("float32", description="Type of stored vectors.")
    all_scores: bool = Field(
        False, description="classify: store the score of every label, not only the best."
    )
    pool_chunks: Literal["mean", "max"] = Field(
        "mean",
        description="classify, rows in chunks: a label's score is their mean or highest.",
    )
    threshold: float = Field(
        0.5, ge=0, le=1, description="classify, several labels a row: the score from which a label holds."
    )
    activation: Literal["auto", "none", "sigmoid", "softmax"] = Field(
        "auto", description="classify, rank: what makes scores of logits. auto: as the model's own files say."
    )
    max_new_tokens: int = Field(256, ge=1, description="generate: the most tokens of a completion.")
    temperature: float = Field(
        0.0, ge=0, le=100, description="generate: 0 takes the likeliest token; higher draws more freely."
    )
    top_p: float | None = Field(
        None, gt=0, le=1, description="generate: draw from the likeliest tokens with this much probability."
    )
    top_k: int | None = Field(
        None, ge=1, description="generate: draw from this many of the likeliest tokens."
    )
    seed: int = Field(0, ge=0, description="generate: another seed, other draws; the same, the same.")
    num_outputs: int = Field(1, ge=1, le=1000, description="generate: completions of each row, drawn apart.")
    stop: list[str] = Field(default=[], description="generate: a completion ends before any of these texts.")
    stop_ids: list[int] = Field(
        default=[],
        description="generate: a completion ends with any of these tokens, as with the model's own.",
    )
    trust_remote_code: bool = Field(
        False, description="Run code that ships with the model. The report shows it."
    )

    @model_validator(mode="after")
    def _options_are_of_the_task(self) -> InferenceSpec:
        for name in sorted(self.model_fields_set):
            tasks = OPTIONS_OF_TASKS.get(name)
            if (
                tasks
                and self.task not in tasks
                and getattr(self, name) != type(self).model_fields[name].default
            ):
                raise ValueError(f"{name}: only for task {' and '.join(tasks)}, not for {self.task}")
        return self

    @model_validator(mode="after")
    def _int8_can_be_held_against_fp32(self) -> InferenceSpec:
        if self.precision == "int8" and self.task == "generate":
            raise ValueError(
                "precision: int8 is not to generate: one token that differs changes all that follow; "
                "use bf16 or fp32"
            )
        default = type(self).model_fields["min_agreement"].default
        if self.precision != "int8" and self.min_agreement != default:
            raise ValueError(f"min_agreement: only for precision int8, not for {self.precision}")
        return self

    @model_validator(mode="after")
    def _draws_have_a_temperature(self) -> InferenceSpec:
        drawn = {"top_p": None, "top_k": None, "seed": 0, "num_outputs": 1}
        for name, without in drawn.items():
            if self.temperature == 0 and getattr(self, name) != without:
                raise ValueError(f"{name}: has no effect at temperature 0; set inference.temperature")
        return self

    @model_validator(mode="after")
    def _stops_are_texts(self) -> InferenceSpec:
        if not all(self.stop) or any(token < 0 for token in self.stop_ids):
            raise ValueError("stop: must hold texts that are not empty, and stop_ids no negative numbers")
        return self


class OutputSpec(Spec):
    """Where the tokens, results, rejects, receipts and the report go."""

    uri: str = Field(min_length=1, description="Folder or bucket prefix that belongs to this job alone.")
    target_part_bytes: int = Field(
        128 * MIB, ge=1, description="Published files are compacted to about this size."
    )
    storage: StorageSpec = StorageSpec()

    @field_validator("uri")
    @classmethod
    def _uri_holds_no_secret(cls, value: str) -> str:
        refuse_secrets(value)
        return value

    @model_validator(mode="after")
    def _storage_is_used(self) -> OutputSpec:
        _storage_fits([self.uri], self.storage)
        return self


class AggregateSpec(Spec):
    """What is computed over the finished results."""

    group_by: list[str] = Field(default=[], description="Kept columns to group by.")


class QualitySpec(Spec):
    """Limits that turn a count into a failure, before the model runs. They change no result."""

    max_reject_rate: float = Field(0.01, ge=0, le=1, description="Highest share of rejected rows.")
    max_unknown_rate: float | None = Field(None, ge=0, le=1, description="Highest share of unknown tokens.")
    max_truncated_rate: float | None = Field(None, ge=0, le=1, description="Highest share of truncated rows.")
    max_blank_rate: float | None = Field(None, ge=0, le=1, description="Highest share of blank rows.")
    max_replaced_rate: float | None = Field(
        None, ge=0, le=1, description="Highest share of rows with characters replaced by U+FFFD."
    )
    max_removed_rate: float | None = Field(
        None, ge=0, le=1, description="Highest share of rows with characters that the normaliser removes."
    )


class RunSpec(Spec):
    """How fast and where. Nothing here changes a result or a shard key."""

    workers: int = Field(2, ge=1, le=256, description="Shards in progress at once.")
    on: Literal["here", "pool"] = Field("here", description="This machine, or a Prefect work pool.")
    max_batch_tokens: int | None = Field(
        None, ge=1, description="Token budget of a batch, padding included. Default: by device."
    )
    window_rows: int = Field(32_768, ge=1, description="Rows sorted together by length.")
    threads: int | None = Field(None, ge=1, description="Compute threads. Default: all cores.")
    overlap: bool = Field(
        False, description="Infer a shard as soon as it is tokenized, before the limits can be checked."
    )
    gates: bool = Field(True, description="Run the Great Expectations gates.")


class Job(Spec):
    """What to do: one corpus, one tokenizer, one model, one output.

    Example:
        >>> job = Job.parse({"name": "docs", "input": {"uri": "docs/*.parquet"},
        ...                  "inference": {"model": "minilm"}, "output": {"uri": "out"}})
        >>> job.input.text, job.tokenizer.overflow
        ('text', 'truncate')
    """

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$",
        description="Names the job in receipts, reports and the Prefect UI.",
    )
    input: InputSpec
    tokenizer: TokenizerSpec = TokenizerSpec()
    inference: InferenceSpec = InferenceSpec()
    output: OutputSpec
    aggregate: AggregateSpec = AggregateSpec()
    quality: QualitySpec = QualitySpec()
    run: RunSpec = RunSpec()

    @model_validator(mode="after")
    def _keep_is_free(self) -> Job:
        keep = self.input.keep
        for name in keep:
            if name in RESERVED | RESULT_NAMES[self.inference.task]:
                raise ValueError(f"input.keep: {name!r} is a column of tokenmill's own; rename it")
        if len(set(keep)) < len(keep):
            raise ValueError("input.keep: names a column twice")
        return self

    @model_validator(mode="after")
    def _chunks_are_of_one_text(self) -> Job:
        if self.tokenizer.overflow == "chunk" and self.input.pair is not None:
            raise ValueError("tokenizer.overflow: pairs cannot be cut into chunks; use truncate or reject")
        if self.tokenizer.stride == 0 and self.inference.task == "score":
            raise ValueError("tokenizer.stride: to score, a chunk needs at least 1 token of the one before")
        return self

    @model_validator(mode="after")
    def _prompts_are_whole(self) -> Job:
        if self.inference.task == "generate" and self.input.pair is not None:
            raise ValueError("input.pair: not to generate; join the texts with input.template")
        if self.inference.task == "generate" and self.tokenizer.overflow == "chunk":
            raise ValueError("tokenizer.overflow: prompts cannot be cut into chunks; use truncate or reject")
        return self

    @model_validator(mode="after")
    def _rank_has_pairs(self) -> Job:
        if self.inference.task == "rank" and self.input.pair is None:
            raise ValueError("inference.task: rank needs pairs of texts; name the second one in input.pair")
        return self

    @model_validator(mode="after")
    def _groups_are_kept(self) -> Job:
        own = {figure.name for figure in (*GROUP_COUNTS, *GROUP_FIGURES[self.inference.task])}
        for name in self.aggregate.group_by:
            if name not in self.input.keep:
                raise ValueError(f"aggregate.group_by: {name!r} must be listed in input.keep")
            if name in own:
                raise ValueError(f"aggregate.group_by: {name!r} is a column of the groups' own; rename it")
        if len(set(self.aggregate.group_by)) < len(self.aggregate.group_by):
            raise ValueError("aggregate.group_by: names a column twice")
        return self

    @classmethod
    def parse(cls, data: Mapping[str, Any], source: str = "job") -> Job:
        """Build a job from plain values.

        source: where they came from, for messages.
        Raises UnknownKeyError (naming the nearest valid key) and ConfigError.
        """
        try:
            return cls.model_validate(data)
        except ValidationError as exc:
            raise _as_config_error(exc, source) from exc

    @classmethod
    def load(cls, path: str | Path) -> Job:
        """Read a job file (YAML).  Raises InputNotFoundError, UnknownKeyError, ConfigError."""
        return cls.parse(read_mapping(Path(path)), source=str(path))


UNION_TAGS = ("str", "list[str]")  # what Pydantic adds to the place of input.uri


def _as_config_error(exc: ValidationError, source: str) -> ConfigError:
    """Turn the first of Pydantic's complaints into one line a person can act on."""
    first = exc.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"] if part not in UNION_TAGS)
    more = len(exc.errors()) - 1
    rest = f" (and {more} more)" if more else ""
    if first["type"] == "extra_forbidden":
        valid = _keys_at(first["loc"][:-1])
        near = difflib.get_close_matches(str(first["loc"][-1]), valid, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(valid)}"
        return UnknownKeyError(f"{source}: unknown key {where!r}; {hint}{rest}")
    if first["type"] == "missing":
        return ConfigError(f"{source}: {where!r} is missing{rest}")
    shown = not isinstance(first["input"], dict) and first["type"] != "secret"
    given = f", not {first['input']!r}" if shown else ""
    message = first["msg"].removeprefix("Value error, ")
    place = f"{source}: {where}" if where else source
    return ConfigError(f"{place}: {message}{given}{rest}")


def _keys_at(loc: tuple[int | str, ...]) -> list[str]:
    """Valid keys of the part of the job that `loc` leads to."""
    model: type[BaseModel] = Job
    for part in loc:
        annotation = model.model_fields[str(part)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
