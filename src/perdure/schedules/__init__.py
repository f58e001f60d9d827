"""Pure rules of schedules: cron expressions, time slots, and the plan of what fires. No store, no clock, no I/O."""
