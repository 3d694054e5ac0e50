"""Fakes for tests of the engine and of whatever is built on it: no model, no network, no device.

FakeTokenizer   words to ids by a checksum, with a start and an end token
FakeBackend     ids to vectors, row by row, the slow and obvious way; can fail on purpose
make_job        a job with every default, input and output below one folder
make_run        that job, settled with the fakes
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.backend import BackendInfo
from tokenmill.engine import Run, Storages
from tokenmill.errors import BackendUnavailableError, OutOfMemoryError
from tokenmill.job import Job
from tokenmill.model_files import EncoderRecipe
from tokenmill.settle import InferSetup, Setup, TokenizeSetup
from tokenmill.store import Store
from tokenmill.tokenizer import Encoded, LostChars, PairTemplate, TokenizerInfo

PAD, START, END, UNKNOWN, FIRST_WORD = range(5)
VOCAB_SIZE = 50_000
LONGEST_WORD = 100


FAKE_INFO = TokenizerInfo(
    fingerprint="fake-tokenizer",
    prefix_ids=(START,),
    suffix_ids=(END,),
    unknown_id=UNKNOWN,
    pad_id=PAD,
    vocab_size=VOCAB_SIZE,
    max_tokens=None,
    special_tokens=("<start>", "<end>"),
    pair=PairTemplate(prefix_ids=(START,), middle_ids=(END,), suffix_ids=(END,), second_type=1),
)


@dataclass(frozen=True, slots=True)
class FakeTokenizer:
    """One id per word: a checksum of it. Words of more than 100 characters are unknown.

    Example: "a b a" -> [id of a, id of b, id of a]; START and END go around it later
    """

    info: TokenizerInfo = FAKE_INFO

    def encode(self, texts: Sequence[str]) -> Encoded:
        rows = [[word_id(word) for word in text.split()] for text in texts]
        offsets = np.cumsum([0, *(len(row) for row in rows)], dtype=np.int64)
        ids = np.array([i for row in rows for i in row], dtype=np.int32)
        return Encoded(ids=ids, offsets_N1=offsets)

    def lost_chars(self, texts: Sequence[str], has_unknown_N: npt.NDArray[np.bool_]) -> LostChars:  # noqa: ARG002
        unknown = [sum(len(word) for word in text.split() if word_id(word) == UNKNOWN) for text in texts]
        return LostChars(
            removed_N=np.zeros(len(texts), dtype=np.int64), unknown_N=np.array(unknown, dtype=np.int64)
        )


def word_id(word: str) -> int:
    """The id that FakeTokenizer gives a word."""
    if len(word) > LONGEST_WORD:
        return UNKNOWN
    return FIRST_WORD + zlib.crc32(word.encode("utf-8")) % (VOCAB_SIZE - FIRST_WORD)


@dataclass(slots=True)
class FakeBackend:
    """A vector that depends on a row's ids and their order, and on nothing else, to the last bit.

    memory_tokens: more tokens than this in a batch, padding included, are out of memory.
    nan_ids: a row with one of these ids gives NaN.
    failures: how many calls fail for now, before the first that works.
    exact: what `in_fp32` gives.
    shapes: (rows, longest) of every call that worked.
    """

    dimensions: int = 8
    memory_tokens: int | None = None
    nan_ids: frozenset[int] = frozenset()
    failures: int = 0
    default_batch_tokens: int = 64
    device: str = "cpu"
    exact: FakeBackend | None = None
    shapes: list[tuple[int, int]] = field(default_factory=list)

    @property
    def info(self) -> BackendInfo:
        return BackendInfo(
            model_type="fake",
            num_parameters=0,
            device=self.device,
            precision="fp32",
            matmul="highest",
            num_values=self.dimensions,
            pad_id=PAD,
            default_batch_tokens=self.default_batch_tokens,
        )

    def run(
        self,
        ids_BL: npt.NDArray[np.int64],
        lengths_B: npt.NDArray[np.int64],
        starts_B: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.float32]:
        if self.failures:
            self.failures -= 1
            raise BackendUnavailableError("the fake backend is busy")
        if self.memory_tokens is not None and ids_BL.size > self.memory_tokens:
            raise OutOfMemoryError(f"{ids_BL.size} tokens, the fake device holds {self.memory_tokens}")
        rows, longest = ids_BL.shape
        self.shapes.append((rows, longest))
        vectors_BD = np.empty((rows, self.dimensions), dtype=np.float32)
        for row, length in enumerate(lengths_B.tolist()):
            assert 0 < length <= longest, f"row {row} has {length} of {longest} tokens"
            assert (ids_BL[row, length:] == PAD).all(), f"row {row} is not padded with {PAD}"
            vectors_BD[row] = self.vector(ids_BL[row, :length].tolist())
            if starts_B is not None:
                vectors_BD[row] *= 1 + starts_B[row]
        return vectors_BD

    def vector(self, ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """The vector of one row. The oracle, and the implementation."""
        if self.nan_ids.intersection(ids):
            return np.full(self.dimensions, np.nan, dtype=np.float32)
        places_L = np.arange(1, len(ids) + 1, dtype=np.float64)
        mixed_L = np.array(ids, dtype=np.float64) * places_L
        cells = [np.sin(mixed_L * (d + 1)).sum() / len(ids) for d in range(self.dimensions)]
        return np.array(cells, dtype=np.float32)

    def in_fp32(self) -> FakeBackend | None:
        return self.exact

    def device_memory_bytes(self) -> int:
        return 0


def make_job(folder: Path, **overrides: Any) -> Job:
    """A job that reads folder/in and writes folder/out; sections are merged key by key.

    Example: make_job(tmp_path, input={"text": "body"}, run={"workers": 1})
    """
    sections: dict[str, Any] = {
        "name": "test-job",
        "input": {"uri": str(folder / "in")},
        "inference": {"model": "fake-model"},
        "output": {"uri": str(folder / "out")},
    }
    for name, value in overrides.items():
        known = sections.get(name)
        merge = isinstance(known, dict) and isinstance(value, Mapping)
        sections[name] = {**known, **value} if merge and known else value
    return Job.parse(sections)


FAKE_RECIPE = EncoderRecipe(
    pooling="mean",
    normalize=False,
    dense=(),
    pools_prompt=True,
    max_tokens=None,
    lower_case=False,
    prompts=(),
    default_prompt=None,
)


def make_run(job: Job, tokenizer: FakeTokenizer | None = None) -> Run:
    """A job settled with a fake tokenizer, 256 tokens a row by default, and no checkpoint.

    Give a FakeBackend to `Run.infer` or to `engine.finish`.
    """
    tokenizer = tokenizer or FakeTokenizer()
    spec = job.tokenizer
    tokenize = TokenizeSetup(
        tokenizer=tokenizer,
        prompt=spec.prompt or "",
        num_prompt_tokens=0,
        max_tokens=spec.max_tokens or 256,
        overflow=spec.overflow,
        truncation_side=spec.truncation_side,
        special_tokens_in_text=spec.special_tokens_in_text,
        model_vocab_size=VOCAB_SIZE,
        stride=spec.stride or 0,
    )
    no_folder = Path("/tokenmill-fake-model")
    infer = InferSetup(folder=no_folder, recipe=FAKE_RECIPE, job=job, num_prompt_tokens=0, pad_id=PAD)
    storages = Storages.of(job)
    return Run(
        setup=Setup(job=job, tokenize=tokenize, infer=infer),
        storages=storages,
        store=Store.open(job.output.uri, storages.output),
    )
