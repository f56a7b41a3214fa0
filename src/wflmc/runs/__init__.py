"""Runs: plans of scenarios, the folders that `wflmc run` and `wflmc federate` write, and what may be published."""
