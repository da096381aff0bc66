"""Recorded steps put together to windows, of a live job and of a recording alike.

`decoding` makes columns of slots, `shipped` is what agents send, `logs` finds kept steps, `gather` cuts windows.
"""
