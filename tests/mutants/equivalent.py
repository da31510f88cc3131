"""Generated mutants that change nothing that can be seen from outside, and why.

Keys are (file, where, old statement, new statement), without line numbers; an entry
that no longer fits a mutant fails a test.
"""

EQUIVALENT: dict[tuple[str, str, str, str], str] = {}
