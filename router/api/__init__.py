"""What clients call: the OpenAI-compatible HTTP API and the gRPC service outrider.v1.Generation."""
