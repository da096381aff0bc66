"""A simulator that is slow and obvious: one operation of one step of one worker at a time, by recursion.

It shares nothing with the engine but its inputs: no levels, no arrays, no blocks.
"""

from functools import cache


def simulate(n_ops, dependencies, groups, joined, work):
    """When each operation begins and ends, by (operation, column); ``work[op][column]`` is what it takes.

    ``joined`` says of each group whether it spans all columns.
    """
    n_columns = len(work[0])
    group_of = {op: group for group, ops in enumerate(groups) for op in ops}

    @cache
    def begin(op, column):
        return max((end(earlier, column) for earlier, later in dependencies if later == op), default=0.0)

    @cache
    def end(op, column):
        if op not in group_of:
            return begin(op, column) + work[op][column]
        group = group_of[op]
        columns = range(n_columns) if joined[group] else [column]
        together = max(begin(peer, at) for peer in groups[group] for at in columns)
        return together + work[op][column]

    every = [(op, column) for op in range(n_ops) for column in range(n_columns)]
    return {one: begin(*one) for one in every}, {one: end(*one) for one in every}
