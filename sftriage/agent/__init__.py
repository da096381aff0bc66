"""The per-host side: reads rings, keeps every step, gathers windows, runs captures."""
