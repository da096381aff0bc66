"""Reducing heavy traces to the coarse stages that the recorder knows, so that the two can be compared.

`reading` opens files (`traces.jsonstream` reads JSON) and packs the `events` of a trace, so that a trace of any size
fits into memory. `stages` cuts those into steps and stages, `together` merges ranks into one window and compares it
with the signal, `inside` says what filled a stage, `samples` and `spots` what the sampled stacks say, and `causes` why
it took so long. All times are whole nanoseconds (`intervals`).
"""
