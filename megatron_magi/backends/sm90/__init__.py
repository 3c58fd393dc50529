"""The host side of the kernels in ``csrc/attention/sm90``: choices, tables of tiles, launches.

Read `attention` (forward) and `backward` first. `choices` chooses kernels and tiles, `tiles` and `schedule` make the
tables of a mask, `cost` and `tuning` hold the constants; `sparse*` are for attention over lists of keys.
"""
