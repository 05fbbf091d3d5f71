"""Stage 5 of 5: ids → shards and a manifest, by threads or on a Ray cluster.

Both run one function, writer.encode_units, which reads, encodes and writes units of work.
"""
