"""A policy for ranks on the trainer's host: mapped memory, files, or a stream through shared buckets.

The driver's end is `host_route` with `stream_sender` and `packing`; a rank's end is `mapped_memory` and `stream_reader`.
"""
