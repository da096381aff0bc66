"""Recorded steps assembled into windows, of a live job and of a recording alike.

`rings` reads the ranks' rings, `decoding` converts them to columns, `gather` cuts windows; `steplog` writes steps to
disk, and `logs` reads them. Agents, the controller and `runs.recordings` call it.
"""
