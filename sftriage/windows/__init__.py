"""Recorded steps put together to windows, of a live job and of a recording alike.

`rings` reads what ranks record and has what agents send, `decoding` makes columns of it, `gather` cuts windows;
`steplog` keeps steps on disk, and `logs` finds them there.
"""
