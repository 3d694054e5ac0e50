"""Reading a job file: YAML in which words are words.

YAML 1.1, which PyYAML speaks, takes `on`, `no` and `y` for booleans and 2024-01-01 for a date: the
key in `run: {on: here}` would become True. Here, as in YAML 1.2, only true and false are booleans.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from tokenmill.errors import ConfigError, InputNotFoundError

BOOL, TIMESTAMP = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:timestamp"


class _Loader(yaml.SafeLoader):
    """SafeLoader with plain words, and with an error for a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {name!r} is given twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (BOOL, TIMESTAMP)]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(BOOL, re.compile("^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds.  Raises InputNotFoundError, ConfigError."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader)  # a SafeLoader
    except FileNotFoundError as exc:
        raise InputNotFoundError(f"{path}: no such job file") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path}: cannot be read as a job file: {exc}") from exc
    except yaml.YAMLError as exc:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(exc).split())}") from exc
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a job file is a mapping with name, input, inference, output")
    return data
