"""What a window shows: an exact accounting of its exposed time, and what mending a suspect would have saved.

Pure numpy, no I/O, no clock, no threshold of a verdict, and no memory of the run. `accounting` cuts a window where its
ranks are together and walks through it, `whatif` replays it, and `units` has what ranks and hosts would have saved.
"""
