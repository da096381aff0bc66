"""Reducing heavy traces to the coarse stages that the recorder knows, so that the two can be compared.

`reading` opens files, `kineto` reads torch.profiler's JSON (`traces.jsonstream`), `nsys` an Nsight export; both pack
the `events` of a trace, so that a trace of any size fits into memory. `stages` cuts those into steps and stages
(`naming`: by which names), `together` merges ranks into one window and compares it with the signal, `inside` says what
filled a stage, and `causes` why it took so long. All times are whole nanoseconds (`intervals`).
"""
