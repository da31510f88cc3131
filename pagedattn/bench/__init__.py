"""Benchmarks: what readers can measure on their own machines."""
