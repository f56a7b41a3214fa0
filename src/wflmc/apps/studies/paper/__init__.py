"""The figures of the paper, with the claims made about them.

There is one file for each group of figures that shares a computation.
"""
