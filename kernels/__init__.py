"""Every hot loop of the engine: a torch specification and the fast versions beside it."""

__version__ = "0"
