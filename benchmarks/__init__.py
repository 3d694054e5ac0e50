"""Side-by-side measurements against peers; not shipped."""
