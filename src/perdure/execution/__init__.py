"""The engine: drives many runs. It decides nothing that the runner decides, and keeps nothing that the store keeps.

`Core` (core.py) puts the rooms together. A turn goes coordinator -> committer -> store, and only then are its effects
carried out (executor). Duties (duties.py) are everything that happens because time passes.
"""
