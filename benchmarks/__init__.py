"""Side-by-side measurements against peers; not shipped.

run            the command: `python -m benchmarks.run [--smoke] [--check]`
corpus         real docstrings, deduplicated, cut into chunks
contenders     what is measured beside what: ours, sentence-transformers, a plain loop
child          a process that runs one contender, a chunk at a time, on demand
side_by_side   contenders in turn on the same chunks
whole_flow     a job under Prefect beside the engine alone
memory         peak memory at one and at four times the corpus
machine, show  what it ran on; the table, the plot, the JSON
"""
