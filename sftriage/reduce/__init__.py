"""Reducing heavy traces to the coarse stages that the recorder knows, so that the two can be compared.

`sources` opens files, `jsonstream` and `kineto` read torch.profiler's JSON as a stream, `nsys` an Nsight export; both
come to the `columns` of `events`, which are `packed`, so that a trace of any size fits into memory, and unpacked a part
at a time (`self_time`: in order of time; `halves`: an event written as two). `steps` and `stages` cut those into the
stages of each step (`naming`: by which names; `stages` infers where there are none), `together` puts ranks beside each
other, `inside` says what filled a stage (`filling`: what was done in it), and `agreeing` whether the trace says what
the signal said. All times are whole nanoseconds (`intervals`).
"""
