"""What is wrong with the manifests, found without a cluster: schemas, the operator's rules, and our own."""
