"""What a window shows: an exact accounting of its exposed time, and what mending somebody would have saved.

Pure numpy, no I/O, no clock, no threshold of a verdict, and no memory of the run. A window is cut where its ranks are
together (`segments`), walked (`accounting`) and replayed (`whatif`, for ranks and hosts `units`), but for what the
window before has in common with it (`overlap`); `profile` is what its steps take where nobody is late.
"""
