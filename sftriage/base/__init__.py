"""Files, notes, processes, loops: each mechanism once, from the standard library, safe inside a trainer."""
