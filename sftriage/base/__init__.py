"""Files, notes, processes and loops, from the standard library alone, safe inside a trainer."""
