"""Sphinx settings of the book's pages; `build.py` lays out what they are made from."""

project = "pagedattn"
author = "the pagedattn authors"
html_title = "pagedattn: a book that is an engine"
extensions = ["myst_nb"]
nb_execution_mode = "off"  # chapters were executed when they were woven
nb_mime_priority_overrides = [("html", "text/html", 0), ("html", "text/markdown", 1)]
myst_enable_extensions = ["dollarmath", "deflist", "html_image"]
myst_heading_anchors = 3
html_theme = "furo"  # search, dark mode, no outside resources
html_copy_source = False
html_show_sphinx = False
html_static_path: list[str] = []
exclude_patterns: list[str] = []
# Headings start at one in chapters, and cells without a language are Python.
highlight_language = "python"
suppress_warnings = ["myst.header", "misc.highlighting_failure"]
