"""What a process is told at its start: small frozen groups of options, each checked once, where it is made.

Command line, Ray and Kubernetes are derived from the fields. Nothing here loads gRPC or torch, so that --help
stays quick.
"""
