"""What is wrong with the manifests, found without a cluster: by published schemas, and by rules of our own.

It stands on the libraries of `.[dev]` and is not installed with the wheel."""
