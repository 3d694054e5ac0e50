"""What the three blocks share: fields that mirror a part of the job, no unknown keys, a logo.

Defaults, limits and descriptions stay in `tokenmill.job`; a block repeats only names and types, and a
test compares those.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from prefect.blocks.core import Block
from pydantic import BaseModel, ConfigDict, HttpUrl

from tokenmill.errors import UnknownKeyError

DOCUMENTATION = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")
LOGO = HttpUrl(  # one that Prefect publishes; tokenmill has none
    "https://raw.githubusercontent.com/PrefectHQ/prefect/420d0d6a78bb6df1fc18bcf188fdad43c1d22ea9"
    "/assets/block-logos/terminal.png"
)
NO_INPUT_IN_ERRORS = ConfigDict(hide_input_in_errors=True)  # an error must not print a secret


def mirrored(spec: type[BaseModel], name: str) -> Any:
    """The field `name` of a part of the job: its default, limits and description."""
    return copy(spec.model_fields[name])


def settings_of(block: Block) -> dict[str, Any]:
    """Values by field, secrets still wrapped, without what Prefect adds to a dump."""
    return {name: getattr(block, name) for name in type(block).model_fields}


def refuse_unknown_keys(block: Block) -> None:
    """Raises UnknownKeyError. Subtle: `extra="forbid"` would refuse Prefect's own block_type_slug."""
    for name in sorted(set(block.model_extra or ()) - {"block_type_slug"}):
        valid = ", ".join(type(block).model_fields)
        raise UnknownKeyError(
            f"block {block.get_block_type_slug()}: unknown key {name!r}; valid keys: {valid}"
        )
