"""Jobs that stand still, told from what each rank is doing now and not from windows: pure numpy, no I/O, no clock.

`pace` is what is normal for a job, and `verdict` how long it may stand still by that, and who is waited for.
"""
