"""Measurements of sftriage: `python -m bench NAME`; see `bench.runner` for what a bench provides."""
