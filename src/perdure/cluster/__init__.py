"""Who is alive, and what becomes of the runs of those who are not. Knows the store, and neither runs nor workflows."""
