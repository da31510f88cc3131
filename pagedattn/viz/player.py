"""The film that moves: play, scrub, hover for the line that acted, click for the chain.

A widget around `player.js`, which draws what `strip` draws. Needs anywidget, which
JupyterLab has; follows a still picture wherever it stands in the book.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagedattn.viz.figure import CACHED, COLOURS, SHARED, TINTS
from pagedattn.viz.film import Film
from pagedattn.viz.strip import SHARED_TINT, people

HERE = Path(__file__).parent


def player(film: Film) -> Any:
    """A widget that plays `film`; its `frame` can be read and set."""
    import anywidget
    import traitlets

    class Player(anywidget.AnyWidget):
        """The widget; `film` is plain data, `frame` counts from 0."""

        _esm = HERE / "player.js"
        _css = HERE / "player.css"
        film = traitlets.Dict().tag(sync=True)
        frame = traitlets.Int(0).tag(sync=True)

    return Player(film=script(film))


def script(film: Film) -> dict[str, Any]:
    """What the page needs: the film, and everybody's colours."""
    names = people(film.frames)
    return {
        **film.data(),
        "colours": {n: [COLOURS[i % 6], TINTS[i % 6]] for i, n in enumerate(names)},
        "shared": [SHARED, SHARED_TINT],
        "cached": [CACHED, "#f2f2f2"],
    }
