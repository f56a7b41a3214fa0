"""`python -m wflmc`."""

from wflmc.cli import main

main()
