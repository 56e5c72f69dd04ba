"""Plans: partition, schedule and devices of a run, with the predicted time and memory."""
