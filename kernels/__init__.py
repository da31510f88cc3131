"""Every hot loop of the engine: a torch specification beside the fast versions."""

__version__ = "0"
