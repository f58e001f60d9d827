"""`python -m tests.simulate`: play seeds, from the command line."""

from tests.simulate.command import main

main()
