"""The figures of the paper, one file for each group that shares a computation, with the
claims made about them."""
