"""The cases of each operation, the same on every device: one module an operation, each a generator of
`functools.partial`s that build a `case.Case`, so that one case at a time lies in memory and one that fails is one row.
"""
