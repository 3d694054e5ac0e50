"""A count over its limit is a failure, and the model has not run by then."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from outputs import jsonl, published, run_fake, write_files

from tokenmill.accounting import Counts
from tokenmill.errors import QualityError, RejectLimitError
from tokenmill.job import QualitySpec
from tokenmill.limits import LIMITS, check_limits
from tokenmill.testing import FakeBackend, make_job

COUNTS = Counts(
    rows_in=10,
    rows_out=8,
    rows_truncated=3,
    rows_blank=3,
    rows_scrubbed=3,
    rows_with_removed=3,
    tokens=10,
    tokens_unknown=3,
    rejects=Counter(bad_json=2),
)


def quality(**limits: float) -> QualitySpec:
    return QualitySpec(**{"max_reject_rate": 1, **limits})


def test_every_option_is_in_the_table() -> None:
    assert {limit.option for limit in LIMITS} | {"max_reject_rate"} == set(QualitySpec.model_fields)


@pytest.mark.parametrize("option", [limit.option for limit in LIMITS])
def test_a_count_may_be_as_high_as_its_limit_and_no_higher(option: str) -> None:
    check_limits(COUNTS, quality(**{option: 0.3}))
    with pytest.raises(QualityError, match=rf"3 of 10 .* \(30\.00%\), quality\.{option} is 29\.00%"):
        check_limits(COUNTS, quality(**{option: 0.29}))


def test_rejects_are_told_by_reason() -> None:
    with pytest.raises(RejectLimitError, match=r"2 of 10 rows rejected \(20\.00%: bad_json 2\)"):
        check_limits(COUNTS, quality(max_reject_rate=0.1))


def test_nothing_is_within_every_limit() -> None:
    check_limits(Counts(), quality(**{limit.option: 0 for limit in LIMITS}, max_reject_rate=0))


class Counting(FakeBackend):
    calls = 0

    def run(self, ids_BL, lengths_B, starts_B=None):
        type(self).calls += 1
        return super().run(ids_BL, lengths_B, starts_B)


@pytest.mark.parametrize(("overlap", "did_run"), [(False, False), (True, True)])
def test_the_model_does_not_run_over_what_is_out_of_limits(
    tmp_path: Path, overlap: bool, did_run: bool
) -> None:
    files = {f"{n}.jsonl": jsonl(["fine", ""]) for n in range(3)}
    write_files(tmp_path, files)
    options = {"run": {"overlap": overlap}, "input": {"shard_bytes": 1}}
    Counting.calls = 0
    with pytest.raises(QualityError, match=r"3 of 6 rows are blank .* quality\.max_blank_rate is 10\.00%"):
        run_fake(make_job(tmp_path, quality={"max_blank_rate": 0.1}, **options), Counting())
    assert (Counting.calls > 0) == did_run
    job = make_job(tmp_path, quality={"max_blank_rate": 0.5}, **options)
    run_fake(job)
    assert len(published(job)) == 6
