"""A pytest plugin (-p unshrunk) for tests of tests: any failing example will do.

Knows Hypothesis: with it, a failure is found as without, but nobody waits until it is
as small as it can be.
"""

import pytest
from hypothesis import Phase, settings


@pytest.hookimpl(trylast=True)
def pytest_configure() -> None:
    """Whatever profile is in force, without its last phase."""
    phases = [phase for phase in settings().phases if phase is not Phase.shrink]
    settings.register_profile("unshrunk", settings(), phases=phases)
    settings.load_profile("unshrunk")
