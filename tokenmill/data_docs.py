"""Data Docs: Great Expectations' own pages of what the gates found, below report/data-docs/.

One site a gate, so that gates that run at different times or places never read each other's. No text
of the user's is on the pages. They take their styles from public CDNs, as GX makes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenmill.expectations import GateResult, make_context, open_gx
from tokenmill.store import Store

FOLDER = "report/data-docs"
UPLOAD_THREADS = 16
LOGO = re.compile(rb"https://great-expectations-web-assets[^\"')]*")
INDEX = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Data Docs</title>
<h1>Quality gates</h1>
<ul>
{links}
</ul>
</html>
"""


def write_data_docs(store: Store, results: Sequence[GateResult]) -> None:
    """The Data Docs of these gates are in report/data-docs/GATE/, and an index.html of all gates above.

    Pages of earlier runs of the same gates are gone.  Raises StoreError.
    """
    with open_gx() as gx, TemporaryDirectory(prefix="tokenmill-docs-") as folder:
        for result in results:
            site = Path(folder, result.name)
            _build_site(gx, site, result)
            _upload_site(store, site, f"{FOLDER}/{result.name}")
        gates = sorted(name.split("/")[2] for name in store.sizes(FOLDER) if name.count("/") == 3)
        links = "\n".join(f'<li><a href="{gate}/index.html">{gate}</a></li>' for gate in gates)
        store.write_bytes(f"{FOLDER}/index.html", INDEX.format(links=links).encode())


def _build_site(gx: Any, folder: Path, result: GateResult) -> None:
    from great_expectations.data_context.types import resource_identifiers as ids

    site = {
        "class_name": "SiteBuilder",
        "show_how_to_buttons": False,
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(folder)},
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
    }
    context = make_context(gx, {result.name: site})
    for suite in result.suites:
        context.suites.add(suite)
    for validation in result.validations:
        key = ids.ValidationResultIdentifier(
            ids.ExpectationSuiteIdentifier(name=validation.suite_name),
            run_id=validation.meta["run_id"],
            batch_identifier=validation.batch_id,
        )
        context.validation_results_store.set(key, validation)
    context.build_data_docs()


def _upload_site(store: Store, folder: Path, target: str) -> None:
    """Put a site in the place of the one before.

    Subtle: GX's pages fetch their logo from GX's own server, with an id; here it is the local file.
    """
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    pages = [name for name in names if not name.endswith(".gif")]  # 3 MB that no page shows

    def upload(name: str) -> None:
        logo = "../" * name.count("/") + "static/images/logo-long.png"
        data = LOGO.sub(logo.encode(), (folder / name).read_bytes())
        store.write_bytes(f"{target}/{name}", data)

    with ThreadPoolExecutor(UPLOAD_THREADS) as pool:
        list(pool.map(upload, pages))
    store.remove(store.sizes(target).keys() - {f"{target}/{name}" for name in pages})
