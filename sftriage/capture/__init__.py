"""Executors: what runs a profiler on one rank, and what checks that it brought what was promised."""
