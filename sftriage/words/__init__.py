"""Verdicts, decisions and captures in words. The same ones everywhere: on a terminal, in a manifest, on a page."""
