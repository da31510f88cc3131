"""Draw the README's picture: `python -m pagedattn.viz book/figures/blocks.svg`."""

import argparse
from pathlib import Path

from pagedattn.viz.pool import block_map, example

parser = argparse.ArgumentParser(prog="pagedattn.viz", description=__doc__)
parser.add_argument("file", type=Path, help="the SVG file to write")
block_map(example()).save(parser.parse_args().file)
