"""The per-job side: the one place that sees the whole flow from window to decision."""
