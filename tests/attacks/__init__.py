"""Attacks on the privacy promise, a catalogue: what the attacker knows, does, and gets. Each one worked once."""
