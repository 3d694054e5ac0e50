"""The stages: tokenize a shard, infer a shard, aggregate. Each takes settled values and a store,
writes parts and receipts, and returns what it did. Planning and adapters are below them."""
