"""`outrider bench`: measures a service as its clients see it, beside what else could be run in its place."""
