"""A job file as JSON on one line, as `prefect deployment run --param job=...` takes it.

    prefect deployment run token-pipeline/cpu --param job="$(python -m deployments.job job.yaml)"

Paths stay as they are: on a worker, relative ones start at the checkout.
"""

from __future__ import annotations

import sys

from tokenmill.errors import ConfigError
from tokenmill.job import Job


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m deployments.job JOB", file=sys.stderr)
        return 2
    try:
        job = Job.load(arguments[0])
    except ConfigError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return exc.exit_code
    # Only what the file says: a key given beside a block wins over the block's (see blocks.resolve).
    print(job.model_dump_json(exclude_unset=True))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
