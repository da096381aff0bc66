"""Jobs that stand still, by what each rank is doing now and not by windows: pure numpy, no I/O, no clock."""
