"""Execution of runs by one worker. Decides nothing that the runner decides, and keeps nothing that the store keeps.

`WorkerRuntime` (runtime.py) assembles the parts. A turn goes from the coordinator through the committer to the store;
its effects start after the commit (effect_runner.py). Everything that happens because time passes is a periodic task
(periodic.py): claiming, takeover, finalization, retention.
"""
