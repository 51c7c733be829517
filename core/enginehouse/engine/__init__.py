"""The serving loop: schedules sequences over a runner, samples, and keeps the prefix cache; in a worker process."""
