"""What a checkpoint folder says of itself: where it is, how it pools, what identifies it.

Honours the files of sentence-transformers (modules.json, pooling config, prompts). Reads JSON and
hashes files; it never loads weights, and never imports torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tokenmill.errors import ModelMismatchError, ModelNotFoundError

PACKAGE_PREFIX = "package:"
HASHED_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".py", ".jinja")
ST_CONFIGS = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlnet_config.json")


def resolve_model(name: str) -> Path:
    """Local folder of a model or tokenizer.

    name: a folder, "package:NAME/FOLDER" for one inside an installed Python package, or a hub id,
    which is taken from the cache and downloaded only if it is not there and HF_HUB_OFFLINE allows.
    Raises ModelNotFoundError.
    """
    if name.startswith(PACKAGE_PREFIX):
        return _from_package(name)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked(folder.resolve(), name)
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(
            f"model {name}: no such folder; give a folder, package:NAME/FOLDER or a hub id"
        )
    return _from_hub(name)


def _from_package(name: str) -> Path:
    package, _, inner = name.removeprefix(PACKAGE_PREFIX).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ModelNotFoundError(
            f"model {name}: no installed package {package!r}; pip install it or give a folder"
        )
    folder = Path(spec.submodule_search_locations[0], inner)
    if not folder.is_dir():
        raise ModelNotFoundError(f"model {name}: package {package!r} has no folder {inner!r}")
    return _checked(folder, name)


def _from_hub(name: str) -> Path:
    """The snapshot of a hub id: as it is in the cache where the hub may not or cannot be asked.

    Subtle: the cache alone does not tell whether a snapshot is whole. A model that was once loaded by
    `transformers` lacks its pooling files, and would be pooled wrongly without a word.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [f"*{suffix}" for suffix in HASHED_SUFFIXES]
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    advice = "give a folder, package:NAME/FOLDER or a hub id that is cached or can be downloaded"
    why = "HF_HUB_OFFLINE is set"
    if not offline:
        try:
            return Path(snapshot_download(name, allow_patterns=patterns))
        except HFValidationError as exc:
            raise ModelNotFoundError(f"model {name}: not a folder and not a hub id; {advice}") from exc
        except (HfHubHTTPError, OSError, httpx.TransportError) as exc:
            why = f"the hub does not give it ({type(exc).__name__})"
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except HFValidationError as exc:
        raise ModelNotFoundError(f"model {name}: not a folder and not a hub id; {advice}") from exc
    except LocalEntryNotFoundError as exc:
        raise ModelNotFoundError(f"model {name}: not in the local cache, and {why}; {advice}") from exc


def _checked(folder: Path, name: str) -> Path:
    if not any(
        (folder / file).is_file() for file in ("config.json", "tokenizer.json", "tokenizer_config.json")
    ):
        raise ModelNotFoundError(f"model {name}: {folder} holds neither config.json nor tokenizer.json")
    return folder


def first_line(exc: BaseException) -> str:
    """What a foreign error says, on one line."""
    lines = str(exc).strip().splitlines()
    return lines[0] if lines else type(exc).__name__


FolderState = tuple[tuple[str, int, int], ...]


def folder_state(folder: Path) -> FolderState:
    """Name, size and mtime of a checkpoint's files: whether what was read of it still holds."""
    files = sorted(p for p in folder.rglob("*") if p.suffix in HASHED_SUFFIXES and p.is_file())
    stats = [(path.relative_to(folder).as_posix(), path.stat()) for path in files]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def folder_fingerprint(folder: Path) -> str:
    """Hash of the contents of a checkpoint's files, 32 hex digits. Names count, places do not."""
    return _fingerprint(folder, folder_state(folder))


@functools.lru_cache(maxsize=32)
def _fingerprint(folder: Path, state: FolderState) -> str:
    digest = hashlib.sha256()
    for name, _, _ in state:
        with (folder / name).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{name} {content}\n".encode())
    return digest.hexdigest()[:32]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseLayer:
    """A linear layer after pooling, as sentence-transformers stores it."""

    folder: Path
    activation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderRecipe:
    """How token states become one vector, as the model's own files say."""

    pooling: str
    normalize: bool
    dense: tuple[DenseLayer, ...]
    pools_prompt: bool
    max_tokens: int | None
    lower_case: bool
    prompts: tuple[tuple[str, str], ...]
    default_prompt: str | None


POOLING_FLAGS: Mapping[str, str] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
POOLING_NAMES: Mapping[str, str] = {"mean": "mean", "cls": "cls", "lasttoken": "last", "last": "last"}


def read_recipe(folder: Path, override: str | None = None) -> EncoderRecipe:
    """Pooling, normalisation, prompts and limits of a checkpoint; mean pooling where it is silent.

    Raises ModelMismatchError for a module that tokenmill does not run.
    Source: file formats of sentence-transformers 2.x to 6.x.
    """
    settings = _settings(folder)
    pooling, normalize, dense, pools_prompt = "mean", False, [], True
    for module in read_json(folder / "modules.json") or []:
        kind, path = module["type"].rpartition(".")[2], folder / module["path"]
        if kind == "Pooling":
            config = read_json(path / "config.json") or {}
            pooling, pools_prompt = override or _pooling(config, path), config.get("include_prompt", True)
        elif kind == "Normalize":
            normalize = True
        elif kind == "Dense":
            activation = (read_json(path / "config.json") or {}).get(
                "activation_function", "torch.nn.Identity"
            )
            dense.append(DenseLayer(folder=path, activation=activation.rpartition(".")[2]))
        elif kind not in ("Transformer", "Dropout"):
            raise ModelMismatchError(
                f"{folder}: modules.json names {module['type']}, which tokenmill does not run"
            )
    texts = read_json(folder / "config_sentence_transformers.json") or {}
    return EncoderRecipe(
        pooling=pooling,
        normalize=normalize,
        dense=tuple(dense),
        pools_prompt=pools_prompt,
        max_tokens=settings.get("max_seq_length"),
        lower_case=bool(settings.get("do_lower_case")),
        prompts=tuple((texts.get("prompts") or {}).items()),
        default_prompt=texts.get("default_prompt_name"),
    )


def _settings(folder: Path) -> dict[str, Any]:
    found = (read_json(folder / name) for name in ST_CONFIGS)
    return next((config for config in found if config), {})


def _pooling(config: Mapping[str, Any], path: Path) -> str:
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [flag for flag, on in config.items() if flag.startswith("pooling_mode_") and on]
    modes = [modes] if isinstance(modes, str) else list(modes)
    known = [POOLING_FLAGS.get(mode) or POOLING_NAMES.get(mode) for mode in modes]
    if len(known) != 1 or known[0] is None:
        raise ModelMismatchError(
            f"{path}: pooling {', '.join(modes) or 'none'}; tokenmill pools by one of mean, cls, "
            "last: set inference.pooling to override"
        )
    return known[0]


def read_json(path: Path) -> Any:
    """Parsed file, or None if there is none.  Raises ModelMismatchError if it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise ModelMismatchError(f"{path}: not readable as JSON: {exc}") from exc


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelLimits:
    """What a row may hold at most, from config.json: ids below `vocab_size`, at most `positions`."""

    vocab_size: int | None
    positions: int | None


OFFSET_POSITIONS = frozenset(
    {"roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet"}
    | {"longformer", "data2vec-text", "ibert", "xmod", "luke", "esm", "lilt", "markuplm", "layoutlmv3"}
)


def read_limits(folder: Path) -> ModelLimits:
    """Raises ModelMismatchError where there is no config.json.

    Subtle: RoBERTa and its kin count positions from pad_token_id + 1.
    """
    config = read_json(folder / "config.json")
    if config is None:
        raise ModelMismatchError(f"{folder}: no config.json; not a transformers checkpoint")
    text = config.get("text_config") or config
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    if positions and positions < 0:
        positions = None  # XLNet's way to say that there is no limit
    if positions and config.get("model_type") in OFFSET_POSITIONS:
        pad = config.get("pad_token_id")
        positions -= (1 if pad is None else pad) + 1
    return ModelLimits(vocab_size=text.get("vocab_size"), positions=positions)
