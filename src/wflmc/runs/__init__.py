"""Runs: plans of scenarios, folders that `wflmc run` and `wflmc federate` write, and
what of a run may be published."""
