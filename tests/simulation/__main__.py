"""`python -m tests.simulation`: simulate seeds from the command line."""

from tests.simulation.command_line import main

main()
