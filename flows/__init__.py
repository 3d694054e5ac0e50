"""Prefect flows: wiring only. The command `tokenmill` is in `flows.cli`."""
