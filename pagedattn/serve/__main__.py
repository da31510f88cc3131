"""`python -m pagedattn.serve [MODEL] …`, the same as `pagedattn serve`.

Knows nothing but where the command line is.
"""

import sys

from pagedattn.serve.cli import main

sys.exit(main(["serve", *sys.argv[1:]]))
