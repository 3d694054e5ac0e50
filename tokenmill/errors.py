"""Every error that tokenmill raises on purpose.

    TokenmillError
    ├── ConfigError             the job, an option or a block is wrong; never retried; exit code 2
    │   ├── UnknownKeyError     a key of the job file that does not exist
    │   ├── InputNotFoundError  a file, glob, column or bucket that is not there
    │   ├── ModelNotFoundError  a model or tokenizer that cannot be resolved
    │   ├── ModelMismatchError  a model, tokenizer and task that do not fit together
    │   └── OutputError         an output that cannot be written, or that belongs to another job
    ├── DataError               the input or a stored part is damaged; never retried; exit code 1
    │   ├── UnreadableFileError a file that its format's reader refuses
    │   ├── AccountingError     rows in != rows out + rejects: a defect, never shrugged off
    │   └── QualityError        a limit of the job is passed, or a gate of critical severity failed
    ├── StoreError              storage answered with an error that will not go away; exit code 1
    │   └── StoreUnavailableError   ... or with one that may: throttling, resets, time-outs; retried
    ├── BackendError            the model backend failed for good; exit code 1
    │   ├── BackendUnavailableError ... or for now: a lost device, a busy driver; retried
    │   └── OutOfMemoryError        this batch did not fit; the engine halves it and goes on
    └── RejectLimitError        more rows were rejected than allowed; exit code 3

Foreign exceptions are mapped to these once, in the adapter that calls the foreign code.
A retry is decided by type (`is_transient`), never by the text of a message.
"""

from __future__ import annotations


class TokenmillError(Exception):
    """Base of all. The message is one line: what, where, what to do."""

    exit_code = 1


class ConfigError(TokenmillError):
    """The job, an option or a block is wrong; running it again will not help."""

    exit_code = 2


class UnknownKeyError(ConfigError):
    """A key that the job file does not have; the message names the nearest valid one."""


class InputNotFoundError(ConfigError):
    """A file, glob, column or bucket that the job names is not there."""


class ModelNotFoundError(ConfigError):
    """A model or tokenizer name that resolves to nothing on this machine."""


class ModelMismatchError(ConfigError):
    """Model, tokenizer and task do not fit together."""


class OutputError(ConfigError):
    """The output cannot be written, or was written by another job."""


class DataError(TokenmillError):
    """The input or a stored part is damaged."""


class UnreadableFileError(DataError):
    """A file that the reader of its format refuses."""

    exit_code = 2


class AccountingError(DataError):
    """Rows in differ from rows out plus rejects."""


class QualityError(DataError):
    """A limit of the job is passed, or a critical gate failed; the dataset is not published."""


class StoreError(TokenmillError):
    """Storage failed in a way that a retry will not mend."""


class StoreUnavailableError(StoreError):
    """Storage failed in a way that a retry may mend."""


class BackendError(TokenmillError):
    """The model backend failed in a way that a retry will not mend."""


class BackendUnavailableError(BackendError):
    """The model backend failed in a way that a retry may mend."""


class OutOfMemoryError(BackendError):
    """A batch did not fit into the device's memory."""


class RejectLimitError(TokenmillError):
    """The share of rejected rows is over the job's limit; what is done is kept."""

    exit_code = 3


def is_transient(error: BaseException) -> bool:
    """Whether running the same shard again may succeed without anyone changing anything."""
    return isinstance(error, StoreUnavailableError | BackendUnavailableError)
