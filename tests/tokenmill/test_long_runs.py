"""A text without any word border costs in proportion to its length, whatever the tokenizer."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from outputs import MINILM
from tokenizers import Tokenizer as Trained
from tokenizers import models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tokenmill.encoding import encode_rows
from tokenmill.model_files import resolve_model
from tokenmill.testing import make_job, make_run
from tokenmill.tokenizer import Tokenizer, load_tokenizer

SHORT, TIMES = 25_000, 8
LINEAR_S = 1.0  # below it nobody waits, and the clock says little

ROWS = ["the run goes on and on", "aaaa aaaaaaaa ____ abab", "1234 12345678", "你好 é 😀"] * 10


@pytest.fixture(scope="module", params=["wordpiece", "byte-level bpe", "bpe", "unigram"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    if request.param == "wordpiece":
        return load_tokenizer(resolve_model(MINILM), parse_special_tokens=False)
    quiet = {"vocab_size": 300, "show_progress": False}
    if request.param == "unigram":
        trained, trainer = Trained(models.Unigram()), trainers.UnigramTrainer(unk_token="<unk>", **quiet)
        trained.pre_tokenizer = pre_tokenizers.Metaspace()
    else:
        trained = Trained(models.BPE(unk_token="<unk>"))
        trainer = trainers.BpeTrainer(special_tokens=["<unk>"], **quiet)
        if request.param == "byte-level bpe":
            trained.pre_tokenizer = pre_tokenizers.ByteLevel()
    trained.train_from_iterator(ROWS, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    fast = PreTrainedTokenizerFast(tokenizer_object=trained, unk_token="<unk>", pad_token="<unk>")
    fast.save_pretrained(folder)
    return load_tokenizer(folder, parse_special_tokens=False)


@pytest.mark.parametrize(
    "run",
    ["a", "_", "ab", " ", "\n", "0123456789", "é", "a\u0301", "\u0301\u0323", "\u200d", "😀", "[SEP"],
)
def test_a_run_costs_in_proportion_to_its_length(tmp_path: Path, tokenizer: Tokenizer, run: str) -> None:
    setup = make_run(make_job(tmp_path), tokenizer).setup.tokenize

    def seconds(num_chars: int) -> float:
        start = time.process_time()
        encode_rows(setup, [run * (num_chars // len(run))])
        return time.process_time() - start

    seconds(SHORT)
    short = min(seconds(SHORT) for _ in range(3))
    assert seconds(SHORT * TIMES) < max(LINEAR_S, 4 * TIMES * short)
