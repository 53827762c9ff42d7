"""Ways to run Outrider on a cluster: a Ray Serve application, Kubernetes manifests, images."""
