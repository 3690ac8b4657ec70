"""What a trainer gives: mappings, streams and files, all as one kind of source.

This package knows checkpoint names and dtypes (`fp8refit.live`), but no engine. `sharded` gathers sources from a
trainer's ranks.
"""
