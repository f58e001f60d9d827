"""`python -m tests.simulation`: play seeds, from the command line."""

from tests.simulation.command_line import main

main()
