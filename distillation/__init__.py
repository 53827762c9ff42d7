"""Makes a draft for a target: text that the target writes, and a model cut from it that learns from it."""
