"""The per-host side: reads rings, keeps every step, runs captures."""
