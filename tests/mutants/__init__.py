"""Mutants: the engine's source with one thing changed, to see whether tests notice.

`operators` makes them, `museum` lists those written by hand, `equivalent` those that
change nothing, and `killers` runs the tests against one of them.
"""
