"""Reducing heavy traces to the coarse stages that the recorder knows, so that the two can be compared.

`reading` opens files, `kineto` reads torch.profiler's JSON (`traces.jsonstream`), `nsys` an Nsight export; both
fill `columns`, which make the packed `events` of a trace, so that one of any size fits into memory. `steps` and
`stages` cut those into the stages of each step (`naming`: by which names; `stages` infers where there are none),
`together` puts ranks beside each other, `inside` says what filled a stage, and `agreeing` whether the trace says what
the signal said. All times are whole nanoseconds (`intervals`).
"""
