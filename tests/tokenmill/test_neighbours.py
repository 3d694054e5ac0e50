"""Nearest rows and self-retrieval, with a bag of words for a model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from tokenmill.engine import Run, finish
from tokenmill.errors import ConfigError
from tokenmill.job import Job
from tokenmill.manifest import read_manifest
from tokenmill.neighbours import answers, first_sentence, nearest, self_retrieval, texts_by_id
from tokenmill.testing import FIRST_WORD, FakeBackend, make_job, make_run
from tokenmill.vectors import embed_texts

TEXTS = {
    "cat": "the small cat sleeps on the warm mat. it dreams of mice and milk",
    "dog": "a loud dog barks at the postman outside. nobody knows why it does",
    "sea": "waves roll over the deep blue sea. ships sail far away",
    "sun": "sunlight falls upon golden fields today. farmers harvest wheat",
    "cat2": "the small cat sleeps on the warm mat. it dreams of mice and milk",
    "short": "one sentence that is all of it.",
}


class WordsBackend(FakeBackend):
    """Counts of words, hashed into 512 dimensions: texts that share words are near."""

    def run(
        self,
        ids_BL: npt.NDArray[np.int64],
        lengths_B: npt.NDArray[np.int64],
        starts_B: npt.NDArray[np.int64] | None = None,
    ) -> npt.NDArray[np.float32]:
        vectors_BD = np.zeros((len(ids_BL), self.dimensions), dtype=np.float32)
        for row, length in enumerate(lengths_B.tolist()):
            words = ids_BL[row, :length]
            np.add.at(vectors_BD[row], words[words >= FIRST_WORD] % self.dimensions, 1.0)
        return vectors_BD


def write_texts(folder: Path, texts: dict[str, str], files: int = 2) -> None:
    (folder / "in").mkdir(parents=True, exist_ok=True)
    rows = [json.dumps({"id": key, "text": text}) for key, text in texts.items()]
    for number in range(files):
        (folder / "in" / f"{number}.jsonl").write_text("\n".join(rows[number::files]) + "\n")


def words_job(folder: Path) -> Job:
    return make_job(folder, input={"id": "id", "shard_bytes": 1}, output={"target_part_bytes": 1})


@pytest.fixture
def backend() -> WordsBackend:
    return WordsBackend(dimensions=512)


@pytest.fixture
def done(tmp_path: Path, backend: WordsBackend) -> Run:
    write_texts(tmp_path, TEXTS)
    run = make_run(words_job(tmp_path))
    finish(run, backend)
    return run


def test_first_sentence() -> None:
    assert first_sentence("Return the sum of\n    all items.  Slow.") == "Return the sum of all items."
    assert first_sentence("Return the mean of items\n\nMore text.") == "Return the mean of items"
    assert first_sentence("Version 3.11 of the reader. More.") == "Version 3.11 of the reader."
    assert first_sentence("One sentence that is all of it.\n") is None
    assert first_sentence("Alias. See below.") is None
    assert first_sentence("") is None


def test_embed_texts_gives_what_the_job_gives(done: Run, backend: WordsBackend) -> None:
    manifest = read_manifest(done.store)
    assert manifest is not None
    vectors_ND = embed_texts(done.setup, list(TEXTS.values()), backend)
    for key, found in zip(TEXTS, nearest(done.store, manifest, vectors_ND, 1), strict=True):
        assert found[0].score == pytest.approx(1.0, abs=1e-6)
        assert found[0].id == key.removesuffix("2")


def test_embed_texts_keeps_order_prompt_and_limit(tmp_path: Path) -> None:
    tokenizer = {"prompt": "q ", "max_tokens": 5}
    run = make_run(make_job(tmp_path, tokenizer=tokenizer, run={"max_batch_tokens": 6}))
    backend = FakeBackend()
    texts = ["a", "a b c d e f", "", "a b"]
    vectors_ND = embed_texts(run.setup, texts, backend)
    alone = [embed_texts(run.setup, [text], backend)[0] for text in ["a", "a b", "", "a b"]]
    np.testing.assert_array_equal(vectors_ND, np.array(alone))
    assert embed_texts(run.setup, [], backend).shape == (0, backend.dimensions)


def test_answers_are_the_nearest_rows_of_all_parts_in_order(done: Run, backend: WordsBackend) -> None:
    assert len(done.plan().shards) == 2
    (found,) = answers(done, ["ships on the blue sea"], 3, backend)
    assert found[0].id == "sea"
    assert [n.score for n in found] == sorted((n.score for n in found), reverse=True)
    everything = answers(done, ["ships on the blue sea"], 100, backend)[0]
    assert len(everything) == len(TEXTS)
    assert everything[:3] == found
    assert everything[-1].score >= -1


def test_texts_are_found_by_id(done: Run) -> None:
    assert texts_by_id(done, done.plan(), ["sun", "nowhere"]) == {"sun": TEXTS["sun"]}


def test_documents_find_themselves(done: Run, backend: WordsBackend) -> None:
    recall = self_retrieval(done, done.plan(), top=1, backend=backend)
    assert (recall.num_queries, recall.num_rows, recall.num_found) == (5, 6, 5)
    assert recall.recall == 1.0
    assert recall.chance == pytest.approx(1 / 6)


def test_equal_texts_do_not_hide_each_other(tmp_path: Path, backend: WordsBackend) -> None:
    write_texts(tmp_path, {f"copy{number}": TEXTS["cat"] for number in range(20)})
    run = make_run(words_job(tmp_path))
    finish(run, backend)
    assert self_retrieval(run, run.plan(), top=2, backend=backend).recall == 1.0


def test_vectors_in_the_wrong_rows_are_noticed(tmp_path: Path, backend: WordsBackend) -> None:
    write_texts(tmp_path, {f"t{n}": f"{TEXTS['cat']} {n}. word{n} other{n} more{n}" for n in range(40)})

    class Mixed(WordsBackend):
        def run(
            self,
            ids_BL: npt.NDArray[np.int64],
            lengths_B: npt.NDArray[np.int64],
            starts_B: npt.NDArray[np.int64] | None = None,
        ) -> npt.NDArray[np.float32]:
            return np.roll(WordsBackend.run(self, ids_BL, lengths_B, starts_B), 1, axis=0)

    run = make_run(make_job(tmp_path, input={"id": "id"}, run={"max_batch_tokens": 10_000}))
    finish(run, Mixed(dimensions=512))
    wrong = self_retrieval(run, run.plan(), top=2, backend=backend)
    assert wrong.recall < 0.5


def test_sample_is_bounded_and_the_same_each_time(done: Run, backend: WordsBackend) -> None:
    first = self_retrieval(done, done.plan(), sample=2, backend=backend)
    assert first.num_queries == 2
    assert first == self_retrieval(done, done.plan(), sample=2, backend=backend)


def test_nothing_published_is_said_so(tmp_path: Path, backend: WordsBackend) -> None:
    write_texts(tmp_path, TEXTS)
    run = make_run(words_job(tmp_path))
    with pytest.raises(ConfigError, match="nothing is published"):
        self_retrieval(run, run.plan(), backend=backend)
    with pytest.raises(ConfigError, match="nothing is published"):
        answers(run, ["a"], backend=backend)


def test_float16_results_and_zero_vectors_score(tmp_path: Path, backend: WordsBackend) -> None:
    write_texts(tmp_path, {**TEXTS, "blank": ""}, files=1)
    run = make_run(make_job(tmp_path, input={"id": "id"}, inference={"dtype": "float16"}))
    finish(run, backend)
    (found,) = answers(run, ["ships sea"], 10, backend)
    assert found[0].id == "sea"
    assert {n.id: n.score for n in found}["blank"] == 0.0
